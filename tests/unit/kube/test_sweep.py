import asyncio
from datetime import datetime
from types import SimpleNamespace

import pytest
from kubernetes.aio.client import ApiException

from gradsharding.kube.sweep import is_expired, is_idle, sweep
from gradsharding.platforms.knative_service import LAST_USED

NOW = datetime.fromisoformat("2026-11-01T10:00:00Z").timestamp()


def round_(ttl=600, ended="2026-11-01T09:50:00Z", state="True", **meta):
    status = {"conditions": [{"type": "Succeeded", "status": state}]}
    if ended:
        status["completionTime"] = ended
    spec = {} if ttl is None else {"ttlSecondsAfterFinished": ttl}
    return {"metadata": {"namespace": "ns", "name": "r", "uid": "u", **meta}, "spec": spec, "status": status}


@pytest.mark.parametrize(
    ("body", "expired"),
    [
        (round_(), True),
        (round_(601), False),
        (round_(0), True),
        (round_(state="False"), True),
        (round_(None), False),
        (round_(state="Unknown"), False),
        (round_(ended=None), False),
        ({"spec": {"ttlSecondsAfterFinished": 0}}, False),
    ],
)
def test_expired(body, expired):
    assert is_expired(body, NOW) is expired


def service(used="2026-11-01T08:59:59Z", owners=(), created="2026-01-01T00:00:00Z"):
    meta = {"namespace": "ns", "name": "f", "creationTimestamp": created}
    if used is not None:
        meta["annotations"] = {LAST_USED: used}
    if owners:
        meta["ownerReferences"] = [{"uid": uid} for uid in owners]
    return {"metadata": meta}


@pytest.mark.parametrize(
    ("body", "idle"),
    [
        (service(), True),
        (service(used="2026-11-01T09:00:01Z"), False),
        (service(owners=["ended"]), True),
        (service(owners=["ended", "running"]), False),
        (service(used=None), True),
        (service(used=None, created="2026-11-01T09:30:00Z"), False),
        (service(used="yesterday"), True),
    ],
)
def test_idle(body, idle):
    assert is_idle(body, {"running"}, NOW, 3600) is idle


class Api:
    """Rounds and functions by namespace, and what was deleted."""

    def __init__(self, rounds=(), services=(), error=None):
        self.found, self.services, self.error = rounds, services, error
        self.deleted = []

    async def rounds(self, namespace):
        return self.found

    async def delete_round(self, namespace, name, uid):
        if self.error:
            raise self.error
        self.deleted.append((namespace, name, uid))

    async def list_services(self, namespace):
        if isinstance(self.services, Exception):
            raise self.services
        return self.services

    async def delete_service(self, namespace, name):
        self.deleted.append((namespace, name))


def run(api, namespaces=("ns",), drivers=()):
    settings = SimpleNamespace(idle_function_seconds=3600)
    operator = SimpleNamespace(
        api=api, functions=SimpleNamespace(api=api), namespaces=namespaces, drivers=drivers, clock=lambda: NOW,
        settings=settings,
    )  # fmt: skip
    asyncio.run(sweep(operator))
    return api.deleted


def test_one_sweep():
    api = Api([round_(), round_(None), round_(deletionTimestamp="now")], [service(), service(owners=["running"])])
    assert run(api, None, {"running": object()}) == [("ns", "r", "u"), ("ns", "f")]


def test_without_knative():
    assert run(Api([round_()], ApiException(status=404))) == [("ns", "r", "u")]


def test_a_round_that_is_gone_already_does_not_end_the_sweep():
    assert run(Api([round_()], [service()], ApiException(status=404))) == [("ns", "f")]


def test_an_api_that_forbids_is_told():
    with pytest.raises(ApiException):
        run(Api([], ApiException(status=403)))
