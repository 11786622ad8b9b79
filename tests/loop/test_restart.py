"""The operator dies, is stopped, or runs twice: one right result, and nothing that is recorded runs again."""

import threading

import pytest
from loop.kubernetes_mock import LIMIT
from rounds_kit import OUTPUT, keys_under

COUNT = 44
"""Store operations of a round of two shards, its functions' ones included, and some more."""


def recorded(world):
    return {key for key in keys_under(world.bucket, OUTPUT + ".round/") if "/shards/" in key}


@pytest.mark.parametrize("crash_at", range(1, COUNT, 4))
def test_killed_at_a_store_operation(world, crash_at):
    first = world.operator(crash_at=crash_at)
    world.upload(1, 2)
    world.apply(updates_maxCount=2)
    world.cluster.wait(lambda: first.crashed.is_set() or (world.condition("Succeeded") and ended(world)), "either")
    first.stop()
    before = recorded(world)
    second = world.operator()
    world.wait_for_end("True", "Succeeded")
    world.check_success([1, 2])
    assert not before & {key for op, key in second.operations if op == "http PUT"}, "a recorded shard ran again"


def ended(world):
    return world.condition("Succeeded")["status"] == "True"


@pytest.mark.parametrize("state", ["Collecting", "Reducing", "Completing", "Succeeded"])
def test_stopped_at_a_transition(world, state):
    """Stopped as by SIGTERM as soon as the status says so: in the middle of whatever comes next."""
    reached, stopped = threading.Event(), threading.Event()

    def watch(request):
        if request.subresource == "status" and f"'{state}'" in str(request.data) and not stopped.is_set():
            reached.set()

    world.cluster.before_write = watch
    first = world.operator()
    world.upload(1, 2)
    world.apply(updates_minCount=2, updates_maxCount=3 if state == "Collecting" else 2)
    assert reached.wait(LIMIT)
    assert first.stop() < 5
    stopped.set()
    if state == "Collecting":
        world.upload(3)
    world.operator()
    world.wait_for_end("True", "Succeeded")
    world.check_success([1, 2, 3] if state == "Collecting" else [1, 2])


def test_stopped_while_functions_run(world):
    """Calls are hung up, and made again."""
    held, release = threading.Event(), threading.Event()

    def hold(op, key):
        if op == "http PUT part" and not release.is_set():
            held.set()
            assert release.wait(LIMIT)

    first = world.operator(on_operation=hold)
    world.upload(1, 2)
    world.apply(updates_maxCount=2)
    assert held.wait(LIMIT)
    stopper = threading.Timer(0.5, release.set)  # the thread of the in-process reducer cannot be killed
    stopper.start()
    assert first.stop() < 5
    stopper.join()
    world.operator()
    world.wait_for_end("True", "Succeeded")
    world.check_success([1, 2])


def test_the_status_goes_on_where_it_was(world, eager):
    first = world.operator()
    world.upload(1)
    world.apply()
    world.wait_for("Succeeded", "Unknown", "Collecting")
    before = world.get()["status"]
    first.stop()
    world.ahead = 20
    world.operator()
    world.upload(2)
    world.cluster.wait(lambda: world.get()["status"]["updates"]["accepted"] == 2, "the second update")
    after = world.get()["status"]
    assert after["startTime"] == before["startTime"]
    times = [[c["lastTransitionTime"] for c in status["conditions"]] for status in (before, after)]
    assert times[0] == times[1]


def test_two_operators_at_once(world):
    operators = [world.operator(), world.operator()]
    world.upload(1, 2)
    world.apply(updates_maxCount=2)
    world.wait_for_end("True", "Succeeded")
    world.check_success([1, 2])
    world.cluster.wait(lambda: not any(o.operator.drivers for o in operators), "both to let go")
    assert sum(op == "complete_upload" for o in operators for op, _ in o.operations) >= 1


@pytest.mark.parametrize("pause_at", ["put_new", "complete_upload"])
def test_two_operators_of_which_one_sleeps(world, pause_at):
    """One of them is stopped between look and write until the other is through."""
    paused, go_on = threading.Event(), threading.Event()

    def sleep(op, key):
        if op == pause_at and not paused.is_set():
            paused.set()
            assert go_on.wait(LIMIT)

    sleeper = world.operator(on_operation=sleep)
    world.upload(1, 2)
    world.apply(updates_maxCount=2)
    assert paused.wait(LIMIT)
    world.operator()
    world.wait_for("Succeeded", "True", "Succeeded")
    go_on.set()
    world.wait_for_end("True", "Succeeded")
    world.cluster.wait(lambda: not sleeper.operator.drivers, "the sleeper to let go")
    sleeper.stop()
    world.check_success([1, 2])
    assert world.get()["status"]["conditions"][-1]["status"] == "True"


def test_two_operators_and_a_deletion(world):
    operators = [world.operator(), world.operator()]
    world.upload(1)
    world.apply()
    world.wait_for("Succeeded", "Unknown", "Collecting")
    world.delete()
    world.cluster.wait(lambda: not world.exists(), "the deletion")
    world.cluster.wait(lambda: not any(o.operator.drivers for o in operators), "both to let go")
    world.check_nothing_left()
