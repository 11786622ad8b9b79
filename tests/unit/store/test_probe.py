"""The probe on stores that keep the promise and on one that does not."""

from __future__ import annotations

from threading import Barrier

import pytest
from memory_store import MemoryBucket, MemoryStore

from gradsharding.errors import StoreUnreachable, StoreUnsupported
from gradsharding.probe import probe_conditional_put


@pytest.fixture
def operations():
    return []


@pytest.fixture
def store(operations):
    with MemoryStore(after=lambda op, key: operations.append((op, key))) as store:
        store.bucket("b")
        yield store


class Racing(MemoryBucket):
    """Checks first and writes then, as SeaweedFS did up to 4.16."""

    def __init__(self, store):
        super().__init__(store, "b")
        self.all_have_looked = Barrier(8)

    def put_new(self, key, body):
        free = self.stat(key) is None
        self.all_have_looked.wait(10)
        if free:
            self.put(key, body)
        return free


def test_a_store_that_keeps_the_promise_is_asked_once(store, operations):
    probe_conditional_put(store.bucket("b"), "round/")
    assert [op for op, _ in operations] == ["put_new"] * 8 + ["delete"]
    [key] = {key for _, key in operations}
    assert key.startswith("round/probe-")

    probe_conditional_put(store.bucket("b"), "round/")
    assert len(operations) == 9
    probe_conditional_put(store.bucket("c"), "round/")
    assert len(operations) == 18


def test_a_store_in_which_two_win_is_named_with_what_to_do(store):
    bucket = Racing(store)

    with pytest.raises(StoreUnsupported, match=rf"{store.origin} let 8 of 8 .*'b'.*: use a store with"):
        probe_conditional_put(bucket, "round/")
    assert list(bucket.list("")) == []


def test_a_store_that_ignores_the_condition_for_all_is_refused_too(store):
    bucket = store.bucket("b")
    bucket.put_new = lambda key, body: False

    with pytest.raises(StoreUnsupported, match="let 0 of 8"):
        probe_conditional_put(bucket, "round/")


def test_without_all_answers_nothing_is_decided_and_nothing_left(store):
    bucket = store.bucket("b")
    put_new = bucket.put_new

    def lose_one_answer(key, body):
        if put_new(key, body):
            raise StoreUnreachable("lost")
        return False

    bucket.put_new = lose_one_answer
    with pytest.raises(StoreUnreachable):
        probe_conditional_put(bucket, "round/")
    assert list(bucket.list("")) == []

    bucket.put_new = put_new
    probe_conditional_put(bucket, "round/")
