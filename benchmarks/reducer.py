"""Does the reducer reach its figures on this machine? Prints a table of ratios, each measured within this one run.

    python benchmarks/reducer.py [--quick] [--only NAME] [--json] [--directory DIR]

Everything runs against an embedded SeaweedFS whose data are removed at the end. What is compared is run in turns, and
the median of the ratios counts: a noisy neighbour hits both. Absolute numbers explain; they compare no machines.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from native import Native
from report import Figure, as_json, markdown, surroundings
from workload import MIB, OUTPUT_HEADER, Invocation, Update, Workload, slices

from gradsharding.embedded import EmbeddedStore
from gradsharding.rounds import memory
from gradsharding.rounds.memory import Sizing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

USUAL = Sizing(part_bytes=16 * MIB, range_bytes=8 * MIB, prefetch=4)
SMALL = Sizing(part_bytes=8 * MIB, range_bytes=4 * MIB, prefetch=4)
SHARD = 128 * MIB
CLIENTS = 20
"""As in the paper."""
DEEP = Sizing(part_bytes=8 * MIB, range_bytes=8 * MIB, prefetch=16)
"""A part that is one block can be uploaded while all of the next one is read."""
CAP_MIB = 128


class Scale(NamedTuple):
    """How much is done. ``repeats`` of what is a ratio of times; the throttled store is so slow that three suffice."""

    repeats: int
    throttled_repeats: int
    clients: int
    models: tuple[tuple[int, int], ...]
    """Bytes and clients for the memory figures."""
    disk_bytes: int


FULL = Scale(5, 3, CLIENTS, ((64 * MIB, 4), (512 * MIB, 4), (2048 * MIB, 4), (64 * MIB, 40)), 6 * 10**9)
QUICK = Scale(2, 1, CLIENTS, ((64 * MIB, 4), (256 * MIB, 4), (64 * MIB, 40)), 2 * 10**9)


class Bench(NamedTuple):
    """What a figure is measured with."""

    work: Workload
    native: Native
    scale: Scale
    connection_rate: float
    """Bytes per second of one connection to the throttled store."""


def rate(bench: Bench) -> Iterator[Figure]:
    """Read rate against the raw client, and CPU time."""
    objects = shards(bench, bench.scale.clients)
    # The raw client writes nothing. Many clients of one part each make the reducer's writing small beside its reading.
    many = [piece for update in objects for piece in slices(update, USUAL.part_bytes)]
    ranges = bench.work.ranges(many, USUAL)
    ours: list[Invocation] = []
    whole: list[Invocation] = []
    raw: list[float] = []
    for _ in turns("rate", bench.scale.repeats):
        raw.append(bench.native.read(ranges, USUAL.prefetch))
        ours.append(bench.work.reduce(many, USUAL))
        whole.append(bench.work.reduce(objects, USUAL))
    how = f"{len(many)} x 16 MiB, 8 MiB ranges, K=4"
    yield Figure(
        "read rate ÷ raw C client",
        statistics.median(our.rate / theirs for our, theirs in zip(ours, raw, strict=True)),
        "x",
        0.75,
        False,
        f"{how}; {mb(our.rate for our in ours)}, folding and writing included, against {mb(raw)}; {stages(ours)}",
    )
    yield Figure(
        "CPU seconds per GB read",
        statistics.median(our.cpu_per_gb for our in ours),
        " s",
        0.55,
        True,
        f"{how}; user and system time, interpreter start included",
    )
    how = f"{len(objects)} x 128 MiB: one byte is written for {len(objects)} read"
    yield Figure(
        "the same, writing more: rate ÷ raw C client",
        statistics.median(our.rate / theirs for our, theirs in zip(whole, raw, strict=True)),
        "x",
        None,
        False,
        f"{how}; {mb(our.rate for our in whole)}; {stages(whole)}",
    )
    yield Figure(
        "the same, writing more: CPU seconds per GB read",
        statistics.median(our.cpu_per_gb for our in whole),
        " s",
        0.55,
        True,
        how,
    )


def peak(bench: Bench) -> Iterator[Figure]:
    """Peak memory for known sizings and under a cap, and whether the planner knows it."""
    predictions = []
    for sizing, limit in ((USUAL, 115), (SMALL, 80)):
        rss = bench.work.reduce(shards(bench, 4), sizing).rss_bytes
        how = f"{sizing.range_bytes // MIB} MiB ranges, K={sizing.prefetch}, {sizing.part_bytes // MIB} MiB parts"
        yield Figure(f"peak memory at {how}", rss / 1e6, " MB", limit, True, "4 x 128 MiB F32, ru_maxrss")
        predictions.append(prediction(how, sizing, "F32", 4, rss))
    for dtype in ("F32", "BF16"):
        update = bench.work.upload(f"capped-{dtype}", SHARD, dtype)
        sizing = memory.choose(
            CAP_MIB, size=SHARD, header_bytes=len(OUTPUT_HEADER), shards=1, sources=4, timeout_seconds=300
        )
        results = bench.work.reduce_capped([update] * 4, sizing, CAP_MIB, runs=3)
        peaks = [result.peak_rss_bytes for result in results]
        how = f"{sizing.part_bytes / MIB:.1f} MiB parts, {sizing.range_bytes / MIB:.1f} MiB ranges, K={sizing.prefetch}"
        yield Figure(
            f"runs that succeed under a {CAP_MIB} MiB cap, {dtype}",
            len(results),
            " of 3",
            3,
            False,
            f"4 x 128 MiB; planned for the cap: {how}; "
            + ", ".join(f"{rss / MIB:.1f} MiB" for rss in peaks)
            + f"; enforced by {results[0].runtime.memory_cap if results else 'the kernel'}",
        )
        if peaks:
            predictions.append(prediction(f"{CAP_MIB} MiB cap, {dtype}", sizing, dtype, 4, max(peaks)))
    yield from predictions


def growth(bench: Bench) -> Iterator[Figure]:
    """That memory grows neither with the model nor with the number of clients."""
    seen: dict[str, int] = {}
    predictions = []
    for size, clients in bench.scale.models:
        update = bench.work.upload(f"model-{size}", size)
        name = f"{clients} x {size // MIB} MiB"
        seen[name] = bench.work.reduce([update] * clients, USUAL).rss_bytes
        predictions.append(prediction(name, USUAL, "F32", clients, seen[name]))
    yield Figure(
        "peak memory, largest - smallest over models and clients",
        (max(seen.values()) - min(seen.values())) / 1e6,
        " MB",
        5,
        True,
        ", ".join(f"{name}: {rss / 1e6:.1f} MB" for name, rss in seen.items()),
    )
    yield from predictions


def prediction(name: str, sizing: Sizing, dtype: str, clients: int, rss: int) -> Figure:
    """How far the planner's peak is from the measured one."""
    width = {"F32": 4, "BF16": 2}[dtype]
    expected = memory.predict_peak(sizing, header_bytes=len(OUTPUT_HEADER), sources=clients, width=width)
    return Figure(
        f"planner's prediction, {name}",
        abs(expected - rss) / rss * 100,
        " %",
        10,
        True,
        f"predicted {expected / 1e6:.1f} MB, measured {rss / 1e6:.1f} MB",
    )


