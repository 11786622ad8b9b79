"""Tasks on a platform: which shard is called when, how often, and when that is hopeless.

What a call's end means is one pure function, ``after``; the Dispatcher around it owns the asyncio tasks. It never reads the
store: whether a lost answer was work done all the same is seen by the next pass, in the records, before anything is repeated.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from gradsharding.errors import RoundFailed, StoreError
from gradsharding.platforms import (
    FunctionFailed,
    FunctionSpec,
    InvocationError,
    OutOfMemory,
    Platform,
    Throttled,
    TimedOut,
    Unreachable,
)
from gradsharding.rounds import memory
from gradsharding.rounds.outcome import Attempt, attempt_of
from gradsharding.rounds.plan import Plan, PlannedPart
from gradsharding.rounds.step import Step
from gradsharding_reducer.task import Outcome, ReduceResult, ReduceTask, UrlKind

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 600.0
"""Beyond the function's timeout, how long no part may finish while the platform throttles or cannot be reached."""

Sign = Callable[[Plan, int, tuple[PlannedPart, ...], memory.Sizing], ReduceTask]
"""Make the task of one call, with fresh URLs. Runs in a thread; raises StoreError or RoundFailed."""


@dataclass(frozen=True, slots=True)
class ShardState:
    """What is known of one shard between its calls."""

    missing: tuple[int, int] = (0, 0)
    """First and last missing part when it was last wanted: a change is progress."""
    tries: int = 0
    """Calls in a row that ended without progress."""
    step: int = 0
    """Memory steps below the sizing that the round begins with."""
    denied: int = 0
    waits: int = 0
    """Throttled or Unreachable in a row."""
    not_before: float = 0.0
    held: Outcome | None = None
    """SourceGone or Cancelled: no call until a pass has looked at why."""
    gone: int | None = None
    """The participant that SourceGone named."""
    failure: RoundFailed | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one round's calls."""

    memory_mib: int
    timeout_seconds: int
    backoff_limit: int
    max_concurrency: int


@dataclass(frozen=True, slots=True)
class Calls:
    """What a pass is told of the calls, frozen for its length. Shard numbers are those of the plan ``digest``."""

    digest: str = ""
    running: frozenset[int] = frozenset()
    source_gone: Mapping[int, int | None] | None = None
    """Shard → the participant it named."""
    upload_gone: frozenset[int] = frozenset()
    failure: RoundFailed | None = None
    attempts: tuple[Attempt, ...] = ()


def after(
    state: ShardState, end: ReduceResult | Exception, sizing: memory.Sizing, limits: Limits, now: float, luck: float
) -> ShardState:
    """The state of a shard after one call. ``luck`` in [0, 1) spreads the back-off; formula: full jitter over 0.5·2^n s, at most 30 s."""

    def pause(n: int) -> float:
        return now + (0.5 + luck) * min(30.0, 0.5 * 2.0 ** min(n, 10))

    match end:
        case ReduceResult(outcome=Outcome.DONE | Outcome.PARTIAL | Outcome.BAD_VALUES):
            # Counted as a try until the next pass sees its record: an answer without a record must not loop for ever.
            return replace(state, tries=state.tries + 1, denied=0, waits=0)
        case ReduceResult(outcome=Outcome.SOURCE_GONE):
            return replace(state, held=Outcome.SOURCE_GONE, gone=end.refusal.source if end.refusal else None)
        case ReduceResult(outcome=Outcome.CANCELLED) if end.refusal and end.refusal.url is UrlKind.PART:
            return replace(state, held=Outcome.CANCELLED)
        case ReduceResult(outcome=Outcome.DENIED):
            if state.denied:
                kind = end.refusal.url.value if end.refusal and end.refusal.url else "unknown"
                code = end.refusal.code if end.refusal else ""
                message = f"the store refuses fresh {kind} URLs ({code}): check the rights of the keys, and the clock of this machine"
                return replace(state, failure=RoundFailed("StoreDenied", message))
            return replace(state, denied=1)
        case OutOfMemory():
            if memory.lower(sizing, state.step + 1) is None:
                message = (
                    f"a function of {limits.memory_mib} MiB is killed for its memory even with the smallest ranges: "
                    f"raise spec.function.memoryMiB, to {limits.memory_mib * 2} say"
                )
                return replace(state, failure=RoundFailed("OutOfMemory", message))
            return replace(state, step=state.step + 1)
        case Throttled(retry_after=seconds):
            return replace(state, waits=state.waits + 1, not_before=max(now + seconds, pause(state.waits)))
        case Unreachable() | ReduceResult():
            return replace(state, waits=state.waits + 1, not_before=pause(state.waits))
        case RoundFailed():
            return replace(state, failure=end)
        case _:
            tries = state.tries + 1
            failure = hopeless(end, limits) if tries >= limits.backoff_limit else None
            return replace(state, tries=tries, not_before=pause(tries), failure=failure)


