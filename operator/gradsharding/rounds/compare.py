"""Sizing advice: what other memories and numbers of shards would do to time and cost. Pure.

The *knee* is the point of the Pareto front (no other is both faster and cheaper) that lies farthest below the straight
line from the fastest to the cheapest one, time and cost on logarithmic scales, each scaled to the front's own span. A
front that never lies below that line has its knee at the cheapest. (The idea is that of Satopaa et al., "Finding a
Kneedle in a Haystack", 2011.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log

from gradsharding.errors import RoundFailed
from gradsharding.rounds.cost import PRICES, Arch, Estimate, Prices, Work, estimate

MEMORIES = (128, 192, 256, 384, 512, 1024, 2048, 4096, 10_240)
"""MiB: Lambda's least, its most, and between them dense where the reducer's size lies."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """``rows`` by memory, then shards. The three that are named are among them; ``why`` explains them in one sentence.

    ``misfits`` are the memories that cannot hold the round, each with the sentence why.
    """

    rows: tuple[Estimate, ...]
    misfits: tuple[tuple[int, str], ...]
    cheapest: Estimate
    fastest: Estimate
    knee: Estimate
    why: str

    def marks(self, row: Estimate) -> tuple[str, ...]:
        """Which of the three this row is."""
        named = (("cheapest", self.cheapest), ("fastest", self.fastest), ("knee", self.knee))
        return tuple(name for name, one in named if one == row)


def compare(
    work: Work,
    concurrency: int,
    *,
    memories: Iterable[int] = MEMORIES,
    also: tuple[int, int] | None = None,
    arch: Arch = "x86_64",
    prices: Prices = PRICES,
) -> Comparison:
    """Every memory with 1 … ``concurrency`` shards, in steps. ``also``: the round's own memoryMiB and shards.

    Shards beyond the number of parts are the same round, and left out. Raises RoundFailed when nothing fits.
    """
    rows: dict[tuple[int, int], Estimate] = {}
    misfits: dict[int, RoundFailed] = {}
    wanted_memories = sorted({*memories, *([also[0]] if also else [])})
    wanted_shards = sorted({*_steps(concurrency), *([also[1]] if also else [])})
    for memory_mib in wanted_memories:
        for shards in wanted_shards:
            try:
                row = estimate(work, memory_mib, shards, concurrency, arch, prices)
            except RoundFailed as failure:
                misfits[memory_mib] = failure
            else:
                rows.setdefault((memory_mib, row.shards), row)
    if not rows:
        raise misfits[max(misfits)]
    found = tuple(rows[key] for key in sorted(rows))
    fitting = {row.memory_mib for row in found}
    front = pareto(found)
    fastest, cheapest, best = front[0], front[-1], knee(front)
    return Comparison(
        rows=found,
        misfits=tuple((size, str(failure)) for size, failure in sorted(misfits.items()) if size not in fitting),
        cheapest=cheapest,
        fastest=fastest,
        knee=best,
        why=_why(cheapest, fastest, best),
    )


def pareto(rows: Iterable[Estimate]) -> tuple[Estimate, ...]:
    """Those that no other row beats in both time and cost, the fastest first; of equal ones the smallest memory."""
    front: list[Estimate] = []
    for row in sorted(rows, key=lambda row: (row.seconds, row.usd, row.memory_mib)):
        if not front or row.usd < front[-1].usd:
            front.append(row)
    return tuple(front)


def knee(front: Sequence[Estimate]) -> Estimate:
    """The knee of a Pareto front that begins with the fastest, as this file's head defines it."""
    fastest, cheapest = front[0], front[-1]
    time_span = log(cheapest.seconds / fastest.seconds) if cheapest != fastest else 1.0
    cost_span = log(fastest.usd / cheapest.usd) if cheapest != fastest else 1.0

    def above_line(row: Estimate) -> float:
        return log(row.seconds / fastest.seconds) / time_span + log(row.usd / cheapest.usd) / cost_span - 1

    best = min(front, key=above_line)
    return best if above_line(best) < 0 else cheapest


def _steps(most: int) -> Iterable[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, … up to ``most``, which is the last."""
    step = 1
    while step < most:
        yield step
        if 1 < step < most and step * 3 // 2 < most:
            yield step * 3 // 2
        step *= 2
    yield most


def _why(cheapest: Estimate, fastest: Estimate, best: Estimate) -> str:
    if cheapest == fastest:
        return f"{_named(best)} is both the cheapest and the fastest."
    sentence = f"The knee is {_named(best)}"
    if best == cheapest:
        return (
            f"{sentence}, the cheapest: whatever is faster costs more than it gains, up to {_percent(fastest.usd, best.usd)} "
            f"more for {fastest.seconds:.1f} s instead of {best.seconds:.1f} s."
        )
    sentence += (
        f": {best.seconds:.1f} s instead of the cheapest's {cheapest.seconds:.1f} s, "
        f"for {_percent(best.usd, cheapest.usd)} more"
    )
    if best == fastest:
        return f"{sentence}; nothing is faster."
    return (
        f"{sentence}; beyond it the fastest, {_named(fastest)}, saves {best.seconds - fastest.seconds:.1f} s "
        f"for another {_percent(fastest.usd, best.usd)}."
    )


def _named(row: Estimate) -> str:
    return f"{row.memory_mib} MiB with {row.shards} {'shard' if row.shards == 1 else 'shards'}"


def _percent(more: float, less: float) -> str:
    percent = (more / less - 1) * 100
    return f"{percent:.1f} %" if percent < 10 else f"{percent:.0f} %"
