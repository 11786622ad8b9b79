"""An S3 store in memory: the Bucket protocol for the operator's side, an HTTP front for the URLs that reducers get.

It is held to the same contract suite as the real thing. ``before`` and ``after`` are called around every operation of
either side, so that a test can count them, stop a process at each of them, or change the store in between.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from memory_content import Content, Stored, Upload, md5
from memory_front import Front, Server

from gradsharding.errors import ObjectGone, StoreRefused
from gradsharding.store import Completion, ObjectInfo

Hook = Callable[[str, str], None]
"""Called with the operation ("put_new", "http PUT part") and the key (for "delete" all keys, joined by commas).

What it raises ends the operation. On the HTTP side that means: the connection is cut without an answer."""

MIN_PART = 5 << 20


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
        self._server = Server(("127.0.0.1", 0), Front)
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
            self.store.write(self.name, key, body, md5(body), metadata or {})

    def put_new(self, key: str, body: bytes) -> bool:
        with self._operation("put_new", key) as content:
            free = key not in content.objects
            if free:
                self.store.write(self.name, key, body, md5(body), {})
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
        begun = content.upload(upload, key)
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
        self.store.write(self.name, key, b"".join(bodies), f"{md5(digests)}-{len(bodies)}", {})
        del content.uploads[upload]
        return Completion.COMPLETED

    def abort_upload(self, key: str, upload: str) -> bool:
        with self._operation("abort_upload", key) as content:
            known = content.upload(upload, key) is not None
            if known:
                del content.uploads[upload]
        return known

    def list_parts(self, key: str, upload: str) -> Mapping[int, Sequence[str]] | None:
        with self._operation("list_parts", key) as content:
            begun = content.upload(upload, key)
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


def _info(key: str, stored: Stored, *, whole: bool = True) -> ObjectInfo:
    return ObjectInfo(
        key=key,
        size=len(stored.body),
        etag=stored.etag,
        last_modified=stored.last_modified.strftime("%Y-%m-%dT%H:%M:%SZ"),
        version_id=stored.version_id if whole else None,
        metadata=dict(stored.metadata) if whole else {},
    )
