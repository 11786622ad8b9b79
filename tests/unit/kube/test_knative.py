"""The Knative platform against a function that answers as told and an API server of a few dictionaries."""

import asyncio
import copy
import gzip
import json
import os
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio.client import (
    ApiException,
    V1ContainerState,
    V1ContainerStateTerminated,
    V1ContainerStatus,
    V1ObjectMeta,
    V1Pod,
    V1PodCondition,
    V1PodStatus,
)

from gradsharding.errors import RoundFailed
from gradsharding.platforms import FunctionFailed, FunctionSpec, OutOfMemory, Throttled, TimedOut, Unreachable, knative
from gradsharding.platforms.knative import Functions, KnativePlatform
from gradsharding.platforms.knative_api import KnativeApi
from gradsharding.platforms.knative_service import LAST_USED, PodSettings
from gradsharding_reducer.task import Outcome, ReduceResult

FUNCTION = FunctionSpec(256, 300, 2, 2, ("http://minio.storage.svc:9000",))
ANSWER = ReduceResult("round", 1, 0, "plan", Outcome.DONE, bytes_read=7).to_json()


def refusal(status, message="", **details):
    error = ApiException(status=status)
    error.body = json.dumps({"message": message, "details": details})
    return error


class Api:
    """As KnativeApi. ``refuse(verb)`` may raise; ``url`` is the function's once its Service is there."""

    def __init__(self, url=""):
        self.url = url
        self.services = {}
        self.pods = []
        self.secrets = set()
        self.calls = []
        self.refuse = lambda verb, manifest: None

    async def get_service(self, namespace, name):
        self.calls.append("get")
        self.refuse("get", None)
        if name not in self.services:
            raise refusal(404, "not found", name=name)
        return copy.deepcopy(self.services[name])

    async def create_service(self, manifest):
        self.calls.append("create")
        self.refuse("create", manifest)
        return self._store(manifest, {"resourceVersion": "1", "generation": 1})

    async def patch_service(self, namespace, name, patch):
        self.calls.append("patch")
        self.refuse("patch", patch)
        before = self.services[name]["metadata"]
        return self._store(patch, {"resourceVersion": "2", "generation": before["generation"] + 1})

    def _store(self, manifest, meta):
        status = {
            "address": {"url": self.url},
            "observedGeneration": meta["generation"],
            "conditions": [{"type": "RoutesReady", "status": "True"}],
        }
        body = {**copy.deepcopy(manifest), "status": status}
        body["metadata"] |= meta
        self.services[body["metadata"]["name"]] = body
        return copy.deepcopy(body)

    async def lacks_secret(self, namespace, name):
        return name not in self.secrets

    async def list_pods(self, namespace, service):
        return self.pods

    async def delete_pod(self, namespace, name):
        self.calls.append(f"delete {name}")


class Task:
    """As much of a ReduceTask as the platform looks at."""

    def __init__(self, round_="round", body=b"{}"):
        self.round, self.shard, self.body = round_, 3, body
        self.sources, self.parts = (1, 2), (1,)

    def to_json(self):
        return self.body


def killed_pod(name="p", uid="uid"):
    ended = V1ContainerState(terminated=V1ContainerStateTerminated(exit_code=137, reason="OOMKilled"))
    status = V1ContainerStatus(
        name="reducer", state=ended, last_state=None, restart_count=0, image="i", image_id="", ready=False
    )
    return V1Pod(metadata=V1ObjectMeta(name=name, uid=uid), status=V1PodStatus(container_statuses=[status]))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(knative, "OOM_SECONDS", 0.0)
    monkeypatch.setattr(knative, "TROUBLE_AFTER", 0.01)


@asynccontextmanager
async def world(handler=None, ready=True):
    """An API, the shared Functions, and a maker of platforms; ``handler(request)`` is the function."""
    server = None
    api = Api("http://127.0.0.1:1/")
    if handler is not None:
        server = web.ServerRunner(web.Server(handler))
        await server.setup()
        await web.TCPSite(server, "127.0.0.1", 0).start()
        api.url = f"http://127.0.0.1:{server.addresses[0][1]}/"
    async with aiohttp.ClientSession() as session:
        functions = Functions(api, session, PodSettings("image"))

        async def make(uid="u"):
            platform = KnativePlatform(functions, "ns", {"kind": "AggregationRound", "name": "r", "uid": uid})
            if ready:
                await platform.prepare(FUNCTION)
            return platform

        yield SimpleNamespace(api=api, functions=functions, make=make)
    if server is not None:
        await server.cleanup()


