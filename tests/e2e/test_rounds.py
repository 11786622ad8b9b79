"""Rounds as users have them, under an operator that nobody disturbs."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from e2e.conftest import make_store, stores
from e2e.federation import tensors
from e2e.figures import measured
from e2e.waiting import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.usefixtures("operator")]

CLIENTS, MIB, SHARDS, MEMORY_MIB = 8, 64, 4, 256


def writes(api):
    """Writes to rounds and functions by whomever, but not to the status of functions, which is Knative's; None: not to be had."""
    text = api.text("metrics")
    if text is None:
        return None
    total = 0.0
    for line in text.splitlines():
        if line.startswith("apiserver_request_total{") and 'verb="WATCH"' not in line:
            ours = 'resource="aggregationrounds"' in line
            ours |= 'group="serving.knative.dev"' in line and 'resource="services"' in line and 'subresource=""' in line
            if ours and any(f'verb="{verb}"' in line for verb in ("POST", "PUT", "PATCH", "DELETE")):
                total += float(line.rsplit(" ", 1)[1])
    return total


class Run:
    """One timed round of (a)."""

    def __init__(self, namespace, federation, name):
        self.pods = {}
        output = f"{name}.safetensors"
        document = federation.manifest(name, output, function_memoryMiB=MEMORY_MIB, function_shards=SHARDS)
        before, begun = writes(namespace.api), time.monotonic()
        namespace.apply(document)
        self.round = namespace.success_of(name, 120, lambda: self._count(namespace))
        self.seconds = time.monotonic() - begun
        after = writes(namespace.api)
        self.writes = None if after is None else after - before - 1  # the apply itself
        attempts = federation.document(output)["attempts"]
        self.data_seconds = max(a["finished"] for a in attempts) - min(a["started"] for a in attempts)
        self.attempts = attempts

    def _count(self, namespace):
        """The pods that exist at once, most of them seen, with their limits."""
        pods = {pod["metadata"]["name"]: limit(pod) for pod in namespace.function_pods()}
        pods = {name: memory for name, memory in pods.items() if memory == f"{MEMORY_MIB}Mi"}
        self.pods = max(self.pods, pods, key=len)


def limit(pod):
    container = next(c for c in pod["spec"]["containers"] if c["name"] == "reducer")
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
    return container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("name", list(stores()))
def test_a_round_on_capped_functions_has_the_bits_of_a_local_run(name, namespace, request, tmp_path):
    federation = make_store(stores()[name]).federation()
    request.addfinalizer(federation.remove)
    federation.upload(CLIENTS, MIB)
    cold = Run(namespace, federation, f"cold-{name}")
    warm = Run(namespace, federation, f"warm-{name}")

    status = cold.round["status"]
    assert [(c["type"], c["status"]) for c in status["conditions"]] == [
        (kind, "True") for kind in ("Collected", "Planned", "Reduced", "Succeeded")
    ]
    assert status["shards"] | {"active": 0} == status["shards"]
    assert (status["shards"]["total"], status["shards"]["progress"]) == (SHARDS, f"{SHARDS}/{SHARDS}")
    assert status["updates"]["participants"] == CLIENTS
    assert len(cold.pods) >= SHARDS, cold.pods
    assert {a["request_id"] for a in cold.attempts} - {""} <= cold.pods.keys(), "attempts name their pods"
    assert all(attempt["peak_rss_bytes"] < MEMORY_MIB << 20 for attempt in cold.attempts)

    file = tmp_path / "round.yaml"
    file.write_text(json.dumps(federation.manifest("local", "cold.safetensors", function_memoryMiB=MEMORY_MIB)))
    command = [sys.executable, "-c", "import sys; from gradsharding.cli import main; sys.exit(main())", "run"]
    subprocess.run([*command, file, "--no-wait", "--output-key", "local.safetensors"], check=True, timeout=120)
    local = federation.result("local.safetensors")
    assert federation.result(f"cold-{name}.safetensors") == local
    assert federation.result(f"warm-{name}.safetensors") == local

    measured(f"(a) on {name}: apply to Succeeded, from zero pods and no function", cold.seconds, "s", 15)
    measured(f"(a) on {name}: apply to Succeeded, warm", warm.seconds, "s", 6)
    measured(f"(a) on {name}: of which first call's start to last call's end, cold", cold.data_seconds, "s")
    measured(f"(a) on {name}: of which first call's start to last call's end, warm", warm.data_seconds, "s")
    measured(f"(a) on {name}: the operator's own overhead, warm", warm.seconds - warm.data_seconds, "s", 3)
    for run, what in ((cold, "cold"), (warm, "warm")):
        if run.writes is not None:
            measured(f"(a) on {name}: API writes of a round, {what}", run.writes, "", 12 + run.seconds / 5)


def test_at_the_deadline_a_quorum_is_enough(namespace, federation):
    federation.upload(3, 1)
    document = federation.manifest("quorum", updates_minCount=2, updates_maxCount=5, updates_deadlineSeconds=5)
    namespace.apply(document)
    round_ = namespace.success_of("quorum")
    assert round_["status"]["updates"]["participants"] == 3
    assert federation.result() == federation.expected()


def test_at_the_deadline_without_a_quorum_the_round_fails(namespace, federation):
    federation.upload(1, 1)
    namespace.apply(federation.manifest("too-few", updates_minCount=2, updates_maxCount=5, updates_deadlineSeconds=3))
    namespace.end_of("too-few")
    state, reason, message = namespace.condition("too-few")
    assert (state, reason) == ("False", "QuorumNotMet")
    assert "1 usable updates of at least 2" in message
    wait_for("the event", lambda: namespace.events("QuorumNotMet"))


