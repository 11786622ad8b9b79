"""Telling a running invocation to stop: its caller hung up, or the process was told to end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Cancellation:
    """A flag that wakes those who wait. ``cancel`` takes locks: call it from a thread, never from a signal handler."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._wakers: list[Callable[[], None]] = []

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def cancel(self) -> None:
        self._event.set()
        for wake in tuple(self._wakers):
            wake()

    def on_cancel(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` when cancelled, at once if that was before."""
        self._wakers.append(wake)
        if self.requested:
            wake()

    def sleep(self, seconds: float) -> None:
        """Wait so long, or until cancelled."""
        self._event.wait(seconds)
