"""Prometheus metrics; docs/metrics.md lists them. One registry for each operator, so that tests can have many."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gradsharding.rounds.outcome import Attempt
from gradsharding.rounds.report import ANSWERED


class Metrics:
    """What the operator counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.rounds = Counter(
            "gradsharding_rounds", "Rounds that ended, by reason.", ["succeeded", "reason"], registry=self.registry
        )
        self.running = Gauge("gradsharding_rounds_running", "Rounds that have not ended.", registry=self.registry)
        self.shard_seconds = Histogram(
            "gradsharding_shard_seconds",
            "Seconds of one invocation that answered.",
            ["platform"],
            buckets=(0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 900),
            registry=self.registry,
        )
        self.bytes_read = Counter("gradsharding_read_bytes", "Bytes that reducers read.", registry=self.registry)
        self.retries = Counter(
            "gradsharding_retries",
            "Invocations that ended without an answer of use, by cause.",
            ["cause"],
            registry=self.registry,
        )
        self.active = Gauge("gradsharding_invocations_active", "Invocations in flight.", registry=self.registry)
        self.store_errors = Counter(
            "gradsharding_store_errors", "Passes that a store error cut short.", ["kind"], registry=self.registry
        )
        self.passes = Histogram(
            "gradsharding_pass_seconds",
            "Seconds of one pass over a round.",
            buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10),
            registry=self.registry,
        )

    def attempts(self, new: Iterable[Attempt]) -> None:
        """Count invocations that ended since the last pass."""
        for attempt in new:
            if attempt.outcome in ANSWERED:
                self.shard_seconds.labels(attempt.platform).observe(max(0.0, attempt.finished - attempt.started))
                self.bytes_read.inc(attempt.bytes_read)
            else:
                self.retries.labels(attempt.outcome).inc()
