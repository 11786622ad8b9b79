"""What the triggers do: a few lines each, around the driver of a round."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import aiohttp
import kopf

from gradsharding.kube import sweep
from gradsharding.kube.api import connect
from gradsharding.kube.driver import Driver, Pass
from gradsharding.kube.operator import Operator
from gradsharding.kube.server import Health, serve
from gradsharding.kube.status import must_write, project

MAX_WAIT = 2.0
"""Seconds that one pass may take, its waiting included: so long a stop of the operator may have to wait."""
CLEANUP_SECONDS = 30.0


async def start(memo: kopf.Memo, **_: Any) -> None:
    """Connect, and start what runs beside the rounds."""
    client = await connect()
    operator = Operator(memo.settings, memo.namespaces, client, aiohttp.ClientSession(auto_decompress=True))
    operator.api_servers = await operator.api.api_servers()
    health = Health(operator.oldest_pass)
    operator.server = await serve(memo.settings.port, health, operator.metrics.registry)
    operator.tasks = [
        asyncio.create_task(health.watch()),
        asyncio.create_task(operator.count_active()),
        asyncio.create_task(sweep.sweep_for_ever(operator)),
    ]
    memo.operator = operator


async def close(memo: kopf.Memo, **_: Any) -> None:
    """Leave the rounds where they are."""
    if memo.operator is not None:
        await memo.operator.close()


async def run_round(body: kopf.Body, patch: kopf.Patch, memo: kopf.Memo, **_: Any) -> None:
    """One pass. Kopf writes its status, then calls again."""
    operator: Operator = memo.operator
    driver = operator.driver(body)
    due = memo.get("due", 0.0)
    wait = min(due - time.monotonic(), MAX_WAIT)
    if wait > 0:
        await driver.wait(wait)
        if time.monotonic() < due and not driver.has_news:
            raise kopf.TemporaryError("nothing new", delay=0.01)
    done = await driver.step(body)
    memo["due"] = time.monotonic() + done.delay
    _write(done, body, patch, memo)
    for kind, reason, message in operator.events.pop(driver.uid, []):
        kopf.event(body, type=kind, reason=reason, message=message)
    finished = done.seen.finished
    if finished is None:
        raise kopf.TemporaryError("next pass", delay=0.01)
    operator.metrics.rounds.labels(str(finished.succeeded), finished.reason).inc()
    if not finished.succeeded:
        kopf.event(body, type="Warning", reason=finished.reason, message=finished.message[:1000])
    await operator.forget(driver.uid)


def _write(done: Pass, body: kopf.Body, patch: kopf.Patch, memo: kopf.Memo) -> None:
    """Put the new status into Kopf's patch, if it is due."""
    # What was written last is the better base: the body may lag behind our own writes.
    old: Mapping[str, Any] = memo.get("status") or dict(body.get("status", {}))
    new = project(old, done.seen, body["spec"], body["metadata"]["generation"], time.time())
    now = time.monotonic()
    if done.seen.finished is None and not must_write(old, new, now - memo.get("written", -1e9)):
        return
    memo["status"], memo["written"] = new, now
    patch.fns.append(partial(_set_status, status=new))


def _set_status(body: dict[str, Any], status: Mapping[str, Any]) -> None:
    body.setdefault("status", {}).update(status)


async def clean_up(body: kopf.Body, memo: kopf.Memo, **_: Any) -> None:
    """Leave nothing of a deleted round. What cannot be removed is named in an Event, and the object goes all the same."""
    operator: Operator = memo.operator
    driver = operator.driver(body)
    await driver.stop()
    deadline = time.monotonic() + CLEANUP_SECONDS
    while True:
        done = await driver.step(body, deleting=True)
        if done.seen.finished is not None:
            break
        if done.seen.trouble is not None and time.monotonic() + done.delay > deadline:
            _tell_leftovers(driver, body, done.seen.trouble[1])
            break
        if time.monotonic() > deadline:
            _tell_leftovers(driver, body, "it took too long")
            break
        await driver.wait(min(done.delay, MAX_WAIT))
    await operator.forget(driver.uid)


def _tell_leftovers(driver: Driver, body: kopf.Body, why: str) -> None:
    output = body["spec"]["output"]
    message = (
        f"the scratch of the deleted round was not removed: {why}; what is left is under "
        f"{output['bucket']}/{output['key']}.round/{driver.uid}/, and maybe an unfinished upload of {output['key']}"
    )
    kopf.event(body, type="Warning", reason="CleanupIncomplete", message=message[:1000])
