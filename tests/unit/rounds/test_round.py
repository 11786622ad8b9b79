"""Whole rounds on the memory store, with the real reducer in this process: one test for each clause of docs/protocol.md."""

import dataclasses

import numpy as np
import pytest
from inline_platform import InlinePlatform
from memory_store import MemoryStore
from rounds_kit import (
    OUTPUT,
    PREFIX,
    Clock,
    assert_mean,
    document,
    keys_under,
    make_round,
    run,
    spec,
    tensors,
    upload,
)

from gradsharding.errors import StoreRefused, StoreUnreachable, StoreUnsupported
from gradsharding.rounds.ending import remove_scratch
from gradsharding.rounds.keys import Keys
from gradsharding.rounds.plan import Plan
from gradsharding.rounds.report import report
from gradsharding_reducer.task import Outcome, PartResult, ReduceResult

SCRATCH = OUTPUT + ".round/"


def fill(bucket, count=3, spoil=None):
    """Upload ``count`` updates; ``spoil=(client, tensor, value)`` puts a bad value in one. Returns them with their weights."""
    updates = [(tensors(i), 10 + i) for i in range(count)]
    if spoil is not None:
        client, name, value = spoil
        updates[client][0][name].flat[3] = value
    for i, (values, examples) in enumerate(updates):
        upload(bucket, f"{i}.safetensors", values, examples)
    return updates


def go(bucket, platform, **options):
    return run(make_round(bucket, wait=options.pop("wait", False), **options), platform)


def assert_clean(bucket, finished):
    """After success output and manifest are all that is left, after failure the outcome; never an upload."""
    left = keys_under(bucket, OUTPUT)
    if finished.succeeded:
        assert left == [OUTPUT, OUTPUT + ".manifest.json"]
    else:
        assert [key for key in left if key.startswith(SCRATCH)] == [
            key for key in left if key.endswith("/outcome.json")
        ]
        assert len([key for key in left if key.startswith(SCRATCH)]) == 1
    assert bucket.list_uploads(OUTPUT) == []


# Endings


def test_success_leaves_output_and_manifest(bucket, platform):
    updates = fill(bucket)
    finished = go(bucket, platform)
    assert (finished.succeeded, finished.reason) == (True, "Succeeded")
    assert_mean(bucket, updates)
    assert_clean(bucket, finished)
    manifest = document(bucket)
    assert [(p["key"], p["weight"]) for p in manifest["participants"]] == [
        (f"{PREFIX}{i}.safetensors", 10 + i) for i in range(3)
    ]
    told = report(finished, "federation", OUTPUT, 1.0)
    assert told["updates"]["participants"] == 3
    assert told["shards"] == {"total": 2, "succeeded": 2, "retried": 0}
    assert told["bytes_read"] == 3 * sum(v.nbytes for v in updates[0][0].values())


def test_failure_leaves_its_outcome_and_tells_who_was_rejected(bucket, platform):
    fill(bucket, 1)
    bucket.put(PREFIX + "x.safetensors", b"nonsense")
    finished = go(bucket, platform)
    assert finished.reason == "QuorumNotMet"
    assert "1 usable updates of at least 2" in finished.message
    assert "x.safetensors" in finished.message
    assert_clean(bucket, finished)
    assert finished.document["rejected"][0]["key"] == PREFIX + "x.safetensors"


def test_run_again_after_a_failure_begins_anew(bucket, platform):
    fill(bucket, 1)
    assert go(bucket, platform).reason == "QuorumNotMet"
    updates = fill(bucket, 2)
    round_ = make_round(bucket, wait=False, rerun=True)
    round_.begin_anew()
    assert run(round_, platform).reason == "Succeeded"
    assert_mean(bucket, updates)
    assert keys_under(bucket, SCRATCH) == []


def test_without_begin_anew_a_failure_is_final(bucket, platform):
    fill(bucket, 1)
    assert go(bucket, platform).reason == "QuorumNotMet"
    fill(bucket, 2)
    assert go(bucket, platform).reason == "QuorumNotMet"


def test_output_removed_by_the_user_is_made_again(bucket, platform):
    updates = fill(bucket)
    go(bucket, platform)
    bucket.delete([OUTPUT])
    round_ = make_round(bucket, wait=False, rerun=True)
    round_.begin_anew()
    assert run(round_, platform).reason == "Succeeded"
    assert_mean(bucket, updates)


