"""A platform that runs the real reducer in a thread of this process: for rounds in milliseconds."""

import asyncio
import dataclasses
from collections.abc import Callable

from gradsharding.platforms import FunctionSpec
from gradsharding_reducer.access import Access
from gradsharding_reducer.cancellation import Cancellation
from gradsharding_reducer.exchange import Patience
from gradsharding_reducer.reduce import reduce
from gradsharding_reducer.task import ReduceResult, ReduceTask, Runtime


class InlinePlatform:
    """``script(task, call number)`` may raise an InvocationError, return a result of its own, or None for the real thing."""

    name = "inline"
    startup_seconds = 5.0
    trouble = None

    def __init__(
        self,
        origin: str,
        script: Callable[[ReduceTask, int], ReduceResult | None] | None = None,
        cancellation: Cancellation | None = None,
    ) -> None:
        self._access = Access((origin,))
        self._script = script
        self._cancellation = cancellation
        self.tasks: list[ReduceTask] = []

    async def prepare(self, function: FunctionSpec) -> None:
        """Nothing to prepare."""

    async def invoke(self, task: ReduceTask, attempt: int) -> ReduceResult:
        self.tasks.append(task)
        number = len(self.tasks)
        result = self._script(task, number) if self._script else None
        if result is None:
            result = await asyncio.to_thread(reduce, task, self._access, self._cancellation, Patience())
        return dataclasses.replace(result, runtime=Runtime("inline", f"call {number}", "none"))

    async def release(self) -> None:
        """Nothing to release."""
