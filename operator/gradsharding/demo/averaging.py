"""One averaging round of the demo: its manifest, how it is run, what it took, and the same mean by plain numpy."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gradsharding.errors import RoundFailed
from gradsharding.rounds.report import report
from gradsharding.rounds.spec import RoundSpec, parse_round

if TYPE_CHECKING:
    from gradsharding.demo.training import F32
    from gradsharding.rounds.step import Finished

MEMORY_MIB = 128
"""Cap of one reducer: the smallest that AWS Lambda sells."""
REDUCERS = 4
TIMEOUT_SECONDS = 300

TILE = 1 << 16
"""Elements that are averaged in one go: what stays in a cache is much faster."""

Average = Callable[[RoundSpec], "Finished"]
"""Runs a round to its end, as ``gradsharding run`` does."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What one round took, by the reducers' own account.

    ``at_once`` is how many of their processes ran at the same time, ``peak_bytes`` the highest resident memory of any.
    """

    shards: int
    at_once: int
    cap: str
    peak_bytes: int
    bytes_read: int
    seconds: float


def round_spec(endpoint: str, region: str, bucket: str, folder: str, clients: int) -> RoundSpec:
    """The round of all updates under ``<folder>/updates/``; its output is ``<folder>/model.safetensors``."""
    return parse_round(
        {
            "apiVersion": "gradsharding.dev/v1alpha1",
            "kind": "AggregationRound",
            "metadata": {"name": folder.replace("/", "-")},
            "spec": {
                "store": {"endpoint": endpoint, "region": region},
                "updates": {
                    "bucket": bucket,
                    "prefix": f"{folder}/updates/",
                    "minCount": clients,
                    "maxCount": clients,
                },
                "output": {"bucket": bucket, "key": f"{folder}/model.safetensors"},
                "function": {
                    "memoryMiB": MEMORY_MIB,
                    "timeoutSeconds": TIMEOUT_SECONDS,
                    "maxConcurrency": REDUCERS,
                    "shards": REDUCERS,
                },
            },
        }
    )


def run(spec: RoundSpec, average: Average) -> Ran:
    """Run the round and sum up what it took. Raises RoundFailed, and what ``average`` raises."""
    started = time.monotonic()
    finished = average(spec)
    seconds = time.monotonic() - started
    if not finished.succeeded:
        raise RoundFailed(finished.reason, f"the averaging of {spec.updates.prefix} failed: {finished.message}")
    result, attempts = report(finished, spec.output.bucket, spec.output.key, seconds), finished.document["attempts"]
    return Ran(
        shards=result["shards"]["succeeded"],
        at_once=most_at_once([(a["started"], a["finished"]) for a in attempts]),
        cap=", ".join(sorted({a["memory_cap"] for a in attempts if a["memory_cap"]})),
        peak_bytes=result["max_reducer_rss_bytes"],
        bytes_read=result["bytes_read"],
        seconds=seconds,
    )


def most_at_once(intervals: Sequence[tuple[float, float]]) -> int:
    """How many of the intervals (start, end) overlap, where most do."""
    edges = sorted([(start, 1) for start, _ in intervals] + [(end, -1) for _, end in intervals])
    running = most = 0
    for _, change in edges:
        running += change
        most = max(most, running)
    return most


def weighted_mean(values: Sequence[F32], examples: Sequence[int]) -> F32:
    """The mean that a round promises, bit for bit: integer weights, float64 sums in order, one rounding."""
    flat, mean = [value.reshape(-1) for value in values], np.empty(values[0].size, np.float32)
    for start in range(0, mean.size, TILE):
        products = [
            np.float64(n) * value[start : start + TILE].astype(np.float64)
            for n, value in zip(examples, flat, strict=True)
        ]
        mean[start : start + TILE] = functools.reduce(np.add, products) / np.float64(sum(examples))
    return mean.reshape(values[0].shape)


def same_bits(left: F32, right: F32) -> bool:
    """Equal to the last bit; -0.0 is not 0.0."""
    return left.shape == right.shape and np.array_equal(left.view(np.uint32), right.view(np.uint32))
