"""The chart's rules against what the operator asks: no right is missing, and none is there that was never used.

The operator runs from the checkout, as the chart's service account, through a proxy that writes down what it asks.
"""

import json
import os
from urllib.parse import urlsplit

import pytest
from chart.kit import render, rules
from e2e.api_recorder import ApiRecorder, call
from e2e.conftest import keys, logs, stores
from e2e.namespace import Namespace
from e2e.operator_process import OperatorProcess
from e2e.release import Release
from e2e.waiting import wait_for

from gradsharding.platforms.knative_service import LAST_USED

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

LONG_AGO = "2020-01-01T00:00:00+00:00"


@pytest.fixture
def place(api):
    made = Namespace(api, keys(), "rights")
    yield made
    made.remove()


@pytest.fixture
def recorder():
    made = ApiRecorder()
    yield made
    made.close()


@pytest.fixture
def account(place):
    """The chart with all its rights and no operator: what runs is the one of this test."""
    made = Release([place.name], [], operator={"nodeSelector": {"nowhere": "true"}})
    try:
        made.install(wait=False)
        yield made
    finally:
        made.remove()


@pytest.fixture
def start(recorder, account, place, monkeypatch, tmp_path, proxy_of_session):
    """Start operators as that service account."""
    folder, started = tmp_path, []
    config = folder / "kubeconfig"
    config.write_text(recorder.kubeconfig(account.token()))
    hosts = {urlsplit(endpoint).hostname for endpoint in (proxy_of_session.endpoint, *stores().values())}

    def start(image):
        log = folder / f"{len(started)}.log"
        logs.append(log)
        settings = {"REDUCER_IMAGE": image, "ALLOWED_ENDPOINTS": " ".join(hosts), "FUNCTION_CPU_REQUEST": "50m"}
        with monkeypatch.context() as only_the_operator:
            only_the_operator.setenv("KUBECONFIG", str(config))
            started.append(OperatorProcess(place.name, log, **settings))
        return started[-1]

    yield start
    for operator in started:
        operator.stop()


@pytest.mark.parametrize(
    ("method", "url", "right"),
    [
        ("GET", "/apis/gradsharding.dev/v1alpha1/namespaces/a/aggregationrounds", ("gradsharding.dev", "aggregationrounds", "list")),
        ("GET", "/apis/gradsharding.dev/v1alpha1/aggregationrounds?watch=true", ("gradsharding.dev", "aggregationrounds", "watch")),
        ("PATCH", "/apis/g/v1/namespaces/a/things/x/status?a=b", ("g", "things/status", "patch")),
        ("GET", "/api/v1/namespaces/a/secrets/x", ("", "secrets", "get")),
        ("DELETE", "/api/v1/namespaces/a/pods", ("", "pods", "deletecollection")),
        ("GET", "/apis/gradsharding.dev/v1alpha1", None),
        ("GET", "/version", None),
    ],
)  # fmt: skip
def test_requests_are_read_as_rbac_reads_them(method, url, right):
    found = call(method, url, 200)
    assert (found and found.right) == right


def test_the_operator_uses_every_right_of_the_chart_and_no_other(recorder, account, start, place, watched, proxy):
    watched.upload(4, 4)
    operator = start(os.environ["E2E_REDUCER_IMAGE"])
    # The first goes by its ttl; the second, the newest owner, keeps the function.
    place.apply(watched.manifest("swept", "swept.safetensors", ttlSecondsAfterFinished=0))
    wait_for("the first round has its function", place.services, 120)
    place.apply(watched.manifest("kept", "kept.safetensors"))
    place.success_of("kept", 180)
    wait_for("the first round is done and swept", lambda: place.round("swept") is None, 240)
    for name in ("kept", "swept"):
        assert watched.result(f"{name}.safetensors") == watched.expected()
    (service,) = place.services()
    old = json.dumps({"metadata": {"annotations": {LAST_USED: LONG_AGO}}})
    place.kubectl("patch", "ksvc", service["metadata"]["name"], "--type=merge", "-p", old)
    wait_for("the idle function is swept", lambda: not place.services(), 150)
    hold = proxy.hold(lambda request: request.is_record)
    place.apply(watched.manifest("deleted", "deleted.safetensors"))
    hold.wait()
    place.kubectl("delete", "agground", "deleted", "--wait=false")
    hold.release()
    wait_for("the deleted round is gone", lambda: place.round("deleted") is None, 120)
    operator.stop()

    # A function that dies of its memory: its pod is looked at and removed, and an Event tells.
    start(os.environ["E2E_OOM_IMAGE"])
    place.apply(watched.manifest("hungry", "hungry.safetensors"))
    wait_for("an Event tells of the kill", lambda: place.events("OutOfMemory"), 240)

    chart = rules(render({"watchNamespaces": [place.name]}))
    seen = {made.right for made in recorder.calls}
    assert not {made for made in recorder.calls if made.status == 403}, "rights that the chart lacks"
    assert not seen - chart, "asked for, and allowed by something else"
    assert not chart - seen, "rights that the operator never used"
    assert {made.namespace for made in recorder.calls} <= {place.name, "default"}
