"""How much memory a function has, and so: how large its parts and ranges may be, and how many ranges are in flight.

The size follows from the cap, never the other way round. One invocation holds, whatever the model, N and M are::

    peak = interpreter + part body + (prefetch + 1) ranges + accumulator + scratch + 4 * unpacked task

A block has at most ``range_bytes / 4`` elements and at most ``range_bytes`` bytes, so its float64 accumulator takes at
most two ranges, whatever the dtype. The constants are measured, see ``docs/performance.md``. Sizes are bytes
unless a name says MiB. All functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradsharding.errors import RoundFailed

MIB = 1 << 20

INTERPRETER = 34 * 10**6
"""Resident size of a reducer before its first byte: CPython, numpy, http.client."""

SCRATCH = 4 * MIB
"""The tile in which elements are widened, and what the allocator keeps."""

PER_CONNECTION = 128 << 10
"""Stack, socket and parser of one prefetching thread."""

TASK_COPIES = 4
"""A task is there as bytes, as text, as lists and as dataclasses."""

EXTENT_BYTES = 57
"""What to count an extent as in ``task_bytes``: it has 25 bytes in JSON, but a tuple of numbers weighs more."""

PER_SOURCE = 1_000
"""JSON of a source with one extent, and of a part: mostly their URLs. With a session token a URL is 1.4 kB."""

MIN_PART = 5 * MIB
"""S3 takes no smaller part but the last."""

MAX_PARTS = 10_000
"""Of one upload."""

MIN_RANGE = 256 << 10
MAX_PREFETCH = 16

LADDER = tuple(
    (range_bytes + range_bytes // 16, prefetch)
    for range_bytes, prefetch in (
        (8 * MIB, 4), (4 * MIB, 4), (4 * MIB, 2), (4 * MIB, 1),
        (2 * MIB, 1), (1 * MIB, 1), (512 << 10, 1), (MIN_RANGE, 1),
    )
)  # fmt: skip
"""Ranges and prefetch to try, best first. Stores keep chunks of 4-8 MiB; below, a chunk is read more than once.
A sixteenth is on top, so that a part that is a little over some ranges is cut evenly and no tiny range is left over."""

GOOD_PART = LADDER[0][0]
"""No larger without need: a part leaves while the first block of the next one is folded, so the upload of a part that is
one block is hidden behind all of the next part. Larger ones hide no more and take memory from the prefetch."""

COMFORTABLE = 2
"""So many rungs of the ladder are good enough to give GOOD_PART the preference over a higher rung."""

BYTES_PER_SECOND = 50 * 10**6
"""What a function is sure to read, with one S3 connection alone giving 60-90 MB/s."""

MIN_MEMORY_MIB = 96
"""The smallest cap that a round may ask for."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """``part_bytes`` of an uploaded part, ``range_bytes`` of a ranged read, and how many reads are in flight."""

    part_bytes: int
    range_bytes: int
    prefetch: int


def usable(memory_mib: int) -> int:
    """Bytes of a cap that are planned with; the rest is for page cache, sockets, page tables and a server's queue."""
    return memory_mib * MIB * 9 // 10 - 2 * MIB


