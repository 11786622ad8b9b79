"""Whole invocations against an object server: the bits, the outcomes, the records."""

import hashlib
import ssl
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.reducer.object_server import ObjectServer, error, reply
from unit.reducer.shards import make_shard

from gradsharding_reducer.access import Access
from gradsharding_reducer.cancellation import Cancellation
from gradsharding_reducer.exchange import Patience
from gradsharding_reducer.failures import ReducerFailure
from gradsharding_reducer.reduce import reduce
from gradsharding_reducer.task import (
    DTYPES,
    BadKind,
    BadValue,
    Fault,
    FaultKind,
    Outcome,
    ReduceResult,
    Refusal,
    Run,
    Tuning,
    UrlKind,
)  # fmt: skip

MIXED = [
    ("F32", 5000), ("I64", 1), ("BF16", 3001), ("BOOL", 3), ("F64", 700), ("F16", 4099), ("I32", 100), ("F32", 0),
    ("U8", 4097), ("I8", 11), ("U16", 1001), ("I16", 5), ("U64", 9), ("U32", 77), ("F32", 1), ("BF16", 1),
]  # fmt: skip
QUICK = Patience(tries=4, first_delay=0.01, longest_delay=0.02)


@pytest.fixture
def server():
    with ObjectServer() as server:
        yield server


@pytest.fixture(scope="module")
def one_server():
    with ObjectServer() as server:
        yield server


def run(server, task, **kwargs):
    return reduce(task, Access((server.origin,)), **{"patience": QUICK, **kwargs})


def put_update(server, task, source, data):
    """Replace a source's data section, given in canonical order; the task with the new pin."""
    front = task.sources[source].extents[0].offset
    etag = server.put(f"update-{source}", bytes(front) + data)
    sources = list(task.sources)
    target = replace(sources[source].objects[0], etag=etag)
    sources[source] = replace(sources[source], objects=(target,))
    return replace(task, sources=tuple(sources))


def uploaded(server, result):
    return [server.objects[f"part-{part.number}"] for part in result.parts if part.etag]


def test_all_dtypes_with_unaligned_runs_give_the_bits_of_the_reference(server):
    assert {dtype for dtype, _ in MIXED} == set(DTYPES)
    shard = make_shard(server, MIXED, [3, 1, 2**40 + 1], part_bytes=20_001, range_bytes=4096)
    result = run(server, shard.task)
    assert result.outcome is Outcome.DONE
    assert len(result.parts) == len(shard.task.parts) > 2
    for part in result.parts:
        body = server.objects[f"part-{part.number}"]
        assert body == shard.part_body(part.number)
        assert part.sha256 == hashlib.sha256(body).hexdigest()
        assert part.etag == hashlib.md5(body).hexdigest()
        assert part.bytes == len(body)
    assert result.bytes_read == sum(map(len, shard.updates))
    assert result.bytes_written == sum(part.bytes for part in result.parts)
    assert result.peak_rss_bytes > 1 << 20
    assert result.started <= result.finished
    assert set(result.seconds) == {"read", "fold", "write"}


def test_the_record_is_the_answer_and_the_last_act(server):
    shard = make_shard(server, [("F32", 100)], [1, 2], part_bytes=200)
    result = run(server, shard.task)
    assert server.requests[-1] == ("PUT", "record")
    assert ReduceResult.from_json(server.objects["record"]) == result
    assert result.plan == shard.task.plan
    assert result.runtime.platform == ""


@settings(max_examples=25, deadline=None)
@given(
    tensors=st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.integers(0, 3000)), min_size=1, max_size=6),
    weights=st.lists(st.integers(1, 2**30), min_size=1, max_size=4),
    part_bytes=st.integers(500, 9000),
    range_bytes=st.integers(4096, 10_000),
    prefetch=st.integers(1, 5),
    flaky=st.integers(2, 9),
    data=st.data(),
)
def test_any_cut_order_prefetch_and_retries_give_the_bits_of_the_reference(
    one_server, tensors, weights, part_bytes, range_bytes, prefetch, flaky, data
):
    orders = [data.draw(st.permutations(range(len(tensors)))) for _ in weights]
    shard = make_shard(one_server, tensors, weights, part_bytes, range_bytes, prefetch, orders=orders)
    asked = iter(range(10**9))
    one_server.faults = lambda method, path, nth: (
        (lambda handler: error(handler, 503, "SlowDown")) if next(asked) % flaky == 0 else None
    )
    result = run(one_server, shard.task, patience=replace(QUICK, tries=50, first_delay=0.001, longest_delay=0.001))
    assert result.outcome is Outcome.DONE
    assert result.retries > 0
    assert b"".join(uploaded(one_server, result)) == shard.header + shard.expected


