"""What a round takes in time and money: hand-calculated rows, bounds, the knee, and the bill of a round that ran."""

import dataclasses
import json
from collections import Counter
from itertools import pairwise

import pytest
from inline_platform import InlinePlatform
from memory_store import MemoryStore
from rounds_kit import document, make_round, run, spec, tensors, upload

from gradsharding.errors import RoundFailed
from gradsharding.platforms import Throttled
from gradsharding.rounds import cost, memory
from gradsharding.rounds.compare import compare, knee, pareto
from gradsharding.rounds.cost import Estimate, Work, estimate, measured_cost, shard_time
from gradsharding_reducer.task import Runtime

VGG = Work(537_206_056, 8_000, 20, timeout_seconds=300)


def row(seconds, usd, memory_mib=128):
    return Estimate(memory_mib, 1, memory.Sizing(1, 1, 1), seconds, seconds, 1, 0, 0, usd, 0.0)


# One shard


def test_a_shard_by_hand():
    work = Work(150_000_000, 0, 10)
    one = shard_time(work, memory.Sizing(75_000_000, 8_000_000, 4), 1769, 2, 150_000_000)
    # 1.5 GB at 75 MB/s, in twenty blocks of 1 s; a PUT of 75 MB over one connection of 60 MB/s, with 0.12 s of hashing
    upload = 0.074 + 1.25 + 0.12
    # the first waits for the end of the next block, the second for nothing; start and record
    assert one.seconds == pytest.approx(20.0 + (upload - 1.0) + upload + (0.5 + 0.074))
    assert one.calls == 1


def test_parts_of_one_block_are_uploaded_at_no_cost_but_the_last():
    work = Work(80_000_000, 0, 20)
    one = shard_time(work, memory.Sizing(8_000_000, 8_000_000, 4), 1769, 10, 80_000_000)
    # ten blocks of 2.1 s, and an upload takes 0.2
    assert one.seconds == pytest.approx(1.6e9 / 75e6 + (0.074 + 8 / 60 + 0.0128) + 0.574)


def test_hashing_takes_from_the_processor_of_the_fold():
    work = Work(100_000_000, 0, 10)
    share = 44.225 / 1769  # a fortieth
    one = shard_time(work, memory.Sizing(50_000_000, 8_000_000, 16), 44.225, 2, 100_000_000)
    busy = (1.0 * 0.72 + 0.05 * 1.6) / share
    upload = 0.074 + 50 / 60 + 0.05 * 1.6 / share
    assert one.seconds == pytest.approx(busy + (upload - busy / 14) + upload + 0.574)


def test_one_connection_waits_for_each_answer():
    work = Work(6_000_000, 0, 10)
    one = shard_time(work, memory.Sizing(6_000_000, 6_000_000, 1), 1769, 1, 6_000_000)
    # ten times 0.1 s of reading after 0.074 s of waiting
    assert one.seconds == pytest.approx(10 * 0.174 + (0.074 + 0.1 + 0.0096) + 0.574)


def test_a_small_share_of_a_processor_is_the_limit():
    work = Work(100_000_000, 0, 10)
    sizing = memory.Sizing(100_000_000, 8_000_000, 16)
    share = 44.225 / 1769  # a fortieth
    one = shard_time(work, sizing, 44.225, 1, 100_000_000)
    assert one.seconds == pytest.approx(0.72 / share + (0.074 + 100 / 60 + 0.16 / share) + 0.574)


def test_a_shard_beyond_the_timeout_goes_on_in_another_call():
    sizing = memory.Sizing(16 << 20, 8 << 20, 4)
    long = shard_time(VGG, sizing, 256, 33, VGG.size)
    short = shard_time(dataclasses.replace(VGG, timeout_seconds=60), sizing, 256, 33, VGG.size)
    work = 10.744e9 / 75e6
    last = 0.074 + 0.01628 / 0.06 + 0.01628 * 1.6 * 1769 / 256 + 0.574
    assert (long.calls, short.calls) == (1, 3)
    assert long.seconds == pytest.approx(work + last, rel=0.001)
    assert short.seconds == pytest.approx(work + 3 * last, rel=0.001)


# A round


def test_a_round_by_hand():
    # 16 MB on one function: two parts of one range of each of two clients
    found = estimate(Work(16_000_000, 1_000, 2), 256, 1, 1)
    assert (found.sizing.part_bytes, found.sizing.range_bytes >= 8_000_500) == (8_000_500, True)
    assert found.gets == 18 + 2 * 2 + 3 + 2 * 2 + 1 + 2
    assert found.puts == 13 + 1 + 2 + 1 + 2
    share = 256 / 1769
    upload = 0.074 + 8.0005 / 60 + 0.0080005 * 1.6 / share
    read = 32.002e6 / 75e6
    busy = read + max(0, upload - read / 2) + upload + 0.574
    assert found.billed_seconds == pytest.approx(busy)
    assert found.seconds == pytest.approx(busy + 31 * 0.074)
    assert found.usd_functions == pytest.approx(busy * 0.25 * 0.0000166667 + 0.0000002)
    assert found.usd_store == pytest.approx(32 * 0.0000004 + 19 * 0.000005)


