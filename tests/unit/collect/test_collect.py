"""Which objects under a prefix take part, with which weight, and what is asked of the store for it."""

import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from memory_store import MemoryStore
from update_files import safetensors_file, tensors_of, update, with_header

from gradsharding.errors import StoreRefused, StoreUnreachable
from gradsharding.formats import FRONT_BYTES
from gradsharding.rounds import collect
from gradsharding.rounds.collect import Collected, Collector, Quorum, Rejection, is_candidate, quorum, select
from gradsharding.rounds.layout import merge_metadata
from gradsharding_reducer.task import Extent

W = ("F32", 4, [2])
V = ("F32", 4, [3])


@pytest.fixture
def store():
    with MemoryStore() as store:
        store.asked = []
        store.after = lambda op, key: store.asked.append((op, key))
        yield store


@pytest.fixture
def bucket(store):
    return store.bucket("federation")


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def examples(count, **tensors):
    return update(metadata={"num_examples": str(count)}, **(tensors or {"w": W}))


def keys(items):
    return [getattr(item, "update", item).key for item in items]


def reasons(collected):
    return {rejection.key: rejection.reason for rejection in collected.rejected}


def test_nothing_there(bucket):
    assert Collector(bucket, "u/", "NumExamples").collect() == Collected(0, None, (), ())


def test_candidates_are_the_updates_under_the_prefix(bucket):
    for key in ("u/", "u/b.safetensors", "u/sub/c.safetensors", "v/d.safetensors", "u/notes.txt", "u/x.safetensors/"):
        bucket.put(key, examples(3))
    collected = Collector(bucket, "u/", "NumExamples").collect()
    assert collected.found == 2
    assert keys(collected.accepted) == ["u/b.safetensors", "u/sub/c.safetensors"]
    assert [is_candidate(key) for key in ("u/", "u/a.npy", "u/a.npy.json")] == [False, True, False]


def test_what_is_known_of_an_accepted_update(store, bucket):
    store.versioned = True
    file = update(metadata={"num_examples": "7", "format": "pt", "gradsharding.x": "y"}, w=W, v=V)
    bucket.put("u/a.safetensors", file)
    collected = Collector(bucket, "u/", "NumExamples").collect()
    (accepted,) = collected.accepted
    info = bucket.stat("u/a.safetensors")
    data_start = len(file) - 20
    assert accepted.weight == accepted.update.num_examples == 7
    assert accepted.extents == (Extent(0, 20, 0, data_start),)
    assert (accepted.update.etag, accepted.update.version_id) == (info.etag, info.version_id)
    assert (accepted.update.size, accepted.update.last_modified) == (len(file), info.last_modified)
    assert info.version_id
    assert accepted.update.header.metadata == {"format": "pt"}
    assert [tensor.name for tensor in collected.layout.tensors] == ["w", "v"]


def test_npy_updates_carry_their_number_on_the_object(bucket):
    bucket.put("u/a.npy", npy(np.ones((2, 3), "f4")), {"num-examples": "5"})
    bucket.put("u/b.npy", npy(np.ones((2, 3), "f4")))
    collected = Collector(bucket, "u/", "NumExamples").collect()
    assert [(accepted.update.key, accepted.weight) for accepted in collected.accepted] == [("u/a.npy", 5)]
    assert "neither in its __metadata__ nor, as num-examples, in its object metadata" in reasons(collected)["u/b.npy"]
    assert collected.layout.to_json() == [["array", "F32", [2, 3]]]


