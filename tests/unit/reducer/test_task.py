"""The contract's bytes: golden documents in both directions, and everything unknown refused."""

import json

import pytest

from gradsharding_reducer.task import (
    BadKind,
    BadValue,
    ContractError,
    Extent,
    Fault,
    FaultKind,
    Header,
    Method,
    Outcome,
    Part,
    PartResult,
    ReduceResult,
    ReduceTask,
    Refusal,
    Run,
    Runtime,
    Source,
    SourceObject,
    Tuning,
    UrlKind,
)  # fmt: skip

TASK = ReduceTask(
    round="6f1c", revision=2, shard=3, plan="ab" * 32, method=Method("FedAvg"),
    sources=(
        Source("update", 5, (SourceObject("http://s:9/b/a?X=1", "e1"),), (Extent(0, 12, 0, 96),)),
        Source("update", 7, (SourceObject("http://s:9/b/b?X=1", "e2"),), (Extent(0, 4, 0, 100), Extent(4, 8, 0, 80))),
    ),
    runs=(Run("F32", 0, 8), Run("BF16", 8, 12)),
    parts=(Part(0, 1, 0, 8, "http://s:9/b/o?partNumber=1"), Part(0, 2, 8, 12, "http://s:9/b/o?partNumber=2")),
    header=Header("http://s:9/b/h", 80, "cd" * 32),
    record_url="http://s:9/b/r", budget_seconds=270.5, tuning=Tuning(4194304, 4),
)  # fmt: skip

TASK_JSON = (
    b'{"budget_seconds":270.5,"header":{"length":80,"sha256":"' + b"cd" * 32 + b'","url":"http://s:9/b/h"},'
    b'"method":{"name":"FedAvg","parameters":{}},"parts":[{"end":8,"number":1,"output":0,"start":0,'
    b'"url":"http://s:9/b/o?partNumber=1"},{"end":12,"number":2,"output":0,"start":8,'
    b'"url":"http://s:9/b/o?partNumber=2"}],"plan":"' + b"ab" * 32 + b'","record_url":"http://s:9/b/r","revision":2,'
    b'"round":"6f1c","runs":[["F32",0,8],["BF16",8,12]],"shard":3,"sources":[{"extents":[[0,12,0,96]],'
    b'"objects":[{"etag":"e1","url":"http://s:9/b/a?X=1"}],"role":"update","weight":5},'
    b'{"extents":[[0,4,0,100],[4,8,0,80]],"objects":[{"etag":"e2","url":"http://s:9/b/b?X=1"}],"role":"update",'
    b'"weight":7}],"tuning":{"prefetch":4,"range_bytes":4194304},"version":1}'
)

RESULT = ReduceResult(
    round="6f1c", revision=2, shard=3, plan="ab" * 32, outcome=Outcome.PARTIAL,
    parts=(PartResult(0, 1, 88, "e3", "ef" * 32), PartResult(0, 2, 4, None, None)),
    bad=(BadValue(1, 8, BadKind.NON_FINITE),), faults=(Fault(FaultKind.OVERFLOW, 0),),
    refusal=Refusal(UrlKind.SOURCE, 1, 404, "NoSuchKey"),
    bytes_read=24, bytes_written=88, retries=1, started=1.5, finished=2.25,
    seconds={"read": 0.5, "fold": 0.125, "write": 0.25}, peak_rss_bytes=65536, reducer="0.1.0",
    runtime=Runtime("local", "42", "cgroup", 17),
)  # fmt: skip

RESULT_JSON = (
    b'{"bad":[{"kind":"NonFinite","offset":8,"source":1}],"bytes_read":24,"bytes_written":88,'
    b'"faults":[{"kind":"Overflow","offset":0}],"finished":2.25,"outcome":"Partial","parts":[{"bytes":88,"etag":"e3",'
    b'"number":1,"output":0,"sha256":"' + b"ef" * 32 + b'"},{"bytes":4,"etag":null,"number":2,"output":0,'
    b'"sha256":null}],"peak_rss_bytes":65536,"plan":"' + b"ab" * 32 + b'","reducer":"0.1.0",'
    b'"refusal":{"code":"NoSuchKey","source":1,"status":404,"url":"source"},"retries":1,"revision":2,"round":"6f1c",'
    b'"runtime":{"billed_ms":17,"memory_cap":"cgroup","platform":"local","request_id":"42"},'
    b'"seconds":{"fold":0.125,"read":0.5,"write":0.25},"shard":3,"started":1.5,"version":1}'
)


