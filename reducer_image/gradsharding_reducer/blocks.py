"""How a part is cut into blocks, and where a block's bytes lie in each source. Pure."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from gradsharding_reducer.task import DTYPES, Extent, Run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ACCUMULATOR_DIVISOR = 4
"""A block of ``range_bytes`` has at most a quarter as many elements, so that its float64 accumulator is at most twice
the range."""


class Segment(NamedTuple):
    """``elements`` of one dtype: from byte ``offset`` of the block on, and from ``element`` of its accumulator on."""

    dtype: str
    offset: int
    element: int
    elements: int


class Block(NamedTuple):
    """Canonical bytes ``[start, end)``, folded at once. Its borders are element starts."""

    start: int
    end: int
    segments: tuple[Segment, ...]


class Read(NamedTuple):
    """``length`` bytes of ``object`` from ``offset`` on belong at byte ``at`` of the block."""

    object: int
    offset: int
    length: int
    at: int


def blocks(runs: Sequence[Run], start: int, end: int, range_bytes: int) -> Iterator[Block]:
    """Cut canonical bytes ``[start, end)``, which begin and end on element starts, into blocks of at most
    ``range_bytes``.

    A block may span several runs: models put counters of 8 bytes between their tensors, and a request for each would be
    slow.
    """
    room = range_bytes // ACCUMULATOR_DIVISOR
    segments: list[Segment] = []
    first, elements = start, 0
    for run in runs:
        width = DTYPES[run.dtype]
        at, stop = max(start, run.start), min(end, run.end)
        while at < stop:
            count = min((stop - at) // width, (range_bytes - (at - first)) // width, room - elements)
            if count == 0:
                yield Block(first, at, tuple(segments))
                segments, first, elements = [], at, 0
                continue
            segments.append(Segment(run.dtype, at - first, elements, count))
            elements += count
            at += count * width
    if segments:
        yield Block(first, end, tuple(segments))


class ExtentIndex:
    """The extents of one source, to be asked for any canonical range."""

    def __init__(self, extents: Sequence[Extent]) -> None:
        self._extents = extents
        self._starts = [extent.start for extent in extents]

    def reads(self, start: int, end: int) -> list[Read]:
        """What to read for canonical bytes ``[start, end)``; neighbours in the object become one read."""
        reads: list[Read] = []
        i = bisect_right(self._starts, start) - 1
        at = start
        while at < end:
            extent = self._extents[i]
            skipped = at - extent.start
            length = min(extent.length - skipped, end - at)
            i += 1
            if length <= 0:  # an extent of no bytes
                continue
            read = Read(extent.object, extent.offset + skipped, length, at - start)
            last = reads[-1] if reads else None
            if last and last.object == read.object and last.offset + last.length == read.offset:
                reads[-1] = last._replace(length=last.length + length)
            else:
                reads.append(read)
            at += length
        return reads
