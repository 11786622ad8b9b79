"""A round is stopped, or paused, before and after each store operation that it makes; the points are found by counting."""

import threading

import numpy as np
import pytest
from memory_store import MemoryStore
from processes import MIN_PART, Process
from rounds_kit import OUTPUT, assert_mean, document, keys_under, spec, tensors, upload

from gradsharding.rounds import memory, stitch
from gradsharding.rounds.output import read_output

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Parts of 4 KiB, and the protocol's waits on a clock that jumps."""
    monkeypatch.setattr(memory, "MIN_PART", MIN_PART)
    monkeypatch.setattr(stitch, "ASK_AGAIN_SECONDS", 0.001)


class World:
    """A store with three updates; with ``exclude`` the second holds a NaN."""

    def __init__(self, exclude):
        self.store = MemoryStore(min_part=MIN_PART)
        self.bucket = self.store.bucket("federation")
        updates = [(tensors(i, 2400), 10 + i) for i in range(3)]
        if exclude:
            updates[1][0]["layer.weight"][100, 3] = np.nan
        for i, (values, examples) in enumerate(updates):
            upload(self.bucket, f"{i}.safetensors", values, examples)
        self.expected = [update for i, update in enumerate(updates) if not (exclude and i == 1)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.store.close()

    def check(self, uids=("uid-1",)):
        """One right output, the right manifest, nothing else under the output key, no upload."""
        assert_mean(self.bucket, self.expected)
        assert keys_under(self.bucket, OUTPUT) == [OUTPUT, OUTPUT + ".manifest.json"]
        assert self.bucket.list_uploads(OUTPUT) == []
        manifest = document(self.bucket)
        assert manifest["round"] in uids
        assert [p["weight"] for p in manifest["participants"]] == [weight for _, weight in self.expected]
        assert len(manifest["excluded"]) == 3 - len(self.expected)
        plan = manifest["plan"]
        assert read_output(self.bucket, OUTPUT).plan == (manifest["round"], plan["revision"], plan["sha256"])
        assert manifest["output"]["etag"] == self.bucket.stat(OUTPUT).etag
        assert [p["number"] for p in manifest["parts"]] == list(range(1, plan["parts"] + 1))


def operations_of_a_round(exclude):
    with World(exclude) as world, Process(world.store) as process:
        process.run()
        assert process.finished.reason == "Succeeded"
        world.check()
        return process.operations


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("exclude", [False, True], ids=["all good", "one to exclude"])
def test_crash_at_every_operation(exclude, moment):
    count = len(operations_of_a_round(exclude))
    assert count > 30
    crashed = 0
    for number in range(count):
        with World(exclude) as world:
            with Process(world.store, at=(number, moment)) as first:
                first.run()
                crashed += first.crashed
            recorded = {key for key in keys_under(world.bucket, OUTPUT + ".round/") if "/shards/" in key}
            with Process(world.store, rerun=True) as second:
                second.run()
                assert second.finished.succeeded, (number, first.operations[-1], second.finished)
                again = {key for op, key in second.operations if op == "http PUT"}
            world.check()
            assert not again & recorded, "a recorded shard ran again"
    assert crashed >= count - 2  # timing may shift the very last operations


@pytest.mark.parametrize("uids", [("uid-1", "uid-1"), ("uid-1", "uid-2")], ids=["same round", "two rounds"])
@pytest.mark.parametrize("exclude", [False, True], ids=["all good", "one to exclude"])
def test_pause_at_every_operation(exclude, uids):
    """One of two processes sleeps at each of these points until the other is through."""
    operations = operations_of_a_round(exclude)
    refused = 0
    for number in range(len(operations)):
        moment = "before" if number % 2 else "after"
        with World(exclude) as world, Process(world.store, uids[0], (number, moment), "pause") as sleeper:
            thread = threading.Thread(target=sleeper.run)
            thread.start()
            while thread.is_alive() and not sleeper.paused.wait(0.01):
                pass
            with Process(world.store, uids[1]) as other:
                other.run()
            sleeper.resume.set()
            thread.join(60)
            told = (number, operations[number], sleeper.finished, other.finished)
            assert sleeper.finished is not None, told
            assert sleeper.finished.succeeded, told
            if not other.finished.succeeded:
                # Another round may come between output and manifest of the first, when nobody can say yet what that is.
                assert (uids[1], other.finished.reason) == ("uid-2", "OutputExists"), told
                world.bucket.delete([OUTPUT + ".round/uid-2/1/outcome.json"])
                refused += 1
            world.check(uids)
    assert refused <= 8


@pytest.mark.parametrize("moment", ["before", "after"])
def test_crash_in_a_run_that_forgets_a_failure(moment):
    """A bad client failed the round, its file was mended, and the second run is stopped at each of its operations."""
    fail = spec(aggregation_invalidUpdatePolicy="Fail")

    def failed_world():
        world = World(exclude=True)
        with Process(world.store, spec=fail) as first:
            first.run()
            assert first.finished.reason == "InvalidUpdate"
        mended = tensors(1, 2400)
        upload(world.bucket, "1.safetensors", mended, 11)
        world.expected = [(tensors(i, 2400), 10 + i) for i in range(3)]
        return world

    with failed_world() as world, Process(world.store, spec=fail, rerun=True) as second:
        second.run()
        assert second.finished.succeeded
        count = len(second.operations)
    for number in range(count):
        with failed_world() as world:
            with Process(world.store, at=(number, moment), spec=fail, rerun=True) as second:
                second.run()
            with Process(world.store, spec=fail, rerun=True) as third:
                third.run()
                assert third.finished.succeeded, (number, second.operations[-1], third.finished)
            world.check()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_crash_in_a_round_that_fails(moment):
    """Stopped at each operation and started again, it fails for the same reason and leaves its outcome alone."""
    fail = spec(aggregation_invalidUpdatePolicy="Fail")

    def run_once(world, **options):
        with Process(world.store, spec=fail, begin_anew=False, **options) as process:
            process.run()
            return process

    with World(exclude=True) as world:
        count = len(run_once(world).operations)
    for number in range(count):
        with World(exclude=True) as world:
            run_once(world, at=(number, moment))
            finished = run_once(world).finished
            assert (finished.succeeded, finished.reason) == (False, "InvalidUpdate"), (number, finished)
            assert keys_under(world.bucket, OUTPUT) == [OUTPUT + ".round/uid-1/1/outcome.json"]
            assert world.bucket.list_uploads(OUTPUT) == []
