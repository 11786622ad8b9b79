"""A round's life as its status tells it."""

import time
from datetime import datetime

import numpy as np
from loop.operators import noise
from rounds_kit import OUTPUT, tensors, upload

from gradsharding.kube import sweep

STATES = ["Collected", "Planned", "Reduced", "Succeeded"]


def states(status):
    """("True", …) in the order of STATES, and the reason of the last."""
    found = {condition["type"]: condition for condition in status["conditions"]}
    assert list(found) == STATES
    return "".join(found[kind]["status"][0] for kind in STATES), found["Succeeded"]["reason"]


def test_every_transition(world, caplog):
    operator = world.operator()
    begun = time.monotonic()
    world.upload(1)
    world.apply(updates_minCount=2, updates_maxCount=2)
    collecting = world.wait_for("Succeeded", "Unknown", "Collecting")
    assert collecting["message"].startswith("1 of 2 updates are there, ")
    world.upload(2)
    ended = world.wait_for_end("True", "Succeeded")
    assert ended["message"] == f"averaged 2 updates into federation/{OUTPUT}"
    world.check_success([1, 2])

    seen = []
    for body in world.cluster.history("round"):
        status = body.get("status")
        if status and states(status) not in seen:
            seen.append(states(status))
    assert seen[0] == ("FFFU", "Collecting")
    assert seen[1] == ("TTFU", "Reducing")
    assert seen[-1] == ("TTTT", "Succeeded")
    assert {state for state, _ in seen} <= {"FFFU", "TTFU", "TTTU", "TTTT"}

    status = world.get()["status"]
    stored = world.bucket.stat(OUTPUT)
    assert status["observedGeneration"] == 1
    assert status["updates"] == {"found": 2, "accepted": 2, "rejected": 0, "excluded": 0, "participants": 2}
    assert status["shards"] == {"total": 2, "succeeded": 2, "active": 0, "retried": 0, "progress": "2/2"}
    assert status["output"] == {"bytes": stored.size, "etag": stored.etag, "manifest": OUTPUT + ".manifest.json"}
    assert status["plan"]["revision"] == 1
    assert datetime.fromisoformat(status["startTime"]) <= datetime.fromisoformat(status["completionTime"])
    assert all(condition["observedGeneration"] == 1 for condition in status["conditions"])

    writes = [write for write in world.cluster.writes() if write[1] != "events"]
    assert len(writes) <= 12 + (time.monotonic() - begun) / 5
    assert writes.count(("PATCH", "aggregationrounds", None)) == 2, "the finalizer comes and goes; no annotations"
    assert "annotations" not in world.get()["metadata"]
    assert world.cluster.all("events") == []
    operator.stop()
    assert noise(caplog.records) == ["OS signals are ignored: running not in the main thread."]


def test_a_finished_round_costs_nothing(world):
    operator = world.operator()
    world.upload(1, 2)
    world.apply()
    world.ahead = 61
    world.wait_for_end("True")
    world.apply("other", updates_prefix="elsewhere/", output_key="other/model.safetensors")
    world.wait_for("Succeeded", "Unknown", "Collecting", name="other")
    passes, looked = operator.passes, len(operator.operations)
    version, writes = world.get()["metadata"]["resourceVersion"], len(world.cluster.writes())
    world.cluster.patch("aggregationrounds", "default", "round", {"metadata": {"labels": {"an": "event"}}})
    world.delete("other")
    world.cluster.wait(lambda: not world.exists("other"))
    others = {key for _, key in operator.operations[looked:] if "other" not in key}
    assert operator.passes > passes, "the other round had passes meanwhile"
    assert int(world.get()["metadata"]["resourceVersion"]) > int(version)
    assert not any(world.get()["metadata"]["uid"] in key for key in others)
    assert operator.operator.drivers == {}
    assert len(world.cluster.writes()) > writes

    operator.stop()
    again = world.operator()
    world.apply("other", updates_prefix="elsewhere/", output_key="other/model.safetensors")
    world.wait_for("Succeeded", "Unknown", "Collecting", name="other")
    assert not any(world.get()["metadata"]["uid"] in key for _, key in again.operations)


def test_deadline_with_a_quorum(world):
    world.operator()
    world.upload(1, 2)
    world.apply(updates_minCount=2, updates_maxCount=5)
    world.wait_for("Succeeded", "Unknown", "Collecting")
    world.ahead = 61
    world.wait_for_end("True", "Succeeded")
    world.check_success([1, 2])


