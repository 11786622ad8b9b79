"""Participants + layout + memory cap → the plan of one revision. Pure and deterministic.

A plan holds keys, never buckets, endpoints, URLs or secrets. Its digest is the SHA-256 of its stored bytes; the output's
header names it, so that an output tells which plan made it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from gradsharding.errors import RoundFailed
from gradsharding.rounds import memory
from gradsharding.rounds.layout import OUTPUT_NUM_EXAMPLES, TensorLayout
from gradsharding.rounds.spec import RoundSpec
from gradsharding_reducer.task import DTYPES, METHODS, ContractError, Extent, Method, Run, canonical_json

PLAN_VERSION = 1
PLAN_TAG = "gradsharding.plan"
URL_BYTES = 700
"""What one presigned URL takes in a task, about; 1.4 kB with a session token, which gzip brings back to a few bytes."""

MAX_TASK_BYTES = 16 << 20
"""Of an unpacked task, as design and reducer have it."""


@dataclass(frozen=True, slots=True)
class Participant:
    """A frozen update: pinned by ETag (and version, in a versioned bucket), with its integer weight and its extents."""

    key: str
    etag: str
    version_id: str | None
    weight: int
    extents: tuple[Extent, ...]


class LeftOut(NamedTuple):
    """An update that does not take part. ``etag`` is the one that was looked at; None: it had vanished."""

    key: str
    etag: str | None
    reason: str


class PlannedPart(NamedTuple):
    """Part ``number`` of the output holds canonical bytes ``[start, end)``; part 1 begins with the header, too."""

    number: int
    start: int
    end: int


@dataclass(frozen=True)
class Plan:
    """One revision of a round, as it is stored."""

    round: str
    revision: int
    spec_digest: str
    method: Method
    participants: tuple[Participant, ...]
    rejected: tuple[LeftOut, ...]
    surplus: tuple[LeftOut, ...]
    excluded: tuple[LeftOut, ...]
    layout: TensorLayout
    metadata: Mapping[str, str]
    output_key: str
    upload: str
    header_length: int
    parts: tuple[PlannedPart, ...]
    shards: tuple[tuple[int, int], ...]
    """First and last part number of each shard."""
    sizing: memory.Sizing
    uploads_lost: int
    """How many revisions before this one dropped nobody, since their upload was gone."""

    def to_json(self) -> bytes:
        """The stored form: canonical JSON."""
        return canonical_json(
            {
                "version": PLAN_VERSION,
                "round": self.round,
                "revision": self.revision,
                "spec_digest": self.spec_digest,
                "method": {"name": self.method.name, "parameters": dict(self.method.parameters)},
                "participants": [
                    {
                        "key": p.key,
                        "etag": p.etag,
                        "version_id": p.version_id,
                        "weight": p.weight,
                        "extents": [list(extent) for extent in p.extents],
                    }
                    for p in self.participants
                ],
                "rejected": [list(row) for row in self.rejected],
                "surplus": [list(row) for row in self.surplus],
                "excluded": [list(row) for row in self.excluded],
                "layout": self.layout.to_json(),
                "metadata": dict(self.metadata),
                "outputs": [
                    {
                        "key": self.output_key,
                        "upload": self.upload,
                        "header_length": self.header_length,
                        "parts": [list(part) for part in self.parts],
                    }
                ],
                "shards": [list(shard) for shard in self.shards],
                "sizing": {
                    "part_bytes": self.sizing.part_bytes,
                    "range_bytes": self.sizing.range_bytes,
                    "prefetch": self.sizing.prefetch,
                },
                "uploads_lost": self.uploads_lost,
            }
        )

    @staticmethod
    def from_json(body: bytes) -> Plan:
        """Read a stored plan. Raises ContractError when it is of another version or no plan of this software."""
        try:
            document = json.loads(body)
            if document["version"] != PLAN_VERSION:
                raise ContractError(
                    f"the stored plan has version {document['version']!r:.20}, this build knows {PLAN_VERSION}"
                )
            if document["method"]["name"] not in METHODS or document["method"]["parameters"]:
                raise ContractError(
                    f"the stored plan asks for method {document['method']['name']!r:.40}, unknown to this build"
                )
            (output,) = document["outputs"]
            plan = Plan(
                round=document["round"],
                revision=document["revision"],
                spec_digest=document["spec_digest"],
                method=Method(document["method"]["name"], {}),
                participants=tuple(
                    Participant(
                        p["key"], p["etag"], p["version_id"], p["weight"], tuple(Extent(*e) for e in p["extents"])
                    )
                    for p in document["participants"]
                ),
                rejected=tuple(LeftOut(*row) for row in document["rejected"]),
                surplus=tuple(LeftOut(*row) for row in document["surplus"]),
                excluded=tuple(LeftOut(*row) for row in document["excluded"]),
                layout=TensorLayout.from_json(document["layout"]),
                metadata=document["metadata"],
                output_key=output["key"],
                upload=output["upload"],
                header_length=output["header_length"],
                parts=tuple(PlannedPart(*row) for row in output["parts"]),
                shards=tuple((first, last) for first, last in document["shards"]),
                sizing=memory.Sizing(**document["sizing"]),
                uploads_lost=document["uploads_lost"],
            )
            if plan.digest != hashlib.sha256(body).hexdigest():
                raise ContractError("the stored plan has fields that this build does not know")
        except ContractError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ContractError(f"the stored plan cannot be read: {type(error).__name__}") from None
        return plan

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the stored bytes."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @property
    def total_weight(self) -> int:
        """What the weighted sum is divided by."""
        return sum(p.weight for p in self.participants)

    def shard_parts(self, shard: int) -> tuple[PlannedPart, ...]:
        """The parts of one shard, in order."""
        first, last = self.shards[shard]
        return self.parts[first - 1 : last]

    def part_bytes(self, part: PlannedPart) -> int:
        """Length of the uploaded body of a part."""
        return part.end - part.start + (self.header_length if part.number == 1 else 0)

    def header(self) -> bytes:
        """What the output begins with: made of the plan alone, so that anybody writes the same bytes."""
        return output_header(
            self.layout, self.metadata, f"{self.round}/{self.revision}/{self.digest}", self.total_weight
        )


def output_header(layout: TensorLayout, metadata: Mapping[str, str], tag: str, num_examples: int) -> bytes:
    """A safetensors header: 8 bytes of length, then JSON padded with spaces to a multiple of 8."""
    tensors: dict[str, Any] = {
        "__metadata__": {**metadata, PLAN_TAG: tag, OUTPUT_NUM_EXAMPLES: str(num_examples)},
    }
    for tensor in layout.tensors:
        tensors[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [tensor.start, tensor.end],
        }
    body = json.dumps(tensors, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def first_plan(
    spec: RoundSpec,
    uid: str,
    layout: TensorLayout,
    metadata: Mapping[str, str],
    participants: Sequence[Participant],
    rejected: Iterable[LeftOut],
    surplus: Iterable[LeftOut],
    upload: str,
) -> Plan:
    """The plan of revision 1. Raises RoundFailed when the functions cannot hold or finish it."""
    return _sized(
        Plan(
            round=uid,
            revision=1,
            spec_digest=spec.digest(),
            method=Method(spec.aggregation.method),
            participants=tuple(participants),
            rejected=tuple(rejected),
            surplus=tuple(surplus),
            excluded=(),
            layout=layout,
            metadata=metadata,
            output_key=spec.output.key,
            upload=upload,
            header_length=0,
            parts=(),
            shards=(),
            sizing=memory.Sizing(0, 0, 0),
            uploads_lost=0,
        ),
        spec,
    )


def next_plan(plan: Plan, spec: RoundSpec, drop: Sequence[LeftOut], upload: str) -> Plan:
    """Revision r+1: of plan r alone, without ``drop``; the layout and the metadata stay. Raises RoundFailed as first_plan does."""
    gone = {row.key for row in drop}
    return _sized(
        replace(
            plan,
            revision=plan.revision + 1,
            participants=tuple(p for p in plan.participants if p.key not in gone),
            excluded=plan.excluded + tuple(drop),
            upload=upload,
            uploads_lost=plan.uploads_lost + (not drop),
        ),
        spec,
    )


def _sized(plan: Plan, spec: RoundSpec) -> Plan:
    """Cut the data section into parts and the parts into shards, as the functions' memory and time allow."""
    function = spec.function
    tag = f"{plan.round}/{plan.revision}/{'0' * 64}"
    header_length = len(output_header(plan.layout, plan.metadata, tag, plan.total_weight))
    shards = function.shards or function.max_concurrency
    sizing = memory.choose(
        function.memory_mib,
        size=plan.layout.size,
        header_bytes=header_length,
        shards=shards,
        sources=len(plan.participants),
        timeout_seconds=function.timeout_seconds,
        task_bytes=_task_bytes(plan.participants, plan.layout.size, shards),
    )
    parts = cut(plan.layout.runs, plan.layout.size, header_length, sizing.part_bytes)
    return replace(plan, header_length=header_length, parts=parts, shards=deal(len(parts), shards), sizing=sizing)


