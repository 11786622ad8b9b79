"""Runs one server for as long as its starter lives: ``python keeper.py FILE[:FILE...] COMMAND ...``.

The starter holds the other end of our standard input. When that ends, because the starter wants it or because it was
killed, the server gets SIGTERM, after a grace SIGKILL, and then the files named (sockets that it leaves behind) are
removed. Were we killed ourselves, the kernel kills the server. Run by its path: it needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

GRACE_SECONDS = 2.0
"""SeaweedFS takes 15 s to end, waiting for a stream of its own; all data has left the process before."""

_PR_SET_PDEATHSIG = 1


def main(left_behind: str, command: list[str]) -> int:
    """The server's exit status, as subprocess gives it."""
    libc = ctypes.CDLL(None)

    ours = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def die_with_us() -> None:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    for number in ours:
        signal.signal(number, signal.SIG_IGN)  # the end of our input is the one sign
    try:
        # A group of its own, so that its children end with it. preexec_fn is safe here: this process has one thread.
        server = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_us
        )
        watched = select.poll()
        watched.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
        watched.register(os.pidfd_open(server.pid), select.POLLIN)
        watched.poll()
        signal_group(server.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(GRACE_SECONDS)
        signal_group(server.pid, signal.SIGKILL)
        return server.wait()
    finally:
        for file in filter(None, left_behind.split(":")):
            Path(file).unlink(missing_ok=True)


def signal_group(group: int, number: int) -> None:
    """Send a signal to what is left of a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]) != 0)
