"""What happens around every command: the first Ctrl-C ends it in good order, with ``--json`` an error is an object."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from gradsharding.cli.exits import INTERRUPTED, Interrupted, status_and_reason
from gradsharding.cli.terminal import print_json, say

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from types import FrameType

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h\n"


class Interrupts:
    """Ctrl-C and SIGTERM while a command runs. The first raises Interrupted in the main thread, the next quits."""

    def __init__(self) -> None:
        self._seen = False
        self._act: Callable[[], object] = _raise_interrupted

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        if self._seen:
            # A bar hides the cursor. Nothing is lost: reducers and servers end with this process.
            if os.isatty(2):
                os.write(2, _SHOW_CURSOR)
            os._exit(INTERRUPTED)
        self._seen = True
        self._act()

    def run(self, work: Coroutine[Any, Any, T], advice: str) -> T:
        """``asyncio.run`` that a signal ends by cancelling ``work``, for which it waits; then Interrupted(advice)."""

        async def supervised() -> T:
            loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

            def stop() -> None:
                say("stopping; Ctrl-C again quits at once")
                task.cancel()

            # Not loop.add_signal_handler: that ends with the coroutine, before the loop has waited for its threads.
            self._act = lambda: loop.call_soon_threadsafe(stop)
            return await task

        try:
            return asyncio.run(supervised())
        except asyncio.CancelledError:
            raise Interrupted(advice) from None
        finally:
            self._act = _raise_interrupted


def _raise_interrupted() -> NoReturn:
    raise Interrupted


@contextmanager
def answering(as_json: bool) -> Iterator[Interrupts]:
    """Around the body of a command. Errors pass through; ``as_json`` prints them on stdout as well."""
    interrupts = Interrupts()
    # One that is ignored, as behind nohup, stays so.
    before = {number: signal.getsignal(number) for number in SIGNALS}
    caught = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, interrupts.handle)
    try:
        yield interrupts
    except BaseException as error:
        if as_json:
            _, reason = status_and_reason(error)
            message = type(error).__name__ if reason == "InternalError" else str(error)
            print_json({"succeeded": False, "reason": reason, "message": message})
        raise
    finally:
        for number in caught:
            signal.signal(number, before[number])
