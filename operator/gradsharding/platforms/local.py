"""The local platform: one subprocess per invocation, with its memory capped by the kernel."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gradsharding.errors import RoundFailed
from gradsharding.platforms import (
    FunctionFailed,
    FunctionSpec,
    InvocationError,
    OutOfMemory,
    Throttled,
    TimedOut,
    Trouble,
)
from gradsharding.platforms import capped as capped_program
from gradsharding.platforms.capped import NOT_STARTED, RLIMIT_KIND
from gradsharding.platforms.cgroups import CgroupOwner, owners, remove
from gradsharding_reducer.task import ContractError, ReduceResult, ReduceTask, Runtime

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

MIB = 1 << 20

REDUCER = (sys.executable, "-I", "-m", "gradsharding_reducer")
"""``-I``: neither PYTHON* variables nor the working directory decide which code runs."""

OUT_OF_MEMORY_EXIT = 12
"""The reducer's exit status when the cap is too small for it."""

STOP_SECONDS = 2.0
"""From SIGTERM to SIGKILL when an invocation is cancelled."""

PROBE_SECONDS = 30.0
PROBE_CAP = 32 * MIB
PROBE_HUNGRY = (sys.executable, "-I", "-S", "-c", f"b'x' * {3 * PROBE_CAP}")
MEASURE = """
import re
import gradsharding_reducer.reduce
with open("/proc/self/status") as file:
    sizes = dict(re.findall(r"^(Vm\\w+):\\s+(\\d+) kB$", file.read(), re.MULTILINE))
print((int(sizes["VmData"]) - int(sizes["VmRSS"])) * 1024)
"""
PROBE_REDUCER = (sys.executable, "-I", "-c", MEASURE)

PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""What a reducer gets of this process's environment: never a key of a store or a cloud."""

NO_MEMORY = re.compile(r"MemoryError|[Cc]annot allocate memory|can't start new thread|failed to map segment|bad_alloc")
"""How interpreters and libraries say it that fail before the reducer can."""

PROGRESS = re.compile(rb"progress ([0-9]{1,18})")
"""A line of stderr, when the reducer was asked for it."""

SIGNED = re.compile(r"\?[^\s'\"]+")
"""The query of a URL, where signatures are."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """A process that is over. ``status`` is negative for a signal."""

    pid: int
    status: int
    stdout: bytes
    stderr: str
    oom_kills: int

    @property
    def starved(self) -> bool:
        """Whether it was its memory: by the kernel's account, its own, or what a library said."""
        return (
            self.oom_kills > 0
            or self.status in (OUT_OF_MEMORY_EXIT, -signal.SIGKILL)
            or (self.status != 0 and NO_MEMORY.search(self.stderr) is not None)
        )


Told = Callable[[int], object]
"""Told how many bytes a reducer has read so far."""


def _nobody(_count: int) -> None:
    """For processes whose progress is nobody's matter."""


