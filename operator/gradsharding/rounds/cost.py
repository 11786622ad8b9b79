"""What a round on AWS Lambda takes in time and money, before it runs and after. Pure.

One shard is modelled as the reducer works (``reduce.py``)::

    rate    = min(FUNCTION_RATE, prefetch * range / (REQUEST_SECONDS + range / CONNECTION_RATE))
    read    = max(bytes / rate, processor seconds / share)            prefetching, folding and hashing overlap
    upload  = REQUEST_SECONDS + part / CONNECTION_RATE + part * CPU_TO_WRITE / share                 of one part
    stall   = max(0, upload - read / blocks)         a part leaves while the first block of the next one is read
    billed  = read + (parts - calls) * stall + calls * (START_SECONDS + upload + REQUEST_SECONDS)

with ``share = memory / 1769 MB`` of a processor, at most one. Of each call the last part is uploaded, and then the record
is, when there is nothing left to read. What a function sends is not taken from what it receives. A round takes ``waves``
of such shards, the slowest of each wave, and the operator's own requests. Money counts the full trip of a round: the
clients' uploads, the reducers, the operator, the readers' downloads. Not in it: what leaves AWS ($0.09 a GB where clients
are outside), storage, logs, the operator's own machine, taxes, free tiers.

Every assumption is a constant of this file and has its source beside it; ``docs/cost.md`` holds them against the
measurements of arXiv 2604.22072. Sizes are bytes and times are seconds unless a name says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from statistics import NormalDist
from typing import Any, Literal

from gradsharding.rounds import memory

Arch = Literal["x86_64", "arm64"]


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars, in us-east-1, without free tiers; the x86 and S3 ones reproduce the paper's bill of that date to 0.3 %.

    ``gb_second_*`` of 1024 MB; requests each; ``puts`` are the PUT class: PUT, POST, LIST. DELETE is free."""

    date: str
    source: str
    gb_second_x86: float
    gb_second_arm: float
    invocation: float
    get: float
    put: float

    def gb_second(self, arch: Arch) -> float:
        """What one GB-second costs."""
        return self.gb_second_arm if arch == "arm64" else self.gb_second_x86


PRICES = Prices(
    date="2026-04",
    source="https://aws.amazon.com/lambda/pricing/ and https://aws.amazon.com/s3/pricing/, us-east-1, first tier",
    gb_second_x86=0.0000166667,
    gb_second_arm=0.0000133334,
    invocation=0.20 / 1e6,
    get=0.0004 / 1e3,
    put=0.005 / 1e3,
)

FUNCTION_RATE = 75e6
"""Bytes per second that a function gets, whatever its memory; bursts of the first 300 MB are left out (AWS, observed)."""

CONNECTION_RATE = 60e6
"""Of one S3 connection: 60-90 MB/s were measured, the lower end is taken. The paper's one-connection reads fit 56."""

REQUEST_SECONDS = 0.074
"""From a request to its first byte within a region: fitted to the paper's table, see ``docs/cost.md``."""

START_SECONDS = 0.5
"""A cold start of Python and numpy; AWS: "under 100 ms to over 1 s". Billed, since August 2025 for zip packages too.
Every call is taken for a cold one."""

MB_PER_PROCESSOR = 1769
"""AWS: one vCPU at 1,769 MB, in proportion below. More than one is not counted: the fold has one thread."""

CPU_TO_READ = (0.37 + 0.20 + 0.15) / 1e9
"""Processor seconds a byte: http.client into a buffer 0.37 a GB, AES-GCM at 5 GB/s 0.20, float64 fold 0.15 (measured)."""

CPU_TO_WRITE = (1.1 + 0.5) / 1e9
"""Processor seconds a byte of output: MD5 at 0.9 GB/s and SHA-256 at 2.1 GB/s (measured). Beside the fold, but for the
last part of a call."""

SPREAD = 0.058
"""Standard deviation of a call's time over its mean, for the slowest of many: fitted to the paper's table."""

TIMEOUT_MARGIN = 5
"""Seconds that the reducer keeps for its record and answer. A shard that takes longer goes on in another call."""

OPERATOR_GETS, GETS_PER_CLIENT, GETS_PER_SHARD = 18, 2, 3
"""GET and HEAD requests of the operator; counted on a round without faults, and held by a test."""

OPERATOR_PUTS, LISTS_PER_SHARD, RECORDS_PER_CALL = 13, 1, 1
"""PUT, POST and LIST requests of operator and reducers beside the parts; counted likewise."""

