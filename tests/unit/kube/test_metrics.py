import pytest

from gradsharding.kube.metrics import Metrics
from gradsharding.rounds.outcome import Attempt


def attempt(outcome, **changes):
    fields = {
        "revision": 1, "shard": 0, "first_part": 1, "last_part": 2, "detail": "", "started": 10.0, "finished": 12.0,
        "bytes_read": 100, "bytes_written": 50, "retries": 0, "seconds": {}, "peak_rss_bytes": 0, "range_bytes": 0,
        "prefetch": 0, "platform": "knative", "request_id": "", "memory_cap": "",
    }  # fmt: skip
    return Attempt(**{**fields, "outcome": outcome, **changes})


@pytest.mark.parametrize("outcome", ["Done", "Partial", "BadValues"])
def test_an_answer(outcome):
    metrics = Metrics()
    metrics.attempts([attempt(outcome), attempt(outcome, started=13.0)])
    get = metrics.registry.get_sample_value
    assert get("gradsharding_shard_seconds_count", {"platform": "knative"}) == 2
    assert get("gradsharding_shard_seconds_sum", {"platform": "knative"}) == 2.0, (
        "clocks that differ give no negative time"
    )
    assert get("gradsharding_read_bytes_total") == 200


@pytest.mark.parametrize("outcome", ["OutOfMemory", "TimedOut", "SourceGone", "Denied"])
def test_no_answer(outcome):
    metrics = Metrics()
    metrics.attempts([attempt(outcome)])
    get = metrics.registry.get_sample_value
    assert get("gradsharding_retries_total", {"cause": outcome}) == 1
    assert get("gradsharding_read_bytes_total") == 0


def test_two_operators_in_one_process():
    first, second = Metrics(), Metrics()
    first.running.set(3)
    assert second.registry.get_sample_value("gradsharding_rounds_running") == 0