# Collecting


def test_waits_for_max_count(bucket, platform):
    fill(bucket, 2)
    clock = Clock()
    round_ = make_round(bucket, clock=clock, spec=spec(updates_maxCount=3))
    step = round_.advance(calls_of_nobody())
    assert (step.phase, step.counts.accepted) == ("Collecting", 2)
    assert "2 of 3 updates" in step.message
    updates = fill(bucket, 5)
    assert run(round_, platform).succeeded
    assert_mean(bucket, updates[:3])
    assert [row["key"] for row in document(bucket)["surplus"]] == [PREFIX + "3.safetensors", PREFIX + "4.safetensors"]


def test_starts_at_the_deadline_with_a_quorum(bucket, platform):
    updates = fill(bucket, 2)
    clock = Clock()
    round_ = make_round(bucket, clock=clock)
    assert round_.advance(calls_of_nobody()).phase == "Collecting"
    clock.now += 61
    assert run(round_, platform).succeeded
    assert_mean(bucket, updates)


def test_unsupported_store_is_refused_before_the_first_plan(bucket, platform):
    fill(bucket)

    def check(_bucket, _prefix):
        raise StoreUnsupported("no conditional PUT")

    with pytest.raises(StoreUnsupported):
        go(bucket, platform, check_store=check)
    assert keys_under(bucket, SCRATCH) == []


def test_uniform_weights(bucket, platform):
    updates = fill(bucket)
    assert go(bucket, platform, spec=spec(aggregation_weighting="Uniform")).succeeded
    assert_mean(bucket, [(values, 1) for values, _ in updates])


# Bad values and vanished updates


def test_bad_values_are_excluded_and_named(bucket, platform):
    updates = fill(bucket, spoil=(1, "layer.weight", np.inf))
    finished = go(bucket, platform)
    assert finished.succeeded
    assert_mean(bucket, [updates[0], updates[2]])
    (excluded,) = document(bucket)["excluded"]
    assert excluded["key"] == PREFIX + "1.safetensors"
    assert excluded["reason"] == "holds a value that is not finite in tensor 'layer.weight', byte 12 of it"
    assert document(bucket)["plan"]["revision"] == 2


def test_bad_values_fail_the_round_under_fail(bucket, platform):
    fill(bucket, spoil=(1, "layer.weight", np.nan))
    finished = go(bucket, platform, spec=spec(aggregation_invalidUpdatePolicy="Fail"))
    assert finished.reason == "InvalidUpdate"
    assert "1.safetensors holds a value that is not finite" in finished.message
    assert finished.document["excluded"][0]["key"] == PREFIX + "1.safetensors"
    assert_clean(bucket, finished)


def test_exclusion_below_the_quorum_fails(bucket, platform):
    fill(bucket, 2, spoil=(0, "layer.bias", np.nan))
    finished = go(bucket, platform)
    assert finished.reason == "QuorumNotMet"
    assert "1 participants are left" in finished.message
    assert_clean(bucket, finished)


def test_all_bad_clients_of_all_shards_are_dropped_at_once(bucket, platform):
    updates = [(tensors(i), 10) for i in range(4)]
    updates[0][0]["layer.weight"].flat[0] = np.nan
    updates[1][0]["layer.weight"].flat[-1] = np.nan  # in the other shard
    for i, (values, examples) in enumerate(updates):
        upload(bucket, f"{i}.safetensors", values, examples)
    assert go(bucket, platform).succeeded
    assert document(bucket)["plan"]["revision"] == 2
    assert len(document(bucket)["excluded"]) == 2


@pytest.mark.parametrize("policy", ["Exclude", "Fail"])
@pytest.mark.parametrize("how", ["removed", "overwritten"])
def test_update_lost_during_the_round(bucket, how, policy):
    updates = fill(bucket)
    key = PREFIX + "1.safetensors"

    def meddle(task, number):
        if number == 2:
            bucket.delete([key]) if how == "removed" else bucket.put(key, b"other")

    finished = go(bucket, InlinePlatform(bucket.origin, meddle), spec=spec(aggregation_invalidUpdatePolicy=policy))
    if policy == "Fail":
        assert finished.reason == "InvalidUpdate"
        assert f"was {how} during the round" in finished.message
    else:
        assert_mean(bucket, [updates[0], updates[2]])
        assert document(bucket)["excluded"][0]["reason"] == f"was {how} during the round"
    assert_clean(bucket, finished)


