"""An S3 store in memory: the Bucket protocol for the operator's side, an HTTP front for the URLs that reducers get.

It is held to the same contract suite as the real thing. ``before`` and ``after`` are called around every operation of
either side, so that a test can count them, stop a process at each of them, or change the store in between.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from gradsharding.errors import ObjectGone, StoreRefused
from gradsharding.store import Completion, ObjectInfo

Hook = Callable[[str, str], None]
"""Called with the operation ("put_new", "http PUT part") and the key (for "delete" all keys, joined by commas).

What it raises ends the operation. On the HTTP side that means: the connection is cut without an answer."""

MIN_PART = 5 << 20


@dataclass
class Stored:
    body: bytes
    etag: str
    last_modified: datetime
    version_id: str | None
    metadata: Mapping[str, str]


@dataclass
class Upload:
    key: str
    parts: dict[int, list[tuple[str, bytes]]] = field(default_factory=dict)
    """By number, in the order of arrival: (ETag, body)."""


@dataclass
class Content:
    """What one bucket holds."""

    objects: dict[str, Stored] = field(default_factory=dict)
    versions: dict[tuple[str, str], Stored] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)


def _nothing(op: str, key: str) -> None:
    """A hook that lets everything pass."""


class MemoryStore:
    """All buckets, and the server; a context manager.

    ``atomic_complete``: a conditional Complete looks at the key and writes it in one step; else it does not look, as
    SeaweedFS in a race. ``keep_both_parts``: a part that is uploaded twice is kept twice, and the ETag chooses
    (SeaweedFS). ``versioned``: overwritten objects can still be read by version. ``min_part``: the least size of all
    parts but the last. ``now`` is the store's clock, seconds since the epoch.
    """

    def __init__(
        self,
        *,
        atomic_complete: bool = True,
        keep_both_parts: bool = False,
        versioned: bool = False,
        min_part: int = MIN_PART,
        before: Hook = _nothing,
        after: Hook = _nothing,
    ) -> None:
        self.atomic_complete = atomic_complete
        self.keep_both_parts = keep_both_parts
        self.versioned = versioned
        self.min_part = min_part
        self.before = before
        self.after = after
        self.now: Callable[[], float] = time.time
        self.buckets: dict[str, Content] = {}
        self.lock = threading.RLock()
        self._secret = secrets.token_bytes(32)
        self._server = _Server(("127.0.0.1", 0), _Front)
        self._server.store = self
        self.origin = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def __enter__(self) -> MemoryStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def bucket(self, name: str, *, create: bool = True) -> MemoryBucket:
        with self.lock:
            if create:
                self.buckets.setdefault(name, Content())
        return MemoryBucket(self, name)

    def sign(self, claims: dict[str, Any], lifetime: timedelta) -> str:
        """A URL that does what ``claims`` say, until its time is over."""
        claims = claims | {"expires": self.now() + lifetime.total_seconds()}
        text = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode()
        return (
            f"{self.origin}/{claims['bucket']}/{quote(claims['key'])}?claims={text}&signature={self._signature(text)}"
        )

    def claims(self, url: str) -> dict[str, Any] | None:
        """What a URL may do; None when it is foreign, changed or expired."""
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        text, signature = query.get("claims", [""])[0], query.get("signature", [""])[0]
        if set(query) != {"claims", "signature"} or not hmac.compare_digest(self._signature(text), signature):
            return None
        claims: dict[str, Any] = json.loads(base64.urlsafe_b64decode(text))
        same = unquote(parts.path) == f"/{claims['bucket']}/{claims['key']}"
        return claims if same and claims["expires"] > self.now() else None

    def _signature(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), "sha256").hexdigest()

    def content(self, bucket: str) -> Content:
        try:
            return self.buckets[bucket]
        except KeyError:
            raise StoreRefused(
                f"The store {self.origin} has no bucket {bucket!r} (NoSuchBucket): create it.", "NoSuchBucket"
            ) from None

    def write(self, bucket: str, key: str, body: bytes, etag: str, metadata: Mapping[str, str]) -> Stored:
        content = self.content(bucket)
        version = secrets.token_hex(8) if self.versioned else None
        stored = Stored(body, etag, datetime.fromtimestamp(self.now(), UTC), version, metadata)
        content.objects[key] = stored
        if version is not None:
            content.versions[key, version] = stored
        return stored


class MemoryBucket:
    """The Bucket protocol on a MemoryStore."""

    def __init__(self, store: MemoryStore, name: str) -> None:
        self.store = store
        self.name = name
        self.origin = store.origin

    @contextlib.contextmanager
    def _operation(self, op: str, key: str) -> Iterator[Content]:
        self.store.before(op, key)
        with self.store.lock:
            yield self.store.content(self.name)
        self.store.after(op, key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._operation("list", prefix) as content:
            found = sorted((key for key in content.objects if key.startswith(prefix)), key=str.encode)
            infos = [_info(key, content.objects[key], whole=False) for key in found]
        return iter(infos)

    def stat(self, key: str) -> ObjectInfo | None:
        with self._operation("stat", key) as content:
            stored = content.objects.get(key)
        return None if stored is None else _info(key, stored)

    def read(self, key: str, start: int, length: int, etag: str) -> bytes:
        if length == 0:
            return b""
        with self._operation("read", key) as content:
            stored = content.objects.get(key)
        if stored is None:
            raise ObjectGone(f"The object {key!r} in bucket {self.name!r} is gone.", 404)
        if stored.etag != etag:
            raise ObjectGone(f"The object {key!r} in bucket {self.name!r} is another one now.", 412)
        if start + length > len(stored.body):
            raise StoreRefused(
                f"The object {key!r} ends before the bytes that were asked for (InvalidRange).", "InvalidRange"
            )
        return stored.body[start : start + length]

    def get(self, key: str) -> bytes | None:
        with self._operation("get", key) as content:
            stored = content.objects.get(key)
        return None if stored is None else stored.body

    def put(self, key: str, body: bytes, metadata: Mapping[str, str] | None = None) -> None:
        with self._operation("put", key):
            self.store.write(self.name, key, body, _md5(body), metadata or {})

    def put_new(self, key: str, body: bytes) -> bool:
        with self._operation("put_new", key) as content:
            free = key not in content.objects
            if free:
                self.store.write(self.name, key, body, _md5(body), {})
        return free

    def delete(self, keys: Sequence[str]) -> None:
        with self._operation("delete", ",".join(keys)) as content:
            for key in keys:
                content.objects.pop(key, None)

    def create_upload(self, key: str) -> str:
        upload = secrets.token_hex(16)
        with self._operation("create_upload", key) as content:
            content.uploads[upload] = Upload(key)
        return upload

    def complete_upload(self, key: str, upload: str, etags: Mapping[int, str]) -> Completion:
        with self._operation("complete_upload", key) as content:
            return self._complete(content, key, upload, etags)

    def _complete(self, content: Content, key: str, upload: str, etags: Mapping[int, str]) -> Completion:
        begun = _upload(content, key, upload)
        if begun is None:
            return Completion.NO_SUCH_UPLOAD
        if self.store.atomic_complete and key in content.objects:
            return Completion.KEY_EXISTS
        bodies = []
        for number, etag in sorted(etags.items()):
            body = next((body for known, body in begun.parts.get(number, ()) if known == etag), None)
            if body is None:
                return Completion.INVALID_PART
            bodies.append(body)
        if not bodies or any(len(body) < self.store.min_part for body in bodies[:-1]):
            return Completion.INVALID_PART
        digests = b"".join(bytes.fromhex(etag) for _, etag in sorted(etags.items()))
        self.store.write(self.name, key, b"".join(bodies), f"{_md5(digests)}-{len(bodies)}", {})
        del content.uploads[upload]
        return Completion.COMPLETED

    def abort_upload(self, key: str, upload: str) -> bool:
        with self._operation("abort_upload", key) as content:
            known = _upload(content, key, upload) is not None
            if known:
                del content.uploads[upload]
        return known

    def list_parts(self, key: str, upload: str) -> Mapping[int, Sequence[str]] | None:
        with self._operation("list_parts", key) as content:
            begun = _upload(content, key, upload)
            return None if begun is None else {n: [etag for etag, _ in kept] for n, kept in sorted(begun.parts.items())}

    def list_uploads(self, key: str) -> Sequence[str]:
        with self._operation("list_uploads", key) as content:
            return sorted(upload for upload, begun in content.uploads.items() if begun.key == key)

    def presign_get(self, key: str, version_id: str | None, lifetime: timedelta) -> str:
        return self.store.sign({"method": "GET", "bucket": self.name, "key": key, "version": version_id}, lifetime)

    def presign_put(self, key: str, lifetime: timedelta) -> str:
        return self.store.sign({"method": "PUT", "bucket": self.name, "key": key}, lifetime)

    def presign_part(self, key: str, upload: str, number: int, lifetime: timedelta) -> str:
        claims = {"method": "PUT", "bucket": self.name, "key": key, "upload": upload, "number": number}
        return self.store.sign(claims, lifetime)


class _Server(ThreadingHTTPServer):
    store: MemoryStore
    daemon_threads = True
    block_on_close = False  # clients keep their connections
    request_queue_size = 128

    def server_bind(self) -> None:
        # As HTTPServer's, without its look-up of the host's name.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news, and a hook that raises means it."""


