"""Makes shards: updates in an object server, and the task that averages them."""

import hashlib
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from unit.reducer.reference import NUMPY, reference_mean

from gradsharding_reducer.task import (
    DTYPES,
    Extent,
    Header,
    Method,
    Part,
    ReduceTask,
    Run,
    Source,
    SourceObject,
    Tuning,
)  # fmt: skip


@dataclass
class Shard:
    task: ReduceTask
    expected: bytes
    header: bytes
    updates: list = field(default_factory=list)
    """The data sections as uploaded, in canonical order."""

    def part_body(self, number):
        part = self.task.parts[number - self.task.parts[0].number]
        return (self.header if part.number == 1 else b"") + self.expected[part.start : part.end]


def values(rng, dtype, count):
    if dtype == "BOOL":
        return np.resize(np.array([1, 0, 1], np.uint8), count)
    kind = NUMPY[dtype]
    if dtype[0] in "IU":
        limit = min(np.iinfo(kind).max, 2**53)
        return rng.integers(0 if dtype[0] == "U" else -limit, limit, count, endpoint=True).astype(kind)
    return (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 3, count)).astype(kind)


def make_shard(
    server,
    tensors,
    weights,
    part_bytes,
    range_bytes=65536,
    prefetch=3,
    budget=600.0,
    seed=0,
    header=b"{}      ",
    orders=None,
):
    """``tensors`` is a list of (dtype, elements) in canonical order; ``orders`` gives each source its own."""
    rng = np.random.default_rng(seed)
    updates = [[values(rng, dtype, count) for dtype, count in tensors] for _ in weights]
    means = [reference_mean([update[i] for update in updates], weights, dtype) for i, (dtype, _) in enumerate(tensors)]
    runs, at = [], 0
    for dtype, count in tensors:
        end = at + count * DTYPES[dtype]
        if runs and runs[-1].dtype == dtype:
            runs[-1] = runs[-1]._replace(end=end)
        else:
            runs.append(Run(dtype, at, end))
        at = end
    sources = []
    for i, update in enumerate(updates):
        order = orders[i] if orders else range(len(tensors))
        front = bytes(8 + i)  # headers of different length
        offsets, body = {}, front
        for t in order:
            offsets[t] = len(body)
            body += update[t].tobytes()
        extents, start = [], 0
        for t, array in enumerate(update):
            extents.append(Extent(start, array.nbytes, 0, offsets[t]))
            start += array.nbytes
        etag = server.put(f"update-{i}", body)
        sources.append(Source("update", weights[i], (SourceObject(server.url(f"update-{i}"), etag),), tuple(extents)))
    parts = tuple(
        Part(0, n + 1, start, end, server.url(f"part-{n + 1}"))
        for n, (start, end) in enumerate(cut(runs, at, part_bytes))
    )
    server.put("header", header)
    task = ReduceTask(
        round="uid", revision=1, shard=0, plan="00" * 32, method=Method("FedAvg"), sources=tuple(sources),
        runs=tuple(runs), parts=parts,
        header=Header(server.url("header"), len(header), hashlib.sha256(header).hexdigest()),
        record_url=server.url("record"), budget_seconds=budget, tuning=Tuning(range_bytes, prefetch),
    )  # fmt: skip
    expected = b"".join(mean.tobytes() for mean in means)
    return Shard(task, expected, header, [b"".join(a.tobytes() for a in update) for update in updates])


def cut(runs, size, part_bytes):
    """Borders at multiples of ``part_bytes``, moved up to the next element start."""
    borders = [0]
    for wanted in range(part_bytes, size, part_bytes):
        run = next(run for run in runs if run.start <= wanted < run.end)
        width = DTYPES[run.dtype]
        borders.append(run.start + -(-(wanted - run.start) // width) * width)
    return list(pairwise([*borders, size] if borders[-1] < size or size == 0 else borders))
