"""The HTTP side of a memory store: it serves presigned URLs, and them alone."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from memory_content import Content, md5

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memory_store import MemoryStore


class Server(ThreadingHTTPServer):
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


class Front(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: Server

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
        stored = store.write(claims["bucket"], claims["key"], body, md5(body), metadata)
        return {"status": 200, "headers": {"ETag": f'"{stored.etag}"'}}

    def _put_part(self, content: Content, claims: dict[str, Any], body: bytes) -> dict[str, Any]:
        begun = content.upload(claims["upload"], claims["key"])
        if begun is None:
            return {"status": 404, "error": "NoSuchUpload"}
        etag = md5(body)
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
