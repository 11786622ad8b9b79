"""Run one process and tell what it cost: wall and CPU seconds, and its own peak of memory.

``ru_maxrss`` of a child begins with the memory of the process that forked it. So the measured process is started by
this file again, run as a bare interpreter: its 15 MB are below everything that is measured here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import NamedTuple


class Measured(NamedTuple):
    """``rss_bytes`` is the peak resident set; ``cpu_seconds`` are user and system time, interpreter start included."""

    stdout: bytes
    wall_seconds: float
    cpu_seconds: float
    rss_bytes: int


class RunFailedError(RuntimeError):
    """The measured process did not end with status 0; the message holds the end of its standard error."""


def run(command: list[str], stdin: bytes = b"", env: dict[str, str] | None = None) -> Measured:
    """Run ``command`` with ``stdin``. ``env`` is added to the environment. Raises RunFailedError."""
    report_fd, child_fd = os.pipe()
    launcher = [sys.executable, "-I", "-S", __file__, str(child_fd), *command]
    with os.fdopen(report_fd) as report:
        try:
            process = subprocess.Popen(
                launcher,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[child_fd],
                env={**os.environ, **(env or {})},
            )
        finally:
            os.close(child_fd)
        stdout, stderr = process.communicate(stdin)
        line = report.read()
    if not line:
        raise RunFailedError(f"cannot start {command[0]}: {stderr.decode(errors='replace')[-2000:]}")
    wall, cpu, rss, status = json.loads(line)
    if status:
        raise RunFailedError(
            f"{' '.join(command)} ended with status {status}: {stderr.decode(errors='replace')[-2000:]}"
        )
    return Measured(stdout, wall, cpu, rss)


def _launch(report_fd: int, command: list[str]) -> None:
    """Fork, exec, wait, and write ``[wall, cpu, rss, status]`` to the pipe."""
    os.set_inheritable(report_fd, False)
    start = time.monotonic()
    pid = os.posix_spawnp(command[0], command, os.environ)
    _, status, usage = os.wait4(pid, 0)
    wall = time.monotonic() - start
    report = [wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, os.waitstatus_to_exitcode(status)]
    os.write(report_fd, json.dumps(report).encode())


if __name__ == "__main__":
    _launch(int(sys.argv[1]), sys.argv[2:])