def invoke(status, body=b"", headers=None, pods=()):
    """One call that is answered so; the API and what came of it."""

    async def run():
        async def answer(request):
            return web.Response(status=status, body=body, headers=headers)

        async with world(answer) as here:
            here.api.pods = list(pods)
            platform = await here.make()
            try:
                return here.api, await platform.invoke(Task(), 1)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                return here.api, error

    return asyncio.run(run())


# What an answer means


def test_a_result():
    _, result = invoke(200, ANSWER, {"X-Reducer": "pod-1"})
    assert (result.outcome, result.bytes_read) == (Outcome.DONE, 7)
    assert (result.runtime.platform, result.runtime.request_id) == ("knative", "pod-1")


@pytest.mark.parametrize(
    ("status", "body", "kind", "text"),
    [
        (200, b"hello", FunctionFailed, "is no result"),
        (200, b"{}", FunctionFailed, "is no result"),
        (404, b"", Unreachable, "404"),
        (502, b"dial tcp: connection refused", Unreachable, "restarting"),
        (502, b"EOF", FunctionFailed, "ended during the call"),
        (503, b"queue full", Throttled, "503"),
        (504, b"activator request timeout", TimedOut, "300 s"),
        (500, b'{"error": "OutOfMemory: no thread"}', OutOfMemory, "no thread"),
        (500, b'{"error": "a bug"}', FunctionFailed, "a bug"),
        (400, b'{"error": "task.parts: missing"}', FunctionFailed, "task.parts: missing"),
        (500, b"<html>", FunctionFailed, "something unexpected"),
        (301, b"", FunctionFailed, "HTTP 301"),
    ],
)
def test_no_result(status, body, kind, text):
    _, error = invoke(status, body, {"Location": "http://127.0.0.1:1/"} if status == 301 else None)
    assert type(error) is kind
    assert text in error.detail


def test_a_redirect_is_not_followed():
    async def run():
        seen = []

        async def answer(request):
            seen.append(request.path)
            return web.Response(status=307, headers={"Location": "/elsewhere"})

        async with world(answer) as here:
            platform = await here.make()
            with pytest.raises(FunctionFailed):
                await platform.invoke(Task(), 1)
        return seen

    assert asyncio.run(run()) == ["/"]


def test_a_kill_for_memory_is_told_once_and_its_pod_goes():
    api, error = invoke(502, b"EOF", pods=[killed_pod()])
    assert type(error) is OutOfMemory
    assert "256 MiB" in error.detail
    assert error.request_id == "p"
    assert "delete p" in api.calls

    async def two_calls():
        async def answer(request):
            return web.Response(status=502, body=b"EOF")

        async with world(answer) as here:
            here.api.pods = [killed_pod()]
            platform = await here.make()
            return await asyncio.gather(*(platform.invoke(Task(), 1) for _ in range(2)), return_exceptions=True)

    assert [type(error) for error in asyncio.run(two_calls())].count(OutOfMemory) == 1


def test_no_connection():
    async def run():
        async with world() as here:
            with pytest.raises(Unreachable, match="no connection"):
                await (await here.make()).invoke(Task(), 1)

    asyncio.run(run())


def test_no_answer_in_time(monkeypatch):
    monkeypatch.setattr(KnativePlatform, "startup_seconds", -309.7)  # with 300 of the function and 10 of margin: 0.3 s

    async def run():
        release = asyncio.Event()

        async def answer(request):
            await release.wait()
            return web.Response()

        async with world(answer) as here:
            with pytest.raises(TimedOut):
                await (await here.make()).invoke(Task(), 1)
            release.set()

    asyncio.run(run())


# The request


def test_a_big_task_travels_gzipped_and_a_huge_one_not_at_all():
    async def run():
        got = []

        async def answer(request):
            got.append((request.method, request.headers.get("Content-Encoding"), await request.read()))
            return web.Response(body=ANSWER)

        big = b'{"x":"' + b"y" * (300 << 10) + b'"}'
        async with world(answer) as here:
            platform = await here.make()
            await platform.invoke(Task(body=b"{}"), 1)
            await platform.invoke(Task(body=big), 1)
            with pytest.raises(RoundFailed) as caught:
                await platform.invoke(Task(body=os.urandom(6 << 20)), 1)
        assert got[0] == ("POST", None, b"{}")
        method, encoding, body = got[1]
        assert (method, encoding) == ("POST", "gzip")
        assert body == big or gzip.decompress(body) == big
        assert len(got) == 2
        assert caught.value.reason == "TaskTooLarge"
        assert "2 updates, 1 parts" in caught.value.message

    asyncio.run(run())


