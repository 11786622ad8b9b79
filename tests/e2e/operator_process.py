"""The operator from this checkout, as a process that a test may kill, stop and continue."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from e2e.waiting import wait_for

COMMAND = (sys.executable, "-c", "import sys; from gradsharding.cli import main; sys.exit(main())", "operator")


class OperatorProcess:
    """Watches one namespace. ``settings`` are GRADSHARDING_ variables without that prefix."""

    def __init__(self, namespace, log, **settings):
        self.log, self._port = log, _free_port()
        variables = {f"GRADSHARDING_{name}": value for name, value in settings.items()}
        environment = os.environ | variables | {"GRADSHARDING_PORT": str(self._port)}
        # The functions' store keys come from Secrets: the operator has none of its own to fall back on.
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            environment.pop(name, None)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*COMMAND, "--namespace", namespace, "--log-format", "plain"],
                stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment,
            )  # fmt: skip
        self.pid = self._process.pid
        try:
            wait_for("the operator is up", self._is_up)
        except AssertionError:
            self.kill()
            raise

    def _is_up(self):
        assert self._process.poll() is None, f"the operator ended at once: {self.log.read_text()[-2000:]}"
        return self.get("/healthz") is not None

    def get(self, path):
        """What its own server answers; None when it does not."""
        with (
            suppress(OSError, urllib.error.URLError),
            urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=10) as response,
        ):
            return response.read().decode()
        return None

    def metric(self, name):
        """The sum of a metric over its labels."""
        rows = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        return sum(map(float, rows))

    def kill(self):
        """As the kernel does it: nothing of it runs any more."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait(10)

    def pause(self):
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self):
        os.kill(self.pid, signal.SIGCONT)

    def stop(self):
        """SIGTERM, as Kubernetes stops it; it must go by itself."""
        if self._process.poll() is None:
            self.resume()
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError("the operator did not stop within 30 s of SIGTERM") from None

    def resident_mb(self):
        """Resident memory in 10^6 bytes."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", text)[1]) * 1024 / 1e6


def _free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
