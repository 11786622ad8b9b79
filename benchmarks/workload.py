"""What the benchmarks work on: updates in a store, tasks over them, and functions run in processes of their own.

An update here is a flat ``.npy``: the reducer is told where the data begin, and the paper's way reads the same object.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import itertools
import json
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import measured
import numpy as np
import urllib3
from native import RangeJob

from gradsharding.credentials import static
from gradsharding.platforms import FunctionSpec, OutOfMemory
from gradsharding.platforms.local import LocalPlatform
from gradsharding.rounds.plan import cut
from gradsharding.s3 import S3Bucket
from gradsharding.store import Completion
from gradsharding_reducer.blocks import blocks
from gradsharding_reducer.task import (
    DTYPES,
    Extent,
    Header,
    Method,
    Outcome,
    Part,
    ReduceResult,
    ReduceTask,
    Run,
    Source,
    SourceObject,
    Tuning,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gradsharding.rounds.memory import Sizing

MIB = 1 << 20
OUTPUT_HEADER = b"{}".ljust(1024)
"""The output is never completed, so that its header need not be true, only as long as one."""

_OUTPUT_KEY = "output"
_UPLOAD_PART = 16 * MIB
_LIFETIME = timedelta(hours=6)


class Update(NamedTuple):
    """One object: ``size`` bytes of elements from ``offset`` on."""

    key: str
    etag: str
    dtype: str
    size: int
    offset: int


def slices(update: Update, size: int) -> list[Update]:
    """The update cut into updates of ``size`` bytes each, all in the same object."""
    return [update._replace(offset=update.offset + at, size=size) for at in range(0, update.size, size)]


class Invocation(NamedTuple):
    """What one function cost. Only ``seconds`` leaves out the interpreter's start."""

    bytes_read: int
    seconds: float
    cpu_seconds: float
    rss_bytes: int
    stages: Mapping[str, float]

    @property
    def rate(self) -> float:
        """Bytes read per second of the whole invocation, with folding and writing."""
        return self.bytes_read / self.seconds

    @property
    def cpu_per_gb(self) -> float:
        """CPU seconds per 10^9 bytes read."""
        return self.cpu_seconds / self.bytes_read * 1e9