def hopeless(end: Exception | None, limits: Limits) -> RoundFailed:
    """Why a shard is given up after ``backoff_limit`` tries."""
    tries = f"{limits.backoff_limit} tries without progress"
    if isinstance(end, TimedOut):
        message = f"a shard did not finish a single part within {limits.timeout_seconds} s, {tries}: raise spec.function.timeoutSeconds"
        return RoundFailed("FunctionTimedOut", message)
    detail = (
        end.detail if isinstance(end, InvocationError) else type(end).__name__ if end else "its answers left no record"
    )
    return RoundFailed("FunctionFailed", f"a shard failed, {tries}: {detail or 'the function gave no reason'}")


class Dispatcher:
    """The calls of one round. Lives in one event loop; only ``sign`` runs elsewhere."""

    def __init__(
        self,
        platform: Platform,
        function: Callable[[Plan], FunctionSpec],
        sign: Sign,
        limits: Limits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._platform = platform
        self._function = function
        self._sign = sign
        self._limits = limits
        self._clock = clock
        self._slots = asyncio.Semaphore(limits.max_concurrency)
        self._preparing = asyncio.Lock()
        self._prepared = ""
        self._digest = ""
        self._states: dict[int, ShardState] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._underway: set[asyncio.Task[None] | None] = set()
        self._attempts: list[Attempt] = []
        self._calls_made: dict[int, int] = {}
        self._last_progress = clock()
        self.store_error: StoreError | None = None
        self.changed = asyncio.Event()
        """Set whenever a call ends: time for another pass."""

    def snapshot(self) -> Calls:
        """What the next pass has to know."""
        failures = [s.failure for s in self._states.values() if s.failure]
        return Calls(
            digest=self._digest,
            running=frozenset(self._tasks),
            source_gone={i: s.gone for i, s in self._states.items() if s.held is Outcome.SOURCE_GONE},
            upload_gone=frozenset(i for i, s in self._states.items() if s.held is Outcome.CANCELLED),
            failure=failures[0] if failures else None,
            attempts=tuple(self._attempts),
        )

    def want(
        self,
        plan: Plan,
        digest: str,
        missing: Mapping[int, tuple[PlannedPart, ...]],
        sizing: memory.Sizing,
        release: frozenset[int] = frozenset(),
    ) -> None:
        """Call every shard that misses parts and is not being called. ``release`` lifts the hold of shards whose reason turned out void."""
        if digest != self._digest:
            self._forget()
            self._digest, self._last_progress = digest, self._clock()
        for shard, parts in missing.items():
            state = self._states.get(shard, ShardState())
            if shard in release:
                state = replace(state, held=None, gone=None, tries=state.tries + 1, not_before=self._clock() + 1.0)
            where = (parts[0].number, parts[-1].number)
            if where != state.missing:
                self._last_progress = self._clock()
                state = replace(state, missing=where, tries=0, waits=0)
            elif (
                state.tries >= max(1, self._limits.backoff_limit) and state.failure is None and shard not in self._tasks
            ):
                state = replace(state, failure=hopeless(None, self._limits))
            elif self._clock() - self._last_progress > self._limits.timeout_seconds + PATIENCE_SECONDS:
                waited = self._limits.timeout_seconds + PATIENCE_SECONDS
                message = f"no part finished for {waited:.0f} s while the platform was busy or out of reach"
                state = replace(state, failure=RoundFailed("NoProgress", message))
            self._states[shard] = state
            if shard not in self._tasks and state.held is None and state.failure is None:
                self._tasks[shard] = asyncio.create_task(self._call(plan, digest, shard, parts, sizing))

    async def follow(self, step: Step) -> None:
        """Do what a pass wishes."""
        if step.stop:
            await self.stop()
        elif step.plan is not None and step.sizing is not None:
            self.want(step.plan, step.digest, step.missing, step.sizing, step.release)

    async def wait(self, seconds: float) -> None:
        """Until a call ends, at most so long."""
        # Not wait_for: before Python 3.12 it swallows a cancellation that comes in the same moment as the event.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.changed.wait()

    def hold(self) -> None:
        """Take back the calls that still wait for their turn; those that run finish and count."""
        for task in self._tasks.values():
            if task not in self._underway:
                task.cancel()

    async def stop(self, patience: float = 10.0) -> None:
        """Cancel every call and wait for it, at most ``patience`` seconds: functions given up may go on as zombies."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=patience)

    def _forget(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._tasks, self._states = {}, {}

    async def _call(
        self, plan: Plan, digest: str, shard: int, parts: tuple[PlannedPart, ...], most: memory.Sizing
    ) -> None:
        end: ReduceResult | Exception
        state = self._states[shard]
        started = 0.0
        sizing = memory.lower(most, state.step) or most
        try:
            await asyncio.sleep(max(0.0, state.not_before - self._clock()))
            await self._prepare(plan, digest)
            async with self._slots:
                started = self._clock()
                task = await asyncio.to_thread(self._sign, plan, shard, parts, sizing)
                self.store_error = None
                self._calls_made[shard] = self._calls_made.get(shard, 0) + 1
                self._underway.add(asyncio.current_task())
                end = await self._platform.invoke(task, self._calls_made[shard])
        except StoreError as error:
            self.store_error, end = error, Unreachable(str(error))
        except (InvocationError, RoundFailed) as error:
            end = error
        except Exception as error:
            log.exception("shard %d of revision %d", shard, plan.revision)
            end = FunctionFailed(f"{type(error).__name__} in the platform")
        finally:
            self._underway.discard(asyncio.current_task())
            if self._digest == digest:
                self._tasks.pop(shard, None)
            self.changed.set()
        if self._digest == digest:
            self._attempts.append(self._attempt(plan, shard, parts, sizing, started, end))
            # Spreads retries; nothing secret hangs on it.
            self._states[shard] = after(state, end, most, self._limits, self._clock(), random.random())  # noqa: S311

    async def _prepare(self, plan: Plan, digest: str) -> None:
        """Before the first call of a plan, since only that tells how many shards there are."""
        async with self._preparing:
            if self._prepared != digest:
                await self._platform.prepare(self._function(plan))
                self._prepared = digest

    def _attempt(
        self,
        plan: Plan,
        shard: int,
        parts: tuple[PlannedPart, ...],
        sizing: memory.Sizing,
        started: float,
        end: ReduceResult | Exception,
    ) -> Attempt:
        first, last = parts[0].number, parts[-1].number
        if isinstance(end, ReduceResult):
            return attempt_of(end, first, last, sizing.range_bytes, sizing.prefetch)
        detail = end.detail if isinstance(end, InvocationError) else str(end)
        return Attempt(
            revision=plan.revision, shard=shard, first_part=first, last_part=last, outcome=type(end).__name__, detail=detail,
            started=started, finished=self._clock(), bytes_read=0, bytes_written=0, retries=0, seconds={}, peak_rss_bytes=0,
            range_bytes=sizing.range_bytes, prefetch=sizing.prefetch, platform=self._platform.name,
            request_id=end.request_id if isinstance(end, InvocationError) else "", memory_cap="",
            billed_ms=end.billed_ms if isinstance(end, InvocationError) else 0,
        )  # fmt: skip
