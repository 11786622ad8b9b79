"""Run a command under a memory cap and tied to its owner's life: ``python -I -S capped.py OWNER KIND LIMIT COMMAND...``

A program of its own, run by path, because what it does must happen in the child, and between fork and exec of a process
with threads no Python is safe. It costs about 15 ms and then is the command, under the same pid.

KIND ``rlimit-data`` sets RLIMIT_DATA to LIMIT bytes; the other kinds join the cgroup whose folder is LIMIT.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

RLIMIT_KIND = "rlimit-data"
NOT_STARTED = 125
"""Exit status when the command could not be started, as env(1) and timeout(1) have it."""

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Become the command. Returns never: exits with NOT_STARTED and a line on stderr when something is refused."""
    owner, kind, limit, *command = arguments
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(owner):  # it died before the line above
        sys.exit(NOT_STARTED)
    try:
        # When the whole machine is short of memory, a reducer is the one to go: it is tried again.
        Path("/proc/self/oom_score_adj").write_text("1000")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold signed URLs
        if kind == RLIMIT_KIND:
            resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
        else:
            Path(limit, "cgroup.procs").write_text("0")
        os.execv(command[0], command)  # noqa: S606  (the command is the platform's own)
    except OSError as error:
        sys.stderr.write(f"cannot start under cap {kind}: {error}\n")
        sys.exit(NOT_STARTED)


if __name__ == "__main__":
    main(sys.argv[1:])
