"""Whole invocations against an object server: the bits, the outcomes, the records."""

import hashlib
from dataclasses import replace

import pytest
from unit.reducer.object_server import ObjectServer, error
from unit.reducer.shards import make_shard

from gradsharding_reducer.access import Access
from gradsharding_reducer.reduce import reduce
from gradsharding_reducer.task import DTYPES, Outcome, ReduceResult, UrlKind

MIXED = [
    ("F32", 5000), ("I64", 1), ("BF16", 3001), ("BOOL", 3), ("F64", 700), ("F16", 4099), ("I32", 100), ("F32", 0),
    ("U8", 4097), ("I8", 11), ("U16", 1001), ("I16", 5), ("U64", 9), ("U32", 77), ("F32", 1), ("BF16", 1),
]  # fmt: skip


@pytest.fixture
def server():
    with ObjectServer() as server:
        yield server


def run(server, task, **kwargs):
    return reduce(task, Access((server.origin,)), **kwargs)


def test_all_dtypes_with_unaligned_runs_give_the_bits_of_the_reference(server):
    assert {dtype for dtype, _ in MIXED} == set(DTYPES)
    orders = [range(len(MIXED)), reversed(range(len(MIXED))), range(len(MIXED))]
    shard = make_shard(server, MIXED, [3, 1, 2**40 + 1], part_bytes=20_001, range_bytes=4096, orders=[list(o) for o in orders])
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
    assert ReduceResult.from_json(server.objects["record"]) == result
    assert server.requests[-1] == ("PUT", "record")
