"""The records of one revision → what is done, what is missing, and what is wrong with which update. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gradsharding.rounds.plan import LeftOut, Plan, PlannedPart
from gradsharding_reducer.task import BadKind, FaultKind, PartResult, ReduceResult

BAD_WORDS = {
    BadKind.NON_FINITE: "a value that is not finite",
    BadKind.OUT_OF_RANGE: "an integer beyond ±2^53",
    BadKind.NOT_BOOL: "a BOOL that is neither 0 nor 1",
}


@dataclass(frozen=True, slots=True)
class Progress:
    """What the records of a plan say, taken together."""

    answered: Mapping[int, PartResult]
    """Part number → its newest answer. Parts of the plan only."""
    missing: Mapping[int, tuple[PlannedPart, ...]]
    """Shard → its first contiguous run of unanswered parts; shards that have answered are not in it."""
    bad: Mapping[int, tuple[int, BadKind]]
    """Participant's index → canonical offset and kind of its first bad value."""
    faults: Mapping[FaultKind, int]
    """Kind → first canonical offset. Means something only while ``bad`` is empty."""
    records: tuple[ReduceResult, ...]
    shards: int
    """How many the plan has."""

    @property
    def complete(self) -> bool:
        """Every shard has answered."""
        return not self.missing

    @property
    def etags(self) -> dict[int, str]:
        """Part number → ETag of each uploaded part, as the store's Complete wants them."""
        return {number: part.etag for number, part in self.answered.items() if part.etag is not None}

    @property
    def shards_answered(self) -> int:
        """How many shards have no part missing."""
        return self.shards - len(self.missing)


def progress(plan: Plan, digest: str, records: Iterable[ReduceResult]) -> Progress:
    """Fold the records that carry this plan's digest; those of other plans are ignored, so that no zombie can touch this one."""
    mine = sorted((r for r in records if r.plan == digest), key=lambda r: r.finished)
    answered: dict[int, PartResult] = {}
    bad: dict[int, tuple[int, BadKind]] = {}
    faults: dict[FaultKind, int] = {}
    for record in mine:
        for part in record.parts:
            if 1 <= part.number <= len(plan.parts):
                answered[part.number] = part
        for value in record.bad:
            if value.source < len(plan.participants):
                first = bad.get(value.source)
                if first is None or value.offset < first[0]:
                    bad[value.source] = (value.offset, value.kind)
        for fault in record.faults:
            faults[fault.kind] = min(fault.offset, faults.get(fault.kind, fault.offset))
    missing = {}
    for shard in range(len(plan.shards)):
        parts = first_missing(plan.shard_parts(shard), answered)
        if parts:
            missing[shard] = parts
    return Progress(answered, missing, bad, faults, tuple(mine), len(plan.shards))


def first_missing(parts: Sequence[PlannedPart], answered: Mapping[int, PartResult]) -> tuple[PlannedPart, ...]:
    """The first contiguous run of parts without an answer."""
    run: list[PlannedPart] = []
    for part in parts:
        if part.number not in answered:
            run.append(part)
        elif run:
            break
    return tuple(run)


def bad_updates(plan: Plan, bad: Mapping[int, tuple[int, BadKind]]) -> tuple[LeftOut, ...]:
    """Whom to leave out, and why: the tensor and the element of the first bad value of each."""
    rows = []
    for index in sorted(bad):
        offset, kind = bad[index]
        participant = plan.participants[index]
        rows.append(LeftOut(participant.key, participant.etag, f"holds {BAD_WORDS[kind]} in {place(plan, offset)}"))
    return tuple(rows)


def place(plan: Plan, offset: int) -> str:
    """Name the tensor and element at a canonical offset."""
    tensor = plan.layout.tensor_at(offset)
    return f"tensor {tensor.name!r:.200}, byte {offset - tensor.start} of it"


def fault_message(plan: Plan, faults: Mapping[FaultKind, int]) -> tuple[str, str]:
    """Reason and sentence of the first fault."""
    kind, offset = min(faults.items(), key=lambda item: item[1])
    where = place(plan, offset)
    if kind is FaultKind.BOOL_DISAGREES:
        return (
            "BoolDisagrees",
            f"the updates disagree in {where}, and booleans have no mean: let all clients send the same mask",
        )
    return "Overflow", f"the weighted sum of {where} exceeds what float64 can hold: scale the updates or send F32"