@pytest.mark.parametrize(
    ("in_file", "on_object", "count", "reason"),
    [
        ("1", None, 1, ""),
        (None, "12", 12, ""),
        ("12", "12", 12, ""),
        ("12", "012", 12, ""),
        (str(2**53), None, 2**53, ""),
        ("12", "13", None, "num_examples is '12' in its __metadata__ but '13' in its object metadata"),
        ("12", "x", None, "num_examples is '12' in its __metadata__ but 'x' in its object metadata"),
        (None, None, None, "neither in its __metadata__"),
        *(
            (bad, None, None, "not a decimal integer from 1 to 2^53")
            for bad in ("", "0", "-1", "1.0", "1e3", " 1", "1_0", "٣", "nan", str(2**53 + 1), "9" * 5000)
        ),
        ("0", "0", None, "num_examples is '0', not a decimal integer"),
    ],
)
def test_number_of_examples(bucket, in_file, on_object, count, reason):
    metadata = {} if in_file is None else {"num_examples": in_file}
    bucket.put(
        "u/a.safetensors", update(metadata=metadata, w=W), {} if on_object is None else {"num-examples": on_object}
    )
    collected = Collector(bucket, "u/", "NumExamples").collect()
    assert [accepted.weight for accepted in collected.accepted] == ([] if count is None else [count])
    assert reason in reasons(collected).get("u/a.safetensors", "")
    # A uniform mean needs no number; a contradiction is refused all the same.
    uniform = Collector(bucket, "u/", "Uniform").collect()
    contradicts = " but " in reason
    assert [accepted.weight for accepted in uniform.accepted] == ([] if contradicts else [1])
    assert [accepted.update.num_examples for accepted in uniform.accepted] == ([] if contradicts else [count])


def test_too_many_examples(bucket):
    bucket.put("u/a.safetensors", examples(100))
    bucket.put("u/b.safetensors", examples(101))
    collected = Collector(bucket, "u/", "NumExamples", max_num_examples=100).collect()
    assert keys(collected.accepted) == ["u/a.safetensors"]
    assert reasons(collected) == {"u/b.safetensors": "num_examples is 101, above maxNumExamples of 100"}
    assert len(Collector(bucket, "u/", "Uniform", max_num_examples=100).collect().accepted) == 2


def test_an_update_that_is_rejected_for_its_number_has_no_vote(bucket):
    for key in ("a", "b"):
        bucket.put(f"u/{key}.safetensors", examples(0, v=V))
    bucket.put("u/c.safetensors", examples(1, w=W))
    collected = Collector(bucket, "u/", "NumExamples").collect()
    assert keys(collected.accepted) == ["u/c.safetensors"]


def test_rejected_by_name_with_the_reason(bucket):
    sound, length = tensors_of(w=W, v=V)
    bad = {
        "missing": (update(w=W), "tensor 'v' is missing"),
        "extra": (update(w=W, v=V, x=W), "tensor 'x' is not in most updates"),
        "shape": (update(w=W, v=("F32", 4, [3, 1])), "tensor 'v' has shape [3, 1], but [3] in most updates"),
        "dtype": (update(w=("I32", 4, [2]), v=V), "tensor 'w' is I32, but F32 in most updates"),
        "f8": (update(w=("F8_E4M3", 1, [2]), v=V), "unsupported dtype F8_E4M3 of tensor 'w'"),
        "cut": (safetensors_file(sound, bytes(length - 1)), "the object is truncated"),
        "json": (with_header("{"), "its header is not JSON"),
        "empty": (b"", "the object has 0 bytes, too few for a safetensors header"),
        "short": (b"abc", "the object has 3 bytes"),
    }
    for name, (file, _) in bad.items():
        bucket.put(f"u/{name}.safetensors", file)
    for name in ("good1", "good2"):
        bucket.put(f"u/{name}.safetensors", safetensors_file(sound, bytes(length)))
    bucket.put("u/good3.safetensors", update(v=V, w=W))
    collected = Collector(bucket, "u/", "Uniform").collect()
    assert keys(collected.accepted) == [f"u/good{i}.safetensors" for i in (1, 2, 3)]
    assert [len(accepted.extents) for accepted in collected.accepted] == [1, 1, 2]
    assert keys(collected.rejected) == sorted(f"u/{name}.safetensors" for name in bad)
    for name, (_, reason) in bad.items():
        assert reason in reasons(collected)[f"u/{name}.safetensors"]
    assert collected.found == len(bad) + 3