def test_pinned_version_survives_an_overwrite():
    with MemoryStore(min_part=4096, versioned=True) as store:
        bucket = store.bucket("federation")
        updates = fill(bucket)

        def meddle(task, number):
            if number == 2:
                bucket.put(PREFIX + "1.safetensors", b"other")

        assert go(bucket, InlinePlatform(bucket.origin, meddle)).succeeded
        assert_mean(bucket, updates)
        assert document(bucket)["excluded"] == []


def test_disagreeing_booleans_fail_under_exclude_too(bucket, platform):
    for i in range(3):
        values = {"mask": np.array([True, i != 2, False]), "w": tensors(i)["layer.weight"]}
        upload(bucket, f"{i}.safetensors", values)
    finished = go(bucket, platform)
    assert finished.reason == "BoolDisagrees"
    assert "'mask', byte 1" in finished.message


# Somebody else's output


def test_foreign_output_is_left_alone(bucket, platform):
    fill(bucket)
    bucket.put(OUTPUT, b"mine, not yours")
    finished = go(bucket, platform)
    assert finished.reason == "OutputExists"
    assert "written by somebody else" in finished.message
    assert bucket.get(OUTPUT) == b"mine, not yours"
    assert platform.tasks == []


def test_foreign_output_that_appears_before_complete(bucket, platform):
    fill(bucket)

    def meddle(task, number):
        if number == 2:
            bucket.put(OUTPUT, b"foreign")

    finished = go(bucket, InlinePlatform(bucket.origin, meddle))
    assert finished.reason == "OutputExists"
    assert bucket.get(OUTPUT) == b"foreign"
    assert_clean(bucket, finished)


def test_the_same_round_again_is_already_committed(bucket, platform):
    fill(bucket)
    go(bucket, platform)
    again = go(bucket, platform, uid="uid-2")
    assert (again.succeeded, again.reason) == (True, "AlreadyCommitted")
    assert again.document["round"] == "uid-1"
    assert_clean(bucket, again)


@pytest.mark.parametrize("uid", ["uid-1", "uid-2"])
@pytest.mark.parametrize("what", ["new", "changed"])
def test_the_same_round_with_another_update_says_so(bucket, platform, what, uid):
    fill(bucket)
    go(bucket, platform)
    upload(bucket, "3.safetensors" if what == "new" else "1.safetensors", tensors(9))
    again = go(bucket, platform, uid=uid, rerun=True)
    assert (again.succeeded, again.reason) == (False, "OutputExists")
    assert f"new or changed since: {PREFIX}{'3' if what == 'new' else '1'}.safetensors" in again.message


def test_an_excluded_update_does_not_count_as_new(bucket, platform):
    fill(bucket, spoil=(1, "layer.weight", np.nan))
    bucket.put(PREFIX + "x.safetensors", b"nonsense")
    go(bucket, platform)
    assert go(bucket, platform, uid="uid-2").reason == "AlreadyCommitted"


# Uploads and parts


def test_upload_dropped_by_the_store_is_begun_anew(bucket):
    updates = fill(bucket)

    def meddle(task, number):
        if number == 2:
            for upload_id in bucket.list_uploads(OUTPUT):
                bucket.abort_upload(OUTPUT, upload_id)

    finished = go(bucket, InlinePlatform(bucket.origin, meddle))
    assert finished.succeeded
    assert document(bucket)["plan"]["revision"] == 2
    assert_mean(bucket, updates)


def test_upload_dropped_again_and_again_fails(bucket):
    fill(bucket)

    def meddle(task, number):
        for upload_id in bucket.list_uploads(OUTPUT):
            bucket.abort_upload(OUTPUT, upload_id)

    finished = go(bucket, InlinePlatform(bucket.origin, meddle))
    assert finished.reason == "UploadLost"
    assert "3 times" in finished.message
    assert_clean(bucket, finished)


