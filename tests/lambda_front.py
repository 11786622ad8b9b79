"""A Lambda-compatible front for tests: many environments at once, each AWS's own emulator with AWS's own runtime client.

The Runtime Interface Emulator serves one call at a time and knows no memory cap. Here every concurrent call has an
emulator of its own, whose runtime process lives in a memory cgroup; the emulator stays outside. What the emulator says
in its own way (502 for a runtime that died, plain text for a timeout) is told as Lambda tells it.
"""

import base64
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

from gradsharding.deploy.package import HANDLER
from gradsharding.platforms.cgroups import owners, remove

START_SECONDS = 30.0
DIED = re.compile(r"Invoke failed error=(Runtime exited with error: .*?) InvokeID=")


def find_emulator():
    """The emulator's path, from LAMBDA_RIE or PATH."""
    found = os.environ.get("LAMBDA_RIE") or shutil.which("aws-lambda-rie")
    if not found:
        _not_here("no Lambda emulator: set LAMBDA_RIE to the path of aws-lambda-rie")
    return found


def _not_here(why):
    """Skip the test; fail it in CI, where everything must be there."""
    if os.environ.get("CI") == "true":
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


class LambdaFront:
    """A server at ``url`` that boto3 takes for Lambda; a context manager.

    ``task_root`` is the unzipped package. ``script(number)``, called for each invocation from 1 on, returns None or the
    HTTP status to refuse it with. ``cap_mib`` None: what the configuration says. ``host`` is where the server listens.
    """

    def __init__(
        self,
        task_root,
        directory,
        *,
        memory_mb=256,
        timeout=60,
        cap_mib=None,
        origins=(),
        script=None,
        host="127.0.0.1",
    ):
        self.name = "gradsharding-test"
        self.memory_mb, self.timeout, self.origins = memory_mb, timeout, origins
        self.calls = self.environments_started = self.most_at_once = 0
        self._task_root, self._directory = Path(task_root), Path(directory)
        self._emulator = find_emulator()
        self._cap = (cap_mib or memory_mb) << 20
        self._script = script or (lambda number: None)
        self._lock = threading.Lock()
        self._idle, self.busy = [], []
        self._cgroups = _capped_here()
        _lay_out_runtime_client(self._directory / "ric")
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                answer = front._configuration() if self.path == front._path("configuration") else None
                self._send(
                    200 if answer else 404,
                    answer or {"Type": "User"},
                    {} if answer else _code("ResourceNotFoundException"),
                )

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path != front._path("invocations"):
                    return self._send(404, {"Type": "User"}, _code("ResourceNotFoundException"))
                return self._send(*front._invoke(body))

            def _send(self, status, document, headers):
                raw = document if isinstance(document, bytes) else json.dumps(document).encode()
                self.send_response(status)
                for name, value in {"x-amzn-RequestId": str(uuid.uuid4()), **headers}.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._server.shutdown()
        self._server.server_close()
        for environment in [*self._idle, *self.busy]:
            environment.close()
        self._cgroups.close()

    def kill(self, number=signal.SIGKILL):
        """Send a signal to the runtime of one environment whose handler is at work: there must be one."""
        with self._lock:
            next(environment for environment in self.busy if environment.is_working()).signal(number)

    def _path(self, what):
        return f"/2015-03-31/functions/{self.name}/{what}"

    def _configuration(self):
        return {
            "FunctionName": self.name,
            "MemorySize": self.memory_mb,
            "Timeout": self.timeout,
            "Handler": HANDLER,
            "State": "Active",
            "LastUpdateStatus": "Successful",
            "Environment": {"Variables": self._variables()},
        }

    def _variables(self):
        return {"GRADSHARDING_ALLOWED_ORIGINS": " ".join(self.origins)}

    def _invoke(self, body):
        with self._lock:
            self.calls += 1
            status = self._script(self.calls)
        if status is not None:
            kind = "TooManyRequestsException" if status == 429 else "ServiceException"
            document = {"Type": "User", "Reason": "ConcurrentInvocationLimitExceeded", "Message": "scripted"}
            return status, document, {**_code(kind), "Retry-After": "0"}
        environment = self._take()
        answer = None
        try:
            answer = environment.invoke(body)
        finally:
            with self._lock:
                self.busy.remove(environment)
                if answer and "X-Amz-Function-Error" not in answer[2]:
                    self._idle.append(environment)
                    environment = None
            if environment:  # Lambda, too, gives a fresh one after a failure
                environment.close()
        return answer

    def _take(self):
        with self._lock:
            environment = self._idle.pop() if self._idle else None
            if environment is None:
                self.environments_started += 1
                cgroup = self._cgroups.create(self._cap)
                folder = self._directory / f"environment-{self.environments_started}"
                environment = Environment(self, folder, cgroup)
            self.busy.append(environment)
            self.most_at_once = max(self.most_at_once, len(self.busy))
        environment.wait_until_up()
        return environment