def test_no_more_calls_at_once_than_the_function_may_have():
    async def run():
        now, most, release = 0, 0, asyncio.Event()

        async def answer(request):
            nonlocal now, most
            now += 1
            most = max(most, now)
            if now == 2:
                release.set()
            await release.wait()
            await asyncio.sleep(0)
            now -= 1
            return web.Response(body=ANSWER)

        async with world(answer) as here:
            rounds = [await here.make(uid) for uid in ("a", "b", "c")]
            await asyncio.gather(*(p.invoke(Task(str(i)), 1) for i, p in enumerate(rounds) for _ in range(3)))
            (slots,) = here.functions.slots.values()
        assert (most, slots.in_use) == (2, 0)

    asyncio.run(run())


def test_cancelling_hangs_up():
    async def run():
        reached, hung_up = asyncio.Event(), asyncio.Event()

        async def answer(request):
            reached.set()
            while request.transport is not None:
                await asyncio.sleep(0.01)
            hung_up.set()
            return web.Response()

        async with world(answer) as here:
            call = asyncio.create_task((await here.make()).invoke(Task(), 1))
            await reached.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            (slots,) = here.functions.slots.values()
            assert slots.in_use == 0
            await asyncio.wait_for(hung_up.wait(), 30)

    asyncio.run(run())


def test_what_keeps_pods_from_running_is_told_while_the_call_waits():
    async def run():
        release = asyncio.Event()

        async def answer(request):
            await release.wait()
            return web.Response(body=ANSWER)

        async with world(answer) as here:
            condition = V1PodCondition(type="PodScheduled", status="False", message="0/1 nodes: no memory")
            here.api.pods = [V1Pod(metadata=V1ObjectMeta(name="p"), status=V1PodStatus(conditions=[condition]))]
            platform = await here.make()
            call = asyncio.create_task(platform.invoke(Task(), 1))
            while not platform.trouble:
                await asyncio.sleep(0.01)
            reason, why = platform.trouble
            assert reason == "FunctionsNotStarting"
            assert "cannot be scheduled: 0/1 nodes" in why
            release.set()
            await call
            assert platform.trouble is None

    asyncio.run(run())


# The Service


def test_created_once_then_shared():
    async def run():
        async with world() as here:
            await here.make("a")
            assert here.api.calls == ["get", "create"]
            await here.make("a")
            assert here.api.calls == ["get", "create", "get"], "nothing to change"
            await here.make("b")
            assert here.api.calls[3:] == ["get", "patch"]
            (service,) = here.api.services.values()
            assert [owner["uid"] for owner in service["metadata"]["ownerReferences"]] == ["a", "b"]

    asyncio.run(run())


def test_finished_rounds_are_owners_no_longer():
    async def run():
        async with world() as here:
            await here.make("a")
            here.functions.is_running = lambda uid: uid != "a"
            await here.make("b")
            (service,) = here.api.services.values()
            assert [owner["uid"] for owner in service["metadata"]["ownerReferences"]] == ["b"]

    asyncio.run(run())


def test_a_service_that_somebody_changed_or_that_is_long_unused_is_patched():
    async def run():
        async with world() as here:
            await here.make()
            (service,) = here.api.services.values()
            service["spec"]["template"]["spec"]["timeoutSeconds"] = 7
            await here.make()
            (service,) = here.api.services.values()
            assert service["spec"]["template"]["spec"]["timeoutSeconds"] == 300
            service["metadata"]["annotations"][LAST_USED] = "2026-01-01T00:00:00Z"
            await here.make()
            (service,) = here.api.services.values()
            used = datetime.fromisoformat(service["metadata"]["annotations"][LAST_USED])
            assert (datetime.now(UTC) - used).total_seconds() < 60
            service["spec"]["traffic"] = [{"percent": 100}]  # what the server fills in is no difference
            calls = len(here.api.calls)
            await here.make()
            assert here.api.calls[calls:] == ["get"]

    asyncio.run(run())


def prepare(refuse):
    """What ``prepare`` raises when the API refuses so; and the API."""

    async def run():
        async with world(ready=False) as here:
            here.api.refuse = refuse
            platform = await here.make()
            try:
                await platform.prepare(FUNCTION)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                return error, here.api
            return None, here.api

    return asyncio.run(run())