def memory_for(peak: int) -> int:
    """The smallest memoryMiB that leaves ``peak`` bytes usable."""
    return max(MIN_MEMORY_MIB, -(-(peak + 2 * MIB) * 10 // (9 * MIB)))


def predict_peak(
    sizing: Sizing, *, header_bytes: int, sources: int, task_bytes: int | None = None, width: int = 4
) -> int:
    """Peak resident bytes of an invocation with this sizing that writes part 1.

    ``width`` is the element width: 4 is the worst case (wider: a smaller accumulator, narrower: shorter reads).
    ``task_bytes`` of the unpacked task; None: with one extent per source and a few parts.
    """
    if task_bytes is None:
        task_bytes = (sources + 8) * PER_SOURCE
    elements = min(sizing.range_bytes, sizing.part_bytes) // max(width, 4)
    return (
        INTERPRETER
        + _body(sizing.part_bytes, header_bytes)
        + (sizing.prefetch + 1) * elements * width
        + 8 * elements
        + SCRATCH
        + sizing.prefetch * PER_CONNECTION
        + TASK_COPIES * task_bytes
    )


def choose(
    memory_mib: int,
    *,
    size: int,
    header_bytes: int,
    shards: int,
    sources: int,
    timeout_seconds: int,
    task_bytes: int | None = None,
    step: int = 0,
) -> Sizing:
    """The sizing for a data section of ``size`` bytes on ``shards`` functions that read ``sources`` updates.

    Every shard gets equally many parts. ``step`` counts out-of-memory kills: the parts stay, the rest is lowered.
    Raises RoundFailed, which names the setting that would do: ModelTooLarge, MemoryTooSmall or TimeoutTooShort.
    """

    def peak(part_bytes: int, range_bytes: int, prefetch: int) -> int:
        sizing = Sizing(part_bytes, range_bytes, prefetch)
        return predict_peak(sizing, header_bytes=header_bytes, sources=sources, task_bytes=task_bytes)

    def deepest(part_bytes: int, range_bytes: int) -> int:
        return max(k for k in range(1, MAX_PREFETCH + 1) if peak(part_bytes, range_bytes, k) <= room)

    room, total = usable(memory_mib), size + header_bytes
    least = max(MIN_PART, -(-total // MAX_PARTS))
    share = max(least, -(-total // shards))
    most = min(share, max(least, GOOD_PART), _timely_part(least, sources, timeout_seconds))
    rungs = [(most, *rung) for rung in LADDER[:COMFORTABLE]] + [(least, *rung) for rung in LADDER]
    rung = next((rung for rung in rungs if peak(*rung) <= room), None)
    if rung is None:
        needed = memory_for(peak(least, *LADDER[-1]))
        raise _too_small(memory_mib, needed, least, total, header_bytes, sources)
    part, read, _ = rung
    left = room - peak(part, read, deepest(part, read)) + _body(part, header_bytes)
    part = max(least, -(-share // -(-share // min(most, _largest_part(left, header_bytes)))))
    read = _even(part, read)
    sizing = lower(Sizing(part, read, deepest(part, read)), step)
    if sizing is None:
        raise RoundFailed(
            "MemoryTooSmall",
            f"spec.function.memoryMiB is {memory_mib}, and functions ran out of memory even when they read "
            f"{MIN_RANGE >> 10} KiB at a time: set it to {2 * memory_mib}",
        )
    return sizing


def lower(sizing: Sizing, step: int = 1) -> Sizing | None:
    """The sizing ``step`` memory steps lower: first less prefetch, then shorter ranges; None below the floor.

    The part stays, since the plan has its borders: so a retry gives the same bits and ETags.
    """
    for _ in range(step):
        if sizing.prefetch > 1:
            sizing = replace(sizing, prefetch=sizing.prefetch // 2)
        elif sizing.range_bytes > MIN_RANGE:
            sizing = replace(sizing, range_bytes=max(MIN_RANGE, _aligned(sizing.range_bytes // 2)))
        else:
            return None
    return sizing


def fit(
    sizing: Sizing, memory_mib: int, *, header_bytes: int, sources: int, task_bytes: int | None = None
) -> Sizing | None:
    """The sizing, lowered until it fits this cap; None when the parts are too large for it: another plan is needed."""
    lowered: Sizing | None = sizing
    while lowered is not None and usable(memory_mib) < predict_peak(
        lowered, header_bytes=header_bytes, sources=sources, task_bytes=task_bytes
    ):
        lowered = lower(lowered)
    return lowered


def _body(part_bytes: int, header_bytes: int) -> int:
    """Length of part 1, which a header of over half a part enlarges; no less than that of a smaller part."""
    return max(part_bytes, min(part_bytes, 2 * header_bytes) + header_bytes)


def _largest_part(body_bytes: int, header_bytes: int) -> int:
    """The inverse of ``_body``."""
    return body_bytes if body_bytes >= 3 * header_bytes else body_bytes - header_bytes


def _timely_part(least: int, sources: int, timeout_seconds: int) -> int:
    """The largest part that all sources are read for in under half of the timeout."""
    timely = (timeout_seconds * BYTES_PER_SECOND // 2 - 1) // sources
    if timely < least:
        needed = sources * least * 2 // BYTES_PER_SECOND + 1
        raise RoundFailed(
            "TimeoutTooShort",
            f"reading {least / MIB:.0f} MiB of each of {sources} updates at {BYTES_PER_SECOND // 10**6} MB/s must "
            f"take less than half of the timeout; spec.function.timeoutSeconds is {timeout_seconds}: "
            f"set it to {needed} or more",
        )
    return timely


def _too_small(memory_mib: int, needed: int, least: int, total: int, header_bytes: int, sources: int) -> RoundFailed:
    remedy = f"spec.function.memoryMiB is {memory_mib}: set it to {needed} or more"
    if least > MIN_PART:
        return RoundFailed(
            "ModelTooLarge",
            f"an output of {total / 2**30:.1f} GiB takes parts of {least / MIB:.1f} MiB, since an upload has at most "
            f"{MAX_PARTS} of them, and a function must hold one; {remedy}",
        )
    return RoundFailed(
        "MemoryTooSmall",
        f"a function cannot hold its task for {sources} updates and the smallest part, of {least / MIB:.0f} MiB "
        f"with an output header of {header_bytes / MIB:.1f} MiB; {remedy}",
    )


def _even(part_bytes: int, range_bytes: int) -> int:
    """A range no longer than this one that cuts the part into equally long reads."""
    reads = -(-part_bytes // range_bytes)
    return min(range_bytes, _aligned(-(-part_bytes // reads) + 4095))


def _aligned(length: int) -> int:
    """Down to whole pages, and so to whole elements."""
    return length // 4096 * 4096
