"""One round in this operator: its buckets, its calls, and one pass at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradsharding.credentials import ambient
from gradsharding.errors import (
    GradsShardingError,
    ManifestError,
    RoundFailed,
    StoreError,
    StoreRefused,
    StoreUnsupported,
)
from gradsharding.kube.endpoints import EndpointRefused, check_endpoint, resolve_host
from gradsharding.kube.secrets import RotatingKeys, SecretUnusable, text
from gradsharding.kube.status import Seen, collecting_since, parse_time
from gradsharding.kube.threads import in_thread
from gradsharding.platforms import Platform
from gradsharding.probe import probe_conditional_put
from gradsharding.rounds.advance import Round
from gradsharding.rounds.dispatch import Calls, Dispatcher
from gradsharding.rounds.drive import make_dispatcher
from gradsharding.rounds.outcome import nobody_yet
from gradsharding.rounds.report import ANSWERED
from gradsharding.rounds.spec import RoundSpec, parse_round
from gradsharding.rounds.step import Finished, Intent, Phase, Step

if TYPE_CHECKING:
    from gradsharding.kube.operator import Operator

TROUBLE_SECONDS = 5.0
"""Until the next try when a Secret, an endpoint or the store is not as it must be."""
CHAIN_SECONDS = 1.0
"""So long one pass may take steps that want no pause."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What a pass saw, and when the next one is due."""

    seen: Seen
    delay: float


