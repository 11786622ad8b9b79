"""The operator as users have it: a pod that the chart installed, with no rights but the chart's."""

import json
from urllib.parse import urlsplit

import pytest
from cluster import kubectl
from e2e.conftest import keys, stores
from e2e.namespace import Namespace
from e2e.release import Release
from e2e.s3_proxy import Request
from e2e.waiting import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.xdist_group("chart")]

CRD = "crd/aggregationrounds.gradsharding.dev"


@pytest.fixture(scope="module")
def place(api):
    made = Namespace(api, keys(), "chart")
    yield made
    made.remove()


@pytest.fixture(scope="module")
def installed(place, proxy_of_session):
    hosts = {urlsplit(endpoint).hostname for endpoint in (proxy_of_session.endpoint, *stores().values())}
    made = Release([place.name], sorted(hosts))
    try:
        made.notes = made.install()
        yield made
    finally:
        made.remove()


@pytest.fixture
def release(installed):
    """Whatever the test before left, it is installed."""
    if not installed.pods():
        installed.install()
    return installed


def record(request: Request):
    return request.is_record


def test_it_is_installed_as_it_says(release, place):
    (pod,) = release.pods()
    (container,) = pod["spec"]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
    assert f"kubectl apply -n {place.name} -k crds/samples" in release.notes
    assert f"kubectl wait -n {place.name} --for=condition=Succeeded" in release.notes
    assert kubectl("get", CRD, "-o", "jsonpath={.metadata.annotations.helm\\.sh/resource-policy}").stdout == "keep"


def test_a_round_succeeds_with_the_charts_rights_alone(release, place, federation):
    federation.upload(4, 8)
    place.apply(federation.manifest("granted"))
    place.success_of("granted", 180)
    assert federation.result() == federation.expected()
    assert federation.is_clean()
    assert "orbidden" not in release.log()
    wait_for("the operator counts it", lambda: release.metric("gradsharding_rounds_total") >= 1)


def test_its_rights_end_at_its_namespaces(release, place):
    assert release.may("get", "secrets", place.name)
    for verb, resource, namespace in (
        ("get", "secrets", release.namespace),
        ("get", "secrets", "kube-system"),
        ("list", "secrets", place.name),
        ("create", "pods", place.name),
        ("list", "aggregationrounds.gradsharding.dev", "default"),
        ("patch", "deployments.apps", release.namespace),
    ):
        assert not release.may(verb, resource, namespace), (verb, resource, namespace)


def test_people_who_may_edit_may_edit_rounds(place):
    kubectl("-n", place.name, "create", "serviceaccount", "editor")
    account = f"{place.name}:editor"
    kubectl("-n", place.name, "create", "rolebinding", "editor", "--clusterrole=edit", f"--serviceaccount={account}")

    def may(verb):
        question = ("auth", "can-i", verb, "agground.gradsharding.dev", "-n", place.name)
        return kubectl(*question, "--as", f"system:serviceaccount:{account}", check=False).stdout.strip() == "yes"

    wait_for("the roles are aggregated", lambda: may("create") and may("watch"))


def test_a_round_that_runs_survives_an_upgrade(release, place, watched, proxy):
    watched.upload(3, 16)
    hold = proxy.hold(record)
    place.apply(watched.manifest("upgraded"))
    hold.wait(1)
    (before,) = release.pods()
    release.install(operator={"podAnnotations": {"upgrade": "1"}})
    (after,) = [pod for pod in release.pods() if "deletionTimestamp" not in pod["metadata"]]
    assert before["metadata"]["uid"] != after["metadata"]["uid"]
    assert place.condition("upgraded")[0] == "Unknown"
    hold.release()
    place.success_of("upgraded", 180)
    assert watched.result() == watched.expected()
    assert watched.is_clean()


def test_uninstalling_with_rounds_left_hangs_nothing(release, place, watched, proxy):
    watched.upload(3, 16)
    hold = proxy.hold(record)
    place.apply(watched.manifest("finished", "finished.safetensors", suspend=True, activeDeadlineSeconds=1))
    assert place.end_of("finished")
    place.apply(watched.manifest("running"))
    hold.wait(1)

    release.uninstall()
    release.until_gone()
    hold.release()
    assert kubectl("get", CRD, check=False).returncode == 0, "crds.keep"
    place.delete("finished")
    place.kubectl("delete", "agground", "running", "--wait=false")
    metadata = place.round("running")["metadata"]
    assert metadata["deletionTimestamp"]
    assert metadata["finalizers"] == ["gradsharding.dev/cleanup"]

    release.install()
    wait_for("the next operator lets it go", lambda: place.round("running") is None, 120)
    assert watched.is_clean()


def test_without_an_operator_a_round_can_be_let_go_by_hand(release, place, watched, proxy):
    watched.upload(3, 16)
    hold = proxy.hold(record)
    place.apply(watched.manifest("abandoned"))
    hold.wait(1)
    release.uninstall()
    release.until_gone()
    hold.release()
    place.kubectl("delete", "agground", "abandoned", "--wait=false")
    place.kubectl(
        "patch", "agground", "abandoned", "--type=merge", "-p", json.dumps({"metadata": {"finalizers": None}})
    )
    wait_for("it is gone", lambda: place.round("abandoned") is None)
