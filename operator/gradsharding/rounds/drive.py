"""The loop of a process that runs one round to its end: pass, call what is missing, wait, pass again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gradsharding.errors import StoreUnreachable
from gradsharding.platforms import FunctionSpec, Platform
from gradsharding.rounds.advance import Round
from gradsharding.rounds.dispatch import Calls, Dispatcher, Limits
from gradsharding.rounds.plan import Plan
from gradsharding.rounds.sign import Signer
from gradsharding.rounds.step import Finished, Intent, Step

Watch = Callable[[Step, Calls], None]
"""Told of every pass, with the calls as they were before it."""

STORE_PATIENCE = 8
"""Passes in a row that may fail to reach the store, with pauses of 1, 2, 4 … 30 s: about two minutes."""


def make_dispatcher(round_: Round, platform: Platform, ca_pem: str | None = None) -> Dispatcher:
    """The calls of a round on a platform. ``ca_pem``: further certificates that reducers trust."""
    context = round_.context
    function = context.spec.function
    signer = Signer(context.keys, context.updates, context.output, function.timeout_seconds, platform.startup_seconds)
    limits = Limits(function.memory_mib, function.timeout_seconds, function.backoff_limit, function.max_concurrency)

    def spec(plan: Plan) -> FunctionSpec:
        return FunctionSpec(
            memory_mib=function.memory_mib,
            timeout_seconds=function.timeout_seconds,
            max_concurrency=function.max_concurrency,
            at_once=min(len(plan.shards), function.max_concurrency),
            origins=tuple(sorted({context.updates.origin, context.output.origin})),
            ca_pem=ca_pem,
        )

    return Dispatcher(platform, spec, signer, limits)


async def drive(
    round_: Round,
    platform: Platform,
    watch: Watch = lambda _step, _calls: None,
    intent: Callable[[], Intent] = lambda: Intent.RUN,
    ca_pem: str | None = None,
) -> Finished:
    """Run a round to its end. Raises StoreError when the store refuses, or cannot be reached for about two minutes.

    Cancelling stops all calls and leaves the round as it is in the store: driving it again goes on there.
    """
    dispatcher = make_dispatcher(round_, platform, ca_pem)
    failures, reached = 0, False
    try:
        while True:
            dispatcher.changed.clear()
            calls = dispatcher.snapshot()
            try:
                step = await asyncio.to_thread(round_.advance, calls, intent())
                failures, reached = 0, True
            except StoreUnreachable:
                failures += 1
                if not reached or failures > STORE_PATIENCE:
                    raise
                await asyncio.sleep(min(30.0, 2.0 ** (failures - 1)))
                continue
            watch(step, calls)
            if step.finished is not None:
                return step.finished
            await dispatcher.follow(step)
            if step.delay:
                await dispatcher.wait(step.delay)
    finally:
        await dispatcher.stop()
        await platform.release()
