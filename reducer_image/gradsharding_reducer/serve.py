"""``python -m gradsharding_reducer.serve``: the HTTP entrance, for Knative. ``POST /`` runs a task, ``GET /healthz``
says ok.

A shard runs in this very process (PID 1 of its container), so that a kill for its memory ends the container and shows.
One shard at a time; others get 503. Nothing that is logged holds a URL. An answer's X-Reducer header names the pod.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy comes in with the reducer

from gradsharding_reducer import peak_rss
from gradsharding_reducer.access import Access
from gradsharding_reducer.cancellation import Cancellation
from gradsharding_reducer.entrance import TaskTooLargeError, complain, describe, on_sigterm, read_task
from gradsharding_reducer.reduce import reduce
from gradsharding_reducer.task import ContractError

BODY_LIMIT = 5 << 20
"""Bytes of a task as sent."""

IDLE_SECONDS = 120
"""Keep-alive. Knative's queue-proxy reuses idle connections for 90 s; who closes first makes it answer 502."""

_WATCH_MILLISECONDS = 250
_GRACE_SECONDS = 1.0
"""A caller may be back before the thread that answered it has put down its work."""


class ReducerServer(ThreadingHTTPServer):
    """Serves until ``stop``, which lets the running shard finish."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], access: Access) -> None:
        super().__init__(address, _Handler)
        self.access = access
        self.busy = threading.Lock()
        self.stopping = False

    def server_bind(self) -> None:
        """Without the base class's look-up of the host's name, which can take seconds in a pod."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "reducer", self.server_address[1]

    def stop(self) -> None:
        """Take no new shard, wait until the running one is answered, and end ``serve_forever``."""
        self.stopping = True
        self.busy.acquire()  # for good
        self.shutdown()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that hung up is no error, and a traceback could hold a URL."""


class _Handler(BaseHTTPRequestHandler):
    server: ReducerServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True
    wbufsize = -1  # status, headers and body leave together

    def do_GET(self) -> None:
        if self.path == "/healthz":
            self._answer(200, b"ok\n", "text/plain")
        else:
            self._error(404, "there is GET /healthz and POST / here")

    def do_POST(self) -> None:
        if self.path != "/":
            return self._error(404, "there is GET /healthz and POST / here", close=True)
        if self.server.stopping or not self.server.busy.acquire(timeout=_GRACE_SECONDS):
            return self._error(503, "busy with another shard", close=True, headers={"Retry-After": "1"})
        try:
            return self._run()
        finally:
            self.server.busy.release()

    def _run(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or "Transfer-Encoding" in self.headers:
            return self._error(411, "a task needs a Content-Length", close=True)
        if len(length) > 18 or int(length) > BODY_LIMIT:
            return self._error(413, f"task is larger than {BODY_LIMIT >> 20} MiB as sent: gzip it", close=True)
        peak_rss.reset()
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True
            return None
        try:
            task = read_task(body, self.headers.get("Content-Encoding", "").lower() == "gzip")
        except TaskTooLargeError as error:
            return self._error(413, str(error))
        except ContractError as error:
            return self._error(400, str(error))
        del body
        cancellation = Cancellation()
        try:
            with _hang_up_cancels(self.connection, cancellation):
                result = reduce(task, self.server.access, cancellation)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets a sentence
            complain(json.dumps({"round": task.round, "shard": task.shard, "error": describe(error)}))
            return self._error(500, describe(error))
        complain(json.dumps({"round": task.round, "shard": task.shard, "outcome": result.outcome}))
        return self._answer(200, result.to_json(), "application/json", {"X-Reducer": os.environ.get("HOSTNAME", "")})

    def _error(self, status: int, message: str, close: bool = False, headers: dict[str, str] | None = None) -> None:
        """``close``: the body was not read, so the connection cannot be used again."""
        self.close_connection = self.close_connection or close
        self._answer(status, json.dumps({"error": message}).encode(), "application/json", headers)

    def _answer(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def version_string(self) -> str:
        return "gradsharding-reducer"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Requests are not logged: what matters of them is, by ``_run``."""


@contextmanager
def _hang_up_cancels(connection: socket.socket, cancellation: Cancellation) -> Iterator[None]:
    """Cancel when the caller closes its connection: nobody is left to use the answer."""
    done = threading.Event()

    def watch() -> None:
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)  # hang-up and error are always reported
        while not done.is_set():
            if poll.poll(_WATCH_MILLISECONDS):
                cancellation.cancel()
                return

    watcher = threading.Thread(target=watch, daemon=True, name="hang-up")
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def main() -> int:
    """Serve on ``$PORT`` (8080) until SIGTERM."""
    try:
        access = Access.from_environment(os.environ)
        server = ReducerServer(("", int(os.environ.get("PORT") or "8080")), access)
    except Exception as error:  # noqa: BLE001 - one sentence instead of a traceback
        complain(json.dumps({"error": describe(error)}))
        return 1
    stopped = threading.Event()

    def stop() -> None:
        server.stop()
        stopped.set()

    on_sigterm(stop)
    complain(json.dumps({"listening": server.server_address[1]}))
    server.serve_forever(poll_interval=0.1)
    stopped.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
