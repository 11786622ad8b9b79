"""What a pass looks like to somebody who waits."""

import pytest
from rounds_kit import spec

from gradsharding.cli.display import Display
from gradsharding.cli.picture import picture
from gradsharding.cli.summary import summary
from gradsharding.rounds import memory
from gradsharding.rounds.dispatch import Calls
from gradsharding.rounds.layout import TensorLayout
from gradsharding.rounds.plan import LeftOut, Participant, first_plan, next_plan
from gradsharding.rounds.step import Counts, Phase, Step
from gradsharding_reducer.task import Extent


@pytest.fixture
def plan(monkeypatch):
    """Four equal parts in two shards, 5 updates."""
    monkeypatch.setattr(memory, "MIN_PART", 4096)
    layout = TensorLayout.of([("a", "F32", (16_384,))])
    people = [Participant(f"{i}.npy", "e", None, 1, (Extent(0, 65_536, 0, 128),)) for i in range(5)]
    plan = first_plan(spec(function_memoryMiB=128), "uid", layout, {}, people, [], [], "")
    assert len(plan.shards) == 2
    return plan


def reducing(plan, parts, shards=0):
    counts = Counts(shards=2, shards_answered=shards, parts_answered=parts)
    return Step(Phase.REDUCING, plan=plan, counts=counts)


def test_bytes_are_those_of_answered_parts_and_of_running_calls(plan):
    total = 5 * 65_536
    seen = picture(reducing(plan, 0), {})
    assert (seen.done, seen.total, seen.shards_done, seen.shards) == (0, total, 0, 2)
    half = len(plan.parts) // 2
    seen = picture(reducing(plan, half, 1), {1: 1000})
    assert (seen.done, seen.shards_done) == (total * half // len(plan.parts) + 1000, 1)
    assert picture(reducing(plan, len(plan.parts), 2), {1: 1000}).done == total


def test_what_is_awaited_is_said_with_what_to_do():
    step = Step(
        Phase.COLLECTING, message="8 of 10 updates are there, 35 s are left to collect", counts=Counts(accepted=8)
    )
    seen = picture(step, {})
    assert seen.line.startswith("8 of 10 updates are there, 35 s ")
    assert "--no-wait" in seen.line
    assert (seen.done, seen.total) == (0, 0)


class Seen:
    def __init__(self):
        self.notes, self.shown = [], []

    def note(self, text):
        self.notes.append(text)

    def show(self, shown):
        self.shown.append(shown)


def test_what_a_call_has_read_counts_until_it_ends(plan):
    view = Seen()
    display = Display(view)
    display.read(0, 5)  # before the first pass: nothing to show it in
    assert view.shown == []
    display.watch(reducing(plan, 0), Calls(running=frozenset({0, 1})))
    display.read(0, 2000)
    display.read(1, 3000)
    assert view.shown[-1].done == 5000
    display.watch(reducing(plan, 0), Calls(running=frozenset({1})))
    assert view.shown[-1].done == 3000


def test_who_is_left_out_is_told_once(plan):
    view = Seen()
    display = Display(view)
    following = next_plan(plan, spec(function_memoryMiB=128), [LeftOut("3.npy", "e", "was overwritten")], "")
    for _ in range(2):
        display.watch(reducing(following, 0), Calls())
    assert view.notes == ["going on without 3.npy: it was overwritten"]
    assert view.shown[-1].total == 4 * 65_536


def test_a_long_list_of_the_rejected_is_cut():
    rejected = [{"key": str(i), "reason": "bad"} for i in range(50)]
    result = {
        "succeeded": False, "reason": "QuorumNotMet", "message": "", "bytes_read": 0, "seconds": 1.0,
        "output": {"bucket": "b", "key": "k", "bytes": None}, "max_reducer_rss_bytes": 0, "shards": {"total": 0},
        "updates": {"participants": 0, "found": 50, "rejected": rejected, "excluded": []},
    }  # fmt: skip
    rows = list(summary(result, {}, 128))
    assert ("rejected", "50") in rows
    assert ("", "and 30 more") in rows
    assert len(rows) == 25