def test_wrong_keys_are_told_and_new_ones_taken_up(namespace, federation, store):
    federation.upload(2, 1)
    document = federation.manifest("keys", store_credentialsSecretName="rotated")
    namespace.apply(document)
    assert "rotated" in namespace.until("keys", "SecretUnusable")[2]
    namespace.set_secret("rotated", (store.keys[0], "wrong" * 8))
    message = namespace.until("keys", "StoreDenied")[2]
    assert "wrong" not in message
    namespace.set_secret("rotated", store.keys)
    namespace.success_of("keys")


def test_a_wrong_bucket_is_told(namespace, federation):
    federation.upload(2, 1)
    document = federation.manifest("bucket", updates_bucket="gradsharding-e2e-is-not-there")
    namespace.apply(document)
    assert "gradsharding-e2e-is-not-there" in namespace.until("bucket", "StoreDenied")[2]
    namespace.delete("bucket")


@pytest.mark.parametrize("policy", ["Fail", "Exclude"])
def test_an_update_with_nan(policy, namespace, federation):
    federation.upload(3, 1)
    bad = tensors(1, 99)
    bad["head.bias"] = np.full_like(bad["head.bias"], np.nan)
    federation.put("updates/client-1.safetensors", bad, 11)
    name = f"nan-{policy.lower()}"
    namespace.apply(federation.manifest(name, updates_minCount=2, aggregation_invalidUpdatePolicy=policy))
    round_ = namespace.end_of(name)
    state, reason, message = namespace.condition(name)
    if policy == "Fail":
        assert (state, reason) == ("False", "InvalidUpdate")
        assert "updates/client-1.safetensors" in message
        assert "'head.bias'" in message
        assert federation.leftovers() == [f"model.safetensors.round/{round_['metadata']['uid']}/1/outcome.json"]
    else:
        assert (state, reason) == ("True", "Succeeded")
        assert round_["status"]["updates"]["excluded"] == 1
        assert round_["status"]["updates"]["participants"] == 2
        assert federation.result() == federation.expected(without=["updates/client-1.safetensors"])
        assert "'head.bias'" in federation.document()["excluded"][0]["reason"]


def test_the_same_round_again_is_committed_already_unless_an_update_changed(namespace, federation):
    federation.upload(2, 1)
    document = federation.manifest("again")
    namespace.apply(document)
    first = namespace.success_of("again")
    namespace.delete("again")
    output = federation.bucket.stat("model.safetensors")
    assert output is not None, "the result outlives the round's resource"

    namespace.apply(document)
    second = namespace.success_of("again")
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    assert namespace.condition("again")[1] == "AlreadyCommitted"
    assert first["metadata"]["uid"] in namespace.condition("again")[2]
    namespace.delete("again")

    federation.put("updates/client-1.safetensors", tensors(1, 50), 11)
    namespace.apply(document)
    namespace.end_of("again")
    state, reason, message = namespace.condition("again")
    assert (state, reason) == ("False", "OutputExists")
    assert "new or changed since: updates/client-1.safetensors" in message
    assert federation.bucket.stat("model.safetensors").etag == output.etag


def test_a_suspended_round_waits_until_it_is_resumed(namespace, federation):
    federation.upload(2, 1)
    namespace.apply(federation.manifest("suspended", suspend=True))
    namespace.until("suspended", "Suspended")
    assert namespace.condition("suspended", "Suspended")[0] == "True"
    assert federation.keys() == []
    namespace.patch("suspended", {"suspend": False})
    namespace.success_of("suspended")
    assert namespace.condition("suspended", "Suspended")[:2] == ("False", "Resumed")
    assert federation.result() == federation.expected()


def test_what_is_over_goes_by_itself(namespace, federation):
    """A round when its time after finishing is over; the pods of a function that nobody calls, while its round stays."""
    federation.upload(2, 1)
    namespace.apply(federation.manifest("idle", "idle.safetensors", function_memoryMiB=134))
    namespace.success_of("idle")
    idle = [pod["metadata"]["name"] for pod in namespace.function_pods() if limit(pod) == "134Mi"]
    assert idle
    namespace.apply(federation.manifest("short-lived", ttlSecondsAfterFinished=0))
    wait_for("the round is removed", lambda: namespace.round("short-lived") is None, 150)
    assert federation.result() == federation.expected()

    def left():
        return [pod for pod in namespace.function_pods() if limit(pod) == "134Mi"]

    wait_for("the function is at zero", lambda: not left(), 180)
    assert namespace.condition("idle")[0] == "True"


def test_the_operator_stays_small_with_many_rounds(namespace, federation, operator):
    """50 finished rounds, each with its functions called, and 10 that wait for updates."""
    federation.upload(2, 1)
    for i in range(10):
        namespace.apply(
            federation.manifest(f"waiting-{i}", f"waiting-{i}.safetensors", updates_minCount=9, updates_maxCount=9)
        )
    batch = [federation.manifest(f"many-{i}", f"many-{i}.safetensors") for i in range(50)]
    namespace.apply({"apiVersion": "v1", "kind": "List", "items": batch})
    begun = time.monotonic()
    for i in range(50):
        namespace.success_of(f"many-{i}", 200)
    measured("50 small rounds at once", time.monotonic() - begun, "s")
    measured("operator RSS with 50 finished and 10 running rounds", operator.resident_mb(), "MB", 150)
    assert operator.metric("gradsharding_rounds_running") == 10
    for i in range(10):
        namespace.kubectl("delete", "agground", f"waiting-{i}", "--wait=false")
    wait_for("the waiting rounds are gone", lambda: operator.metric("gradsharding_rounds_running") == 0)