def test_deadline_without_a_quorum(world):
    world.operator()
    world.upload(1)
    world.apply(updates_minCount=2)
    world.wait_for("Succeeded", "Unknown", "Collecting")
    world.ahead = 61
    ended = world.wait_for_end("False", "QuorumNotMet")
    assert "1" in ended["message"]
    assert world.condition("Collected")["reason"] == "RoundEnded"
    assert world.get()["status"]["completionTime"]
    (event,) = world.cluster.wait(lambda: world.events("QuorumNotMet"))
    assert (event["message"], event["involvedObject"]["name"]) == (ended["message"], "round")


def test_active_deadline(world):
    world.operator()
    world.apply(activeDeadlineSeconds=300, updates_deadlineSeconds=3000)
    world.wait_for("Succeeded", "Unknown", "Collecting")
    world.ahead = 301
    ended = world.wait_for_end("False", "DeadlineExceeded")
    assert "spec.activeDeadlineSeconds, 300 s" in ended["message"]


def test_active_deadline_of_a_round_whose_store_cannot_be_asked(world):
    world.operator()
    world.apply(activeDeadlineSeconds=300, store={"endpoint": "http://store.svc:9000", "credentialsSecretName": "none"})
    world.wait_for("Succeeded", "Unknown", "SecretUnusable")
    world.ahead = 301
    assert "Secret none is not there" in world.wait_for_end("False", "DeadlineExceeded")["message"]


def test_ttl(world, monkeypatch):
    monkeypatch.setattr(sweep, "EVERY_SECONDS", 0.05)
    world.operator()
    world.upload(1, 2)
    world.apply(updates_maxCount=2, ttlSecondsAfterFinished=600)
    world.apply("kept", updates_maxCount=2, output_key="kept/model.safetensors")
    world.wait_for_end("True", name="round")
    world.wait_for_end("True", name="kept")
    world.ahead = 500
    world.apply("other", updates_prefix="elsewhere/", output_key="other/model.safetensors")
    world.wait_for("Succeeded", "Unknown", name="other")
    assert world.exists()
    world.ahead = 700
    world.cluster.wait(lambda: not world.exists(), "the deletion")
    assert world.exists("kept")
    assert world.bucket.stat(OUTPUT) is not None


def test_a_bad_update_is_excluded_and_counted(world):
    world.operator()
    world.upload(1, 3)
    values = tensors(2, 2400)
    values["layer.weight"][100, 3] = np.nan
    upload(world.bucket, "2.safetensors", values)
    world.apply(updates_maxCount=3, aggregation_invalidUpdatePolicy="Exclude")
    world.wait_for_end("True")
    world.check_success([1, 3])
    status = world.get()["status"]
    assert status["updates"] == {"found": 3, "accepted": 3, "rejected": 0, "excluded": 1, "participants": 2}
    assert status["plan"]["revision"] == 2


def test_a_key_that_is_taken(world):
    world.operator()
    world.bucket.put(OUTPUT, b"something else")
    world.upload(1, 2)
    world.apply(updates_maxCount=2)
    assert OUTPUT in world.wait_for_end("False", "OutputExists")["message"]
    assert world.bucket.get(OUTPUT) == b"something else"


def test_the_same_round_again(world):
    world.operator()
    world.upload(1, 2)
    world.apply(updates_maxCount=2)
    world.wait_for_end("True", "Succeeded")
    world.delete()
    assert not world.exists()
    world.apply(updates_maxCount=2)
    world.wait_for_end("True", "AlreadyCommitted")


def test_a_spec_that_the_schema_let_pass(world):
    """An old CRD, say. The message names the field."""
    world.operator()
    world.apply(function_memoryMiB=7)
    assert "spec.function.memoryMiB" in world.wait_for_end("False", "InvalidSpec")["message"]


def test_a_function_that_is_not_allowed(world, monkeypatch):
    from gradsharding.kube.operator import Operator

    monkeypatch.setattr("loop.operators.ScriptedOperator.platform", Operator.platform)
    world.operator()
    world.upload(1, 2)
    lambda_ = {"functionName": "somebody-elses", "region": "us-east-1"}
    world.apply(
        updates_maxCount=2,
        function={"platform": "Lambda", "lambda": lambda_, "memoryMiB": 256, "timeoutSeconds": 60},
    )
    assert "GRADSHARDING_LAMBDA_FUNCTIONS" in world.wait_for_end("False", "FunctionNotAllowed")["message"]