def test_upload_dropped_after_the_decision_to_complete(store, bucket, platform):
    updates = fill(bucket)
    dropped = []

    def before(op, key):
        if op == "complete_upload" and not dropped:
            dropped.extend(bucket.list_uploads(OUTPUT))
            bucket.abort_upload(OUTPUT, dropped[0])

    store.before = before
    finished = go(bucket, platform, clock=Clock(step=1.0))
    assert finished.succeeded
    assert document(bucket)["plan"]["revision"] == 2
    assert_mean(bucket, updates)


def test_rejected_part_runs_again(store, bucket, platform):
    """A part is replaced behind the record's back (as SSE-KMS does with equal bytes): only its shard runs again."""
    updates = fill(bucket)
    spoiled = []

    def before(op, key):
        if op == "complete_upload" and not spoiled:
            content = store.content("federation")
            (begun,) = content.uploads.values()
            begun.parts[2] = [("0" * 32, begun.parts[2][0][1])]
            spoiled.append(True)

    store.before = before
    finished = go(bucket, platform)
    assert finished.succeeded
    assert [task.shard for task in platform.tasks] == [0, 1, 1]
    assert_mean(bucket, updates)


def test_parts_rejected_again_and_again_fail(store, bucket, platform):
    fill(bucket)

    def before(op, key):
        if op == "complete_upload":
            (begun,) = store.content("federation").uploads.values()
            begun.parts[2] = [("0" * 32, begun.parts[2][0][1])]

    store.before = before
    finished = go(bucket, platform)
    assert finished.reason == "PartsRejected"
    assert_clean(bucket, finished)


def test_another_process_plan_wins(store, bucket, platform):
    """Between my upload and my plan somebody else with my uid puts a plan: the stored bytes are the plan."""
    updates = fill(bucket)
    theirs = []

    def before(op, key):
        if op == "put_new" and key.endswith("1/plan.json") and not theirs:
            theirs.append(True)
            other = make_round(bucket, wait=False)
            other.advance(calls_of_nobody())

    store.before = before
    assert go(bucket, platform).succeeded
    assert_mean(bucket, updates)
    assert bucket.list_uploads(OUTPUT) == []


def test_records_of_another_plan_are_ignored(store, bucket, platform):
    """A zombie's record lies where ours will be: it must not count for a moment, or a wrong part would be completed."""
    fill(bucket)
    stale = ReduceResult(
        "uid-1", 1, 1, "f" * 64, Outcome.DONE, (PartResult(0, 2, 5, "e" * 32, "s" * 64),), finished=9e9
    )
    bucket.put(f"{SCRATCH}uid-1/1/shards/1/2.json", stale.to_json())
    completed = []
    store.before = lambda op, key: completed.append(key) if op == "complete_upload" else None
    assert go(bucket, platform).succeeded
    assert [task.shard for task in platform.tasks] == [0, 1]
    assert len(completed) == 1


def test_outcomes_are_removed_last(store, bucket):
    """A removal that is cut off must leave a failed round failed."""
    keys = Keys(OUTPUT, "uid-1")
    for key in (keys.plan(1), keys.outcome(1), keys.plan(2), keys.record(2, 0, 1), keys.outcome(2)):
        bucket.put(key, b"x")
    removed = []
    store.before = lambda op, key: removed.append(key) if op == "delete" else None
    remove_scratch(bucket, keys)
    assert removed[-1] == f"{keys.outcome(1)},{keys.outcome(2)}"
    assert keys_under(bucket, keys.scratch) == []


def test_unreadable_record_means_the_shard_runs_again(bucket):
    updates = fill(bucket)

    def spoil(task, number):
        if number == 2:
            bucket.put(f"{SCRATCH}uid-1/1/shards/0/1.json", b"{half a rec")

    platform = InlinePlatform(bucket.origin, spoil)
    assert go(bucket, platform).succeeded
    assert [task.shard for task in platform.tasks] == [0, 1, 0]
    assert_mean(bucket, updates)


# Other


