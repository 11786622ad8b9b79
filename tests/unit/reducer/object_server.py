"""An object server in memory: ranged GETs with If-Match, PUTs, and faults as a script tells it."""

import contextlib
import hashlib
import re
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ObjectServer:
    """``faults`` is called with (method, path, nth request of this method and path) before each request.

    It returns None to be served well, or a function of the handler that answers otherwise. ``bytes_per_second`` slows
    down the bodies of GETs, for each connection.
    """

    def __init__(self, faults=None, bytes_per_second=None, tls=None):
        self.objects = {}
        self.requests = []
        self.headers = []
        self.faults = faults or (lambda method, path, nth: None)
        self.bytes_per_second = bytes_per_second
        self.connections = 0
        self._lock = threading.Lock()
        self._counts = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            wbufsize = 65536  # status line and headers leave in one packet

            def setup(self):
                super().setup()
                outer.connections += 1

            def do_GET(self):
                outer._serve(self)

            def do_PUT(self):
                outer._serve(self)

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request, client_address):
                pass  # clients that hang up are part of the tests

        self._server = Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.scheme = "https" if tls else "http"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def origin(self):
        return f"{self.scheme}://127.0.0.1:{self._server.server_address[1]}"

    def url(self, path):
        return f"{self.origin}/{path}?X-Amz-Signature=secret"

    def put(self, path, body):
        """Store an object; its ETag, bare."""
        self.objects[path] = bytes(body)
        return etag_of(body)

    def count(self, method, path):
        return self._counts.get((method, path), 0)

    def _serve(self, handler):
        path = handler.path.split("?")[0].lstrip("/")
        method = handler.command
        with self._lock:
            nth = self._counts[method, path] = self._counts.get((method, path), 0) + 1
            self.requests.append((method, path))
            self.headers.append(dict(handler.headers))
        fault = self.faults(method, path, nth)
        if fault is not None:
            fault(handler)
        elif method == "PUT":
            body = handler.rfile.read(int(handler.headers["Content-Length"]))
            self.objects[path] = body
            reply(handler, 200, b"", {"ETag": f'"{etag_of(body)}"'})
        elif path not in self.objects:
            error(handler, 404, "NoSuchKey")
        else:
            self._get(handler, self.objects[path])

    def _get(self, handler, body):
        etag = f'"{etag_of(body)}"'
        if handler.headers.get("If-Match", etag) != etag:
            return error(handler, 412, "PreconditionFailed")
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        if not wanted:
            return reply(handler, 200, body, {"ETag": etag})
        first, last = int(wanted[1]), min(int(wanted[2]), len(body) - 1)
        if first > last:
            return error(handler, 416, "InvalidRange")
        headers = {"ETag": etag, "Content-Range": f"bytes {first}-{last}/{len(body)}"}
        return reply(handler, 206, memoryview(body)[first : last + 1], headers, self.bytes_per_second)


def etag_of(body):
    return hashlib.md5(body).hexdigest()


def reply(handler, status, body=b"", headers=None, bytes_per_second=None):
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        handler.send_header(name, value)
    handler.end_headers()
    step = len(body) if bytes_per_second is None else max(1, int(bytes_per_second / 50))
    with contextlib.suppress(OSError):
        for start in range(0, len(body), step or 1):
            handler.wfile.write(body[start : start + step])
            handler.wfile.flush()
            if bytes_per_second is not None:
                time.sleep(step / bytes_per_second)
        handler.wfile.flush()


def error(handler, status, code, headers=None):
    if handler.command == "PUT":
        handler.rfile.read(int(handler.headers["Content-Length"]))
    reply(handler, status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode(), headers)


def reset(handler):
    """Break the connection with RST instead of a clean end."""
    handler.wfile.flush()
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True
    handler.rfile.close()
    handler.connection.close()