def paper(bench: Bench) -> Iterator[Figure]:
    """Against the paper's way, on a store that is as fast as it can be."""
    updates = shards(bench, bench.scale.clients)
    ours: list[Invocation] = []
    theirs: list[Invocation] = []
    for _ in turns("paper", bench.scale.repeats):
        theirs.append(bench.work.paper(updates))
        ours.append(bench.work.reduce(updates, USUAL))
    pairs = list(zip(ours, theirs, strict=True))
    how = f"{bench.scale.clients} x 128 MiB shards"
    yield Figure(
        "rate ÷ the paper's way",
        statistics.median(our.rate / their.rate for our, their in pairs),
        "x",
        2,
        False,
        f"{how}, K=4; {mb(our.rate for our in ours)} against {mb(their.rate for their in theirs)}",
    )
    yield Figure(
        "memory ÷ the paper's way",
        statistics.median(our.rss_bytes / their.rss_bytes for our, their in pairs),
        "x",
        0.25,
        True,
        f"{how}; {ours[0].rss_bytes / 1e6:.0f} MB against {theirs[0].rss_bytes / 1e6:.0f} MB",
    )


def throttled(bench: Bench) -> Iterator[Figure]:
    """Against the paper's way, each connection limited in both directions, as cloud stores do."""
    updates = shards(bench, bench.scale.clients)
    where = urlsplit(bench.work.store["endpoint"])
    depths = {4: 4.0, 16: 12.0}
    ours: dict[int, list[Invocation]] = {depth: [] for depth in depths}
    raw: dict[int, list[float]] = {depth: [] for depth in depths}
    theirs: list[Invocation] = []
    with bench.native.throttled(where.hostname or "", where.port or 80, bench.connection_rate) as endpoint:
        work = bench.work.through(endpoint)
        for _ in turns("throttled", bench.scale.throttled_repeats):
            theirs.append(work.paper(updates))
            for depth in depths:
                sizing = replace(DEEP, prefetch=depth)
                raw[depth].append(bench.native.read(work.ranges(updates, sizing), depth))
                ours[depth].append(work.reduce(updates, sizing))
    for depth, target in depths.items():
        yield Figure(
            f"rate ÷ the paper's way, {bench.connection_rate / 1e6:.0f} MB/s per connection, K={depth}",
            statistics.median(our.rate / their.rate for our, their in zip(ours[depth], theirs, strict=True)),
            "x",
            target,
            False,
            f"{bench.scale.clients} x 128 MiB shards, parts and ranges of 8 MiB; {mb(our.rate for our in ours[depth])} against "
            f"{mb(their.rate for their in theirs)}; raw C client {mb(raw[depth])}; {stages(ours[depth])}",
        )


