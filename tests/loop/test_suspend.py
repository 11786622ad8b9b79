"""Suspended rounds make no new call; the time to collect begins again with the resume."""

import threading

from loop.kubernetes_mock import LIMIT
from rounds_kit import OUTPUT, keys_under

DAY = 86400


def test_a_round_that_begins_suspended(world):
    operator = world.operator()
    world.upload(1, 2)
    world.apply(suspend=True, updates_maxCount=2)
    world.wait_for("Suspended", "True")
    assert world.condition("Succeeded")["reason"] == "Suspended"
    assert not any(op == "create_upload" for op, _ in operator.operations)
    world.patch(suspend=False)
    world.wait_for_end("True", "Succeeded")
    assert world.condition("Suspended")["status"] == "False"
    assert world.get()["status"]["observedGeneration"] == 2
    world.check_success([1, 2])


def test_the_deadline_counts_from_the_resume(world):
    operator = world.operator()
    world.upload(1)
    world.apply(updates_minCount=2, updates_deadlineSeconds=3000)
    world.wait_for("Succeeded", "Unknown", "Collecting")
    world.patch(suspend=True)
    world.wait_for("Suspended", "True")
    world.ahead = DAY
    world.patch(suspend=False)
    world.wait_for("Suspended", "False")
    world.wait_for("Succeeded", "Unknown", "Collecting")
    world.ahead = DAY + 2500
    operator.stop()
    world.operator()
    world.upload(2)
    world.wait_for("Succeeded", "Unknown", "Collecting")
    world.ahead = DAY + 3001
    world.wait_for_end("True", "Succeeded")
    world.check_success([1, 2])


def test_a_resume_while_the_operator_is_down(world):
    operator = world.operator()
    world.upload(1)
    world.apply(updates_minCount=2, updates_deadlineSeconds=3000, suspend=True)
    world.wait_for("Suspended", "True")
    operator.stop()
    world.patch(suspend=False)
    world.ahead = DAY
    world.operator()
    world.wait_for("Suspended", "False")
    world.ahead = DAY + 3001
    world.wait_for_end("False", "QuorumNotMet")


def test_running_calls_finish_and_count(world, eager):
    hold, held = threading.Event(), threading.Event()

    def wait(op, key):
        if op == "http PUT part":
            held.set()
            assert hold.wait(LIMIT)

    operator = world.operator(on_operation=wait)
    world.upload(1, 2)
    world.apply(updates_maxCount=2)  # two shards, one after the other
    assert held.wait(LIMIT)
    world.patch(suspend=True)
    world.wait_for("Suspended", "True")
    hold.set()
    world.cluster.wait(lambda: world.get()["status"]["shards"]["succeeded"] == 1, "the shard that ran")
    world.cluster.wait(lambda: world.get()["status"]["shards"]["active"] == 0, "the end of all calls")
    records = [key for key in keys_under(world.bucket, OUTPUT + ".round/") if "/shards/" in key]
    assert len(records) == 1
    world.patch(suspend=False)
    world.wait_for_end("True", "Succeeded")
    assert len({key for op, key in operator.operations if op == "http PUT" and "/shards/" in key}) == 2
    world.check_success([1, 2])