def test_keys_come_in_the_order_of_their_bytes(bucket):
    names = ["u/Z.npy", "u/a.npy", "u/é.npy", "u/\uffff.npy", "u/\U0001f600.npy"]
    bucket.list = lambda prefix, listed=bucket.list: reversed([*listed(prefix)])
    for name in names:
        bucket.put(name, npy(np.ones(2)))
    assert keys(Collector(bucket, "u/", "Uniform").collect().accepted) == names


def test_only_headers_are_read(store, bucket):
    bucket.put("u/a.safetensors", update(w=("F32", 4, [1_000_000])))
    read = []
    bucket.read = lambda key, start, length, etag, read_=bucket.read: (
        read.append(length) or read_(key, start, length, etag)
    )
    assert len(Collector(bucket, "u/", "Uniform").collect().accepted) == 1
    assert read == [FRONT_BYTES]
    assert [op for op, _ in store.asked] == ["put", "list", "stat", "read"]


def test_a_long_header_is_read_whole(bucket):
    tensors = {f"layer{i}.weight": ("I8", 1, [1]) for i in range(3000)}
    bucket.put("u/a.safetensors", update(**tensors))
    (accepted,) = Collector(bucket, "u/", "Uniform").collect().accepted
    assert accepted.extents[0].offset > 2 * FRONT_BYTES
    assert accepted.extents[0].length == 3000


def test_a_header_over_the_limit_is_not_read(bucket):
    bucket.put("u/a.safetensors", update(metadata={"x": "y" * 1000}, w=W))
    size = bucket.stat("u/a.safetensors").size - 8
    assert Collector(bucket, "u/", "Uniform", header_limit=size).collect().accepted
    collected = Collector(bucket, "u/", "Uniform", header_limit=size - 1).collect()
    assert reasons(collected) == {"u/a.safetensors": f"its header of {size} bytes is over the limit of {size - 1}"}


def test_nothing_is_looked_at_twice(store, bucket):
    bucket.put("u/a.safetensors", examples(1))
    bucket.put("u/bad.safetensors", b"abc")
    collector = Collector(bucket, "u/", "NumExamples")
    first = collector.collect()
    store.asked.clear()
    assert collector.collect() == first
    assert store.asked == [("list", "u/")]


def test_what_changes_is_looked_at_again(store, bucket):
    clock = time.time()
    store.now = lambda: clock
    for key in ("etag", "time", "same", "gone", "mended"):
        bucket.put(f"u/{key}.safetensors", b"bad" if key == "mended" else examples(1))
    collector = Collector(bucket, "u/", "NumExamples")
    assert len(collector.collect().accepted) == 4
    bucket.put("u/etag.safetensors", examples(2))
    bucket.put("u/mended.safetensors", examples(3))
    clock += 10
    bucket.put("u/time.safetensors", examples(1), {"num-examples": "4"})
    bucket.put("u/new.safetensors", examples(5))
    bucket.delete(["u/gone.safetensors"])
    store.asked.clear()
    collected = collector.collect()
    looked_at = {key for op, key in store.asked if op == "stat"}
    assert looked_at == {f"u/{key}.safetensors" for key in ("etag", "mended", "time", "new")}
    assert [accepted.weight for accepted in collected.accepted] == [2, 3, 5, 1]
    assert "'1' in its __metadata__ but '4'" in reasons(collected)["u/time.safetensors"]


def test_a_layout_verdict_follows_the_majority(bucket):
    collector = Collector(bucket, "u/", "Uniform")
    bucket.put("u/a.safetensors", update(w=W))
    bucket.put("u/b.safetensors", update(v=V))
    assert keys(collector.collect().accepted) == ["u/a.safetensors"]
    bucket.put("u/c.safetensors", update(v=V))
    collected = collector.collect()
    assert keys(collected.accepted) == ["u/b.safetensors", "u/c.safetensors"]
    assert keys(collected.rejected) == ["u/a.safetensors"]


