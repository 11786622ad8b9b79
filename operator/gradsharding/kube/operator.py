"""What all rounds of one operator process share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import aiohttp

from gradsharding.errors import RoundFailed
from gradsharding.kube.api import KubeApi
from gradsharding.kube.driver import Driver
from gradsharding.kube.metrics import Metrics
from gradsharding.kube.settings import Settings
from gradsharding.platforms import Platform
from gradsharding.platforms.knative import Functions, KnativePlatform
from gradsharding.platforms.knative_api import KnativeApi
from gradsharding.rounds.outcome import Attempt
from gradsharding.rounds.spec import RoundSpec

if TYPE_CHECKING:
    from aiohttp import web
    from kubernetes.aio.client import ApiClient

log = logging.getLogger(__name__)

Event = tuple[str, str, str]
"""Type, reason and message of a Kubernetes Event."""


@dataclass(slots=True)
class Operator:
    """Made at start-up, closed at the end. ``namespaces`` None: all."""

    settings: Settings
    namespaces: tuple[str, ...] | None
    client: ApiClient
    session: aiohttp.ClientSession
    metrics: Metrics = field(default_factory=Metrics)
    drivers: dict[str, Driver] = field(default_factory=dict)
    api_servers: set[tuple[str, int]] = field(default_factory=set)
    events: dict[str, list[Event]] = field(default_factory=dict)
    """By uid of the round: what is to be told with its next pass."""
    api: KubeApi = field(init=False)
    functions: Functions = field(init=False)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    server: web.AppRunner | None = None

    def __post_init__(self) -> None:
        self.api = KubeApi(self.client)
        self.functions = Functions(KnativeApi(self.client), self.session, self.settings.pods)

    def driver(self, body: Mapping[str, Any]) -> Driver:
        """The driver of a round, made when it is first asked for."""
        uid = body["metadata"]["uid"]
        if uid not in self.drivers:
            self.drivers[uid] = Driver(self, body)
            self.metrics.running.set(len(self.drivers))
        return self.drivers[uid]

    async def forget(self, uid: str) -> None:
        """A round has ended, or is none of ours any more."""
        driver = self.drivers.pop(uid, None)
        self.events.pop(uid, None)
        self.metrics.running.set(len(self.drivers))
        if driver is not None:
            await driver.stop()

    def platform(self, spec: RoundSpec, namespace: str, owner: Mapping[str, Any]) -> Platform:
        """Where a round's functions run. Raises RoundFailed when the operator may not use it."""
        if spec.function.aws_lambda is None:
            return KnativePlatform(self.functions, namespace, owner)
        name = spec.function.aws_lambda.function_name
        if not any(fnmatchcase(name, glob) for glob in self.settings.lambda_functions):
            raise RoundFailed(
                "FunctionNotAllowed",
                f"spec.function.lambda.functionName {name} is not among the functions that this operator may call "
                f"({', '.join(self.settings.lambda_functions)}): ask its administrator to add it to GRADSHARDING_LAMBDA_FUNCTIONS",
            )
        raise RoundFailed("PlatformUnavailable", "this build has no Lambda platform")

    def tell(self, driver: Driver, attempts: Sequence[Attempt]) -> None:
        """Log every attempt; make an Event of what a user can act on."""
        for attempt in attempts:
            log.info(
                "shard %d of revision %d: %s",
                attempt.shard,
                attempt.revision,
                attempt.outcome,
                extra={
                    "namespace": driver.namespace, "round": driver.name, "shard": attempt.shard, "outcome": attempt.outcome,
                    "detail": attempt.detail, "seconds": round(attempt.finished - attempt.started, 3),
                },
            )  # fmt: skip
            if attempt.outcome == "OutOfMemory":
                message = (
                    f"shard {attempt.shard} was killed for its memory and goes again with less; "
                    "if it happens often, raise spec.function.memoryMiB"
                )
                self.events.setdefault(driver.uid, []).append(("Warning", "OutOfMemory", message))

    def oldest_pass(self) -> float | None:
        """The longest ago last pass over any running round."""
        return min((driver.last_pass for driver in self.drivers.values()), default=None)

    async def count_active(self) -> None:
        """Keep the gauge of invocations in flight true, for ever."""
        while True:
            self.metrics.active.set(sum(driver.active for driver in self.drivers.values()))
            await asyncio.sleep(2.0)

    async def close(self) -> None:
        """Hang up calls, close connections; rounds go on in the store where they are."""
        for task in self.tasks:
            task.cancel()
        for task in self.tasks:
            with suppress(asyncio.CancelledError):
                await task
        for uid in list(self.drivers):
            await self.forget(uid)
        if self.server is not None:
            await self.server.cleanup()
        await self.session.close()
        await self.client.close()  # type: ignore[no-untyped-call]