class _Front(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing is logged."""

    def do_GET(self) -> None:
        self._serve("GET", b"")

    def do_PUT(self) -> None:
        self._serve("PUT", self.rfile.read(int(self.headers.get("Content-Length", "0"))))

    def _serve(self, method: str, body: bytes) -> None:
        store = self.server.store
        claims = store.claims(self.path)
        if claims is None or claims["method"] != method:
            self._answer(403, error="AccessDenied")
            return
        try:
            reply = self._perform(method, claims, body)
        except BaseException:  # noqa: BLE001
            self.close_connection = True
            return
        self._answer(**reply)

    def _perform(self, method: str, claims: dict[str, Any], body: bytes) -> dict[str, Any]:
        store = self.server.store
        op = f"http {method}" + (" part" if "number" in claims else "")
        store.before(op, claims["key"])
        with store.lock:
            content = store.buckets.get(claims["bucket"])
            if content is None:
                reply: dict[str, Any] = {"status": 404, "error": "NoSuchBucket"}
            elif method == "GET":
                reply = self._get(content, claims)
            elif not self._intact(body):
                reply = {"status": 400, "error": "BadDigest"}
            elif "number" in claims:
                reply = self._put_part(content, claims, body)
            else:
                reply = self._put(claims, body)
        store.after(op, claims["key"])
        return reply

    def _get(self, content: Content, claims: dict[str, Any]) -> dict[str, Any]:
        key, version = claims["key"], claims["version"]
        stored = content.versions.get((key, version)) if version else content.objects.get(key)
        if stored is None:
            return {"status": 404, "error": "NoSuchVersion" if version else "NoSuchKey"}
        if self.headers.get("If-Match", f'"{stored.etag}"').strip('"') != stored.etag:
            return {"status": 412, "error": "PreconditionFailed"}
        headers = {"ETag": f'"{stored.etag}"'}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            return {"status": 200, "headers": headers, "body": stored.body}
        start, end = int(wanted[1]), min(int(wanted[2]) + 1, len(stored.body))
        if start >= len(stored.body):
            return {"status": 416, "error": "InvalidRange"}
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(stored.body)}"
        return {"status": 206, "headers": headers, "body": memoryview(stored.body)[start:end]}

    def _put(self, claims: dict[str, Any], body: bytes) -> dict[str, Any]:
        store = self.server.store
        if self.headers.get("If-None-Match") == "*" and claims["key"] in store.content(claims["bucket"]).objects:
            return {"status": 412, "error": "PreconditionFailed"}
        prefix = "x-amz-meta-"
        metadata = {n.lower().removeprefix(prefix): v for n, v in self.headers.items() if n.lower().startswith(prefix)}
        stored = store.write(claims["bucket"], claims["key"], body, _md5(body), metadata)
        return {"status": 200, "headers": {"ETag": f'"{stored.etag}"'}}

    def _put_part(self, content: Content, claims: dict[str, Any], body: bytes) -> dict[str, Any]:
        begun = _upload(content, claims["key"], claims["upload"])
        if begun is None:
            return {"status": 404, "error": "NoSuchUpload"}
        etag = _md5(body)
        kept = begun.parts.setdefault(claims["number"], [])
        if not self.server.store.keep_both_parts:
            kept.clear()
        if (etag, body) not in kept:
            kept.append((etag, body))
        return {"status": 200, "headers": {"ETag": f'"{etag}"'}}

    def _intact(self, body: bytes) -> bool:
        digest = self.headers.get("Content-MD5")
        return digest is None or digest == base64.b64encode(hashlib.md5(body).digest()).decode()

    def _answer(
        self,
        status: int,
        headers: Mapping[str, str] | None = None,
        body: bytes | memoryview = b"",
        error: str | None = None,
    ) -> None:
        if error is not None:
            body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{error}</Code></Error>'.encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()


def _upload(content: Content, key: str, upload: str) -> Upload | None:
    begun = content.uploads.get(upload)
    return begun if begun is not None and begun.key == key else None


def _info(key: str, stored: Stored, *, whole: bool = True) -> ObjectInfo:
    return ObjectInfo(
        key=key,
        size=len(stored.body),
        etag=stored.etag,
        last_modified=stored.last_modified.strftime("%Y-%m-%dT%H:%M:%SZ"),
        version_id=stored.version_id if whole else None,
        metadata=dict(stored.metadata) if whole else {},
    )


def _md5(body: bytes) -> str:
    return hashlib.md5(body).hexdigest()