def test_a_task_may_begin_in_the_middle(server):
    shard = make_shard(server, [("F32", 1000), ("BF16", 1000)], [1, 2], part_bytes=1000)
    task = replace(shard.task, parts=shard.task.parts[2:], header=None)
    result = run(server, task)
    assert [part.number for part in result.parts] == [3, 4, 5, 6]
    assert b"".join(uploaded(server, result)) == shard.expected[2000:]
    assert ("GET", "header") not in server.requests


def test_a_model_of_no_bytes_is_one_part_that_holds_the_header(server):
    shard = make_shard(server, [("F32", 0)], [1, 2], part_bytes=1000)
    result = run(server, shard.task)
    assert result.outcome is Outcome.DONE
    assert uploaded(server, result) == [shard.header]
    assert ("GET", "update-0") not in server.requests


BIG = [("F32", 50_000)]


def test_partial_over_several_invocations_gives_the_same_bits(server):
    """Without any budget each invocation does one part: the first is always tried."""
    shard = make_shard(server, BIG, [1, 5], part_bytes=50_000)
    task, bodies = shard.task, []
    for budget, parts, outcome in ((0.0, 1, Outcome.PARTIAL), (0.0, 1, Outcome.PARTIAL), (600.0, 2, Outcome.DONE)):
        result = run(server, replace(task, budget_seconds=budget))
        assert result.outcome is outcome
        assert len(result.parts) == parts
        assert ReduceResult.from_json(server.objects["record"]) == result
        bodies += uploaded(server, result)
        task = replace(task, parts=task.parts[parts:], header=None)
    assert task.parts == ()
    assert b"".join(bodies) == shard.header + shard.expected


@pytest.mark.slow
def test_a_budget_of_five_seconds_and_a_slow_store_need_several_invocations():
    with ObjectServer(bytes_per_second=100_000) as server:
        shard = make_shard(server, BIG, [1, 5, 2], part_bytes=20_000, prefetch=1, budget=5.0)
        task, bodies, calls = shard.task, [], 0
        while task.parts:
            result = run(server, task)
            calls += 1
            bodies += uploaded(server, result)
            task = replace(task, parts=task.parts[len(result.parts) :], header=None)
            assert result.outcome is (Outcome.PARTIAL if task.parts else Outcome.DONE)
            assert result.finished - result.started < 15
        assert calls > 1
        assert b"".join(bodies) == shard.header + shard.expected


def test_bad_values_are_collected_to_the_end_and_nothing_more_is_uploaded(server):
    shard = make_shard(server, [("F32", 1000), ("I64", 100), ("BOOL", 100)], [1, 2, 3, 4], part_bytes=1000)
    task = shard.task
    one = bytearray(shard.updates[1])
    one[2400:2404] = np.float32("nan").tobytes()
    one[1600:1604] = np.float32("inf").tobytes()
    one[4000:4008] = np.int64(2**60).tobytes()
    two = bytearray(shard.updates[2])
    two[4016:4024] = np.int64(-(2**53) - 1).tobytes()
    three = bytearray(shard.updates[3])
    three[4899] = 7
    for i, data in enumerate((one, two, three), start=1):
        task = put_update(server, task, i, bytes(data))
    result = run(server, task)
    assert result.outcome is Outcome.BAD_VALUES
    assert result.bad == (
        BadValue(1, 1600, BadKind.NON_FINITE),
        BadValue(2, 4016, BadKind.OUT_OF_RANGE),
        BadValue(3, 4899, BadKind.NOT_BOOL),
    )
    assert result.faults == ()  # source 3 does not also disagree
    assert [part.etag is None for part in result.parts] == [False, True, True, True, True]
    assert [part.sha256 is None for part in result.parts] == [False, True, True, True, True]
    assert server.objects["part-1"] == shard.part_body(1)
    assert not {f"part-{n}" for n in range(2, 6)} & set(server.objects)
    assert ReduceResult.from_json(server.objects["record"]) == result