UPLOAD_LIMIT = 5 << 30
"""Of one PUT, in S3. A client's update above it goes up in parts of UPLOAD_PART."""

UPLOAD_PART = 64 << 20

_CAP = re.compile(r"Lambda, ([0-9]{1,6}) MB")
"""What the Lambda platform writes as an attempt's ``memory_cap``."""

_NOT_RUN = {"Throttled", "Unreachable"}


@dataclass(frozen=True, slots=True)
class Work:
    """What a round has to do: ``sources`` updates of one model, whose output has ``size`` bytes of data and a header.

    ``readers`` download the output with one GET each; None: every client does.
    """

    size: int
    header_bytes: int
    sources: int
    timeout_seconds: int = 900
    readers: int | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A round with functions of ``memory_mib``. ``seconds`` is its wall time from the start of planning to the manifest,
    ``billed_seconds`` the sum over all calls, ``gets`` and ``puts`` are requests to S3; ``usd_*`` are dollars."""

    memory_mib: int
    shards: int
    sizing: memory.Sizing
    seconds: float
    billed_seconds: float
    calls: int
    gets: int
    puts: int
    usd_functions: float
    usd_store: float

    @property
    def usd(self) -> float:
        """Of the full trip."""
        return self.usd_functions + self.usd_store


@dataclass(frozen=True, slots=True)
class ShardTime:
    """Of one shard: ``seconds`` over all its ``calls``."""

    seconds: float
    calls: int


def estimate(
    work: Work, memory_mib: int, shards: int, concurrency: int, arch: Arch = "x86_64", prices: Prices = PRICES
) -> Estimate:
    """Time and cost of ``work`` on at most ``shards`` functions, ``concurrency`` of them at once.

    Raises RoundFailed as ``memory.choose`` does, when it does not fit the memory or the timeout.
    """
    sizing = memory.choose(
        memory_mib,
        size=work.size,
        header_bytes=work.header_bytes,
        shards=shards,
        sources=work.sources,
        timeout_seconds=work.timeout_seconds,
    )
    loads = list(_deal(work.size + work.header_bytes, sizing.part_bytes, shards))
    times = [shard_time(work, sizing, memory_mib, *load) for load in loads]
    calls = sum(time.calls for time in times)
    parts = sum(count for count, _ in loads)
    reads = parts * ceil(min(sizing.part_bytes, work.size) / sizing.range_bytes)
    readers = work.sources if work.readers is None else work.readers
    gets = (
        OPERATOR_GETS
        + GETS_PER_CLIENT * work.sources
        + GETS_PER_SHARD * len(loads)
        + reads * work.sources
        + 1
        + readers
    )
    puts = (
        OPERATOR_PUTS
        + LISTS_PER_SHARD * len(loads)
        + parts
        + RECORDS_PER_CALL * calls
        + work.sources * upload_puts(work)
    )
    billed = sum(time.seconds for time in times)
    at_once = min(len(loads), concurrency)
    return Estimate(
        memory_mib=memory_mib,
        shards=len(loads),
        sizing=sizing,
        seconds=REQUEST_SECONDS * (OPERATOR_GETS + OPERATOR_PUTS)
        + ceil(len(loads) / concurrency) * max(time.seconds for time in times) * straggling(at_once),
        billed_seconds=billed,
        calls=calls,
        gets=gets,
        puts=puts,
        usd_functions=function_usd(billed * memory_mib / 1024, calls, arch, prices),
        usd_store=gets * prices.get + puts * prices.put,
    )


def shard_time(work: Work, sizing: memory.Sizing, memory_mib: int, parts: int, output_bytes: int) -> ShardTime:
    """How long one shard of ``parts`` parts and ``output_bytes`` of the output takes."""
    share = processor_share(memory_mib)
    read_bytes = work.sources * output_bytes
    one = sizing.range_bytes / (REQUEST_SECONDS + sizing.range_bytes / CONNECTION_RATE)
    rate = min(FUNCTION_RATE, sizing.prefetch * one)
    part_bytes = output_bytes / parts
    hashed_meanwhile = output_bytes - part_bytes
    read = max(read_bytes / rate, (read_bytes * CPU_TO_READ + hashed_meanwhile * CPU_TO_WRITE) / share)
    block = read / (parts * max(1, ceil(part_bytes / sizing.range_bytes)))
    upload = REQUEST_SECONDS + part_bytes / CONNECTION_RATE + part_bytes * CPU_TO_WRITE / share
    busy = read + parts * max(0.0, upload - block)
    around = START_SECONDS + min(upload, block) + REQUEST_SECONDS  # of the last part the rest is in `busy`
    calls = ceil(busy / max(1.0, work.timeout_seconds - TIMEOUT_MARGIN - around))
    return ShardTime(calls * around + busy, calls)


def processor_share(memory_mb: float) -> float:
    """Of one processor, at most one: what a thread of the function gets."""
    return min(1.0, memory_mb / MB_PER_PROCESSOR)


def straggling(calls: int, spread: float = SPREAD) -> float:
    """How much longer than the mean the slowest of ``calls`` at once takes.

    ``1 + spread * E[largest of n standard normals]``, by Blom's approximation (Statistical Estimates and Transformed
    Beta-Variables, 1958): ``E = quantile((n - 0.375) / (n + 0.25))``.
    """
    return 1 + spread * NormalDist().inv_cdf((calls - 0.375) / (calls + 0.25)) if calls > 1 else 1.0


def upload_puts(work: Work) -> int:
    """PUT-class requests of one client's upload: one, or the parts and two around them."""
    total = work.size + work.header_bytes
    return 1 if total <= UPLOAD_LIMIT else ceil(total / UPLOAD_PART) + 2


