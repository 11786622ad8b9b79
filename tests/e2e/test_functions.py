"""Functions that die of their memory, and functions that cannot start: what a user is told."""

import json

import pytest
from e2e.conftest import environment
from e2e.waiting import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

WITHIN = 60
"""Seconds until a condition says why functions do not start."""


def test_a_function_killed_for_its_memory_goes_again_with_less(rough_namespace, operators, federation):
    """The image's ballast leaves room for the second step of the tuning, not for the first: the kill is the kernel's."""
    operator = operators(REDUCER_IMAGE=environment("E2E_OOM_IMAGE"))
    federation.upload(8, 64)
    rough_namespace.apply(federation.manifest("ballast", function_memoryMiB=256))
    round_ = rough_namespace.success_of("ballast", 240)
    document = federation.document()
    killed = [a for a in document["attempts"] if a["outcome"] == "OutOfMemory"]
    done = [a for a in document["attempts"] if a["outcome"] == "Done"]
    assert killed
    assert "FunctionFailed" not in {a["outcome"] for a in document["attempts"]}, "a kill was taken for something else"
    assert {a["shard"] for a in done} == set(range(len(document["plan"]["shards"])))
    for attempt in killed:
        later = [a for a in done if a["shard"] == attempt["shard"]]
        assert all(a["prefetch"] < attempt["prefetch"] or a["range_bytes"] < attempt["range_bytes"] for a in later)
        assert attempt["request_id"], "the kill is known by its pod"
    assert round_["status"]["shards"]["retried"] >= len(killed)
    message = wait_for("the event", lambda: rough_namespace.events("OutOfMemory"))[0]
    assert "spec.function.memoryMiB" in message
    assert operator.metric("gradsharding_retries_total") >= len(killed)
    assert federation.result() == federation.expected()


def test_an_image_that_cannot_be_pulled_is_told(rough_namespace, operators, federation):
    operators(REDUCER_IMAGE="dev.local/gradsharding-is-not-there:1")
    federation.upload(2, 1)
    rough_namespace.apply(federation.manifest("no-image"))
    message = rough_namespace.until("no-image", "FunctionsNotStarting", WITHIN)[2]
    assert "dev.local/gradsharding-is-not-there:1" in message
    rough_namespace.delete("no-image")


def test_a_pull_secret_that_is_missing_is_told_until_it_is_there(rough_namespace, operators, federation):
    operators(FUNCTION_PULL_SECRETS='["registry"]')
    federation.upload(2, 1)
    rough_namespace.apply(federation.manifest("no-pull-secret", function_memoryMiB=131))
    message = rough_namespace.until("no-pull-secret", "PullSecretMissing", WITHIN)[2]
    for named in ("pull secret registry", rough_namespace.name, "GRADSHARDING_FUNCTION_PULL_SECRETS"):
        assert named in message
    rough_namespace.apply(
        {
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "registry"},
            "type": "kubernetes.io/dockerconfigjson", "stringData": {".dockerconfigjson": '{"auths": {}}'},
        }
    )  # fmt: skip
    rough_namespace.success_of("no-pull-secret")
    assert federation.result() == federation.expected()


def test_a_pod_that_does_not_fit_any_node_is_told(rough_namespace, operators, federation):
    operators(FUNCTION_CPU_REQUEST="4000")
    federation.upload(2, 1)
    rough_namespace.apply(federation.manifest("too-big", function_memoryMiB=132))
    message = rough_namespace.until("too-big", "FunctionsNotStarting", WITHIN)[2]
    assert "cannot be scheduled" in message
    assert "Insufficient cpu" in message
    rough_namespace.delete("too-big")


def test_a_setting_that_knative_forbids_is_told_with_its_flag(api, rough_namespace, operators, federation):
    features = api.get("api/v1/namespaces/knative-serving/configmaps/config-features").get("data", {})
    flag = "kubernetes.podspec-nodeselector"
    assert features.get(flag, "disabled").lower() == "disabled", f"this cluster has {flag} on: the test needs it off"
    operators(FUNCTION_NODE_SELECTOR=json.dumps({"kubernetes.io/os": "linux"}))
    federation.upload(2, 1)
    rough_namespace.apply(federation.manifest("selector", function_memoryMiB=133))
    rough_namespace.end_of("selector")
    state, reason, message = rough_namespace.condition("selector")
    assert (state, reason) == ("False", "FeatureDisabled")
    assert flag in message