@pytest.mark.parametrize("when", ["list", "stat"])
@pytest.mark.parametrize("change", ["put", "delete"])
def test_an_object_that_changes_meanwhile_waits_for_the_next_pass(store, bucket, when, change):
    bucket.put("u/a.safetensors", examples(1))
    bucket.put("u/b.safetensors", examples(2))

    def interfere(op, key):
        if op == when and key in ("u/", "u/a.safetensors"):
            store.after = lambda op, key: None
            bucket.put("u/a.safetensors", examples(3)) if change == "put" else bucket.delete(["u/a.safetensors"])

    store.after = interfere
    collector = Collector(bucket, "u/", "NumExamples")
    collected = collector.collect()
    assert keys(collected.accepted) == ["u/b.safetensors"]
    assert reasons(collected) == {"u/a.safetensors": "it changed or vanished while it was being read"}
    after = collector.collect()
    assert after.rejected == ()
    assert [accepted.weight for accepted in after.accepted] == ([3, 2] if change == "put" else [2])


@pytest.mark.parametrize("error", [StoreUnreachable("down"), StoreRefused("no right", "AccessDenied")])
@pytest.mark.parametrize("where", ["list", "stat", "read"])
def test_errors_of_the_store_are_the_callers(store, bucket, error, where):
    for i in range(20):
        bucket.put(f"u/{i:02}.safetensors", examples(1))

    def fail(op, key):
        if op == where:
            raise error

    store.before = fail
    collector = Collector(bucket, "u/", "NumExamples")
    with pytest.raises(type(error)) as raised:
        collector.collect()
    assert raised.value is error
    store.before = lambda op, key: None
    assert len(collector.collect().accepted) == 20


def test_an_error_ends_the_pass(bucket, monkeypatch):
    ending = threading.Event()
    others = []

    class Pool(ThreadPoolExecutor):
        def __exit__(self, *exception):
            ending.set()
            return super().__exit__(*exception)

    def stat(key):
        if key == "u/000.safetensors":
            raise StoreUnreachable("down")
        others.append(key)
        assert ending.wait(30)

    for i in range(100):
        bucket.put(f"u/{i:03}.safetensors", examples(1))
    bucket.stat = stat
    monkeypatch.setattr(collect, "ThreadPoolExecutor", Pool)
    with pytest.raises(StoreUnreachable):
        Collector(bucket, "u/", "NumExamples", workers=4).collect()
    assert len(others) <= 4


def test_what_was_found_before_an_error_is_remembered(store, bucket):
    for key in ("a", "b"):
        bucket.put(f"u/{key}.safetensors", examples(1))

    def fail(op, key):
        if (op, key) == ("stat", "u/b.safetensors"):
            raise StoreUnreachable("down")

    store.before = fail
    collector = Collector(bucket, "u/", "NumExamples")
    with pytest.raises(StoreUnreachable):
        collector.collect()
    store.before = lambda op, key: None
    store.asked.clear()
    assert len(collector.collect().accepted) == 2
    assert ("stat", "u/a.safetensors") not in store.asked


def test_workers_run_at_once(store, bucket):
    for i in range(8):
        bucket.put(f"u/{i}.safetensors", examples(1))
    together = threading.Barrier(8, timeout=30)
    bucket.stat = lambda key, stat=bucket.stat: together.wait() >= 0 and stat(key)
    assert len(Collector(bucket, "u/", "Uniform", workers=8).collect().accepted) == 8


@pytest.mark.parametrize("budget", [1, 300_000, 2**30])
def test_headers_in_flight_are_bounded(bucket, budget):
    """Long headers wait for room, and one that is above the whole budget still comes through, alone."""
    file = update(**{f"layer{i}.weight": ("I8", 1, [1]) for i in range(2500)})
    header = len(file) - 2500
    for i in range(12):
        bucket.put(f"u/{i:02}.safetensors", file)
    lock = threading.Lock()
    now = peak = 0

    def read(key, start, length, etag, read_=bucket.read):
        nonlocal now, peak
        with lock:
            now += length
            peak = max(peak, now)
        time.sleep(0.005)  # so that reads which are not held back do overlap
        body = read_(key, start, length, etag)
        with lock:
            now -= length
        return body

    bucket.read = read
    collected = Collector(bucket, "u/", "Uniform", workers=12, header_bytes_in_flight=budget).collect()
    assert len(collected.accepted) == 12
    assert peak <= max(budget, header)
    assert budget < 2**30 or peak >= 2 * FRONT_BYTES