def test_arm_costs_a_fifth_less_and_takes_as_long():
    x86, arm = estimate(VGG, 256, 4, 16), estimate(VGG, 256, 4, 16, "arm64")
    assert arm.seconds == x86.seconds
    calls = x86.calls * cost.PRICES.invocation
    assert (arm.usd_functions - calls) / (x86.usd_functions - calls) == pytest.approx(0.8, abs=1e-4)


def test_shards_beyond_the_concurrency_run_in_waves():
    all_at_once, in_two = estimate(VGG, 256, 16, 16), estimate(VGG, 256, 16, 8)
    assert in_two.billed_seconds == all_at_once.billed_seconds
    operator = 31 * cost.REQUEST_SECONDS
    assert 1.9 < (in_two.seconds - operator) / (all_at_once.seconds - operator) < 2


@pytest.mark.parametrize("memory_mib", [128, 512])
def test_more_shards_are_faster_and_never_cheaper(memory_mib):
    rows = [estimate(VGG, memory_mib, shards, 16) for shards in (1, 2, 4, 8, 16)]
    for fewer, more in pairwise(rows):
        assert more.seconds < fewer.seconds
    assert rows[-1].usd > rows[0].usd


def test_more_clients_and_larger_models_take_more():
    base = estimate(VGG, 256, 8, 16)
    for more in (dataclasses.replace(VGG, sources=40), dataclasses.replace(VGG, size=2 * VGG.size)):
        found = estimate(more, 256, 8, 16)
        assert 1.7 < found.seconds / base.seconds < 2.2
        assert found.usd > base.usd


def test_an_update_above_one_put_goes_up_in_parts():
    assert cost.upload_puts(Work(5 << 30, 0, 2)) == 1
    assert cost.upload_puts(Work(5 << 30, 8, 2)) == 81 + 2


def test_readers_pay_one_get_each():
    none, many = (estimate(dataclasses.replace(VGG, readers=count), 256, 4, 4) for count in (0, 1000))
    assert many.usd_store - none.usd_store == pytest.approx(1000 * 0.0000004)


def test_a_model_that_does_not_fit_is_refused_as_planning_refuses_it():
    with pytest.raises(RoundFailed, match=r"spec\.function\.memoryMiB is 128: set it to"):
        estimate(Work(2 << 40, 1000, 20), 128, 4, 4)


def test_the_straggler_of_many():
    assert cost.straggling(1) == 1
    # the expected largest of 10 standard normals is 1.5388 (Teichroew 1956)
    assert cost.straggling(10, spread=0.1) == pytest.approx(1.15388, abs=0.002)


@pytest.mark.parametrize(("clients", "shards"), [(2, 1), (5, 1), (3, 3)])
def test_requests_are_those_of_a_real_round(clients, shards):
    """Counted at the store: a read, HEAD or GET is a GET; a PUT, POST or LIST is one of the PUT class."""
    seen = Counter()
    with MemoryStore(before=lambda op, _: seen.update([op])) as store:
        bucket = store.bucket("federation")
        for i in range(clients):
            upload(bucket, f"{i}.safetensors", tensors(i, 4_000_000 if shards > 1 else 3000))
        seen.clear()
        wanted = spec(updates_minCount=clients, updates_maxCount=clients, function_shards=shards)
        finished = run(make_round(bucket, spec=wanted), InlinePlatform(store.origin))
        made = finished.document
    work = Work(made["output"]["bytes"] - 400, 400, clients, 300, readers=0)
    found = estimate(work, 128, shards, 1)
    gets = seen["get"] + seen["stat"] + seen["read"] + seen["http GET"]
    puts = seen.total() - gets - seen["delete"]
    assert found.shards == len(made["plan"]["shards"]) == shards
    assert found.gets == pytest.approx(gets, abs=3)
    assert found.puts - clients == pytest.approx(puts, abs=1)


# Advice


def test_the_knee_is_where_the_front_bends():
    front = [row(1, 100), row(2, 11), row(10, 10), row(100, 9.9)]
    assert knee(front) == front[1]


def test_a_straight_front_has_its_knee_at_the_cheapest():
    front = [row(1, 8), row(2, 4), row(4, 2), row(8, 1)]
    assert knee(front) == front[-1]
    assert knee(front[:1]) == front[0]
    assert knee(front[:2]) == front[1]


def test_the_front_holds_whatever_nothing_beats():
    rows = [row(3, 3), row(1, 5), row(2, 4, 256), row(2, 4), row(2.5, 4.5), row(1, 6)]
    assert pareto(rows) == (row(1, 5), row(2, 4), row(3, 3))


