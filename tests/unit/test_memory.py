"""The memory model: what is chosen fits, what is refused names the setting that would do."""

import re

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from gradsharding.errors import RoundFailed
from gradsharding.rounds import memory
from gradsharding.rounds.memory import MIB, Sizing, choose, fit, lower, memory_for, predict_peak, usable
from gradsharding.rounds.plan import cut
from gradsharding_reducer.task import Run

ROUND = {"size": 512 * MIB, "header_bytes": 20_000, "shards": 4, "sources": 20, "timeout_seconds": 300}

rounds = st.fixed_dictionaries(
    {
        "size": st.one_of(st.integers(0, 64 * MIB), st.integers(0, 2 << 40)),
        "header_bytes": st.one_of(st.integers(100, 100_000), st.integers(100, 20 * MIB)),
        "shards": st.integers(1, 1000),
        "sources": st.integers(1, 2000),
        "timeout_seconds": st.integers(1, 900),
        "task_bytes": st.one_of(st.none(), st.integers(1000, 16 * MIB)),
    }
)
memories = st.integers(memory.MIN_MEMORY_MIB, 10_240)


def peak_of(sizing, asked):
    return predict_peak(sizing, **{name: asked[name] for name in ("header_bytes", "sources", "task_bytes")})


def asked_for(memory_mib, asked):
    """The sizing, or the refusal."""
    try:
        return choose(memory_mib, **asked)
    except RoundFailed as refusal:
        return refusal


def chosen(memory_mib, asked):
    answer = asked_for(memory_mib, asked)
    return answer if isinstance(answer, Sizing) else None


