"""The AWS Lambda entrance, called as the runtime calls it."""

import base64
import gzip
import json

import pytest
from unit.reducer.object_server import ObjectServer, error
from unit.reducer.shards import make_shard

from gradsharding_reducer.aws_lambda import handler
from gradsharding_reducer.failures import ReducerFailure
from gradsharding_reducer.task import ContractError, Outcome, ReduceResult


class Context:
    def __init__(self, seconds=900):
        self.seconds = seconds

    def get_remaining_time_in_millis(self):
        return int(self.seconds * 1000)


@pytest.fixture
def shard(monkeypatch):
    with ObjectServer() as server:
        monkeypatch.setenv("GRADSHARDING_ALLOWED_ORIGINS", server.origin)
        shard = make_shard(server, [("BF16", 5000)], [1, 2], part_bytes=3_000)
        shard.server = server
        yield shard


def plain(document):
    return json.loads(document)


def packed(document):
    return {"gzip": base64.b64encode(gzip.compress(document)).decode()}


@pytest.mark.parametrize("event_of", [plain, packed])
def test_an_event_is_answered_with_a_plain_object(shard, event_of):
    answer = handler(event_of(shard.task.to_json()), Context())
    assert type(answer) is dict
    result = ReduceResult.from_json(json.dumps(answer))
    assert result.outcome is Outcome.DONE
    assert result.to_json() == shard.server.objects["record"]


def test_the_budget_never_goes_beyond_lambdas_timeout(shard):
    assert handler(plain(shard.task.to_json()), Context(seconds=5.0))["outcome"] == "Partial"


@pytest.mark.parametrize(
    "event", [{}, [], None, {"gzip": 3}, {"gzip": "é"}, {"gzip": "AAAA"}, {"gzip": ""}, {"gzip": None}]
)
def test_what_is_no_task_raises_a_sentence(event):
    with pytest.raises(ContractError, match=r"^task"):
        handler(event, Context())


def test_a_failure_raises_a_sentence_without_urls(shard):
    shard.server.faults = lambda method, path, nth: lambda handler: error(handler, 416, "InvalidRange")
    with pytest.raises(ReducerFailure, match=r"416 InvalidRange") as caught:
        handler(plain(shard.task.to_json()), Context())
    assert "http" not in str(caught.value)