class Driver:
    """Steps one round. Every call takes the round's object as it is now, since ``suspend`` may change."""

    def __init__(self, operator: Operator, body: Mapping[str, Any]) -> None:
        meta = body["metadata"]
        self._operator = operator
        self.namespace, self.name, self.uid = meta["namespace"], meta["name"], meta["uid"]
        self._last_pass = time.monotonic()
        self._created = parse_time(meta["creationTimestamp"])
        self._owner = {
            "apiVersion": body["apiVersion"],
            "kind": body["kind"],
            "name": self.name,
            "uid": self.uid,
            "controller": False,
            "blockOwnerDeletion": False,
        }
        self._keys = RotatingKeys()
        self._ca = ""
        self._round: Round | None = None
        self._dispatcher: Dispatcher | None = None
        self.platform: Platform | None = None
        self._one_at_a_time = asyncio.Lock()
        self._thread: asyncio.Future[Step] | None = None
        self._told = 0
        self._seen: Seen | None = None

    async def step(self, body: Mapping[str, Any], status: Mapping[str, Any], deleting: bool = False) -> Pass:
        """One pass, on top of the ``status`` that was written last. What a user can mend is not raised: it is the pass's ``trouble``."""
        async with self._one_at_a_time:
            if self._dispatcher is not None:
                self._dispatcher.changed.clear()
            self._last_pass = time.monotonic()
            try:
                spec = parse_round({key: body[key] for key in ("apiVersion", "kind", "metadata", "spec")})
            except ManifestError as error:
                finished = Finished(False, "InvalidSpec", str(error), nobody_yet(self.uid, ""))
                return Pass(Seen(Phase.ENDING, finished=finished), 0.0)
            intent = Intent.DELETE if deleting else Intent.SUSPEND if spec.suspend else Intent.RUN
            try:
                return await self._step(spec, status, intent)
            except RoundFailed as error:
                finished = Finished(False, error.reason, error.message, nobody_yet(self.uid, spec.digest()))
                return Pass(Seen(Phase.ENDING, finished=finished), 0.0)
            except SecretUnusable as error:
                return self._troubled(spec, "SecretUnusable", error, intent)
            except EndpointRefused as error:
                return self._troubled(spec, "EndpointRefused", error, intent)
            except StoreUnsupported as error:
                return self._troubled(spec, "StoreUnsupported", error, intent)
            except StoreRefused as error:
                self._operator.metrics.store_errors.labels("refused").inc()
                return self._troubled(spec, "StoreDenied", error, intent)
            except StoreError as error:
                self._operator.metrics.store_errors.labels("unreachable").inc()
                return self._troubled(spec, "StoreUnreachable", error, intent)
            finally:
                self._last_pass = time.monotonic()

    async def _step(self, spec: RoundSpec, status: Mapping[str, Any], intent: Intent) -> Pass:
        await self._open(spec, intent)
        round_, dispatcher = self._round, self._dispatcher
        assert round_ is not None
        assert dispatcher is not None
        if intent is Intent.RUN:
            round_.started = collecting_since(status, self._created, self._operator.clock())
        begun = time.monotonic()
        while True:
            dispatcher.changed.clear()
            if intent is Intent.SUSPEND:
                dispatcher.hold()
            calls = dispatcher.snapshot()
            with self._operator.metrics.passes.time():
                step = await self._advance(round_, calls, intent)
            await dispatcher.follow(step)
            seen = self._see(step, dispatcher, intent)
            if step.delay or step.finished or time.monotonic() - begun > CHAIN_SECONDS or self._is_news(seen):
                break
        self._seen = seen
        return Pass(seen, step.delay)

    async def _advance(self, round_: Round, calls: Calls, intent: Intent) -> Step:
        """Kopf may cut a pass off, its thread goes on all the same: the next pass waits for it, since a Round has one at a time."""
        if self._thread is not None:
            await asyncio.wait([self._thread])
        self._thread = in_thread(lambda: round_.advance(calls, intent))
        return await asyncio.shield(self._thread)

    async def wait(self, seconds: float) -> None:
        """Until a call ends, at most so long."""
        if self._dispatcher is not None:
            await self._dispatcher.wait(seconds)
        else:
            await asyncio.sleep(seconds)

    async def stop(self) -> None:
        """Hang up all calls. The round stays as it is in the store."""
        if self._dispatcher is not None:
            await self._dispatcher.stop()
        if self.platform is not None:
            await self.platform.release()

    @property
    def has_news(self) -> bool:
        """A call has ended since the last pass."""
        return self._dispatcher is not None and self._dispatcher.changed.is_set()

    @property
    def unattended(self) -> float:
        """Seconds without a pass; 0 while one is under way, since a store that hangs is no fault of the operator."""
        under_way = self._thread is not None and not self._thread.done()
        return 0.0 if under_way else time.monotonic() - self._last_pass

    @property
    def active(self) -> int:
        """Calls in flight."""
        return len(self._dispatcher.snapshot().running) if self._dispatcher is not None else 0

    async def _open(self, spec: RoundSpec, intent: Intent) -> None:
        """Read the round's Secrets, check its endpoint, and build what is not there yet."""
        operator = self._operator
        try:
            ca = await self._read_secrets(spec)
        except SecretUnusable:
            if intent is not Intent.DELETE or self._round is None:
                raise
            ca = self._ca  # with a namespace its Secrets go first: cleaned up with the keys that were there last
        await in_thread(
            lambda: check_endpoint(
                spec.store.endpoint,
                spec.store.region,
                operator.settings.allowed_endpoints,
                operator.api_servers,
                resolve_host,
            )
        )
        if self._round is not None and ca == self._ca:
            return
        await self.stop()
        keys = self._keys if spec.store.credentials_secret_name is not None else ambient(iam=True)
        names = {spec.updates.bucket, spec.output.bucket}
        buckets = {name: operator.bucket(spec, name, keys, ca or None) for name in names}
        self.platform = operator.platform(spec, self.namespace, self._owner)
        self._round = Round(
            spec,
            self.uid,
            buckets[spec.updates.bucket],
            buckets[spec.output.bucket],
            started=self._created,
            created=self._created,
            check_store=probe_conditional_put,
            clock=operator.clock,
        )
        self._dispatcher = make_dispatcher(self._round, self.platform, ca or None)
        self._ca, self._told = ca, 0

    async def _read_secrets(self, spec: RoundSpec) -> str:
        """Take the present keys; give the certificates that the store needs, as PEM. Raises SecretUnusable."""
        store, api = spec.store, self._operator.api
        if store.credentials_secret_name is not None:
            name = store.credentials_secret_name
            self._keys.replace(name, await api.secret(self.namespace, name))
        elif not self._operator.settings.ambient_credentials:
            raise SecretUnusable(
                "spec.store.credentialsSecretName is not set, and this operator does not lend its own keys: name a Secret "
                "with accessKey and secretKey"
            )
        if store.ca_secret_name is None:
            return ""
        return text(store.ca_secret_name, await api.secret(self.namespace, store.ca_secret_name), "ca.crt")

    def _see(self, step: Step, dispatcher: Dispatcher, intent: Intent) -> Seen:
        calls = dispatcher.snapshot()
        self._operator.metrics.attempts(calls.attempts[self._told :])
        self._operator.tell(self, calls.attempts[self._told :])
        self._told = len(calls.attempts)
        trouble = None
        if self.platform is not None and self.platform.trouble and calls.running:
            trouble = self.platform.trouble
        if dispatcher.store_error is not None and not calls.running:
            trouble = ("StoreDenied", str(dispatcher.store_error))
        return Seen(
            step.phase,
            step.counts,
            step.message,
            step.plan.revision if step.plan else None,
            step.digest or (step.plan.digest if step.plan else ""),
            len(calls.running),
            sum(a.outcome not in ANSWERED for a in calls.attempts),
            intent is Intent.SUSPEND,
            trouble,
            step.finished,
        )

    def _is_news(self, seen: Seen) -> bool:
        """Worth writing before the next step: the phase changed, or there is a plan now. The next step tells more of these two."""
        if seen.phase is Phase.ENDING or (seen.phase is Phase.REDUCING and seen.revision is None):
            return False
        last = self._seen
        return last is None or (seen.phase, seen.revision) != (last.phase, last.revision)

    def _troubled(self, spec: RoundSpec, reason: str, error: GradsShardingError, intent: Intent) -> Pass:
        """Nothing is lost: the next pass looks again. Only the active deadline ends a round whose store cannot be asked."""
        limit = spec.active_deadline_seconds
        phase = self._seen.phase if self._seen else Phase.COLLECTING
        if limit is not None and self._operator.clock() > self._created + limit and intent is not Intent.DELETE:
            message = f"the round did not end within spec.activeDeadlineSeconds, {limit} s; last: {error}"
            people = nobody_yet(self.uid, spec.digest())
            return Pass(Seen(phase, finished=Finished(False, "DeadlineExceeded", message, people)), 0.0)
        return Pass(
            Seen(phase, active=self.active, suspended=intent is Intent.SUSPEND, trouble=(reason, str(error))),
            TROUBLE_SECONDS,
        )
