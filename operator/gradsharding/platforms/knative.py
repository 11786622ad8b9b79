"""Reducers on Knative Serving: one Service per kind of function, one POST per shard, and what its failures mean."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import aiohttp

from gradsharding.errors import RoundFailed
from gradsharding.platforms import (
    FunctionFailed,
    FunctionSpec,
    OutOfMemory,
    Throttled,
    TimedOut,
    Trouble,
    Unreachable,
    not_starting,
)
from gradsharding.platforms.knative_api import Json, KnativeApi
from gradsharding.platforms.knative_errors import is_about_the_object, refused
from gradsharding.platforms.knative_pods import killed_for_memory, why_not_running
from gradsharding.platforms.knative_service import LAST_USED, PodSettings, build_service, service_name
from gradsharding.platforms.slots import Slots
from gradsharding_reducer.task import ContractError, ReduceResult, ReduceTask, Runtime

GZIP_FROM = 256 << 10
MAX_SENT = 5 << 20
READY_SECONDS = 60.0
OOM_SECONDS = 10.0
"""How long after a 502 the kubelet may take to say OOMKilled."""
TROUBLE_AFTER = 5.0
"""A call without an answer for so long is asked about: do its pods start?"""
USED_EVERY = 600.0
"""Seconds between two notes of use on a Service."""


@dataclass(slots=True)
class Functions:
    """What all rounds of one operator share: the API, the connections, and the slots of each function."""

    api: KnativeApi
    session: aiohttp.ClientSession
    pods: PodSettings
    is_running: Callable[[str], bool] = lambda _uid: True
    """Whether the round of this uid has not ended: finished ones need not keep a function, or its owners would only ever grow."""
    slots: dict[tuple[str, str], Slots] = field(default_factory=dict)
    killed: set[tuple[str, int]] = field(default_factory=set)
    """Containers, by pod uid and restarts, whose out-of-memory kill has been told to somebody."""
    replaced: dict[tuple[str, str], float] = field(default_factory=dict)
    """By function: when a pod of it was last deleted after a kill, by the monotonic clock."""

    def slots_of(self, namespace: str, name: str, limit: int) -> Slots:
        """The slots of a function."""
        return self.slots.setdefault((namespace, name), Slots(limit))


class KnativePlatform:
    """The Platform of one round in one namespace. ``owner`` is the round's owner reference."""

    name = "knative"
    startup_seconds = 120.0

    def __init__(self, functions: Functions, namespace: str, owner: Mapping[str, Any]) -> None:
        self._functions = functions
        self._namespace = namespace
        self._owner = dict(owner)
        self._function: FunctionSpec | None = None
        self._url = ""
        self._service = ""
        self.trouble: Trouble | None = None

    async def prepare(self, function: FunctionSpec) -> None:
        """Create or patch the Service and wait for its address. Raises RoundFailed, or Unreachable: try again."""
        from kubernetes.aio.client import ApiException

        try:
            await self._look_for_pull_secrets()
            service = await self._ensure(function)
            self._url = await self._address(service)
        except ApiException as error:
            raise refused(error) from None
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            raise Unreachable(f"the Kubernetes API did not answer: {type(error).__name__}") from None
        self._function = function

    async def _look_for_pull_secrets(self) -> None:
        """Before the Service is made: without them its revision would fail, and tell of the registry only."""
        for secret in self._functions.pods.pull_secrets:
            if await self._functions.api.lacks_secret(self._namespace, secret):
                why = (
                    f"pull secret {secret} of function pods is not in namespace {self._namespace}: create it there, or take "
                    "it out of the operator's GRADSHARDING_FUNCTION_PULL_SECRETS"
                )
                self.trouble = ("PullSecretMissing", why)
                raise Unreachable(why)
        self.trouble = None

    async def _ensure(self, function: FunctionSpec) -> Json:
        from kubernetes.aio.client import ApiException

        name = self._service = service_name(function, self._functions.pods.image)
        api = self._functions.api
        for scale in (0, 1):
            try:
                current = await api.get_service(self._namespace, name)
            except ApiException as error:
                if error.status != 404 or not is_about_the_object(error):
                    raise
                current = None
            owners = self._owners(current)
            wanted = build_service(function, self._functions.pods, self._namespace, owners, _now(), scale)
            try:
                if current is None:
                    return await api.create_service(wanted)
                if not _needs_patch(current, wanted):
                    return current
                wanted["metadata"]["resourceVersion"] = current["metadata"]["resourceVersion"]
                return await api.patch_service(self._namespace, name, wanted)
            except ApiException as error:
                if scale == 0 and "initial-scale" in (error.body or ""):
                    continue
                if error.status == 409:
                    raise Unreachable(f"another change to function {name} was faster") from None
                raise
        raise AssertionError("unreachable")

    def _owners(self, current: Json | None) -> list[Mapping[str, Any]]:
        """The running rounds among its owners, and this one, which is the newest."""
        others = current["metadata"].get("ownerReferences", []) if current else []
        mine = self._owner["uid"]
        return [o for o in others if o["uid"] != mine and self._functions.is_running(o["uid"])] + [self._owner]

    async def _address(self, service: Json) -> str:
        """Wait until the current generation has an address."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            status = service.get("status", {})
            url = status.get("address", {}).get("url")
            if url and status.get("observedGeneration") == service["metadata"]["generation"]:
                routed = _condition(status, "RoutesReady")
                if routed.get("status") == "True":
                    return str(url)
            why = _why_not_ready(status)
            self.trouble = not_starting(why)
            if time.monotonic() > deadline:
                raise Unreachable(why or f"function {self._service} has no address after {READY_SECONDS:.0f} s")
            await asyncio.sleep(0.2)
            service = await self._functions.api.get_service(self._namespace, self._service)

    async def invoke(self, task: ReduceTask, attempt: int) -> ReduceResult:  # noqa: ARG002 (the protocol's)
        """POST one task. Cancelling hangs up, which stops the reducer."""
        function = self._function
        assert function is not None, "prepare comes first"
        body, headers = task.to_json(), {"Content-Type": "application/json"}
        if len(body) > GZIP_FROM:
            body, headers["Content-Encoding"] = gzip.compress(body, 6), "gzip"
        if len(body) > MAX_SENT:
            raise RoundFailed(
                "TaskTooLarge",
                f"the task of shard {task.shard} takes {len(body) >> 20} MiB compressed, of {MAX_SENT >> 20}: "
                f"{len(task.sources)} updates, {len(task.parts)} parts; raise spec.function.shards",
            )
        slots = self._functions.slots_of(self._namespace, self._service, function.max_concurrency)
        async with slots.take(task.round):
            begun, watcher = time.monotonic(), asyncio.create_task(self._watch_start())
            try:
                status, text, pod = await self._post(body, headers, function)
            finally:
                watcher.cancel()
        return await self._judge(status, text, pod, function, begun)

    async def _post(self, body: bytes, headers: Mapping[str, str], function: FunctionSpec) -> tuple[int, str, str]:
        limit = aiohttp.ClientTimeout(total=self.startup_seconds + function.timeout_seconds + 10, sock_connect=10)
        try:
            async with self._functions.session.post(
                self._url, data=body, headers=headers, timeout=limit, allow_redirects=False
            ) as response:
                return response.status, await response.text(), response.headers.get("X-Reducer", "")
        except TimeoutError:
            raise TimedOut(f"no answer within {limit.total:.0f} s") from None
        except aiohttp.ClientError as error:
            raise Unreachable(f"no connection to the function: {type(error).__name__}") from None

    async def _judge(self, status: int, text: str, pod: str, function: FunctionSpec, begun: float) -> ReduceResult:
        """What an answer means; see docs/knative.md. ``begun``: when the call was sent, by the monotonic clock."""
        if status == 200:
            try:
                result = ReduceResult.from_json(text)
            except ContractError as error:
                raise FunctionFailed(f"what the function answered is no result: {error}", pod) from None
            self.trouble = None
            return replace(result, runtime=Runtime(self.name, pod, "kubernetes"))
        if status == 502:
            if "refused" in text:  # the call never ran; whose container this was looks for the kill
                raise Unreachable("the function's container is restarting")
            killed = await self._claim_kill()
            if killed:
                raise OutOfMemory(f"killed for its memory under a limit of {function.memory_mib} MiB", killed)
            if self._functions.replaced.get((self._namespace, self._service), 0.0) >= begun:
                raise Unreachable("the function's pod was replaced after another call's out-of-memory kill")
            raise FunctionFailed("the function's container ended during the call (502)", pod)
        if status == 503:
            raise Throttled("no room for another call (503)")
        if status == 504:
            raise TimedOut(f"Knative gave the call up after {function.timeout_seconds} s (504)")
        if status == 404:
            raise Unreachable("the function's revision is not there (404)")
        detail = _detail(text)
        if detail.startswith("OutOfMemory"):
            raise OutOfMemory(detail, pod)
        raise FunctionFailed(f"{detail} (HTTP {status})", pod)

    async def _claim_kill(self) -> str:
        """The pod of an out-of-memory kill that nobody was told of yet, deleted as Lambda would; else an empty string."""
        from kubernetes.aio.client import ApiException

        deadline = time.monotonic() + OOM_SECONDS
        while True:
            try:
                pods = await self._functions.api.list_pods(self._namespace, self._service)
                for pod in pods:
                    kill = killed_for_memory(pod)
                    if kill is not None and kill not in self._functions.killed:
                        self._functions.killed.add(kill)
                        self._functions.replaced[self._namespace, self._service] = time.monotonic()
                        await self._functions.api.delete_pod(self._namespace, pod.metadata.name)
                        return str(pod.metadata.name)
            except (ApiException, OSError, TimeoutError, aiohttp.ClientError):
                pass  # the pods may be gone, or the API busy: asked again until the deadline
            if time.monotonic() > deadline:
                return ""
            await asyncio.sleep(0.3)

    async def _watch_start(self) -> None:
        """While a call waits: say what keeps its pods from running."""
        from kubernetes.aio.client import ApiException

        while True:
            await asyncio.sleep(TROUBLE_AFTER)
            try:
                pods = await self._functions.api.list_pods(self._namespace, self._service)
            except (ApiException, OSError, TimeoutError, aiohttp.ClientError):
                continue
            self.trouble = not_starting(why_not_running(pods))

    async def release(self) -> None:
        """The Service stays for the next round; idle ones are swept, and Kubernetes removes it with its last owner."""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _needs_patch(current: Json, wanted: Json) -> bool:
    """Whether a wanted value differs from what is there, or the round is not among the owners, or the note of use is old."""
    uids = {owner["uid"] for owner in current["metadata"].get("ownerReferences", [])}
    if any(owner["uid"] not in uids for owner in wanted["metadata"]["ownerReferences"]):
        return True
    used = current["metadata"].get("annotations", {}).get(LAST_USED, "")
    try:
        age = (datetime.now(UTC) - datetime.fromisoformat(used)).total_seconds()
    except ValueError:
        return True
    return age > USED_EVERY or not _contains(current["spec"], wanted["spec"])


def _contains(have: Any, want: Any) -> bool:
    """Everything wanted is there; the server's defaults may be there too."""
    if isinstance(want, dict):
        return isinstance(have, dict) and all(_contains(have.get(name), value) for name, value in want.items())
    if isinstance(want, list):
        return isinstance(have, list) and len(have) == len(want) and all(map(_contains, have, want))
    return bool(have == want)


def _condition(status: Json, kind: str) -> Json:
    return next((c for c in status.get("conditions", []) if c["type"] == kind), {})


def _why_not_ready(status: Json) -> str:
    ready = _condition(status, "Ready")
    if ready.get("status") != "False":
        return ""
    return f"Knative says {ready.get('reason', '')}: {ready.get('message', '')}"[:500]


def _detail(text: str) -> str:
    """The sentence of a reducer that failed."""
    try:
        return str(json.loads(text)["error"])[:500]
    except (ValueError, KeyError, TypeError):
        return "the function answered with something unexpected"