def test_plan_made_for_more_memory_is_made_anew(bucket, monkeypatch):
    """The CLI may be run again with a smaller memoryMiB: parts that it cannot hold are cut anew, nobody is dropped."""
    from gradsharding.rounds import revise

    updates = fill(bucket)
    first = make_round(bucket, wait=False)
    first.advance(calls_of_nobody())
    real, asked = revise.memory.fit, []

    def too_large_once(*arguments, **named):
        asked.append(True)
        return None if len(asked) == 1 else real(*arguments, **named)

    monkeypatch.setattr(revise.memory, "fit", too_large_once)
    assert go(bucket, InlinePlatform(bucket.origin)).succeeded
    assert document(bucket)["plan"]["revision"] == 2
    assert document(bucket)["excluded"] == []
    assert_mean(bucket, updates)


def test_plan_of_another_release_is_left_alone(bucket, platform):
    fill(bucket)
    bucket.put(f"{SCRATCH}uid-1/1/plan.json", b'{"version": 99}')
    finished = go(bucket, platform)
    assert finished.reason == "IncompatibleRelease"
    assert "version 99" in finished.message
    assert bucket.get(f"{SCRATCH}uid-1/1/plan.json") is not None


def test_orphaned_uploads_are_swept_but_not_those_of_other_rounds(bucket, platform):
    fill(bucket)
    other = make_round(bucket, uid="uid-2", wait=False)
    other.advance(calls_of_nobody())
    (theirs,) = bucket.list_uploads(OUTPUT)
    orphan = bucket.create_upload(OUTPUT)
    neighbour = bucket.create_upload(OUTPUT + "x")
    assert go(bucket, platform).succeeded
    assert bucket.list_uploads(OUTPUT) == [theirs]
    assert orphan != theirs
    assert bucket.list_uploads(OUTPUT + "x") == [neighbour]


def calls_of_nobody():
    from gradsharding.rounds.dispatch import Calls

    return Calls()


def test_key_that_s3_clients_refuse_is_one_rejected_update(bucket, platform, monkeypatch):
    """A client may name its object so that no request for it can be made; the round of the others goes on."""
    updates = fill(bucket)
    bucket.put(PREFIX + "./x.safetensors", b"x")
    stat = bucket.stat

    def refusing(key):
        if "/./" in key:
            raise StoreRefused("the key cannot be used", "InvalidKey")
        return stat(key)

    monkeypatch.setattr(bucket, "stat", refusing)
    assert go(bucket, platform).succeeded
    assert_mean(bucket, updates)
    assert "rename it" in document(bucket)["rejected"][0]["reason"]


def test_the_loser_of_two_plans_aborts_its_upload_at_once(bucket):
    fill(bucket)
    mine, theirs = make_round(bucket, wait=False), make_round(bucket, wait=False)
    theirs.advance(calls_of_nobody())
    (winner,) = bucket.list_uploads(OUTPUT)
    stored = bucket.get(f"{SCRATCH}uid-1/1/plan.json")
    plan = dataclasses.replace(Plan.from_json(stored), upload=bucket.create_upload(OUTPUT))
    mine.context.scratch.put_plan(plan)
    assert bucket.list_uploads(OUTPUT) == [winner]
    assert bucket.get(f"{SCRATCH}uid-1/1/plan.json") == stored


def test_a_plan_whose_answer_was_lost_keeps_its_upload(bucket, monkeypatch):
    fill(bucket)
    put_new = bucket.put_new

    def lossy(key, body):
        put_new(key, body)
        raise StoreUnreachable("the answer was lost")

    monkeypatch.setattr(bucket, "put_new", lossy)
    make_round(bucket, wait=False).advance(calls_of_nobody())
    plan = Plan.from_json(bucket.get(f"{SCRATCH}uid-1/1/plan.json"))
    assert bucket.list_uploads(OUTPUT) == [plan.upload]


def test_the_key_is_looked_at_once_more_directly_before_complete():
    """A store whose Complete does not look by itself: the foreign output that appears in mid-pass must survive."""
    with MemoryStore(min_part=4096, atomic_complete=False) as store:
        bucket = store.bucket("federation")
        fill(bucket)

        def after(op, key):
            decided = any(name.endswith("1/outcome.json") for name in store.content("federation").objects)
            if op == "stat" and key == OUTPUT and decided and OUTPUT not in store.content("federation").objects:
                store.after = lambda *_: None
                bucket.put(OUTPUT, b"foreign")

        store.after = after
        finished = go(bucket, InlinePlatform(bucket.origin))
        assert finished.reason == "OutputExists"
        assert bucket.get(OUTPUT) == b"foreign"
