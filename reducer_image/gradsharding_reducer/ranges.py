"""Ranged reads, prefetched by K threads into a fixed ring of slots and handed out in the order of the jobs.

Memory is the slots', whatever the number and size of the sources.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from typing import TYPE_CHECKING

from gradsharding_reducer import small_threads
from gradsharding_reducer.exchange import Channel, Request, bare_etag
from gradsharding_reducer.failures import ReducerFailure, Refused, cancelled
from gradsharding_reducer.task import Outcome, Refusal, SourceObject, UrlKind

if TYPE_CHECKING:
    import http.client
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from gradsharding_reducer.cancellation import Cancellation


def read_range(channel: Channel, source: int, target: SourceObject, offset: int, view: memoryview) -> None:
    """Fill ``view`` with bytes from ``offset`` on of the object with exactly this ETag.

    Raises Refused (SourceGone) when the object is gone or another one, ReducerFailure when the store answers anything
    else.
    """
    last = offset + len(view) - 1
    etag = f'"{bare_etag(target.etag)}"'
    request = Request("GET", target.url, UrlKind.SOURCE, source, {"Range": f"bytes={offset}-{last}", "If-Match": etag})

    def receive(response: http.client.HTTPResponse) -> None:
        content_range = response.getheader("Content-Range", "")
        if not re.fullmatch(rf"bytes {offset}-{last}/(\d+|\*)", content_range) or response.length != len(view):
            raise ReducerFailure(
                f"{request}: asked for bytes {offset}-{last}, the store sent {response.length} bytes"
                f" as {content_range[:80]!r}: the object is shorter than planned, or the store is not S3"
            )
        if (sent := response.getheader("ETag")) is not None and bare_etag(sent) != bare_etag(target.etag):
            # Some proxies and old stores ignore If-Match.
            raise Refused(Outcome.SOURCE_GONE, Refusal(UrlKind.SOURCE, source, response.status, "ETagChanged"))
        channel.receive_into(response, view)

    channel.exchange(request, 206, receive)


class Ring:
    """A fixed ring of slots. Use as a context manager: leaving it cancels ``stop`` and ends the threads.

    Each of ``fills`` belongs to one thread: ``fill(job, slot)`` reads, obeys ``stop``, and what it raises comes out of
    ``take`` in the job's turn.
    """

    def __init__(
        self,
        fills: Sequence[Callable[[int, memoryview], None]],
        jobs: int,
        slots: Sequence[memoryview],
        stop: Cancellation,
    ) -> None:
        self._jobs = jobs
        self._free = deque(slots)
        self._ready: dict[int, tuple[memoryview, BaseException | None]] = {}
        self._next_job = 0
        self._next_taken = 0
        self._changed = threading.Condition()
        self._stop = stop
        self._threads = [threading.Thread(target=self._work, args=(fill,), daemon=True) for fill in fills]
        stop.on_cancel(self._wake)

    def __enter__(self) -> Ring:
        try:
            small_threads.start(self._threads)
        except MemoryError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.cancel()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        # `stop` refers to the ring and the ring to `stop`: without this the slots would wait for the garbage collector.
        self._free.clear()
        self._ready.clear()

    def take(self) -> memoryview:
        """The slot of the next job in order, once it is filled; give it back with ``release``."""
        with self._changed:
            while not self._stop.requested and self._next_taken not in self._ready:
                self._changed.wait()
            if self._stop.requested:
                raise cancelled()
            slot, error = self._ready.pop(self._next_taken)
            self._next_taken += 1
        try:
            if error is not None:
                raise error
        finally:
            # Or its traceback would hold this frame, and that the error: the slots would wait for the collector.
            del error
        return slot

    def release(self, slot: memoryview) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def _work(self, fill: Callable[[int, memoryview], None]) -> None:
        while True:
            with self._changed:
                # First the slot, then the number: a number without a slot would stall its turn for ever.
                while not self._free and not self._stop.requested:
                    self._changed.wait()
                if self._stop.requested or self._next_job == self._jobs:
                    return
                slot = self._free.popleft()
                job = self._next_job
                self._next_job += 1
            error: BaseException | None = None
            try:
                fill(job, slot)
            except BaseException as raised:  # noqa: BLE001 - raised again by `take`
                error = raised
            with self._changed:
                self._ready[job] = (slot, error)
                self._changed.notify_all()
                if error is not None:
                    del error  # as in `take`
                    return

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
