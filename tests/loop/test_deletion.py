"""A deleted round leaves nothing, in whatever state it was, and whether or not the operator ran."""

import threading

import pytest
from loop.kubernetes_mock import LIMIT
from rounds_kit import OUTPUT, keys_under

from gradsharding.errors import StoreUnreachable
from gradsharding.kube import handlers

STATES = {
    "planned": "create_upload",
    "the plan is stored": "put_new",
    "a function reads": "http GET",
    "a function writes": "http PUT part",
    "a shard is recorded": "http PUT",
}


class Gate:
    """Store operations of one kind wait until they are let through."""

    def __init__(self, op):
        self.op, self.reached, self.open = op, threading.Event(), threading.Event()

    def __call__(self, op, key):
        if op == self.op:
            self.reached.set()
            assert self.open.wait(LIMIT)


def delete(world):
    world.delete()
    world.cluster.wait(lambda: not world.exists(), "the deletion")


def test_while_collecting(world):
    operator = world.operator()
    world.upload(1)
    world.apply()
    world.wait_for("Succeeded", "Unknown", "Collecting")
    delete(world)
    world.check_nothing_left()
    assert operator.operator.drivers == {}
    assert world.cluster.all("events") == []


@pytest.mark.parametrize("state", STATES)
def test_while_running(world, state):
    gate = Gate(STATES[state])
    operator = world.operator(on_operation=gate)
    world.upload(1, 2)
    world.apply(updates_maxCount=2)
    assert gate.reached.wait(LIMIT)
    world.delete()
    gate.open.set()
    world.cluster.wait(lambda: not world.exists(), "the deletion")
    world.check_nothing_left()
    assert operator.operator.drivers == {}
    assert world.cluster.all("events") == []


def test_no_second_pass_beside_one_that_is_cut_off(world):
    """Kopf cancels the daemon, the thread of its pass goes on: the clean-up waits for it."""
    gate, overlap = Gate("create_upload"), threading.Event()

    def watch(op, key):
        if gate.reached.is_set() and not gate.open.is_set():
            overlap.set()
        gate(op, key)

    world.operator(on_operation=watch)
    world.upload(1, 2)
    world.apply(updates_maxCount=2)
    assert gate.reached.wait(LIMIT)
    world.delete()
    assert not overlap.wait(0.5)
    gate.open.set()
    world.cluster.wait(lambda: not world.exists(), "the deletion")
    world.check_nothing_left()


def test_what_is_decided_to_complete_completes(world):
    gate = Gate("complete_upload")
    world.operator(on_operation=gate)
    world.upload(1, 2)
    world.apply(updates_maxCount=2)
    assert gate.reached.wait(LIMIT)
    world.delete()
    gate.open.set()
    world.cluster.wait(lambda: not world.exists(), "the deletion")
    world.check_nothing_left([OUTPUT, OUTPUT + ".manifest.json"])


def test_while_suspended(world):
    gate = Gate("http PUT part")
    world.operator(on_operation=gate)
    world.upload(1, 2)
    world.apply(updates_maxCount=2)
    assert gate.reached.wait(LIMIT)
    world.patch(suspend=True)
    world.wait_for("Suspended", "True")
    world.delete()
    gate.open.set()
    world.cluster.wait(lambda: not world.exists(), "the deletion")
    world.check_nothing_left()


@pytest.mark.parametrize("crash_at", [3, 8, 14, 20, 26])
def test_while_the_operator_is_down(world, crash_at):
    """The finalizer keeps the object until an operator comes."""
    first = world.operator(crash_at=crash_at)
    world.upload(1, 2)
    world.apply(updates_maxCount=2)
    assert first.crashed.wait(LIMIT)
    first.stop()
    world.delete()
    assert world.get()["metadata"]["deletionTimestamp"]
    second = world.operator()
    world.cluster.wait(lambda: not world.exists(), "the deletion")
    done = world.bucket.stat(OUTPUT) is not None
    world.check_nothing_left([OUTPUT, OUTPUT + ".manifest.json"] if done else [])
    assert second.operator.drivers == {}


def test_a_finished_round_goes_at_once(world):
    operator = world.operator()
    world.upload(1, 2)
    world.apply(updates_maxCount=2)
    world.wait_for_end("True")
    operator.stop()
    world.delete()
    assert not world.exists()
    world.check_nothing_left([OUTPUT, OUTPUT + ".manifest.json"])


def test_with_a_namespace_whose_secrets_go_first(world):
    gate = Gate("http PUT part")
    world.operator(on_operation=gate)
    world.upload(1, 2)
    world.apply(updates_maxCount=2)
    assert gate.reached.wait(LIMIT)
    world.cluster.delete("secrets", "default", "store")
    world.delete()
    gate.open.set()
    world.cluster.wait(lambda: not world.exists(), "the deletion")
    world.check_nothing_left()
    assert world.cluster.all("events") == []


def test_when_the_store_is_gone(world, monkeypatch):
    """An Event names what is left, and the object goes all the same."""
    monkeypatch.setattr(handlers, "CLEANUP_SECONDS", 0.5)
    broken = threading.Event()

    def fail(op, key):
        if broken.is_set():
            raise StoreUnreachable("The store did not answer: no connection.")
        if op == "http PUT part":
            broken.set()

    world.operator(on_operation=fail)
    world.upload(1, 2)
    body = world.apply(updates_maxCount=2)
    world.wait_for("Succeeded", "Unknown", "StoreUnreachable")
    delete(world)
    (event,) = world.cluster.wait(lambda: world.events("CleanupIncomplete"))
    assert "The store did not answer" in event["message"]
    assert f"federation/{OUTPUT}.round/{body['metadata']['uid']}/" in event["message"]
    assert keys_under(world.bucket, OUTPUT + ".round/")


def test_when_the_store_hangs(world, monkeypatch):
    monkeypatch.setattr(handlers, "CLEANUP_SECONDS", 0.5)
    gate = Gate("list")
    world.operator(on_operation=gate)
    world.apply()
    assert gate.reached.wait(LIMIT)
    delete(world)
    (event,) = world.cluster.wait(lambda: world.events("CleanupIncomplete"))
    assert "took more than" in event["message"]
    gate.open.set()


def test_without_a_finalizer(world):
    """Somebody takes the finalizer away and deletes: no pass goes on for what is gone."""
    operator = world.operator()
    world.apply()
    world.wait_for("Succeeded", "Unknown", "Collecting")
    with world.cluster.changed:
        world.cluster.patch("aggregationrounds", "default", "round", {"metadata": {"finalizers": []}})
        world.cluster.delete("aggregationrounds", "default", "round")
    world.cluster.wait(lambda: not operator.operator.drivers, "the driver to go")
    world.apply("other", updates_prefix="elsewhere/", output_key="other/model.safetensors")
    world.wait_for("Succeeded", "Unknown", "Collecting", name="other")
    assert len(operator.operator.drivers) == 1
