import pytest
from inline_platform import InlinePlatform
from memory_store import MemoryStore

from gradsharding.rounds import memory, stitch

MIN_PART = 4096


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Parts of 4 KiB, and the protocol's waits on a clock that jumps."""
    monkeypatch.setattr(memory, "MIN_PART", MIN_PART)
    monkeypatch.setattr(stitch, "ASK_AGAIN_SECONDS", 0.001)


@pytest.fixture
def store():
    with MemoryStore(min_part=MIN_PART) as store:
        yield store


@pytest.fixture
def bucket(store):
    return store.bucket("federation")


@pytest.fixture
def platform(bucket):
    return InlinePlatform(bucket.origin)