def test_comparison_marks_three():
    found = compare(VGG, 16, also=(300, 5))
    assert {r.memory_mib for r in found.rows} >= {128, 300, 10_240}
    assert {r.shards for r in found.rows} >= {1, 5, 16}
    assert found.cheapest.usd == min(r.usd for r in found.rows)
    assert found.fastest.seconds == min(r.seconds for r in found.rows)
    assert found.knee in pareto(found.rows)
    assert Counter(mark for r in found.rows for mark in found.marks(r)) == {"cheapest": 1, "fastest": 1, "knee": 1}
    assert found.why == (
        f"The knee is 128 MiB with 16 shards: {found.knee.seconds:.1f} s instead of the cheapest's "
        f"{found.cheapest.seconds:.1f} s, for {found.knee.usd / found.cheapest.usd - 1:.0%} more; beyond it the fastest, "
        f"2048 MiB with 16 shards, saves {found.knee.seconds - found.fastest.seconds:.1f} s for another "
        f"{found.fastest.usd / found.knee.usd - 1:.0%}."
    ).replace("%", " %")


def test_a_small_model_has_no_more_shards_than_parts():
    found = compare(Work(9 << 20, 1000, 3), 64)
    assert {r.shards for r in found.rows} == {1, 2}


def test_memories_that_cannot_hold_it_are_named():
    large = Work(2 << 40, 1000, 2)
    found = compare(large, 4)
    assert [memory_mib for memory_mib, _ in found.misfits] == [128, 192, 256]
    assert all("ModelTooLarge" in message or "GiB takes parts" in message for _, message in found.misfits)
    assert min(r.memory_mib for r in found.rows) == 384


def test_nothing_fits():
    with pytest.raises(RoundFailed, match="timeoutSeconds"):
        compare(dataclasses.replace(VGG, timeout_seconds=1), 4)


# What a round has cost


def attempt(**changes):
    return {
        "platform": "lambda", "outcome": "Done", "memory_cap": "Lambda, 512 MB", "billed_ms": 4000,
        "started": 100.0, "finished": 110.0, "bytes_read": 20 << 20, "bytes_written": 5 << 20, "range_bytes": 8 << 20,
        "retries": 0, "first_part": 1, "last_part": 1,
    } | changes  # fmt: skip


def manifest_of(*attempts):
    return {"attempts": list(attempts), "participants": [{}, {}], "plan": {"shards": [[1, 1]], "range_bytes": 8 << 20}}


def test_the_bill_is_that_of_the_report_lines():
    found = measured_cost(manifest_of(attempt(), attempt(billed_ms=2000, first_part=2, last_part=3)))
    assert found["gb_seconds"] == 3.0
    assert (found["calls"], found["estimated_calls"]) == (2, 0)
    assert found["gets"] == 18 + 2 * 2 + 3 + 2 + (3 + 1) + 3
    assert found["puts"] == 13 + 1 + 2 + 3 + 2
    store = found["gets"] * 0.0000004 + found["puts"] * 0.000005
    assert found["usd_x86_64"] == pytest.approx(3 * 0.0000166667 + 0.0000004 + store, abs=1e-9)
    assert found["usd_arm64"] == pytest.approx(3 * 0.0000133334 + 0.0000004 + store, abs=1e-9)


def test_calls_without_a_report_are_estimated():
    killed = attempt(outcome="OutOfMemory", memory_cap="", billed_ms=0, bytes_read=0, bytes_written=0)
    recorded = attempt(platform="", memory_cap="", billed_ms=0, finished=102.0, range_bytes=0)
    found = measured_cost(manifest_of(attempt(), killed, recorded))
    assert found["billed_seconds"] == 4 + 10 + 2
    assert (found["calls"], found["estimated_calls"]) == (3, 2)


def test_calls_that_never_ran_cost_nothing():
    refused = [attempt(outcome=outcome, memory_cap="", billed_ms=0) for outcome in ("Throttled", "Unreachable")]
    assert measured_cost(manifest_of(attempt(), *refused)) == measured_cost(manifest_of(attempt()))


def test_other_platforms_have_no_bill():
    assert measured_cost(manifest_of(attempt(platform="local", memory_cap="cgroup"))) is None
    assert measured_cost(manifest_of()) is None


class Billed(InlinePlatform):
    """Answers as the Lambda platform does."""

    async def invoke(self, task, attempt):
        result = await super().invoke(task, attempt)
        return dataclasses.replace(result, runtime=Runtime("lambda", "id", "Lambda, 256 MB", 2000))


def test_the_manifest_has_the_bill():
    def throttle_once(_task, number):
        if number == 1:
            raise Throttled("full", retry_after=0.001)

    with MemoryStore() as store:
        bucket = store.bucket("federation")
        for i in range(2):
            upload(bucket, f"{i}.safetensors", tensors(i))
        platform = Billed(store.origin, throttle_once)
        platform.name = "lambda"
        assert run(make_round(bucket, wait=False), platform).succeeded
        found = document(bucket)
    assert [a["outcome"] for a in found["attempts"]] == ["Throttled", "Done"]
    assert found["cost"] == measured_cost(json.loads(json.dumps(found)))
    assert (found["cost"]["gb_seconds"], found["cost"]["calls"]) == (0.5, 1)