def test_partial_may_carry_bad_values(server):
    shard = make_shard(server, [("F32", 1000)], [1, 2], part_bytes=1000, budget=0.0)
    data = np.frombuffer(shard.updates[0], np.float32).copy()
    data[3] = np.nan
    result = run(server, put_update(server, shard.task, 0, data.tobytes()))
    assert result.outcome is Outcome.PARTIAL
    assert result.bad == (BadValue(0, 12, BadKind.NON_FINITE),)
    assert [part.etag for part in result.parts] == [None]


def test_faults_blame_no_source(server):
    shard = make_shard(server, [("BOOL", 100), ("F64", 100)], [1, 1], part_bytes=2000)
    data = bytearray(shard.updates[1])
    data[10] ^= 1
    data[7] ^= 1
    data[100:900] = np.full(100, 1.7e308).tobytes()
    task = put_update(server, shard.task, 1, bytes(data))
    data[10] ^= 1
    data[7] ^= 1
    task = put_update(server, task, 0, bytes(data))
    result = run(server, task)
    assert result.outcome is Outcome.BAD_VALUES
    assert result.bad == ()
    assert set(result.faults) == {Fault(FaultKind.BOOL_DISAGREES, 7), Fault(FaultKind.OVERFLOW, 100)}
    assert "part-1" not in server.objects


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "outcome", "kind", "source"),
    [
        ("GET", "update-1", 404, "NoSuchKey", Outcome.SOURCE_GONE, UrlKind.SOURCE, 1),
        ("GET", "update-0", 412, "PreconditionFailed", Outcome.SOURCE_GONE, UrlKind.SOURCE, 0),
        ("GET", "update-1", 403, "AccessDenied", Outcome.DENIED, UrlKind.SOURCE, 1),
        ("GET", "header", 403, "RequestTimeTooSkewed", Outcome.DENIED, UrlKind.HEADER, None),
        ("GET", "header", 404, "NoSuchKey", Outcome.CANCELLED, UrlKind.HEADER, None),
        ("PUT", "part-2", 403, "SignatureDoesNotMatch", Outcome.DENIED, UrlKind.PART, None),
        ("PUT", "part-2", 404, "NoSuchUpload", Outcome.CANCELLED, UrlKind.PART, None),
        ("PUT", "record", 403, "AccessDenied", Outcome.DENIED, UrlKind.RECORD, None),
    ],
)
def test_refusals_are_answered_without_a_record(server, method, path, status, code, outcome, kind, source):
    shard = make_shard(server, [("F32", 500)], [1, 2], part_bytes=1000)
    server.faults = lambda m, p, nth: (
        (lambda handler: error(handler, status, code)) if (m, p) == (method, path) else None
    )
    result = run(server, shard.task)
    assert result.outcome is outcome
    assert result.refusal == Refusal(kind, source, status, code)
    assert "record" not in server.objects
    assert ReduceResult.from_json(result.to_json()) == result
    if path == "part-2":
        assert [part.number for part in result.parts] == [1]


@pytest.mark.parametrize("which", ["source", "header", "part", "record"])
def test_another_origin_is_denied_before_the_first_request(server, which):
    shard = make_shard(server, [("F32", 500)], [1, 2], part_bytes=1000)
    elsewhere = "http://169.254.169.254/latest"
    task = shard.task
    if which == "source":
        target = replace(task.sources[1].objects[0], url=elsewhere)
        task = replace(task, sources=(task.sources[0], replace(task.sources[1], objects=(target,))))
    elif which == "header":
        task = replace(task, header=replace(task.header, url=elsewhere))
    elif which == "part":
        task = replace(task, parts=(task.parts[0], replace(task.parts[1], url=elsewhere)))
    else:
        task = replace(task, record_url=elsewhere)
    result = run(server, task)
    assert result.outcome is Outcome.DENIED
    assert result.refusal == Refusal(UrlKind(which), 1 if which == "source" else None, None, "OriginNotAllowed")
    assert server.requests == []


