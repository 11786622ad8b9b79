"""The contract between a round and a reducer: what one invocation is asked, and what it answers.

Both travel as JSON. A reader refuses a version, method or role it does not know, since guessing would change bits.
All offsets and lengths are bytes. *Canonical* offsets count from the start of the output's data section; an extent's
``offset`` counts from the start of the source object, header included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from gradsharding_reducer.document import VERSION, ContractError, Reader, canonical_json

__all__ = [
    "DTYPES", "MAX_WEIGHT", "METHODS", "ROLES", "VERSION", "BadKind", "BadValue", "ContractError", "Extent", "Fault", "FaultKind",
    "Header", "Method", "Outcome", "Part", "PartResult", "ReduceResult", "ReduceTask", "Refusal", "Run", "Runtime", "Source",
    "SourceObject", "Tuning", "UrlKind", "canonical_json",
]  # fmt: skip

DTYPES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1,
    "BOOL": 1,
}  # fmt: skip
"""Supported element types, by their safetensors name, and their width in bytes."""

METHODS = frozenset({"FedAvg"})
"""``FedAvg`` takes no parameters: the weighted mean; a uniform mean is FedAvg with weights of 1."""

ROLES = frozenset({"update"})

MAX_WEIGHT = 2**53


class Outcome(StrEnum):
    """How an invocation that answered ended."""

    DONE = "Done"
    """All parts of the task are uploaded."""
    PARTIAL = "Partial"
    """Some parts are answered; the time budget does not suffice for the next one."""
    BAD_VALUES = "BadValues"
    """All parts were read; ``bad`` or ``faults`` is not empty, so nothing may be completed with this answer."""
    SOURCE_GONE = "SourceGone"
    """A source object is missing (404) or is another one than pinned (412)."""
    DENIED = "Denied"
    """The store refused a URL (403), or its origin is not among the allowed ones (code ``OriginNotAllowed``)."""
    CANCELLED = "Cancelled"
    """The upload is gone, or the caller hung up, or the process was told to stop."""


class UrlKind(StrEnum):
    """What a URL of a task is for."""

    SOURCE = "source"
    HEADER = "header"
    PART = "part"
    RECORD = "record"


class BadKind(StrEnum):
    """Why a source's value cannot be averaged."""

    NON_FINITE = "NonFinite"
    OUT_OF_RANGE = "OutOfRange"
    """An integer beyond ±2^53, which float64 cannot hold exactly."""
    NOT_BOOL = "NotBool"
    """A BOOL byte other than 0 or 1."""


class FaultKind(StrEnum):
    """What is wrong with valid values taken together; no single source is to blame."""

    BOOL_DISAGREES = "BoolDisagrees"
    OVERFLOW = "Overflow"


@dataclass(frozen=True, slots=True)
class Method:
    """The aggregation method and its parameters."""

    name: str
    parameters: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceObject:
    """One object of a source: a presigned GET URL, and the ETag (quotes included as the store gave it, or bare)."""

    url: str
    etag: str


class Extent(NamedTuple):
    """``length`` bytes of the canonical data section from ``start`` on lie in object ``object`` of the source at ``offset``."""

    start: int
    length: int
    object: int
    offset: int


@dataclass(frozen=True, slots=True)
class Source:
    """One participant. Its extents are sorted by ``start`` and cover the byte range of all parts of the task."""

    role: str
    weight: int
    objects: tuple[SourceObject, ...]
    extents: tuple[Extent, ...]


class Run(NamedTuple):
    """Canonical bytes ``[start, end)`` hold elements of one dtype, counted from ``start``."""

    dtype: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Part:
    """Part ``number`` (from 1) of output ``output``: canonical bytes ``[start, end)``, to be PUT to ``url``."""

    output: int
    number: int
    start: int
    end: int
    url: str


@dataclass(frozen=True, slots=True)
class Header:
    """The bytes that part 1 begins with; ``sha256`` in hex."""

    url: str
    length: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Tuning:
    """How to read: blocks of at most ``range_bytes``, ``prefetch`` of them in flight."""

    range_bytes: int
    prefetch: int


