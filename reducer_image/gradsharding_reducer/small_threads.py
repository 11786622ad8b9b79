"""Threads with small stacks: under a memory cap the usual 8 MiB of each count, at least where reservations are limited."""

from __future__ import annotations

import threading
from collections.abc import Iterable

STACK_BYTES = 256 * 1024

_one_at_a_time = threading.Lock()
"""The stack size is the process's: two starters at once would leave the small one behind."""


def start(threads: Iterable[threading.Thread]) -> None:
    """Start them. Raises MemoryError when one cannot: its stack does not fit under the cap."""
    with _one_at_a_time:
        previous = threading.stack_size(STACK_BYTES)
        try:
            for thread in threads:
                thread.start()
        except RuntimeError:  # "can't start new thread"
            raise MemoryError("a thread could not start") from None
        finally:
            threading.stack_size(previous)
