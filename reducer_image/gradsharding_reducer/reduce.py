"""The use case: fold one shard's parts over all sources, part by part, block by block, source by source."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from gradsharding_reducer import __version__, kernel, peak_rss
from gradsharding_reducer.blocks import Block, ExtentIndex, blocks
from gradsharding_reducer.buffers import Buffers
from gradsharding_reducer.cancellation import Cancellation
from gradsharding_reducer.exchange import Channel, Patience
from gradsharding_reducer.failures import Refused
from gradsharding_reducer.ranges import Ring, read_range
from gradsharding_reducer.task import (
    BadValue,
    Fault,
    FaultKind,
    Outcome,
    Part,
    PartResult,
    ReduceResult,
    ReduceTask,
    UrlKind,
)
from gradsharding_reducer.upload import Uploader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gradsharding_reducer.access import Access

PART_TIME_MARGIN = 1.25
"""The next part is begun when the budget holds so many times what it should take at the slowest rate seen."""


def reduce(
    task: ReduceTask,
    access: Access,
    cancellation: Cancellation | None = None,
    patience: Patience | None = None,
    progress: Callable[[int], None] | None = None,
) -> ReduceResult:
    """Run one invocation to its answer. Done, Partial and BadValues are also written to the task's record URL, as the
    last act.

    ``faults`` are given only where ``bad`` is empty: a bad source may have caused them.
    ``progress`` is told of the bytes read so far, block by block.
    Raises ReducerFailure when there is no answer, MemoryError when the cap is too small for the task's tuning.
    """
    return _Invocation(task, access, cancellation or Cancellation(), patience or Patience(), progress).run()


@dataclass
class _Findings:
    """The first bad value of each source and the first fault of each kind. Blocks come in canonical order: first is
    smallest."""

    bad: dict[int, BadValue] = field(default_factory=dict)
    faults: dict[FaultKind, Fault] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.bad or self.faults)

    def add_bad(self, source: int, offset: int, dtype: str) -> None:
        self.bad.setdefault(source, BadValue(source, offset, kernel.BAD_KIND[dtype]))

    def add_fault(self, kind: FaultKind, offset: int) -> None:
        seen = self.faults.get(kind)
        if seen is None or offset < seen.offset:  # sources of one block come one after another
            self.faults[kind] = Fault(kind, offset)


class _Invocation:
    def __init__(
        self,
        task: ReduceTask,
        access: Access,
        cancellation: Cancellation,
        patience: Patience,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._task = task
        self._progress = progress
        self._access = access
        self._started = time.time()
        self._clock_start = time.monotonic()
        self._deadline = self._clock_start + task.budget_seconds
        self._cancellation = cancellation
        # Leaving the ring stops its threads only; the caller's cancellation stops everything.
        self._stop = Cancellation()
        cancellation.on_cancel(self._stop.cancel)
        # Without a record nobody will count the part that is under way: it need not arrive.
        self._give_up = Cancellation()
        cancellation.on_cancel(self._give_up.cancel)
        self._channel = Channel(access, self._give_up, self._deadline, patience)
        self._uploader = Uploader(self._channel)
        self._readers = [Channel(access, self._stop, self._deadline, patience) for _ in range(task.tuning.prefetch)]
        self._seconds = {"read": 0.0, "fold": 0.0, "write": 0.0}
        self._findings = _Findings()
        self._parts: list[PartResult] = []
        self._slowest = 0.0
        """Seconds per byte of the slowest part so far, from its begin to where its upload starts."""
        self._bytes_read = 0
        self._bytes_written = 0

    def run(self) -> ReduceResult:
        try:
            self._check_origins()
            outcome = self._fold_parts()
            self._settle()
            result = self._result(outcome)
            self._channel.put(self._task.record_url, UrlKind.RECORD, result.to_json())
        except Refused as refused:
            return replace(self._result(refused.outcome), refusal=refused.refusal)
        finally:
            self._give_up.cancel()
            self._uploader.abandon()
            for channel in (self._channel, *self._readers):
                channel.close()
        return result

    def _check_origins(self) -> None:
        """Before the first request: an origin that is not allowed shall not be noticed hours later."""
        task = self._task
        for i, source in enumerate(task.sources):
            for target in source.objects:
                self._access.address(target.url, UrlKind.SOURCE, i)
        for part in task.parts:
            self._access.address(part.url, UrlKind.PART)
        if task.header is not None:
            self._access.address(task.header.url, UrlKind.HEADER)
        self._access.address(task.record_url, UrlKind.RECORD)

    def _fold_parts(self) -> Outcome:
        task = self._task
        plan = [list(blocks(task.runs, part.start, part.end, task.tuning.range_bytes)) for part in task.parts]
        every = [block for part_blocks in plan for block in part_blocks]
        jobs = len(every) * len(task.sources)
        # All memory of the invocation is taken here, in one go, and no larger than this task needs.
        self._buffers = Buffers(
            slots=min(task.tuning.prefetch + 1, jobs),
            slot_bytes=max((block.end - block.start for block in every), default=0),
            elements=max((_elements(block) for block in every), default=0),
            body_bytes=max(self._header_bytes(part) + part.end - part.start for part in task.parts),
        )
        indices = [ExtentIndex(source.extents) for source in task.sources]

        def fill(channel: Channel, job: int, slot: memoryview) -> None:
            number, source = divmod(job, len(task.sources))
            block = every[number]
            for read in indices[source].reads(block.start, block.end):
                target = task.sources[source].objects[read.object]
                read_range(channel, source, target, read.offset, slot[read.at : read.at + read.length])

        fills = [partial(fill, channel) for channel in self._readers[:jobs]]
        with Ring(fills, jobs, self._buffers.slots, self._stop) as ring:
            for number, (part, part_blocks) in enumerate(zip(task.parts, plan, strict=True)):
                begun = time.monotonic()
                size = self._header_bytes(part) + part.end - part.start
                if number and not self._in_time(size, size):
                    return Outcome.PARTIAL
                if not self._fold_part(part, part_blocks, ring):
                    return Outcome.PARTIAL
                self._slowest = max(self._slowest, (time.monotonic() - begun) / max(size, 1))
        return Outcome.BAD_VALUES if self._findings else Outcome.DONE

    def _in_time(self, to_fold: int, to_upload: int) -> bool:
        """Whether the budget holds so many bytes of both, as far as their pace is known."""
        needed = (self._slowest * to_fold + self._uploader.slowest * to_upload) * PART_TIME_MARGIN
        return time.monotonic() + needed <= self._deadline

    def _fold_part(self, part: Part, part_blocks: list[Block], ring: Ring) -> bool:
        """Fold a part and begin its upload. False: the one before took so long that the budget does not hold this one."""
        header = self._header_bytes(part)
        body = self._buffers.body[: header + part.end - part.start]
        if header and self._task.header is not None:  # part 1 is the first: nothing is being uploaded from here
            with self._stage("read"):
                self._channel.get_header(self._task.header, body.data[:header])
        for block in part_blocks:
            self._accumulate(block, ring)
            if self._settle() and not self._in_time(part.end - block.end, len(body)):
                return False
            at = header + block.start - part.start
            self._narrow(block, body[at : at + block.end - block.start])
        self._settle()  # where there was no block
        if self._findings:
            self._parts.append(PartResult(part.output, part.number, len(body), None, None))
        else:
            self._uploader.start(part, body.data)
        return True

    def _settle(self) -> bool:
        """Wait until the part that is being uploaded has arrived: before its memory is written to, and before an answer.
        False: there was none."""
        with self._stage("write"):
            done = self._uploader.settle()
        if done is None:
            return False
        self._parts.append(done)
        self._bytes_written += done.bytes
        return True

    def _accumulate(self, block: Block, ring: Ring) -> None:
        """Fold all sources of a block into the accumulator."""
        for i, source in enumerate(self._task.sources):
            with self._stage("read"):
                slot = ring.take()
            with self._stage("fold"):
                data = np.frombuffer(slot, np.uint8)
                for dtype, offset, element, count in block.segments:
                    width = kernel.width(dtype)
                    found = kernel.fold(
                        dtype,
                        data[offset : offset + count * width],
                        self._buffers.accumulator[element : element + count],
                        source.weight,
                        i == 0,
                        self._buffers.scratch,
                    )
                    if found.bad is not None:
                        self._findings.add_bad(i, block.start + offset + found.bad * width, dtype)
                    if found.disagreement is not None:
                        self._findings.add_fault(FaultKind.BOOL_DISAGREES, block.start + offset + found.disagreement)
            ring.release(slot)
            self._bytes_read += block.end - block.start
            if self._progress is not None:
                self._progress(self._bytes_read)

    def _narrow(self, block: Block, out: kernel.Bytes) -> None:
        """Divide and round the accumulator into the part."""
        total = sum(source.weight for source in self._task.sources)
        with self._stage("fold"):
            for dtype, offset, element, count in block.segments:
                width = kernel.width(dtype)
                accumulator = self._buffers.accumulator[element : element + count]
                data = out[offset : offset + count * width]
                overflow = kernel.finish(dtype, accumulator, total, data, self._buffers.scratch)
                if overflow is not None:
                    self._findings.add_fault(FaultKind.OVERFLOW, block.start + offset + overflow * width)

    def _header_bytes(self, part: Part) -> int:
        return self._task.header.length if self._task.header is not None and part.number == 1 else 0

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - begun

    def _result(self, outcome: Outcome) -> ReduceResult:
        task = self._task
        bad = tuple(self._findings.bad[source] for source in sorted(self._findings.bad))
        return ReduceResult(
            round=task.round,
            revision=task.revision,
            shard=task.shard,
            plan=task.plan,
            outcome=outcome,
            parts=tuple(self._parts),
            bad=bad,
            faults=() if bad else tuple(self._findings.faults[kind] for kind in sorted(self._findings.faults)),
            bytes_read=self._bytes_read,
            bytes_written=self._bytes_written,
            retries=sum(channel.retries for channel in (self._channel, *self._readers)),
            started=self._started,
            finished=time.time(),
            seconds={name: round(seconds, 6) for name, seconds in self._seconds.items()},
            peak_rss_bytes=peak_rss.read(),
            reducer=__version__,
        )


def _elements(block: Block) -> int:
    last = block.segments[-1]
    return last.element + last.elements