def refusing(verb, error):
    def refuse(asked, manifest):
        if asked == verb:
            raise error

    return refuse


def test_initial_scale_falls_back():
    def refuse(verb, manifest):
        scale = "autoscaling.knative.dev/initial-scale"
        if verb == "create" and manifest["spec"]["template"]["metadata"]["annotations"][scale] == "0":
            raise refusal(400, "admission webhook: invalid value: 0: autoscaling.knative.dev/initial-scale")

    error, api = prepare(refuse)
    assert error is None
    assert api.calls == ["get", "create", "get", "create"]


def test_a_pull_secret_that_is_missing_is_told_until_it_is_there():
    async def run():
        async with world(ready=False) as here:
            here.functions.pods = PodSettings("image", pull_secrets=("first", "second"))
            here.api.secrets = {"first"}
            platform = await here.make()
            with pytest.raises(Unreachable, match="second") as caught:
                await platform.prepare(FUNCTION)
            assert platform.trouble == ("PullSecretMissing", caught.value.detail)
            for named in ("second", "namespace ns", "GRADSHARDING_FUNCTION_PULL_SECRETS"):
                assert named in caught.value.detail
            assert here.api.calls == [], "no Service that cannot run"
            here.api.secrets.add("second")
            await platform.prepare(FUNCTION)
            assert platform.trouble is None
            assert here.api.calls == ["get", "create"]

    asyncio.run(run())


@pytest.mark.parametrize(("status", "lacks"), [(200, False), (403, False), (404, True)])
def test_a_secret_that_may_not_be_read_counts_as_there(status, lacks):
    class Core:
        async def read_namespaced_secret(self, name, namespace, **options):
            assert (name, namespace) == ("registry", "ns")
            if status != 200:
                raise ApiException(status=status)

    api = object.__new__(KnativeApi)
    api._core = Core()
    assert asyncio.run(api.lacks_secret("ns", "registry")) is lacks


NO_FIELD = "admission webhook denied the request: must not set the field(s): spec.template.spec."


@pytest.mark.parametrize(
    ("verb", "refused", "reason", "text"),
    [
        ("get", refusal(404, "the server could not find the requested resource"), "RuntimeUnavailable", "kubectl get crd"),
        ("create", refusal(403, "services is forbidden"), "Forbidden", "services is forbidden"),
        ("create", refusal(400, "webhook: expected 0 <= 900 <= 600: spec.timeoutSeconds"), "TimeoutNotAllowed",
         "max-revision-timeout-seconds"),
        ("create", refusal(400, NO_FIELD + "nodeSelector"), "FeatureDisabled", "kubernetes.podspec-nodeselector"),
        ("create", refusal(400, NO_FIELD + "tolerations"), "FeatureDisabled", "kubernetes.podspec-tolerations"),
        ("create", refusal(422, "something else"), "FunctionRejected", "something else"),
    ],
)  # fmt: skip
def test_what_the_api_refuses_for_good(verb, refused, reason, text):
    error, _ = prepare(refusing(verb, refused))
    assert isinstance(error, RoundFailed)
    assert error.reason == reason
    assert text in error.message


@pytest.mark.parametrize(
    ("verb", "refused"),
    [
        ("create", refusal(409, "already exists")),
        ("create", refusal(500, "etcd")),
        ("get", refusal(429, "slow down")),
        ("get", aiohttp.ClientConnectionError("secret detail")),
        ("get", TimeoutError()),
    ],
)
def test_what_passes(verb, refused):
    error, _ = prepare(refusing(verb, refused))
    assert isinstance(error, Unreachable)
    assert "secret detail" not in error.detail


def test_a_service_without_an_address(monkeypatch):
    monkeypatch.setattr(knative, "READY_SECONDS", 0.0)

    class NotReady(Api):
        def _store(self, manifest, meta):
            body = super()._store(manifest, meta)
            conditions = [{"type": "Ready", "status": "False", "reason": "RevisionFailed", "message": "no image"}]
            body["status"] = {"observedGeneration": 1, "conditions": conditions}
            return body

    async def run():
        async with aiohttp.ClientSession() as session:
            platform = KnativePlatform(Functions(NotReady(), session, PodSettings("image")), "ns", {"uid": "u"})
            with pytest.raises(Unreachable, match="Knative says RevisionFailed: no image"):
                await platform.prepare(FUNCTION)
            assert "no image" in platform.trouble[1]

    asyncio.run(run())
