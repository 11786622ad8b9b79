"""Memory cgroups: where this process may make them, and what they tell afterwards. Linux, versions 1 and 2.

All cgroups of one owner lie in one folder that carries its pid, ``gradsharding-<pid>-<token>``, so that whoever comes
next can remove what an owner that was killed left behind. They are made inside this process's own cgroup or beside it,
never nearer to the root: the limits that hold for this process hold for its functions, too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

OWNED = re.compile(r"gradsharding-([0-9]+)-[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one version of the interface calls things. ``events`` is the file that counts ``oom_kill``."""

    kind: str
    limit: str
    swap_limit: str
    swap_includes_memory: bool
    events: str


V1 = Dialect("cgroup-v1", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", True, "memory.oom_control")
V2 = Dialect("cgroup-v2", "memory.max", "memory.swap.max", False, "memory.events")


class CgroupOwner:
    """This process's folder of memory cgroups within ``parent``. Methods raise OSError where the kernel refuses."""

    def __init__(self, parent: Path, dialect: Dialect) -> None:
        self.kind = dialect.kind
        self._dialect = dialect
        self._parent = parent
        self._folder = parent / f"gradsharding-{os.getpid()}-{secrets.token_hex(4)}"
        self._numbers = itertools.count()

    def create(self, limit_bytes: int) -> Path:
        """An empty cgroup that holds its processes to ``limit_bytes`` of memory and no swap."""
        if not self._folder.exists():
            self._folder.mkdir()
            if self._dialect is V2:
                (self._folder / "cgroup.subtree_control").write_text("+memory")
        cgroup = self._folder / str(next(self._numbers))
        cgroup.mkdir()
        (cgroup / self._dialect.limit).write_text(str(limit_bytes))
        swap = cgroup / self._dialect.swap_limit
        if swap.exists():
            swap.write_text(str(limit_bytes) if self._dialect.swap_includes_memory else "0")
        return cgroup

    def oom_kills(self, cgroup: Path) -> int:
        """How many processes the kernel has killed in it for their memory."""
        match = re.search(r"^oom_kill ([0-9]+)$", (cgroup / self._dialect.events).read_text(), re.MULTILINE)
        return int(match.group(1)) if match else 0

    def close(self) -> None:
        """Remove the folder and all in it; cgroups with live processes stay."""
        _remove_tree(self._folder)

    def sweep(self) -> None:
        """Remove the folders of owners that are dead."""
        for folder in self._parent.glob("gradsharding-*"):
            match = OWNED.fullmatch(folder.name)
            if match and not _alive(int(match.group(1))):
                _remove_tree(folder)


def owners() -> list[CgroupOwner]:
    """The places where memory cgroups could be made, best first; whether they may is for the caller to try."""
    memberships = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape")
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    return [CgroupOwner(parent, dialect) for parent, dialect in places(memberships, mounts)]


def places(memberships: str, mounts: str) -> list[tuple[Path, Dialect]]:
    """From the texts of /proc/self/cgroup and /proc/self/mountinfo: folders, and the version spoken there.

    In version 2 a cgroup with processes in it cannot pass controllers on, unless it is the root: the place beside
    it, which systemd delegates to users, is the second choice.
    """
    found: list[tuple[Path, Dialect]] = []
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        dialect = V2 if not controllers else V1 if "memory" in controllers.split(",") else None
        mount = _mount(mounts, dialect) if dialect else None
        if dialect is None or mount is None:
            continue
        root, point = mount
        if path != root and not path.startswith(root.rstrip("/") + "/"):  # the mount shows another part of the tree
            continue
        own = Path(point, path[len(root.rstrip("/")) :].lstrip("/"))
        found.append((own, dialect))
        if dialect is V2 and own != Path(point):
            found.append((own.parent, dialect))
    return found


def remove(cgroup: Path) -> None:
    """Remove one cgroup. The kernel may need a moment after the last process; past it the owner's ``close`` does it."""
    for _ in range(10):
        try:
            cgroup.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.01)
        else:
            return


def _mount(mounts: str, dialect: Dialect) -> tuple[str, str] | None:
    """Root and mount point of the hierarchy that speaks this dialect."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if dialect is V2 and kind[0] == "cgroup2":
            return fields[3], fields[4]
        if dialect is V1 and kind[0] == "cgroup" and "memory" in kind[2].split(","):
            return fields[3], fields[4]
    return None


def _remove_tree(folder: Path) -> None:
    for cgroup in folder.glob("*/"):
        remove(cgroup)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