@dataclass(frozen=True)
class Workload:
    """What happens on one bucket of a store ``{endpoint, access_key, secret_key, region, bucket}``."""

    store: Mapping[str, str]
    bucket: S3Bucket

    @staticmethod
    def on(store: Mapping[str, str]) -> Workload:
        keys = static(store["access_key"], store["secret_key"])
        return Workload(store, S3Bucket.connect(store["endpoint"], store["bucket"], store["region"], keys))

    def through(self, endpoint: str) -> Workload:
        """The same bucket behind a proxy."""
        return Workload.on({**self.store, "endpoint": endpoint})

    def upload(self, key: str, size: int, dtype: str = "F32") -> Update:
        """Write an update of ``size`` bytes of finite values, in place of an older one."""
        self.bucket.delete([key])
        header = io.BytesIO()
        element = {"F32": "<f4", "BF16": "<u2"}[dtype]
        shape = (size // DTYPES[dtype],)
        np.lib.format.write_array_header_1_0(header, {"descr": element, "fortran_order": False, "shape": shape})
        upload = self.bucket.create_upload(key)
        etags = {}
        with urllib3.PoolManager() as pool:
            for number, body in enumerate(_bodies(header.getvalue(), size, dtype), start=1):
                answer = pool.request("PUT", self.bucket.presign_part(key, upload, number, _LIFETIME), body=body)
                if answer.status != 200:
                    raise SystemExit(f"The store refused part {number} of an update with status {answer.status}.")
                etags[number] = answer.headers["ETag"].strip('"')
        done = self.bucket.complete_upload(key, upload, etags)
        info = self.bucket.stat(key)
        if done is not Completion.COMPLETED or info is None:
            raise SystemExit("The store did not complete the upload of an update.")
        return Update(key, info.etag, dtype, size, len(header.getvalue()))

    def task(self, updates: Sequence[Update], sizing: Sizing, upload: str) -> ReduceTask:
        """One function that averages whole updates; its parts go to ``upload``."""
        self.bucket.put("header", OUTPUT_HEADER)
        size = updates[0].size
        runs = (Run(updates[0].dtype, 0, size),)
        parts = cut(runs, size, len(OUTPUT_HEADER), sizing.part_bytes)
        presign = self.bucket.presign_part
        return ReduceTask(
            round="benchmark",
            revision=1,
            shard=0,
            plan="0" * 64,
            method=Method("FedAvg"),
            sources=tuple(self._source(update, 1 + i) for i, update in enumerate(updates)),
            runs=runs,
            parts=tuple(
                Part(0, p.number, p.start, p.end, presign(_OUTPUT_KEY, upload, p.number, _LIFETIME)) for p in parts
            ),
            header=Header(
                self.bucket.presign_get("header", None, _LIFETIME),
                len(OUTPUT_HEADER),
                hashlib.sha256(OUTPUT_HEADER).hexdigest(),
            ),
            record_url=self.bucket.presign_put("record.json", _LIFETIME),
            budget_seconds=3600.0,
            tuning=Tuning(sizing.range_bytes, sizing.prefetch),
        )

    def _source(self, update: Update, weight: int) -> Source:
        target = SourceObject(self.bucket.presign_get(update.key, None, _LIFETIME), update.etag)
        return Source("update", weight, (target,), (Extent(0, update.size, 0, update.offset),))

    def reduce(self, updates: Sequence[Update], sizing: Sizing) -> Invocation:
        """Run the reducer once, as the local platform does but without a cap."""
        upload = self.bucket.create_upload(_OUTPUT_KEY)
        try:
            task = self.task(updates, sizing, upload)
            ran = measured.run(
                [sys.executable, "-m", "gradsharding_reducer"],
                task.to_json(),
                {"GRADSHARDING_ALLOWED_ORIGINS": self.bucket.origin, "OPENBLAS_NUM_THREADS": "1"},
            )
        finally:
            self.bucket.abort_upload(_OUTPUT_KEY, upload)
        result = ReduceResult.from_json(ran.stdout)
        if result.outcome is not Outcome.DONE:
            raise SystemExit(f"The reducer answered {result.outcome}: {result.refusal or result.bad or result.faults}")
        seconds = result.finished - result.started
        return Invocation(result.bytes_read, seconds, ran.cpu_seconds, ran.rss_bytes, result.seconds)

    def reduce_capped(
        self, updates: Sequence[Update], sizing: Sizing, memory_mib: int, runs: int
    ) -> list[ReduceResult]:
        """The results of those runs that succeed on the local platform, where the kernel enforces the cap."""
        return asyncio.run(self._reduce_capped(updates, sizing, memory_mib, runs))

    async def _reduce_capped(
        self, updates: Sequence[Update], sizing: Sizing, memory_mib: int, runs: int
    ) -> list[ReduceResult]:
        platform, results = LocalPlatform(), []
        await platform.prepare(FunctionSpec(memory_mib, 300, 1, 1, (self.bucket.origin,)))
        try:
            for _ in range(runs):
                upload = self.bucket.create_upload(_OUTPUT_KEY)
                with contextlib.suppress(OutOfMemory):
                    results.append(await platform.invoke(self.task(updates, sizing, upload), 1))
                self.bucket.abort_upload(_OUTPUT_KEY, upload)
        finally:
            await platform.release()
        return [result for result in results if result.outcome is Outcome.DONE]

    def paper(self, updates: Sequence[Update]) -> Invocation:
        """Run the paper's way once on the same objects."""
        job: dict[str, Any] = {**self.store, "keys": [update.key for update in updates], "output_key": "paper-output"}
        script = Path(__file__).parent / "baselines" / "paper.py"
        ran = measured.run([sys.executable, str(script)], json.dumps(job).encode(), {"OPENBLAS_NUM_THREADS": "1"})
        answer = json.loads(ran.stdout)
        return Invocation(answer["bytes_read"], answer["seconds"], ran.cpu_seconds, ran.rss_bytes, {})

    def ranges(self, updates: Sequence[Update], sizing: Sizing) -> list[RangeJob]:
        """The ranges that the reducer reads for these updates, in its order, for the raw client."""
        size = updates[0].size
        runs = (Run(updates[0].dtype, 0, size),)
        urls = [urlsplit(self.bucket.presign_get(update.key, None, _LIFETIME)) for update in updates]
        return [
            RangeJob(
                url.hostname or "",
                url.port or 80,
                f"{url.path}?{url.query}",
                update.etag,
                update.offset + block.start,
                block.end - block.start,
            )
            for part in cut(runs, size, len(OUTPUT_HEADER), sizing.part_bytes)
            for block in blocks(runs, part.start, part.end, sizing.range_bytes)
            for update, url in zip(updates, urls, strict=True)
        ]


def _bodies(header: bytes, size: int, dtype: str) -> Iterator[bytes]:
    """The parts of an update: one block of random numbers over and over, since nobody looks at the values."""
    values = np.random.default_rng(0).standard_normal(2 * MIB, np.float32)
    block = (values.view(np.uint32) >> 16).astype("<u2").tobytes() if dtype == "BF16" else values.tobytes()
    left, pieces = size, itertools.chain([header], itertools.repeat(block))
    body = next(pieces)
    while left:
        piece = next(pieces)[:left]
        left -= len(piece)
        body += piece
        if len(body) >= _UPLOAD_PART or not left:
            yield body
            body = b""