def function_usd(gb_seconds: float, calls: int, arch: Arch = "x86_64", prices: Prices = PRICES) -> float:
    """What Lambda bills."""
    return gb_seconds * prices.gb_second(arch) + calls * prices.invocation


def measured_cost(document: Mapping[str, Any], prices: Prices = PRICES) -> dict[str, Any] | None:
    """What a round has cost, by the attempts of its manifest or Failed outcome; None when none ran on Lambda.

    The time is that of Lambda's REPORT line, ``billed_ms``, or, where an attempt has none, from its start to its end;
    ``estimated_calls`` counts these. Requests to S3 are counted from what was read and written, with this file's
    constants for clients, readers and operator. Taken for x86; ``usd_arm64`` is the same on arm.
    """
    # Of an attempt that only its record tells, the platform is not known: a round has one.
    ran = [a for a in document["attempts"] if a["platform"] in ("lambda", "") and a["outcome"] not in _NOT_RUN]
    caps = [int(found[1]) for a in ran if (found := _CAP.fullmatch(a["memory_cap"]))]
    if not caps:
        return None
    seconds = sum(a.get("billed_ms", 0) / 1e3 or max(0.0, a["finished"] - a["started"]) for a in ran)
    gb_seconds = seconds * max(caps) / 1024  # one function, one size; a call that failed does not say it
    plan = document.get("plan") or {}
    clients, shards = len(document["participants"]), len(plan.get("shards", ()))
    gets = OPERATOR_GETS + GETS_PER_CLIENT * clients + GETS_PER_SHARD * shards + clients
    gets += sum(
        ceil(a["bytes_read"] / (a["range_bytes"] or plan["range_bytes"])) + a["retries"] + (a["first_part"] == 1)
        for a in ran
    )
    written = sum(a["last_part"] - a["first_part"] + 1 for a in ran if a["bytes_written"])
    puts = OPERATOR_PUTS + LISTS_PER_SHARD * shards + clients + written + RECORDS_PER_CALL * len(ran)
    store = gets * prices.get + puts * prices.put
    usd = {arch: function_usd(gb_seconds, len(ran), arch, prices) + store for arch in ("x86_64", "arm64")}
    return {
        "memory_mb": max(caps),
        "billed_seconds": round(seconds, 3),
        "gb_seconds": round(gb_seconds, 6),
        "calls": len(ran),
        "estimated_calls": sum(not a.get("billed_ms", 0) for a in ran),
        "gets": gets,
        "puts": puts,
        "usd_x86_64": round(usd["x86_64"], 9),
        "usd_arm64": round(usd["arm64"], 9),
        "prices": prices.date,
    }


def _deal(total: int, part_bytes: int, shards: int) -> Iterator[tuple[int, int]]:
    """Parts and bytes of each shard, as ``plan.cut`` and ``plan.deal`` cut them, but for element borders."""
    parts = max(1, ceil(total / part_bytes))
    count = min(parts, shards)
    for i in range(count):
        first, last = parts * i // count, parts * (i + 1) // count
        yield last - first, min(total, last * part_bytes) - first * part_bytes