def test_equal_tensors_are_kept_once(bucket):
    """Also when metadata and so the lengths of the headers differ."""
    for i in range(5):
        bucket.put(f"u/{i}.safetensors", update(metadata={"client": "c" * 9**i}, w=W, v=V))
    collector = Collector(bucket, "u/", "Uniform")
    collected = collector.collect()
    assert len({id(accepted.update.header.tensors) for accepted in collected.accepted}) == 1
    assert len({accepted.extents[0].offset for accepted in collected.accepted}) == 5
    bucket.put("u/0.safetensors", update(x=W))
    assert len(collector._shared) == 1
    collector.collect()
    assert len(collector._shared) == 2
    bucket.delete([f"u/{i}.safetensors" for i in range(1, 5)])
    assert len(collector.collect().accepted) == 1
    assert [tensors[0].name for tensors in collector._shared] == ["x"]


def test_metadata_of_accepted_updates_merges(bucket):
    for i in range(3):
        bucket.put(f"u/{i}.safetensors", update(metadata={"format": "pt", "num_examples": "4", "client": str(i)}, w=W))
    bucket.put("u/bad.safetensors", update(metadata={"format": "other", "num_examples": "4"}, x=W))
    accepted = Collector(bucket, "u/", "NumExamples").collect().accepted
    assert merge_metadata(one.update.header for one in accepted) == {"format": "pt"}


def test_a_model_without_tensors(bucket):
    bucket.put("u/a.safetensors", update())
    collected = Collector(bucket, "u/", "Uniform").collect()
    assert collected.layout.size == 0
    assert collected.accepted[0].extents == ()


@pytest.mark.parametrize(
    ("accepted", "min_count", "max_count", "seconds_left", "verdict"),
    [
        (10, 8, 10, 100, Quorum.START),
        (12, 8, 10, 100, Quorum.START),
        (9, 8, 10, 0.1, Quorum.WAIT),
        (9, 8, 10, 0, Quorum.START),
        (8, 8, 10, -5, Quorum.START),
        (7, 8, 10, 0, Quorum.FAILED),
        (0, 1, None, 1, Quorum.WAIT),
        (10**6, 1, None, 1, Quorum.WAIT),
        (1, 1, None, 0, Quorum.START),
        (0, 1, None, 0, Quorum.FAILED),
        (10, 8, 10, -1, Quorum.START),
    ],
)
def test_quorum(accepted, min_count, max_count, seconds_left, verdict):
    assert quorum(accepted, min_count, max_count, seconds_left) is verdict


@pytest.mark.parametrize(("max_count", "taken"), [(None, 4), (5, 4), (4, 4), (3, 3), (1, 1)])
def test_the_first_in_key_order_take_part(bucket, max_count, taken):
    names = [f"u/{i}.safetensors" for i in range(4)]
    for name in reversed(names):
        bucket.put(name, examples(1))
    participants, surplus = select(Collector(bucket, "u/", "NumExamples").collect(), max_count)
    assert keys(participants) == names[:taken]
    assert keys(surplus) == names[taken:]


def test_a_rejection_names_what_was_listed(bucket):
    for key, file in (
        ("bad", b"abc"),
        ("f4", update(**{"\x1b[31m": ("F4", 1, [1])})),
        ("good", update(w=W)),
        ("z", update()),
    ):
        bucket.put(f"u/{key}.safetensors", file)
    etags = {info.key: info.etag for info in bucket.list("u/")}
    assert Collector(bucket, "u/", "Uniform").collect().rejected == tuple(
        Rejection(f"u/{key}.safetensors", etags[f"u/{key}.safetensors"], reason)
        for key, reason in (
            ("bad", "the object has 3 bytes, too few for a safetensors header"),
            ("f4", r"unsupported dtype F4 of tensor '\x1b[31m'"),
            ("z", "tensor 'w' is missing"),
        )
    )