class LocalPlatform:
    """Runs reducers on this machine. Use it from one event loop, in a thread that lives as long as the invocations do.

    The cap is a memory cgroup where this process may make one, else RLIMIT_DATA; ``caps`` allows fewer kinds.
    Nothing stays behind, whichever way an invocation ends: a reducer whose owner is killed is killed by the kernel.
    ``on_progress`` is told shard and bytes read so far of every running invocation, in the event loop.
    """

    name = "local"
    startup_seconds = 15.0
    trouble: Trouble | None = None

    def __init__(
        self,
        command: Sequence[str] = REDUCER,
        caps: Sequence[str] | None = None,
        on_progress: Callable[[int, int], object] | None = None,
    ) -> None:
        self.command = tuple(command)
        """What an invocation runs: a task on stdin, its result on stdout."""
        self._function: FunctionSpec | None = None
        self._allowed = caps
        self._cgroups: CgroupOwner | None = None
        self._on_progress = on_progress
        self._kind = ""
        self._untouched = 0
        self._ca: int | None = None

    async def prepare(self, function: FunctionSpec) -> None:
        """Find out once which cap the kernel enforces here, and that a reducer starts under it.

        Raises RoundFailed: ``NoMemoryCap`` or ``ReducerUnusable``.
        """
        if not self._kind:
            await self._choose_cap()
        self._function = function
        self._set_ca(function.ca_pem)
        await self._measure_start(function)

    async def invoke(self, task: ReduceTask, attempt: int) -> ReduceResult:  # noqa: ARG002 (the protocol's)
        """Run one task in a process of its own. Cancelling it ends the process, with 2 seconds to do so by itself."""
        function = self._function
        assert function is not None, "prepare comes first"
        command, tell = self.command, self._on_progress
        told: Told = _nobody
        if tell is not None:
            command, told = (*command, "--progress"), lambda count: tell(task.shard, count)
        ended = await self._run(command, task.to_json(), function.memory_mib * MIB, function.timeout_seconds, told)
        request = f"pid {ended.pid}"
        if ended.starved:
            cap = f"{function.memory_mib} MiB ({self._kind})"
            raise OutOfMemory(f"killed for its memory under a cap of {cap}, or could not get any", request)
        if ended.status != 0:
            raise FunctionFailed(_last_words(ended), request)
        try:
            result = ReduceResult.from_json(ended.stdout)
        except ContractError as error:
            raise FunctionFailed(f"what the reducer answered is no result: {error}", request) from None
        return replace(result, runtime=Runtime(self.name, request, self._kind))

    async def release(self) -> None:
        """Remove the cgroups of this process and forget the certificates."""
        self._set_ca(None)
        if self._cgroups is not None:
            self._cgroups.close()

    async def _choose_cap(self) -> None:
        """Try each kind on a process that wants more than it may have: only death proves that a cap is enforced."""
        for cgroups in (*owners(), None):
            kind = cgroups.kind if cgroups else RLIMIT_KIND
            if self._allowed is not None and kind not in self._allowed:
                continue
            self._cgroups, self._kind = cgroups, kind
            try:
                if cgroups:
                    cgroups.sweep()
                ended = await self._run(PROBE_HUNGRY, b"", PROBE_CAP, PROBE_SECONDS)
            except (OSError, InvocationError):
                ended = None
            if ended and ended.starved:
                return
            if cgroups:
                cgroups.close()
        self._cgroups, self._kind = None, ""
        raise RoundFailed(
            "NoMemoryCap",
            "this machine enforces no memory cap on local reducers, neither by a memory cgroup nor by RLIMIT_DATA: "
            "run on Linux, or use spec.function.platform Knative or Lambda",
        )

    async def _measure_start(self, function: FunctionSpec) -> None:
        """A reducer must start under the cap.

        RLIMIT_DATA counts what is reserved and never touched (32 MiB by OpenBLAS alone), but no pages of mapped files.
        The limit is set higher by the difference, so that it holds resident memory to the cap.
        """
        self._untouched = 0
        try:
            ended = await self._run(PROBE_REDUCER, b"", function.memory_mib * MIB, PROBE_SECONDS)
        except InvocationError as error:
            raise RoundFailed("ReducerUnusable", f"no local reducer can be started: {error.detail}") from None
        if ended.status != 0:
            raise RoundFailed(
                "ReducerUnusable",
                f"{sys.executable} -m gradsharding_reducer does not start under a cap of {function.memory_mib} MiB "
                f"({self._kind}): {_last_words(ended)}",
            )
        self._untouched = max(0, int(ended.stdout))

    async def _run(
        self, command: Sequence[str], stdin: bytes, limit_bytes: int, seconds: float, told: Told = _nobody
    ) -> _Ended:
        """Run a command under the cap until it is over. Raises TimedOut, Throttled and FunctionFailed."""
        async with self._cap(limit_bytes) as (limit, cgroup):
            wrapper = (sys.executable, "-I", "-S", str(capped_program.__file__), str(os.getpid()), self._kind, limit)
            try:
                process = await asyncio.create_subprocess_exec(
                    *wrapper,
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env=self._environment(),
                    pass_fds=() if self._ca is None else (self._ca,),
                    start_new_session=True,  # Ctrl-C in a terminal is for us, who then end the reducers in good order
                )
            except BlockingIOError as error:
                raise Throttled(f"no room for another process: {error.strerror}") from None
            except OSError as error:
                raise FunctionFailed(f"cannot start {sys.executable}: {error.strerror}") from None
            stdout, stderr = await _finish(process, stdin, seconds, told)
            kills = self._cgroups.oom_kills(cgroup) if self._cgroups and cgroup else 0
            assert process.returncode is not None
            return _Ended(process.pid, process.returncode, stdout, stderr.decode(errors="replace"), kills)

    @contextlib.asynccontextmanager
    async def _cap(self, limit_bytes: int) -> AsyncIterator[tuple[str, Path | None]]:
        """What the wrapper is told to hold the process to, and the cgroup if it is one."""
        if self._cgroups is None:
            yield str(limit_bytes + self._untouched), None
            return
        try:
            cgroup = self._cgroups.create(limit_bytes)
        except OSError as error:
            raise FunctionFailed(f"cannot make a memory cgroup: {error.strerror}") from None
        try:
            yield str(cgroup), cgroup
        finally:
            remove(cgroup)

    def _environment(self) -> dict[str, str]:
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment |= {"LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}
        if self._function is not None:
            environment["GRADSHARDING_ALLOWED_ORIGINS"] = " ".join(self._function.origins)
        if self._ca is not None:
            environment["GRADSHARDING_CA_FILE"] = f"/proc/self/fd/{self._ca}"
        return environment

    def _set_ca(self, pem: str | None) -> None:
        """Keep the certificates in a file without a name: reducers inherit it, and nobody has to remove it."""
        if self._ca is not None:
            os.close(self._ca)
            self._ca = None
        if pem is not None:
            self._ca = os.memfd_create("gradsharding-ca")
            with os.fdopen(self._ca, "wb", closefd=False) as file:
                file.write(pem.encode())


async def _finish(process: asyncio.subprocess.Process, stdin: bytes, seconds: float, told: Told) -> tuple[bytes, bytes]:
    """Talk to the process until it is over. After TimedOut and after a cancellation it is over, too."""
    talk = asyncio.ensure_future(_talk(process, stdin, told))
    try:
        await asyncio.wait({talk}, timeout=seconds)
        if not talk.done():
            raise TimedOut(f"no answer in {seconds:g} seconds", f"pid {process.pid}")
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait({talk}, timeout=STOP_SECONDS)
        raise
    finally:
        if not talk.done():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await _whatever_comes(talk)
    return talk.result()


async def _talk(process: asyncio.subprocess.Process, stdin: bytes, told: Told) -> tuple[bytes, bytes]:
    """What ``process.communicate`` does, but lines of progress are told as they come, and are not in stderr's rest."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    talk = process.stdout.read(), _listen(process.stderr, told), _feed(process.stdin, stdin)
    stdout, stderr, _ = await asyncio.gather(*talk)
    await process.wait()
    return stdout, stderr


async def _feed(pipe: asyncio.StreamWriter, body: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may end before it has read all
        pipe.write(body)
        await pipe.drain()
    pipe.close()


async def _listen(pipe: asyncio.StreamReader, told: Told) -> bytes:
    kept, rest = bytearray(), b""
    while chunk := await pipe.read(1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            progress = PROGRESS.fullmatch(line)
            if progress:
                told(int(progress[1]))
            else:
                kept += line + b"\n"
    return bytes(kept) + rest


async def _whatever_comes(talk: asyncio.Future[tuple[bytes, bytes]]) -> None:
    """Wait for the end of a process that was killed, also when we are cancelled meanwhile; that comes after."""
    cancelled: asyncio.CancelledError | None = None
    while not talk.done():
        try:
            await asyncio.wait({talk})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _last_words(ended: _Ended) -> str:
    """Why a process failed, by its own account, without what follows a question mark in URLs."""
    line = ended.stderr.strip().rpartition("\n")[2][:500]
    with contextlib.suppress(ValueError, TypeError, KeyError):
        line = str(json.loads(line)["error"])
    line = SIGNED.sub("?...", line)
    if ended.status == NOT_STARTED:
        return line
    how = f"signal {-ended.status}" if ended.status < 0 else f"exit status {ended.status}"
    return f"{line or 'the reducer broke without a word'} ({how})"
