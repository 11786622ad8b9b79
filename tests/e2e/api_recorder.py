"""A proxy in front of the API server that notes what was asked of it, as RBAC sees it."""

import base64
import http.client
import json
import re
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from cluster import kubectl

PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)"
    r"(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<resource>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?"
)
VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}


@dataclass(frozen=True)
class Call:
    """One request for resources; ``status`` is the answer's."""

    group: str
    resource: str
    verb: str
    namespace: str
    status: int

    @property
    def right(self):
        return self.group, self.resource, self.verb


def call(method, url, status):
    """What the API server asks RBAC about a request; None for what everybody may, such as the list of groups."""
    parts = urlsplit(url)
    match = PATH.fullmatch(parts.path)
    if not match:
        return None
    query = parse_qs(parts.query)
    if method == "GET":
        watches = query.get("watch", [""])[0] in ("true", "1")
        verb = "get" if match["name"] else "watch" if watches else "list"
    elif method == "DELETE":
        verb = "delete" if match["name"] else "deletecollection"
    else:
        verb = VERBS[method]
    resource = f"{match['resource']}/{match['sub']}" if match["sub"] else match["resource"]
    return Call(match["group"] or "", resource, verb, match["namespace"] or "", status)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _pass_on(self):
        recorder = self.server.recorder
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        upstream = http.client.HTTPSConnection(recorder.address, context=recorder.tls, timeout=600)
        try:
            upstream.request(self.command, self.path, body or None, headers)
            response = upstream.getresponse()
            recorder.note(self.command, self.path, response.status)
            self.send_response_only(response.status, response.reason)
            for name, value in response.getheaders():
                if name.lower() not in HOP_BY_HOP:
                    self.send_header(name, value)
            self.send_header(
                "Connection", "close"
            )  # the end of the answer is the end of the connection: watches have no length
            self.end_headers()
            with suppress(OSError):  # who asked has gone, as watchers do
                while piece := response.read1(1 << 16):
                    self.wfile.write(piece)
        finally:
            upstream.close()
        self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on  # noqa: N815

    def log_message(self, *_):
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request, client_address):
        """A client that was stopped."""


class ApiRecorder:
    """Plain HTTP on this machine; who asks brings a token of its own."""

    def __init__(self):
        config = json.loads(kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json").stdout)
        cluster = config["clusters"][0]["cluster"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self.tls = ssl.create_default_context(cadata=authority)
        self.address = urlsplit(cluster["server"]).netloc
        self.calls = set()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.recorder = self
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def note(self, method, url, status):
        found = call(method, url, status)
        if found is not None:
            self.calls.add(found)

    def kubeconfig(self, token):
        """Of somebody with this token who asks through here."""
        return json.dumps(
            {
                "apiVersion": "v1", "kind": "Config", "current-context": "recorded",
                "clusters": [{"name": "recorded", "cluster": {"server": self.endpoint}}],
                "users": [{"name": "recorded", "user": {"token": token}}],
                "contexts": [{"name": "recorded", "context": {"cluster": "recorded", "user": "recorded"}}],
            }
        )  # fmt: skip

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
