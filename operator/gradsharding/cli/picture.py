"""What one pass of a round looks like to somebody who waits for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradsharding.cli.terminal import in_bytes
from gradsharding.rounds.step import Phase, Step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradsharding.rounds.plan import LeftOut


@dataclass(frozen=True, slots=True)
class Picture:
    """Bytes are those that the shards of this revision read, of all participants together. ``total`` 0: no plan yet."""

    line: str
    """One sentence about now."""
    milestone: tuple[object, ...]
    """Changes when there is something to tell to whoever sees no bar."""
    done: int = 0
    total: int = 0
    shards_done: int = 0
    shards: int = 0
    left_out: tuple[LeftOut, ...] = ()


def picture(step: Step, reading: Mapping[int, int]) -> Picture:
    """``reading``: shard → bytes that its running call has read so far."""
    plan, counts = step.plan, step.counts
    if plan is None:
        return Picture(_without_plan(step), (step.phase, counts.accepted))
    total = plan.layout.size * len(plan.participants)
    # Parts of one plan are equally long, but for the last.
    answered = total * (counts.parts_answered or 0) // len(plan.parts)
    shards, shards_done = len(plan.shards), counts.shards_answered or 0
    if step.phase is Phase.REDUCING:
        what = f"averaging {len(plan.participants)} updates, {in_bytes(total)}, in {_count(shards, 'shard')}"
    else:
        what = "joining the parts" if step.phase is Phase.COMPLETING else "writing the manifest, cleaning up"
    if step.message:
        what += f": {step.message}"
    done = min(total, answered + sum(reading.values()))
    return Picture(what, (step.phase, plan.revision), done, total, shards_done, shards, plan.excluded)


def _without_plan(step: Step) -> str:
    if step.phase is Phase.COLLECTING and step.message:
        return f"{step.message} (Ctrl-C to stop, --no-wait to start now)"
    return {
        Phase.COLLECTING: "looking at the updates",
        Phase.REDUCING: "making the plan",
        Phase.COMPLETING: "joining the parts",
        Phase.ENDING: "finishing",
    }[step.phase] + (f": {step.message}" if step.message else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