@dataclass(frozen=True, slots=True)
class ReduceTask:
    """One invocation: contiguous parts of one shard, folded over all sources in the order given.

    ``plan`` is the SHA-256 (hex) of the plan, ``round`` its uid. ``runs`` cover ``[parts[0].start, parts[-1].end)``
    and may reach beyond. ``header`` is there when part 1 is. ``budget_seconds`` counts from the start of the invocation.
    """

    round: str
    revision: int
    shard: int
    plan: str
    method: Method
    sources: tuple[Source, ...]
    runs: tuple[Run, ...]
    parts: tuple[Part, ...]
    header: Header | None
    record_url: str
    budget_seconds: float
    tuning: Tuning

    def to_json(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces, ASCII."""
        return canonical_json({"version": VERSION, **asdict(self)})

    @staticmethod
    def from_json(document: bytes | str) -> ReduceTask:
        """Read a task. Raises ContractError, which names the field."""
        return _task(Reader.of(document, "task"))


@dataclass(frozen=True, slots=True)
class PartResult:
    """An answered part. ``etag`` and ``sha256`` (hex, of the whole part body) are None when bad values kept it from being uploaded."""

    output: int
    number: int
    bytes: int
    etag: str | None
    sha256: str | None


@dataclass(frozen=True, slots=True)
class BadValue:
    """The first value of source number ``source`` that cannot be averaged, at canonical byte ``offset``."""

    source: int
    offset: int
    kind: BadKind


@dataclass(frozen=True, slots=True)
class Fault:
    """The first disagreement or overflow of this kind, at canonical byte ``offset``."""

    kind: FaultKind
    offset: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why SourceGone, Denied or Cancelled: which kind of URL, which source, the HTTP status, the store's error code."""

    url: UrlKind | None
    source: int | None
    status: int | None
    code: str


@dataclass(frozen=True, slots=True)
class Runtime:
    """Where it ran. Filled in by the platform, since a function does not know: how its memory is capped, the platform's own id,
    and the milliseconds that it bills, 0 where it bills none."""

    platform: str = ""
    request_id: str = ""
    memory_cap: str = ""
    billed_ms: int = 0


@dataclass(frozen=True, slots=True)
class ReduceResult:
    """The answer, and the record of it in the store.

    ``parts`` are the answered parts, a prefix of the task's. ``started`` and ``finished`` are Unix seconds. ``seconds`` holds
    the stages: ``read`` (waiting for ranges), ``fold``, ``write`` (waiting for uploads). ``retries`` counts repeated HTTP requests.
    """

    round: str
    revision: int
    shard: int
    plan: str
    outcome: Outcome
    parts: tuple[PartResult, ...] = ()
    bad: tuple[BadValue, ...] = ()
    faults: tuple[Fault, ...] = ()
    refusal: Refusal | None = None
    bytes_read: int = 0
    bytes_written: int = 0
    retries: int = 0
    started: float = 0.0
    finished: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    peak_rss_bytes: int = 0
    reducer: str = ""
    runtime: Runtime = field(default_factory=Runtime)

    def to_json(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces, ASCII."""
        return canonical_json({"version": VERSION, **asdict(self)})

    @staticmethod
    def from_json(document: bytes | str) -> ReduceResult:
        """Read a result. Raises ContractError, which names the field."""
        return _result(Reader.of(document, "result"))


def _task(reader: Reader) -> ReduceTask:
    method_reader = reader.object("method")
    method = Method(method_reader.string("name"), method_reader.mapping("parameters", (int, str)))
    method_reader.end()
    if method.name not in METHODS:
        raise method_reader.fail(f".name is {method.name!r:.80}; this reducer knows {', '.join(sorted(METHODS))}")
    if method.parameters:
        raise method_reader.fail(f".parameters: {method.name} takes none")
    tuning_reader = reader.object("tuning")
    tuning = Tuning(tuning_reader.integer("range_bytes", 4096), tuning_reader.integer("prefetch", 1, 256))
    tuning_reader.end()
    header = None
    header_reader = reader.optional("header", "object")
    if header_reader is not None:
        header = Header(header_reader.string("url"), header_reader.integer("length", 0), header_reader.string("sha256"))
        header_reader.end()
    task = ReduceTask(
        round=reader.string("round"),
        revision=reader.integer("revision", 1),
        shard=reader.integer("shard", 0),
        plan=reader.string("plan"),
        method=method,
        sources=tuple(_source(r) for r in reader.objects("sources")),
        runs=tuple(Run(*row) for row in reader.tuples("runs", str, int, int)),
        parts=tuple(_part(r) for r in reader.objects("parts")),
        header=header,
        record_url=reader.string("record_url"),
        budget_seconds=reader.number("budget_seconds"),
        tuning=tuning,
    )
    reader.end()
    _check_task(task, reader)
    return task


def _source(reader: Reader) -> Source:
    objects = []
    for r in reader.objects("objects"):
        objects.append(SourceObject(r.string("url"), r.string("etag")))
        r.end()
    source = Source(
        role=reader.string("role"),
        weight=reader.integer("weight", 1, MAX_WEIGHT),
        objects=tuple(objects),
        extents=tuple(Extent(*row) for row in reader.tuples("extents", int, int, int, int)),
    )
    reader.end()
    if source.role not in ROLES:
        raise reader.fail(f".role is {source.role!r:.80}; this reducer knows {', '.join(sorted(ROLES))}")
    if any(extent.object >= len(objects) for extent in source.extents):
        raise reader.fail(".extents name an object that is not listed")
    return source


def _part(reader: Reader) -> Part:
    part = Part(
        output=reader.integer("output", 0, 0),
        number=reader.integer("number", 1, 10_000),
        start=reader.integer("start", 0),
        end=reader.integer("end", 0),
        url=reader.string("url"),
    )
    reader.end()
    return part


def _check_task(task: ReduceTask, reader: Reader) -> None:
    """What the fields must be to each other, so that a fold can trust them."""
    if not task.sources:
        raise reader.fail(".sources is empty")
    if not task.parts:
        raise reader.fail(".parts is empty")
    if (task.parts[0].number == 1) != (task.header is not None):
        raise reader.fail(".header belongs to part 1, and to no other")
    for a, b in pairwise(task.parts):
        if b.number != a.number + 1 or b.start != a.end:
            raise reader.fail(f".parts: part {b.number} does not follow part {a.number}")
    start, end = task.parts[0].start, task.parts[-1].end
    if any(part.end < part.start for part in task.parts):
        raise reader.fail(".parts end before they start")
    _check_cover("runs", [(run.start, run.end) for run in task.runs], start, end, reader)
    for run in task.runs:
        if run.dtype not in DTYPES:
            raise reader.fail(f".runs: dtype {run.dtype!r:.80} is not supported")
        width = DTYPES[run.dtype]
        if (run.end - run.start) % width:
            raise reader.fail(f".runs: the run at {run.start} is not a whole number of {run.dtype}")
        for part in task.parts:
            for border in (part.start, part.end):
                if run.start < border < run.end and (border - run.start) % width:
                    raise reader.fail(f".parts: part {part.number} cuts an element of {run.dtype} at {border}")
    for i, source in enumerate(task.sources):
        _check_cover(
            f"sources[{i}].extents", [(e.start, e.start + e.length) for e in source.extents], start, end, reader
        )


def _check_cover(name: str, ranges: list[tuple[int, int]], start: int, end: int, reader: Reader) -> None:
    if start == end:
        return
    for (_, a_end), (b_start, _) in pairwise(ranges):
        if a_end != b_start:
            raise reader.fail(f".{name} have a gap or overlap at {b_start}")
    if not ranges or ranges[0][0] > start or ranges[-1][1] < end:
        raise reader.fail(f".{name} do not cover bytes {start} to {end}")


def _result(reader: Reader) -> ReduceResult:
    parts = []
    for r in reader.objects("parts"):
        parts.append(
            PartResult(
                r.integer("output", 0), r.integer("number", 1), r.integer("bytes", 0),
                r.optional("etag", "string"), r.optional("sha256", "string"),
            )
        )  # fmt: skip
        r.end()
    bad = []
    for r in reader.objects("bad"):
        bad.append(BadValue(r.integer("source", 0), r.integer("offset", 0), r.choice("kind", BadKind)))
        r.end()
    faults = []
    for r in reader.objects("faults"):
        faults.append(Fault(r.choice("kind", FaultKind), r.integer("offset", 0)))
        r.end()
    refusal = None
    refused = reader.optional("refusal", "object")
    if refused is not None:
        refusal = Refusal(
            refused.optional("url", "choice", UrlKind), refused.optional("source", "integer", 0),
            refused.optional("status", "integer", 100, 599), refused.string("code"),
        )  # fmt: skip
        refused.end()
    where = reader.object("runtime")
    runtime = Runtime(
        where.string("platform"), where.string("request_id"), where.string("memory_cap"), where.integer("billed_ms", 0)
    )
    where.end()
    result = ReduceResult(
        round=reader.string("round"),
        revision=reader.integer("revision", 1),
        shard=reader.integer("shard", 0),
        plan=reader.string("plan"),
        outcome=reader.choice("outcome", Outcome),
        parts=tuple(parts),
        bad=tuple(bad),
        faults=tuple(faults),
        refusal=refusal,
        bytes_read=reader.integer("bytes_read", 0),
        bytes_written=reader.integer("bytes_written", 0),
        retries=reader.integer("retries", 0),
        started=reader.number("started"),
        finished=reader.number("finished"),
        seconds=reader.mapping("seconds", (int, float)),
        peak_rss_bytes=reader.integer("peak_rss_bytes", 0),
        reducer=reader.string("reducer"),
        runtime=runtime,
    )
    reader.end()
    return result
