"""A proxy in front of an S3 store that can hold a request back: so a test stops the world at an exact point of the protocol.

Requests are passed on as they are, since their Host is signed: the store sees the proxy's address in it, and so do the functions.
"""

import http.client
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "proxy-connection"}


@dataclass
class Request:
    """One request. ``port`` is its client's; ``status`` 0 until it is answered."""

    method: str
    key: str
    query: dict
    client: str
    port: int
    status: int = 0

    @property
    def is_part(self):
        return self.method == "PUT" and "partNumber" in self.query

    @property
    def part(self):
        return int(self.query["partNumber"][0])

    @property
    def is_complete(self):
        return self.method == "POST" and "uploadId" in self.query

    def is_put_of(self, suffix):
        return self.method == "PUT" and not self.is_part and self.key.endswith(suffix)

    @property
    def is_record(self):
        return self.method == "PUT" and "/shards/" in self.key


class Hold:
    """Requests that are held back until ``release``, which passes them on, or ``drop``, which the store never sees."""

    def __init__(self, matches, limit):
        self._matches, self._limit = matches, limit
        self._free, self._arrived = threading.Event(), threading.Condition()
        self._passes = True
        self.requests = []

    def takes(self, request):
        with self._arrived:
            full = self._limit is not None and len(self.requests) >= self._limit
            if self._free.is_set() or full or not self._matches(request):
                return False
            self.requests.append(request)
            self._arrived.notify_all()
            return True

    def verdict(self):
        """Wait; whether to pass the request on."""
        self._free.wait()
        return self._passes

    def wait(self, count=1, seconds=90):
        """Until so many requests are held."""
        with self._arrived:
            done = self._arrived.wait_for(lambda: len(self.requests) >= count, seconds)
        assert done, f"{len(self.requests)} of {count} requests came within {seconds} s"
        return self.requests

    def release(self):
        self._free.set()

    def drop(self):
        self._passes = False
        self._free.set()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def _pass_on(self):
        proxy, parts = self.server.proxy, urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        request = Request(self.command, unquote(parts.path), query, *self.client_address[:2])
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        proxy.log.append(request)
        if not proxy.lets_through(request):
            self.close_connection = True
            return
        status, reason, headers, answer = self._ask(proxy.target, body)
        request.status = status
        self.send_response_only(status, reason)
        for name, value in headers:
            if name.lower() not in HOP_BY_HOP | {"content-length"}:
                self.send_header(name, value)
        length = {name.lower(): value for name, value in headers}.get("content-length")
        self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on  # noqa: N815 - the base class's names

    def _ask(self, target, body):
        upstream = http.client.HTTPConnection(target, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in HOP_BY_HOP:
                    upstream.putheader(name, value)
            upstream.endheaders(body or None)
            response = upstream.getresponse()
            return response.status, response.reason, response.getheaders(), response.read()
        finally:
            upstream.close()

    def log_message(self, *_):
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request, client_address):
        """A client that was killed."""


class S3Proxy:
    """In front of the store at ``target`` (host:port), on an address of this machine that pods reach."""

    def __init__(self, target, host):
        self.target = target
        self.log = []
        self._holds, self._paces = [], []
        self._turn = threading.Lock()
        self._server = _Server((host, 0), _Handler)
        self._server.proxy = self
        self.port = self._server.server_address[1]
        self.host, self.endpoint = host, f"http://{host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def hold(self, matches, limit=None):
        """Hold back requests that match, at most ``limit`` of them."""
        made = Hold(matches, limit)
        self._holds.append(made)
        return made

    def pace(self, matches, seconds):
        """Let requests that match through one after another, one each so many seconds."""
        self._paces.append((matches, seconds))

    def lets_through(self, request):
        for matches, seconds in self._paces:
            if matches(request):
                with self._turn:
                    time.sleep(seconds)  # the pace itself, not a wait for something
        return all(hold.verdict() for hold in self._holds if hold.takes(request))

    def reset(self):
        """Forget holds and the log, between tests."""
        for hold in self._holds:
            hold.drop()
        self._holds, self._paces, self.log = [], [], []

    def parts_written(self):
        """Part number → how often it was uploaded."""
        counts = {}
        for request in list(self.log):
            if request.is_part and request.status == 200:
                counts[request.part] = counts.get(request.part, 0) + 1
        return counts

    def close(self):
        self.reset()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def own_address(endpoint):
    """The address of this machine on the way to the store: that of its network that the nodes are on, too."""
    parts = urlsplit(endpoint)
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=10) as connection:
        return connection.getsockname()[0]


def process_of(request, proxy_port, pids):
    """Which of these processes sent a request that is being held: by its port, and the socket it belongs to."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        local, remote = (int(address.split(":")[1], 16) for address in fields[1:3])
        if (local, remote) == (request.port, proxy_port):
            wanted = f"socket:[{fields[9]}]"
            for pid in pids:
                for entry in Path(f"/proc/{pid}/fd").iterdir():
                    with suppress(OSError):
                        if str(entry.readlink()) == wanted:
                            return pid
    raise AssertionError("the held request comes from none of the operators")