class Environment:
    """One emulator and, within a memory cgroup, the runtime that it starts."""

    def __init__(self, front, folder, cgroup):
        folder.mkdir()
        self._cgroup, self._timeout = cgroup, front.timeout
        self._port, api = _free_ports(2)
        self._log = folder / "log"
        runtime = folder / "runtime"
        # -S: neither the test environment's packages nor its numpy, only the package and the runtime client.
        runtime.write_text(
            f'#!/bin/sh\necho $$ >"{cgroup}/cgroup.procs"\nexec "{sys.executable}" -S -m awslambdaric "$@"\n'
        )
        runtime.chmod(0o755)
        variables = {
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": f"{front._task_root}:{front._directory / 'ric'}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "LAMBDA_TASK_ROOT": str(front._task_root),
            "AWS_LAMBDA_FUNCTION_NAME": front.name,
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(front.memory_mb),
            "AWS_LAMBDA_FUNCTION_TIMEOUT": str(front.timeout),
            **front._variables(),
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    front._emulator, "--runtime-interface-emulator-address", f"127.0.0.1:{self._port}",
                    "--runtime-api-address", f"127.0.0.1:{api}", str(runtime), HANDLER,
                ],
                cwd=front._task_root, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def wait_until_up(self):
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
                return
            assert self._process.poll() is None, self._log.read_text()
            time.sleep(0.02)
        raise AssertionError(f"the emulator does not start: {self._log.read_text()}")

    def invoke(self, body):
        """Status, body and headers as Lambda has them."""
        before, request = self._log.stat().st_size, str(uuid.uuid4())
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._timeout + START_SECONDS)
        with contextlib.closing(connection):
            headers = {"content-type": "application/json", "X-Amzn-RequestId": request}
            connection.request("POST", "/2015-03-31/functions/function/invocations", body, headers)
            response = connection.getresponse()
            said = response.read()
        lines = self._log.read_bytes()[before:].splitlines(keepends=True)
        tail = b"".join(line for line in lines if b"] (rapid) " not in line)[
            -4096:
        ]  # the emulator's own are no part of it
        headers = {"x-amzn-RequestId": request, "X-Amz-Log-Result": base64.b64encode(tail).decode()}
        if said.startswith(b"Task timed out after"):
            message = f"RequestId: {request} Error: {said.decode()}"
            said = json.dumps({"errorType": "Sandbox.Timedout", "errorMessage": message}).encode()
        if b'"errorType"' in said and b'"outcome"' not in said:
            headers["X-Amz-Function-Error"] = "Unhandled"
        elif response.status != 200 and (died := DIED.findall(self._log.read_text())):  # while it was starting
            said = json.dumps(
                {"errorType": "Runtime.ExitError", "errorMessage": f"RequestId: {request} Error: {died[-1]}"}
            )
            return 200, said.encode(), {**headers, "X-Amz-Function-Error": "Unhandled"}
        elif response.status != 200:
            return 500, {"Type": "Service", "Message": f"emulator: {response.status}"}, _code("ServiceException")
        return 200, said, headers

    def is_working(self):
        """Whether the handler has been called and has not returned, by the emulator's log."""
        log = self._log.read_text()
        started = "INIT RTDONE(status: success)" in log
        return started and log.count("] (rapid) INVOKE START(") > log.count("] (rapid) INVOKE RTDONE(")

    def signal(self, number):
        """To the runtime, not to the emulator."""
        for pid in (self._cgroup / "cgroup.procs").read_text().split():
            os.kill(int(pid), number)

    def close(self):
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self.signal(signal.SIGKILL)
        remove(self._cgroup)


def _capped_here():
    """The first place where a memory cgroup can be made, as LocalPlatform looks for it."""
    for cgroups in owners():
        try:
            remove(cgroups.create(64 << 20))
        except OSError:
            cgroups.close()
        else:
            return cgroups
    return _not_here("this machine lets nobody make a memory cgroup, and the emulator has no cap of its own")


def _lay_out_runtime_client(folder):
    """awslambdaric and what it needs, without all the rest of the test environment."""
    if folder.exists():
        return
    folder.mkdir()
    site = Path(find_spec("awslambdaric").origin).parents[1]
    for found in (
        *site.glob("awslambdaric"),
        *site.glob("runtime_client*.so"),
        *site.glob("snapshot_restore_py"),
        *site.glob("simplejson"),
    ):
        (folder / found.name).symlink_to(found)


def _free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in sockets]


def _code(name):
    return {"x-amzn-ErrorType": name}