FIGURES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "rate": rate,
    "memory": peak,
    "growth": growth,
    "paper": paper,
    "throttled": throttled,
}


def shards(bench: Bench, clients: int) -> list[Update]:
    """So many sources of 128 MiB, on two objects in turns: who reads cannot tell, and the disk is spared."""
    objects = [bench.work.upload(f"shard-{i}.npy", SHARD) for i in range(2)]
    return [objects[i % 2] for i in range(clients)]


def turns(name: str, repeats: int) -> Iterator[int]:
    """Count the turns, and say so to whoever waits."""
    for turn in range(repeats):
        print(f"{name}: {turn + 1} of {repeats}", file=sys.stderr)
        yield turn


def mb(rates: Iterable[float]) -> str:
    """The median of rates in bytes per second."""
    return f"{statistics.median(rates) / 1e6:.0f} MB/s"


def stages(invocations: list[Invocation]) -> str:
    """Where the reducer's time went, in the last of the invocations."""
    last = invocations[-1]
    return ", ".join(f"{name} {seconds / last.seconds:.0%}" for name, seconds in last.stages.items())


def measure(native: Native, scale: Scale, rate: float, names: Iterable[str], directory: Path) -> list[Figure]:
    """The named figures, on a store in ``directory``: each in a bucket of its own, whose end gives its space back."""
    figures: list[Figure] = []
    with EmbeddedStore.start(directory) as store:
        keys = {"access_key": store.access_key, "secret_key": store.secret_key, "region": store.region}
        for name in names:
            bucket = f"bench-{name}"
            store.create_bucket(bucket)
            work = Workload.on({**keys, "endpoint": store.endpoint, "bucket": bucket})
            figures += FIGURES[name](Bench(work, native, scale, rate))
            store.remove_bucket(bucket)
    return figures


def main() -> int:
    """Print the figures; status 1 when one misses its target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer clients, turns and models")
    parser.add_argument(
        "--only", action="append", choices=FIGURES, metavar="NAME", help=f"one of {', '.join(FIGURES)}; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of Markdown")
    parser.add_argument(
        "--connection",
        type=float,
        default=60,
        metavar="MB/S",
        help="rate of one connection to the throttled store (60)",
    )
    parser.add_argument("--directory", type=Path, help="where the store keeps its data (default: a temporary folder)")
    options = parser.parse_args()
    scale = QUICK if options.quick else FULL
    where = surroundings()
    with Native() as native, tempfile.TemporaryDirectory(prefix="gradsharding-bench-", dir=options.directory) as folder:
        free = shutil.disk_usage(folder).free
        if free < scale.disk_bytes:
            parser.error(
                f"{folder} has {free / 1e9:.1f} GB free, the benchmark needs {scale.disk_bytes / 1e9:.0f} GB:"
                " name another place with --directory, or use --quick"
            )
        figures = measure(native, scale, options.connection * 1e6, options.only or FIGURES, Path(folder))
    print((as_json if options.json else markdown)(where, figures))
    return int(any(figure.passed is False for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
