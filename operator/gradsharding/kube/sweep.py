"""Every minute: delete rounds whose time after finishing is over, and functions that nobody has used for long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from gradsharding.kube.status import is_terminal, parse_time
from gradsharding.platforms.knative_service import LAST_USED

if TYPE_CHECKING:
    from gradsharding.kube.operator import Operator

log = logging.getLogger(__name__)
EVERY_SECONDS = 60.0


def is_expired(body: Mapping[str, Any], now: float) -> bool:
    """A finished round whose ttlSecondsAfterFinished is over. Pure."""
    ttl = body["spec"].get("ttlSecondsAfterFinished")
    status = body.get("status", {})
    ended = status.get("completionTime")
    return ttl is not None and ended is not None and is_terminal(status) and now >= parse_time(ended) + ttl


def is_idle(service: Mapping[str, Any], running: set[str], now: float, limit: float) -> bool:
    """A function without a running round among its owners, whose last use is long ago. Pure."""
    meta = service["metadata"]
    if any(owner["uid"] in running for owner in meta.get("ownerReferences", [])):
        return False
    used = meta.get("annotations", {}).get(LAST_USED) or meta["creationTimestamp"]
    try:
        return now - datetime.fromisoformat(used).timestamp() > limit
    except ValueError:
        return True


async def sweep(operator: Operator) -> None:
    """One sweep over the watched namespaces."""
    from kubernetes.aio.client import ApiException

    now = operator.clock()
    for namespace in operator.namespaces or (None,):
        for body in await operator.api.rounds(namespace):
            meta = body["metadata"]
            if is_expired(body, now) and not meta.get("deletionTimestamp"):
                log.info("round %s/%s: its time after finishing is over", meta["namespace"], meta["name"])
                with suppress(ApiException):  # somebody was faster, or it is looked at again in a minute
                    await operator.api.delete_round(meta["namespace"], meta["name"], meta["uid"])
        for service in await _services(operator, namespace):
            meta, running = service["metadata"], set(operator.drivers)
            if is_idle(service, running, now, operator.settings.idle_function_seconds):
                log.info("function %s/%s: unused, removed", meta["namespace"], meta["name"])
                with suppress(ApiException):
                    await operator.functions.api.delete_service(meta["namespace"], meta["name"])


async def _services(operator: Operator, namespace: str | None) -> list[Any]:
    from kubernetes.aio.client import ApiException

    try:
        return await operator.functions.api.list_services(namespace)
    except ApiException as error:
        if error.status == 404:  # no Knative here: rounds on Lambda need none
            return []
        raise


async def sweep_for_ever(operator: Operator) -> None:
    """A sweep that fails is logged, and tried again with the next."""
    while True:
        await asyncio.sleep(EVERY_SECONDS)
        try:
            await sweep(operator)
        except Exception as error:  # noqa: BLE001 - nothing may end the sweeping
            log.warning("the sweep was cut short: %s", type(error).__name__)