def _task_bytes(participants: Sequence[Participant], size: int, shards: int) -> int:
    """An upper estimate of one unpacked task: its URLs, and the extents that one shard may meet."""
    extents = sum(2 + len(p.extents) // shards if len(p.extents) > 1 else 1 for p in participants)
    part_urls = 1 + size // shards // (5 << 20)
    needed = (len(participants) + part_urls) * URL_BYTES + extents * memory.EXTENT_BYTES
    if needed > MAX_TASK_BYTES:
        raise RoundFailed(
            "TaskTooLarge",
            f"one task would take {needed >> 20} MiB of {MAX_TASK_BYTES >> 20}: {len(participants)} updates with {extents} extents "
            f"and {part_urls} parts a shard; raise spec.function.shards, or let clients write their tensors in one order",
        )
    return needed


def cut(runs: Sequence[Run], size: int, header_length: int, part_bytes: int) -> tuple[PlannedPart, ...]:
    """Parts of about ``part_bytes`` whose borders fall on element starts, moved up where they do not: only the last may be smaller.

    The header counts in part 1; a header of over half a part enlarges it instead, so that part 1 never lacks data.
    """
    parts: list[PlannedPart] = []
    start, index = 0, 0
    while start < size or not parts:
        room = part_bytes - header_length if not parts and header_length * 2 <= part_bytes else part_bytes
        end = min(start + room, size)
        while index < len(runs) and runs[index].end <= end:
            index += 1
        if end < size and index < len(runs):
            run = runs[index]
            end += -(end - run.start) % DTYPES[run.dtype]
        parts.append(PlannedPart(len(parts) + 1, start, end))
        start = end
    return tuple(parts)


def deal(parts: int, shards: int) -> tuple[tuple[int, int], ...]:
    """Contiguous runs of parts for at most ``shards`` functions, as even as can be: ``(first, last)`` part numbers."""
    count = min(parts, shards)
    borders = [parts * i // count for i in range(count + 1)]
    return tuple((a + 1, b) for a, b in pairwise(borders))
