"""How many calls a function may have in flight, over all rounds that share it, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """At most ``limit`` holders at once. Who waits is served round by round in turn, so that no round starves another."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def take(self, round_: str) -> AsyncIterator[None]:
        """Hold a slot for a call of this round."""
        if self.in_use < self.limit and not self._waiting:
            self.in_use += 1
        else:
            await self._wait(round_)
        try:
            yield
        finally:
            self.in_use -= 1
            self._serve()

    async def _wait(self, round_: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(round_, deque()).append(turn)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was served in the same moment: pass the slot on
                self.in_use -= 1
                self._serve()
            raise

    def _serve(self) -> None:
        while self.in_use < self.limit and self._waiting:
            round_, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[round_] = queue  # behind all others
            if not turn.done():
                self.in_use += 1
                turn.set_result(None)