def test_puts_carry_their_md5_and_are_repeated(server):
    shard = make_shard(server, [("F32", 500)], [1, 2], part_bytes=10_000)
    first = lambda path: lambda handler: error(handler, 503 if path != "part-1" else 400, "BadDigest")  # noqa: E731
    server.faults = lambda method, path, nth: first(path) if nth == 1 and not path.startswith("update") else None
    result = run(server, shard.task)
    assert result.outcome is Outcome.DONE
    assert result.retries == 2  # header and part; the record cannot hold its own
    digests = {headers["Content-MD5"] for headers in server.headers if "Content-MD5" in headers}
    assert len(digests) == 2
    assert server.objects["part-1"] == shard.part_body(1)


def test_a_store_that_refuses_a_part_before_it_has_its_body_is_understood(server):
    shard = make_shard(server, [("F32", 2_000_000)], [1], part_bytes=8_000_000, range_bytes=1 << 20)

    def refuse_early(handler):
        reply(handler, 403, b"<Error><Code>AccessDenied</Code></Error>", {"Connection": "close"})
        handler.close_connection = True

    server.faults = lambda method, path, nth: refuse_early if path == "part-1" else None
    result = run(server, shard.task)
    assert result.outcome is Outcome.DENIED
    assert result.refusal.url is UrlKind.PART


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda handler: reply(handler, 200, b"{}       "), "has 9 bytes in the store, 8 in the plan"),
        (lambda handler: reply(handler, 200, b"[]      "), "SHA-256 differs"),
    ],
)
def test_a_header_other_than_the_plans_is_a_failure(server, answer, sentence):
    shard = make_shard(server, [("F32", 500)], [1, 2], part_bytes=10_000)
    server.faults = lambda method, path, nth: answer if path == "header" else None
    with pytest.raises(ReducerFailure, match=sentence):
        run(server, shard.task)
    assert "part-1" not in server.objects


def test_a_part_without_an_etag_is_a_failure(server):
    shard = make_shard(server, [("F32", 500)], [1, 2], part_bytes=10_000)
    server.faults = lambda method, path, nth: (lambda handler: error(handler, 200, "")) if path == "part-1" else None
    with pytest.raises(ReducerFailure, match="without an ETag"):
        run(server, shard.task)


@pytest.mark.parametrize("silent", ["update-1", "part-1"])
def test_cancelling_ends_a_read_or_write_that_waits(server, silent):
    shard = make_shard(server, [("F32", 500)], [1, 2], part_bytes=10_000)
    cancellation, over = Cancellation(), threading.Event()

    def wait(handler):
        cancellation.cancel()
        over.wait()
        handler.close_connection = True

    server.faults = lambda method, path, nth: wait if path == silent else None
    result = run(server, shard.task, cancellation=cancellation)
    over.set()
    assert result.outcome is Outcome.CANCELLED
    assert result.refusal == Refusal(None, None, None, "Stopped")
    assert "record" not in server.objects


TLS = Path(__file__).with_name("tls.pem")


def tls_server():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS)
    return ObjectServer(tls=context)


def test_tls_with_a_certificate_of_ones_own():
    with tls_server() as server:
        shard = make_shard(server, [("F32", 50_000)], [1, 2], part_bytes=100_000)
        result = reduce(shard.task, Access((server.origin,), str(TLS)))
        assert result.outcome is Outcome.DONE
        assert b"".join(uploaded(server, result)) == shard.header + shard.expected


def test_tls_is_verified():
    with tls_server() as server:
        shard = make_shard(server, [("F32", 500)], [1, 2], part_bytes=10_000)
        with pytest.raises(ReducerFailure, match=r"certificate is not trusted .*GRADSHARDING_CA_FILE"):
            run(server, shard.task)


def test_a_ca_file_that_cannot_be_read_is_named_by_its_variable(tmp_path):
    with tls_server() as server:
        shard = make_shard(server, [("F32", 500)], [1, 2], part_bytes=10_000)
        with pytest.raises(ReducerFailure, match="GRADSHARDING_CA_FILE"):
            reduce(shard.task, Access((server.origin,), str(tmp_path / "missing.pem")))


def test_tuning_does_not_change_what_is_kept_in_memory_of_a_small_task(server):
    """A range larger than the shard takes no memory of its own."""
    shard = make_shard(server, [("F32", 500)], [1, 2], part_bytes=10_000)
    task = replace(shard.task, tuning=Tuning(2**40, 256), runs=(Run("F32", 0, 2000),))
    assert run(server, task).outcome is Outcome.DONE
