"""What all rounds of one operator process share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import aiohttp

from gradsharding.errors import RoundFailed
from gradsharding.kube.api import KubeApi
from gradsharding.kube.driver import Driver
from gradsharding.kube.metrics import Metrics
from gradsharding.kube.server import Health, serve
from gradsharding.kube.settings import Settings
from gradsharding.kube.sweep import sweep_for_ever
from gradsharding.platforms import Platform
from gradsharding.platforms.knative import Functions, KnativePlatform
from gradsharding.platforms.knative_api import KnativeApi
from gradsharding.rounds.outcome import Attempt
from gradsharding.rounds.spec import RoundSpec
from gradsharding.s3 import S3Bucket
from gradsharding.s3_transport import Patience
from gradsharding.store import Bucket

if TYPE_CHECKING:
    from aiohttp import web
    from kubernetes.aio.client import ApiClient
    from minio.credentials.providers import Provider

log = logging.getLogger(__name__)

PATIENCE = Patience(tries=3)
"""With a store: the next pass asks again, and until then a condition tells the user."""

Event = tuple[str, str, str]
"""Type, reason and message of a Kubernetes Event."""


@dataclass(slots=True)
class Operator:
    """Made at start-up, closed at the end. ``namespaces`` None: all."""

    settings: Settings
    namespaces: tuple[str, ...] | None
    client: ApiClient
    session: aiohttp.ClientSession
    clock: Callable[[], float] = time.time
    """Unix seconds, for deadlines and the times in a status."""
    metrics: Metrics = field(default_factory=Metrics)
    drivers: dict[str, Driver] = field(default_factory=dict)
    api_servers: set[tuple[str, int]] = field(default_factory=set)
    events: dict[str, list[Event]] = field(default_factory=dict)
    """By uid of the round: what is to be told with its next pass."""
    api: KubeApi = field(init=False)
    functions: Functions = field(init=False)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    server: web.AppRunner | None = None
    stopping: bool = False

    def __post_init__(self) -> None:
        self.api = KubeApi(self.client)
        self.functions = Functions(
            KnativeApi(self.client), self.session, self.settings.pods, lambda uid: uid in self.drivers
        )

    async def begin(self) -> None:
        """Start what runs beside the rounds. Raises SettingsError when the port is taken, or rounds cannot be listed."""
        for namespace in self.namespaces or (None,):  # Kopf would wait in silence for a resource that is not there
            await self.api.check_rounds(namespace)
        self.api_servers = await self.api.api_servers()
        health = Health(self.unattended)
        self.server = await serve(self.settings.port, health, self.metrics.registry)
        beside = (health.watch(), self.count_active(), sweep_for_ever(self))
        self.tasks = [asyncio.create_task(work) for work in beside]

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

    def bucket(self, spec: RoundSpec, name: str, keys: Provider, ca_pem: str | None) -> Bucket:
        """One of a round's buckets. Raises StoreRefused when its settings cannot be right."""
        return S3Bucket.connect(spec.store.endpoint, name, spec.store.region, keys, ca_pem, patience=PATIENCE)

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
        from gradsharding.platforms.aws_lambda import LambdaPlatform

        region = spec.function.aws_lambda.region or spec.store.region
        return LambdaPlatform(name, region, allowed=self.settings.lambda_functions)

    def tell(self, driver: Driver, attempts: Sequence[Attempt]) -> None:
        """Log every attempt; make one Event of what a user can act on."""
        killed = sorted({attempt.shard for attempt in attempts if attempt.outcome == "OutOfMemory"})
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
        if killed:
            names = ", ".join(map(str, killed[:20])) + (f" and {len(killed) - 20} more" if len(killed) > 20 else "")
            message = (
                f"killed for its memory, and goes again with less: shard {names}; "
                "if it happens often, raise spec.function.memoryMiB"
            )
            self.events.setdefault(driver.uid, []).append(("Warning", "OutOfMemory", message))

    def unattended(self) -> float:
        """The most seconds that any running round is without a pass."""
        return max((driver.unattended for driver in self.drivers.values()), default=0.0)

    async def count_active(self) -> None:
        """Keep the gauge of invocations in flight true, for ever."""
        while True:
            self.metrics.active.set(sum(driver.active for driver in self.drivers.values()))
            await asyncio.sleep(2.0)

    async def hang_up(self) -> None:
        """Leave all rounds; they go on in the store where they are."""
        self.stopping = True  # a watch event in the last moment makes Kopf start a daemon anew
        await asyncio.gather(*(self.forget(uid) for uid in list(self.drivers)))

    async def close(self) -> None:
        """Leave all rounds, close connections."""
        for task in self.tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self.hang_up()
        if self.server is not None:
            await self.server.cleanup()
        await self.session.close()
        await self.client.close()  # type: ignore[no-untyped-call]
