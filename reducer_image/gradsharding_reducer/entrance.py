"""What the entrances share: unpacking a task, and the last word on an error. Imports no numpy."""

from __future__ import annotations

import signal
import sys
import threading
import zlib
from typing import TYPE_CHECKING

from gradsharding_reducer import small_threads
from gradsharding_reducer.failures import ReducerFailure
from gradsharding_reducer.task import ContractError, ReduceTask

if TYPE_CHECKING:
    from collections.abc import Callable

UNPACKED_LIMIT = 16 << 20
"""Bytes of a task after gunzip."""

_GZIP_MAGIC = b"\x1f\x8b"


class TaskTooLargeError(ContractError):
    """Larger than the contract allows."""


def read_task(document: bytes, gzipped: bool = False) -> ReduceTask:
    """A task as it travels: JSON, or gzipped JSON (recognised by its first bytes). Raises ContractError."""
    if gzipped or document.startswith(_GZIP_MAGIC):
        unpacker = zlib.decompressobj(wbits=31)
        try:
            document = unpacker.decompress(document, UNPACKED_LIMIT + 1)
        except zlib.error as error:
            raise ContractError(f"task is not valid gzip: {error}") from None
        if len(document) <= UNPACKED_LIMIT and not unpacker.eof:
            raise ContractError("task is not valid gzip: it ends too early")
    if len(document) > UNPACKED_LIMIT:
        raise TaskTooLargeError(f"task is larger than {UNPACKED_LIMIT >> 20} MiB unpacked: use more, smaller shards")
    return ReduceTask.from_json(document)


def on_sigterm(act: Callable[[], None]) -> None:
    """Call ``act`` in a thread of its own when SIGTERM comes.

    A signal handler would run between two bytecodes of the folding thread, maybe while that holds the very lock that
    ``act`` needs. So the signal is blocked, in this and all later threads, and one thread waits for it. Call it from
    the main thread.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        act()

    small_threads.start([threading.Thread(target=wait, daemon=True, name="sigterm")])


def describe(error: Exception) -> str:
    """The sentence for an answer that will not come."""
    if isinstance(error, MemoryError):
        return "OutOfMemory: the memory cap does not hold this task's ranges and parts"
    if isinstance(error, ReducerFailure | ContractError):
        return str(error)
    if isinstance(error, OSError):
        return f"{type(error).__name__}: {error.strerror}"
    return f"bug in the reducer: {type(error).__name__}"  # its text may hold a URL, its type cannot


def complain(line: str) -> None:
    """One line on stderr."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
