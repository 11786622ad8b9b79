"""Whole rounds on the memory store, with the real reducer in this process."""

import pytest

from gradsharding.rounds import memory
from inline_platform import InlinePlatform
from memory_store import MemoryStore
from rounds_kit import OUTPUT, assert_mean, document, keys_under, make_round, run, spec, tensors, upload


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setattr(memory, "MIN_PART", 4096)
    with MemoryStore(min_part=4096) as store:
        yield store.bucket("federation")


@pytest.fixture
def platform(bucket):
    return InlinePlatform(bucket.origin)


def test_round_leaves_output_and_manifest(bucket, platform):
    updates = [(tensors(i), 10 + i) for i in range(3)]
    for i, (values, examples) in enumerate(updates):
        upload(bucket, f"{i}.safetensors", values, examples)
    finished = run(make_round(bucket, wait=False), platform)
    assert (finished.succeeded, finished.reason) == (True, "Succeeded")
    assert_mean(bucket, updates)
    assert keys_under(bucket, OUTPUT) == [OUTPUT, OUTPUT + ".manifest.json"]
    assert bucket.list_uploads(OUTPUT) == []
    manifest = document(bucket)
    assert [(p["key"][-13:], p["weight"]) for p in manifest["participants"]] == [
        (f"{i}.safetensors", 10 + i) for i in range(3)
    ]