def test_a_task_has_these_bytes():
    assert TASK.to_json() == TASK_JSON


def test_these_bytes_are_the_task():
    assert ReduceTask.from_json(TASK_JSON) == TASK


def test_a_result_has_these_bytes():
    assert RESULT.to_json() == RESULT_JSON


def test_these_bytes_are_the_result():
    assert ReduceResult.from_json(RESULT_JSON) == RESULT


def test_a_result_without_refusal_survives():
    result = ReduceResult("6f1c", 1, 0, "ab" * 32, Outcome.DONE)
    assert ReduceResult.from_json(result.to_json()) == result


def changed(document, path, value):
    """The document with the value at ``path`` replaced, or removed when it is ``...``."""
    root = json.loads(document)
    at = root
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(root)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("version",), 2, "version is 2"),
        (("version",), True, "version"),
        (("version",), ..., "version is missing"),
        (("method", "name"), "Krum", "method.name is 'Krum'"),
        (("method", "parameters"), {"trim": 2}, "method.parameters"),
        (("method", "extra"), 1, "method.extra is not a field"),
        (("sources", 1, "role"), "state", r"sources\[1\].role is 'state'"),
        (("sources", 1, "weight"), 0, r"sources\[1\].weight"),
        (("sources", 1, "weight"), 2**53 + 1, r"sources\[1\].weight"),
        (("sources", 1, "weight"), 1.0, r"sources\[1\].weight"),
        (("sources", 1, "extra"), 1, r"sources\[1\].extra is not a field"),
        (("sources", 0, "extents", 0, 2), 1, "object that is not listed"),
        (("sources", 0, "extents", 0, 1), 11, "do not cover"),
        (("sources", 1, "extents", 1, 0), 5, "gap or overlap"),
        (("sources", 1, "extents", 1, 3), -1, r"extents\[1\]"),
        (("sources",), [], "sources is empty"),
        (("parts",), [], "parts is empty"),
        (("parts", 1, "start"), 9, "does not follow"),
        (("parts", 1, "number"), 3, "does not follow"),
        (("parts", 0, "end"), 6, "does not follow"),
        (("header",), None, "header belongs to part 1"),
        (("header", "extra"), None, "header.extra is not a field"),
        (("runs", 0, 0), "F8_E4M3", "dtype 'F8_E4M3' is not supported"),
        (("runs", 1, 1), 9, "gap or overlap"),
        (("tuning", "prefetch"), 0, "tuning.prefetch"),
        (("tuning", "range_bytes"), 1, "tuning.range_bytes"),
        (("budget_seconds",), -1, "budget_seconds"),
        (("record_url",), None, "record_url"),
        (("extra",), 1, "extra is not a field"),
        (("shard",), ..., "shard is missing"),
    ],
)
def test_what_a_task_must_not_hold_is_refused_by_name(path, value, named):
    with pytest.raises(ContractError, match=named):
        ReduceTask.from_json(changed(TASK_JSON, path, value))


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("version",), 0, "version is 0"),
        (("outcome",), "Fine", "outcome is 'Fine'"),
        (("bad", 0, "kind"), "Odd", "kind is 'Odd'"),
        (("faults", 0, "kind"), "Odd", "kind is 'Odd'"),
        (("refusal", "url"), "door", "url is 'door'"),
        (("parts", 0, "etag"), 3, "etag must be a string"),
        (("extra",), 1, "extra is not a field"),
        (("seconds", "read"), "1", "seconds"),
    ],
)
def test_what_a_result_must_not_hold_is_refused_by_name(path, value, named):
    with pytest.raises(ContractError, match=named):
        ReduceResult.from_json(changed(RESULT_JSON, path, value))


@pytest.mark.parametrize(
    "document", [b"", b"[]", b"null", b"{", b"\xff", b'{"version":1}', b"[" * 100_000, b"1" * 5000]
)
def test_what_is_no_task_at_all_is_refused(document):
    with pytest.raises(ContractError):
        ReduceTask.from_json(document)