@given(memories, rounds)
@example(
    101,
    {"size": 535386465, "header_bytes": 100000, "shards": 1, "sources": 257, "timeout_seconds": 68, "task_bytes": None},
)
def test_what_is_chosen_keeps_every_rule(memory_mib, asked):
    sizing = chosen(memory_mib, asked)
    assume(sizing)
    assert peak_of(sizing, asked) <= usable(memory_mib) < memory_mib * MIB
    assert sizing.part_bytes >= memory.MIN_PART
    assert sizing.part_bytes * memory.MAX_PARTS >= asked["size"] + asked["header_bytes"]
    assert sizing.part_bytes <= max(8.5 * MIB, -(-(asked["size"] + asked["header_bytes"]) // memory.MAX_PARTS))
    seconds = asked["sources"] * sizing.part_bytes / memory.BYTES_PER_SECOND
    assert seconds < asked["timeout_seconds"] / 2
    assert memory.MIN_RANGE <= sizing.range_bytes <= 8.5 * MIB
    assert sizing.range_bytes % 4096 == 0
    assert 1 <= sizing.prefetch <= memory.MAX_PREFETCH


@given(memories, rounds)
def test_more_memory_never_refuses_and_time_neither(memory_mib, asked):
    assume(chosen(memory_mib, asked))
    assert chosen(memory_mib + 1, asked)
    assert chosen(memory_mib, {**asked, "timeout_seconds": asked["timeout_seconds"] + 1})


@given(memories, rounds)
@settings(suppress_health_check=[HealthCheck.filter_too_much])  # few rounds are refused, and only those count here
def test_a_refusal_names_the_least_setting_that_would_do(memory_mib, asked):
    refusal = asked_for(memory_mib, asked)
    assume(isinstance(refusal, RoundFailed))
    needed = int(re.search(r"set it to (\d+) or more", refusal.message)[1])
    if refusal.reason == "TimeoutTooShort":
        assert "spec.function.timeoutSeconds is" in refusal.message
        at_needed, below = (asked_for(memory_mib, {**asked, "timeout_seconds": s}) for s in (needed, needed - 1))
        assert below.reason == "TimeoutTooShort"
        assert getattr(at_needed, "reason", "") != "TimeoutTooShort"
    else:
        assert refusal.reason in {"MemoryTooSmall", "ModelTooLarge"}
        assert "spec.function.memoryMiB is" in refusal.message
        assert chosen(needed, asked)
        assert needed == memory.MIN_MEMORY_MIB or chosen(needed - 1, asked) is None


@given(memories, rounds, st.integers(1, 20))
def test_memory_steps_lower_the_peak_and_keep_the_parts(memory_mib, asked, step):
    sizing = chosen(memory_mib, asked)
    assume(sizing)
    lowered = lower(sizing)
    while lowered is not None:
        assert lowered.part_bytes == sizing.part_bytes
        assert lowered.range_bytes >= memory.MIN_RANGE
        assert peak_of(lowered, asked) < peak_of(sizing, asked)
        sizing, lowered = lowered, lower(lowered)
    assert (sizing.range_bytes, sizing.prefetch) == (memory.MIN_RANGE, 1)
    first = chosen(memory_mib, asked)
    assert chosen(memory_mib, {**asked, "step": step}) == lower(first, step)


def test_prefetch_goes_before_the_range():
    steps = [lower(Sizing(16 * MIB, 8 * MIB, 4), step) for step in range(9)]
    assert [(s.range_bytes >> 10, s.prefetch) for s in steps[:-1]] == [
        (8192, 4), (8192, 2), (8192, 1), (4096, 1), (2048, 1), (1024, 1), (512, 1), (256, 1),
    ]  # fmt: skip
    assert steps[-1] is None


@given(
    st.builds(Sizing, st.integers(5 * MIB, 1 << 30), st.integers(4096, 16 * MIB), st.integers(1, 16)),
    st.integers(0, 20 * MIB),
    st.integers(1, 1000),
    st.integers(0, 16 * MIB),
)
def test_the_prediction_grows_with_everything(sizing, header_bytes, sources, task_bytes):
    def peak(part=0, read=0, prefetch=0, header=0, task=0):
        larger = Sizing(sizing.part_bytes + part, sizing.range_bytes + read, sizing.prefetch + prefetch)
        return predict_peak(
            larger, header_bytes=header_bytes + header, sources=sources, task_bytes=task_bytes + task
        )  # fmt: skip

    least = peak()
    assert least <= min(peak(part=MIB), peak(read=MIB), peak(prefetch=1), peak(header=MIB), peak(task=MIB))
    common = {"header_bytes": header_bytes, "sources": sources, "task_bytes": task_bytes}
    assert all(predict_peak(sizing, **common, width=width) <= least for width in (1, 2, 8))


@given(st.integers(1, 20 * MIB), st.integers(5 * MIB, 64 * MIB))
def test_the_prediction_holds_part_1_as_the_plan_cuts_it(header_bytes, part_bytes):
    first, *_ = cut((Run("F32", 0, 400 * MIB),), 400 * MIB, header_bytes, part_bytes)
    body = header_bytes + first.end - first.start
    common = {"sources": 1, "task_bytes": 0, "width": 4}
    without = predict_peak(Sizing(part_bytes, MIB, 1), header_bytes=0, **common) - part_bytes
    predicted = predict_peak(Sizing(part_bytes, MIB, 1), header_bytes=header_bytes, **common) - without
    assert body - 8 <= predicted <= max(body, 3 * header_bytes)


@pytest.mark.parametrize("memory_mib", [96, 128, 256, 1024])
def test_shards_get_equally_many_parts(memory_mib):
    for size in (24 * MIB, 100 * MIB, 512 * MIB, 5 << 30):
        sizing = choose(memory_mib, **{**ROUND, "size": size})
        parts = -(-(size + ROUND["header_bytes"]) // sizing.part_bytes)
        assert parts % ROUND["shards"] == 0


def test_the_smallest_functions_read_well():
    for memory_mib, least_range in ((96, 4 * MIB), (128, 8 * MIB)):
        sizing = choose(memory_mib, **ROUND)
        assert sizing.prefetch >= 4
        assert sizing.range_bytes >= least_range
        assert sizing.part_bytes >= 8 * MIB


def test_memory_goes_into_connections_and_no_more_than_they_need_is_taken():
    sizings = [choose(memory_mib, **ROUND) for memory_mib in (128, 160, 256, 1024)]
    assert [s.prefetch for s in sizings] == sorted(s.prefetch for s in sizings)
    assert sizings[-1] == sizings[-2]
    assert sizings[-1].prefetch == 16


@pytest.mark.parametrize("memory_mib", [128, 256, 1024])
@pytest.mark.parametrize("size", [24 * MIB, 100 * MIB, 512 * MIB, 5 << 30, 64 << 30])
def test_a_part_is_one_block_so_that_its_upload_is_hidden(memory_mib, size):
    sizing = choose(memory_mib, **{**ROUND, "size": size})
    assert sizing.part_bytes <= sizing.range_bytes


def test_parts_are_larger_only_where_there_would_be_too_many():
    sizing = choose(1024, **{**ROUND, "size": 200 << 30})
    assert 20 * MIB < sizing.part_bytes < 21 * MIB


def test_a_small_model_needs_no_more_than_its_share():
    sizing = choose(1024, **{**ROUND, "size": 24 * MIB})
    assert 6 * MIB < sizing.part_bytes < 6.1 * MIB
    assert sizing.part_bytes <= sizing.range_bytes < sizing.part_bytes + 8192


def test_an_empty_model_has_one_part():
    assert choose(96, **{**ROUND, "size": 0}).part_bytes == memory.MIN_PART


def test_time_makes_parts_smaller_before_it_refuses():
    crowd = {**ROUND, "sources": 100}
    long, short = (choose(3008, **{**crowd, "timeout_seconds": seconds}) for seconds in (900, 30))
    assert long.part_bytes > short.part_bytes > memory.MIN_PART
    with pytest.raises(RoundFailed, match=r"5 MiB of each of 1000 updates .* spec.function.timeoutSeconds is 30") as no:
        choose(3008, **{**ROUND, "timeout_seconds": 30, "sources": 1000})
    assert no.value.reason == "TimeoutTooShort"


def test_a_model_too_large_for_ten_thousand_parts_is_refused():
    with pytest.raises(RoundFailed, match="10000 of them") as no:
        choose(96, **{**ROUND, "size": 1 << 40, "timeout_seconds": 900})
    assert no.value.reason == "ModelTooLarge"


def test_a_header_that_does_not_fit_is_refused():
    with pytest.raises(RoundFailed, match=r"output header of 60\.0 MiB; spec.function.memoryMiB is 96") as no:
        choose(96, **{**ROUND, "header_bytes": 60 * MIB})
    assert no.value.reason == "MemoryTooSmall"


def test_too_many_steps_ask_for_more_memory():
    with pytest.raises(RoundFailed, match="set it to 256") as no:
        choose(128, **ROUND, step=20)
    assert no.value.reason == "MemoryTooSmall"


def test_a_plan_is_fitted_to_another_cap_or_given_up():
    planned = choose(256, **ROUND)
    common = {"header_bytes": ROUND["header_bytes"], "sources": ROUND["sources"]}
    assert fit(planned, 256, **common) == planned
    lowered = fit(planned, 128, **common)
    assert lowered.part_bytes == planned.part_bytes
    assert predict_peak(lowered, **common) <= usable(128)
    assert fit(Sizing(200 * MIB, MIB, 1), 128, **common) is None


@given(st.integers(0, 1 << 40))
def test_memory_for_is_the_inverse_of_usable(peak):
    needed = memory_for(peak)
    assert usable(needed) >= peak
    assert needed == memory.MIN_MEMORY_MIB or usable(needed - 1) < peak
