"""Plan + shard → the task of one call, with fresh presigned URLs. Signing asks nobody; a URL opens exactly one door, for one call."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from gradsharding.errors import RoundFailed
from gradsharding.rounds.keys import Keys
from gradsharding.rounds.memory import Sizing
from gradsharding.rounds.plan import MAX_TASK_BYTES, Plan, PlannedPart
from gradsharding.store import Bucket
from gradsharding_reducer.task import Extent, Header, Part, ReduceTask, Source, SourceObject, Tuning

MARGIN_SECONDS = 60.0
"""What a URL lives beyond start and timeout of its call: clocks of store and signer differ by as much, unnoticed."""


@dataclass(frozen=True, slots=True)
class Signer:
    """Makes the tasks of a round."""

    keys: Keys
    updates: Bucket
    output: Bucket
    timeout_seconds: int
    startup_seconds: float

    def __call__(self, plan: Plan, shard: int, parts: tuple[PlannedPart, ...], sizing: Sizing) -> ReduceTask:
        """The task of ``parts``, a contiguous run of ``shard``'s. Raises RoundFailed (TaskTooLarge)."""
        lifetime = timedelta(seconds=self.startup_seconds + self.timeout_seconds + MARGIN_SECONDS)
        start, end = parts[0].start, parts[-1].end
        header = None
        if parts[0].number == 1:
            body = plan.header()
            url = self.output.presign_get(self.keys.header(plan.revision), None, lifetime)
            header = Header(url, len(body), hashlib.sha256(body).hexdigest())
        task = ReduceTask(
            round=plan.round,
            revision=plan.revision,
            shard=shard,
            plan=plan.digest,
            method=plan.method,
            sources=tuple(
                Source(
                    "update",
                    p.weight,
                    (SourceObject(self.updates.presign_get(p.key, p.version_id, lifetime), p.etag),),
                    clip(p.extents, start, end),
                )
                for p in plan.participants
            ),
            runs=tuple(run for run in plan.layout.runs if run.start < end and run.end > start),
            parts=tuple(
                Part(
                    0,
                    p.number,
                    p.start,
                    p.end,
                    self.output.presign_part(self.keys.output, plan.upload, p.number, lifetime),
                )
                for p in parts
            ),
            header=header,
            record_url=self.output.presign_put(self.keys.record(plan.revision, shard, parts[0].number), lifetime),
            budget_seconds=budget(self.timeout_seconds),
            tuning=Tuning(sizing.range_bytes, sizing.prefetch),
        )
        size = len(task.to_json())
        if size > MAX_TASK_BYTES:
            extents = sum(len(source.extents) for source in task.sources)
            raise RoundFailed(
                "TaskTooLarge",
                f"the task of shard {shard} takes {size >> 20} MiB of {MAX_TASK_BYTES >> 20}: {len(task.sources)} updates with {extents} "
                f"extents, {len(task.parts)} parts; raise spec.function.shards, or let clients write their tensors in one order",
            )
        return task


def budget(timeout_seconds: int) -> float:
    """What a reducer may use of its timeout: all but what its last answer and record need."""
    return max(timeout_seconds - max(5.0, timeout_seconds * 0.1), timeout_seconds / 2)


def clip(extents: Sequence[Extent], start: int, end: int) -> tuple[Extent, ...]:
    """What of a client's extents lies in canonical ``[start, end)``."""
    clipped = []
    for extent in extents:
        low, high = max(extent.start, start), min(extent.start + extent.length, end)
        if low < high:
            clipped.append(Extent(low, high - low, extent.object, extent.offset + low - extent.start))
    return tuple(clipped)
