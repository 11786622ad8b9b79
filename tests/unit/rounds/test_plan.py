"""Cutting and dealing, and the stored form of a plan."""

import dataclasses
import hashlib
import json
from itertools import pairwise

import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from rounds_kit import PREFIX, spec, tensors, upload

from gradsharding.errors import RoundFailed
from gradsharding.rounds.collect import Collector
from gradsharding.rounds.memory import Sizing
from gradsharding.rounds.plan import Plan, cut, deal, next_plan
from gradsharding.rounds.propose import propose
from gradsharding.rounds.sign import budget, clip
from gradsharding_reducer.task import DTYPES, ContractError, Extent, Run


@st.composite
def layouts(draw):
    runs, at = [], 0
    for dtype, count in draw(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.integers(1, 200)), max_size=8)):
        runs.append(Run(dtype, at, at + count * DTYPES[dtype]))
        at = runs[-1].end
    return runs, at


@given(layouts(), st.integers(0, 400), st.integers(8, 500))
def test_parts_cover_the_data_and_cut_no_element(layout, header, part_bytes):
    runs, size = layout
    parts = cut(runs, size, header, part_bytes)
    assert [part.number for part in parts] == list(range(1, len(parts) + 1))
    assert (parts[0].start, parts[-1].end) == (0, size)
    for a, b in pairwise(parts):
        assert a.end == b.start
    for part in parts[:-1]:
        body = part.end - part.start + (header if part.number == 1 else 0)
        assert part_bytes <= body < part_bytes + 8 + (header if header * 2 > part_bytes else 0)
        run = next(run for run in runs if run.start <= part.end <= run.end)
        assert (part.end - run.start) % DTYPES[run.dtype] == 0


@given(st.integers(1, 10_000), st.integers(1, 1000))
def test_shards_are_contiguous_and_even(parts, shards):
    dealt = deal(parts, shards)
    assert len(dealt) == min(parts, shards)
    assert (dealt[0][0], dealt[-1][1]) == (1, parts)
    assert all(b[0] == a[1] + 1 for a, b in pairwise(dealt))
    sizes = {last - first + 1 for first, last in dealt}
    assert max(sizes) - min(sizes) <= 1


def test_clip_keeps_what_a_shard_needs():
    extents = (Extent(0, 100, 0, 1000), Extent(100, 50, 0, 200), Extent(150, 50, 0, 5000))
    assert clip(extents, 90, 160) == (Extent(90, 10, 0, 1090), Extent(100, 50, 0, 200), Extent(150, 10, 0, 5000))
    assert clip(extents, 0, 0) == ()


@pytest.mark.parametrize(("timeout", "left"), [(10, 5.0), (60, 54.0), (300, 270.0), (900, 810.0)])
def test_budget_leaves_time_for_the_last_words(timeout, left):
    assert budget(timeout) == left


@pytest.fixture
def plan(bucket):
    for i in range(3):
        upload(bucket, f"{i}.safetensors", tensors(i), 10 + i)
    collected = Collector(bucket, PREFIX, "NumExamples").collect()
    return dataclasses.replace(propose(spec(), "uid-1", collected), upload="upload-1")


def test_stored_form_round_trips(plan):
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.digest == hashlib.sha256(plan.to_json()).hexdigest()


def test_a_plan_holds_no_bucket_endpoint_or_url(plan):
    text = plan.to_json().decode()
    assert "federation" not in text
    assert "http" not in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"method": {"name": "Krum", "parameters": {}}}, "method 'Krum'"),
        ({"surprise": 1}, "does not know"),
        ({"outputs": []}, "cannot be read"),
        ({"participants": 7}, "cannot be read"),
    ],
)
def test_plans_of_other_releases_are_refused(plan, change, words):
    document = json.loads(plan.to_json()) | change
    with pytest.raises(ContractError, match=words):
        Plan.from_json(json.dumps(document).encode())


def test_header_is_readable_by_the_library_and_names_the_plan(plan):
    header = plan.header()
    assert len(header) == plan.header_length
    body = header + bytes(plan.layout.size)
    assert sorted(safetensors.numpy.load(body)) == sorted(tensors(0))
    metadata = json.loads(header[8:])["__metadata__"]
    assert metadata["gradsharding.plan"] == f"uid-1/1/{plan.digest}"
    assert metadata["gradsharding.num_examples"] == "33"


def test_next_plan_keeps_layout_and_counts_lost_uploads(plan):
    from gradsharding.rounds.plan import LeftOut

    dropped = LeftOut(plan.participants[1].key, "x", "because")
    following = next_plan(plan, spec(), [dropped], "upload-2")
    assert [p.weight for p in following.participants] == [10, 12]
    assert (following.revision, following.excluded, following.uploads_lost) == (2, (dropped,), 0)
    assert following.layout == plan.layout
    assert next_plan(following, spec(), [], "upload-3").uploads_lost == 1


def test_tasks_that_cannot_travel_are_refused_early(plan):
    crowd = dataclasses.replace(plan, participants=plan.participants * 10_000)
    with pytest.raises(RoundFailed, match="30000 updates"):
        next_plan(crowd, spec(), [], "u")


def test_sizing_is_stored(plan):
    assert isinstance(Plan.from_json(plan.to_json()).sizing, Sizing)
