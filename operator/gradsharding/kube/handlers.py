"""What the triggers do: a few lines each, around the driver of a round."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import kopf

from gradsharding.kube.driver import Driver, Pass
from gradsharding.kube.logs import NextPass
from gradsharding.kube.operator import Operator
from gradsharding.kube.status import is_terminal, must_write, project
from gradsharding.rounds.step import Finished

MAX_WAIT = 2.0
"""Seconds that a pass waits for news at most, before Kopf is asked to call again."""
WRITE_AGAIN = 0.5
"""Seconds until a status that was refused, since the object changed meanwhile, is sent again."""
CLEANUP_SECONDS = 30.0

log = logging.getLogger(__name__)


async def run_round(body: kopf.Body, patch: kopf.Patch, memo: kopf.Memo, **_: Any) -> None:
    """One pass. Kopf writes its status, then calls again, and stops doing so when it sees a status that is final.

    So it returns only when nobody waits for it: whoever returns is not called again, and a last status that the lock refused
    were lost.
    """
    operator: Operator = memo.operator
    if memo.get("gone") or operator.stopping:
        return
    if is_terminal(body.get("status", {})):
        raise NextPass(WRITE_AGAIN)  # Kopf is about to stop this daemon
    driver = operator.driver(body)
    if "ended" in memo:
        await _write(memo.status, body, patch, memo)
        raise NextPass(WRITE_AGAIN)
    wait = min(memo.get("due", 0.0) - time.monotonic(), MAX_WAIT)
    if wait > 0 and memo.generation == body["metadata"]["generation"]:  # else it was suspended or resumed
        await driver.wait(min(wait, WRITE_AGAIN) if patch.fns else wait)
        if time.monotonic() < memo.due and not driver.has_news:
            raise NextPass(0.0)
    # What was written last is the better base: the body may lag behind our own writes.
    old: Mapping[str, Any] = memo.get("status") or dict(body.get("status", {}))
    generation = body["metadata"]["generation"]
    done = await driver.step(body, old)
    memo["due"], memo["generation"] = time.monotonic() + done.delay, generation
    new = project(old, done.seen, body["spec"], generation, operator.clock())
    finished = done.seen.finished
    if finished is not None or must_write(old, new, time.monotonic() - memo.get("written", -1e9)):
        await _write(new, body, patch, memo)
    for kind, reason, message in operator.events.pop(driver.uid, []):
        kopf.event(body, type=kind, reason=reason, message=message)
    if finished is not None:
        memo["ended"] = True
        _tell_end(operator, driver, body, finished)
    raise NextPass(0.0 if finished is None else WRITE_AGAIN)


async def _write(status: Mapping[str, Any], body: kopf.Body, patch: kopf.Patch, memo: kopf.Memo) -> None:
    """Put the status into Kopf's patch, in place of one that was refused.

    The lock is the version of the body as it was last watched. It would refuse a write that is faster than the watch event of
    the write before, so that one is waited for.
    """
    for _ in range(100):
        if body["metadata"]["resourceVersion"] != memo.get("version"):
            break
        await asyncio.sleep(0.01)
    memo["status"], memo["written"], memo["version"] = status, time.monotonic(), body["metadata"]["resourceVersion"]
    patch.fns[:] = [partial(_set_status, status=status)]


def _set_status(body: dict[str, Any], status: Mapping[str, Any]) -> None:
    body.setdefault("status", {}).update(status)


def _tell_end(operator: Operator, driver: Driver, body: kopf.Body, finished: Finished) -> None:
    operator.metrics.rounds.labels(str(finished.succeeded), finished.reason).inc()
    log.info(
        "round ended: %s", finished.reason,
        extra={"namespace": driver.namespace, "round": driver.name, "succeeded": finished.succeeded, "detail": finished.message},
    )  # fmt: skip
    if not finished.succeeded:
        kopf.event(body, type="Warning", reason=finished.reason, message=finished.message[:1000])


async def let_go(type: str | None, body: kopf.Body, memo: kopf.Memo, **_: Any) -> None:  # noqa: A002 - Kopf's name
    """A round is over, whoever ended it, or was deleted: stop what still runs for it here."""
    memo["gone"] = type == "DELETED"
    operator: Operator = memo.operator
    driver = operator.drivers.get(body["metadata"]["uid"])
    if driver is not None and type != "DELETED" and "ended" not in memo:
        await _clear_late_writes(driver, body)
    await operator.forget(body["metadata"]["uid"])


async def _clear_late_writes(driver: Driver, body: kopf.Body) -> None:
    """Another operator ended the round, and removed its scratch, while a pass here may have been about to write a plan.

    One pass more, as of a suspended round: it may clean up after the end that is stored, but begins nothing.
    """
    await driver.stop()
    suspended = {**body, "spec": {**body["spec"], "suspend": True}}
    with suppress(TimeoutError):
        async with asyncio.timeout(CLEANUP_SECONDS):
            await driver.step(suspended, body.get("status", {}))


async def clean_up(body: kopf.Body, memo: kopf.Memo, **_: Any) -> None:
    """Leave nothing of a deleted round. What cannot be removed is named in an Event, and the object goes all the same."""
    operator: Operator = memo.operator
    driver = operator.driver(body)
    trouble = ""
    try:
        async with asyncio.timeout(CLEANUP_SECONDS):
            await driver.stop()
            while (done := await _remove(driver, body)).seen.finished is None:
                trouble = done.seen.trouble[1] if done.seen.trouble else ""
                await driver.wait(done.delay)
    except TimeoutError:
        _tell_leftovers(driver, body, trouble or f"it took more than {CLEANUP_SECONDS:.0f} s")
    except Exception as error:  # a bug must not keep a namespace from going
        log.exception("clean-up", extra={"namespace": driver.namespace, "round": driver.name})
        _tell_leftovers(driver, body, f"{type(error).__name__} in the operator")
    await operator.forget(driver.uid)


async def _remove(driver: Driver, body: kopf.Body) -> Pass:
    return await driver.step(body, body.get("status", {}), deleting=True)


def _tell_leftovers(driver: Driver, body: kopf.Body, why: str) -> None:
    output = body["spec"]["output"]
    message = (
        f"the scratch of the deleted round was not removed: {why}; what is left is under "
        f"{output['bucket']}/{output['key']}.round/{driver.uid}/, and maybe an unfinished upload of {output['key']}"
    )
    log.warning(message, extra={"namespace": driver.namespace, "round": driver.name})
    kopf.event(body, type="Warning", reason="CleanupIncomplete", message=message[:1000])


async def hang_up(memo: kopf.Memo, **_: Any) -> None:
    """The operator stops: leave the rounds where they are."""
    await memo.operator.hang_up()
