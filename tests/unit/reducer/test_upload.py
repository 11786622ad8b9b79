"""A part is uploaded while the next one is folded: the overlap itself, and every way in which either of the two ends badly."""

import gc
import http.client
import mmap
import threading
import time
import weakref
from contextlib import closing, suppress
from dataclasses import replace

import numpy as np
import pytest
from unit.reducer.object_server import ObjectServer, error
from unit.reducer.shards import make_shard

from gradsharding_reducer import reduce as reduce_module
from gradsharding_reducer.access import Access
from gradsharding_reducer.cancellation import Cancellation
from gradsharding_reducer.exchange import Channel, Patience
from gradsharding_reducer.failures import ReducerFailure, Refused
from gradsharding_reducer.reduce import reduce
from gradsharding_reducer.task import BadKind, BadValue, Outcome, ReduceResult, Refusal, UrlKind
from gradsharding_reducer.upload import Uploader

WAIT = 30
SOURCES = 4
LAST_READ = ("GET", f"update-{SOURCES - 1}", 2)
"""Of part 2. With one read in flight there are two slots, so whoever folds nothing cannot get so far."""


@pytest.fixture
def server():
    with ObjectServer() as server:
        yield server


@pytest.fixture
def shard(server):
    """Three parts of one block each."""
    return make_shard(server, [("F32", 750)], [3, 1, 2, 5], part_bytes=1000, prefetch=1)


def run(server, task, **kwargs):
    patience = Patience(tries=4, first_delay=0.01, longest_delay=0.02)
    return reduce(task, Access((server.origin,)), **{"patience": patience, **kwargs})


class Held:
    """The answer to the PUT of part 1 is held until the last read of part 2 has come, and that until the PUT has come.

    ``late`` then answers the PUT, None: well.
    ``others`` are faults by (method, path, nth).
    """

    def __init__(self, server, late=None, others=None):
        self._come, self._begun = threading.Event(), threading.Event()
        self._late = late
        self._others = others or {}
        self.overlapped = False
        server.faults = self._fault

    def _fault(self, method, path, nth):
        if (method, path, nth) == LAST_READ:
            self._come.set()
            self._begun.wait(WAIT)
        if (method, path, nth) == ("PUT", "part-1", 1):
            self._begun.set()
            self.overlapped = self._come.wait(WAIT)
            return self._late
        return self._others.get((method, path, nth))


class Silent(Held):
    """The PUT of part 1 is not answered before ``over``. Who waits for it all the same loses patience, and sends it again."""

    def __init__(self, server, others):
        self.over = threading.Event()
        super().__init__(server, self._wait, others)

    def _wait(self, handler):
        self.over.wait()
        handler.close_connection = True


def refuse(status, code):
    return lambda handler: error(handler, status, code)


def test_a_part_is_uploaded_while_the_next_one_is_read(server, shard):
    held = Held(server)
    result = run(server, shard.task)
    assert held.overlapped
    assert result.outcome is Outcome.DONE
    assert [part.number for part in result.parts] == [1, 2, 3]
    assert b"".join(server.objects[f"part-{n}"] for n in (1, 2, 3)) == shard.header + shard.expected
    assert result.bytes_written == len(shard.header + shard.expected)
    assert server.requests[-1] == ("PUT", "record")


def test_a_part_that_is_refused_late_is_told(server, shard):
    held = Held(server, refuse(404, "NoSuchUpload"))
    result = run(server, shard.task)
    assert held.overlapped
    assert result.outcome is Outcome.CANCELLED
    assert result.refusal == Refusal(UrlKind.PART, None, 404, "NoSuchUpload")
    assert result.parts == ()
    assert not {"part-2", "record"} & set(server.objects)


def test_a_part_that_fails_late_is_a_failure(server, shard):
    Held(server, refuse(400, "MalformedPOSTRequest"))
    with pytest.raises(ReducerFailure, match="writing part: the store refused with 400"):
        run(server, shard.task)
    assert not {"part-2", "record"} & set(server.objects)


def test_a_part_whose_answer_is_lost_is_sent_again_as_it_was(server, shard):
    """The fold has gone on meanwhile, and must not have touched the part."""
    held = Held(server, refuse(503, "SlowDown"))
    result = run(server, shard.task)
    assert held.overlapped
    assert result.retries == 1
    assert server.objects["part-1"] == shard.part_body(1)


def test_the_last_part_too_can_be_refused(server, shard):
    server.faults = lambda method, path, nth: refuse(403, "AccessDenied") if path == "part-3" else None
    result = run(server, shard.task)
    assert result.outcome is Outcome.DENIED
    assert [part.number for part in result.parts] == [1, 2]
    assert "record" not in server.objects


def test_bad_values_beside_an_upload_do_not_keep_it_from_counting(server, shard):
    data = np.frombuffer(shard.updates[2], np.float32).copy()
    data[300] = np.inf
    front = shard.task.sources[2].extents[0].offset
    target = replace(shard.task.sources[2].objects[0], etag=server.put("update-2", bytes(front) + data.tobytes()))
    sources = list(shard.task.sources)
    sources[2] = replace(sources[2], objects=(target,))
    held = Held(server)
    result = run(server, replace(shard.task, sources=tuple(sources)))
    assert held.overlapped
    assert result.outcome is Outcome.BAD_VALUES
    assert result.bad == (BadValue(2, 1200, BadKind.NON_FINITE),)
    assert [(part.number, part.etag is None) for part in result.parts] == [(1, False), (2, True), (3, True)]


def test_a_read_that_is_refused_does_not_wait_for_the_part_that_hangs(server, shard):
    silent = Silent(server, {LAST_READ: refuse(412, "PreconditionFailed")})
    result = run(server, shard.task)
    silent.over.set()
    assert server.count("PUT", "part-1") == 1
    assert result.refusal == Refusal(UrlKind.SOURCE, SOURCES - 1, 412, "PreconditionFailed")
    assert result.parts == ()


def test_a_read_that_fails_does_not_either(server, shard):
    silent = Silent(server, {LAST_READ: refuse(416, "InvalidRange")})
    with pytest.raises(ReducerFailure, match="reading source 3"):
        run(server, shard.task)
    silent.over.set()
    assert server.count("PUT", "part-1") == 1


def test_cancelling_ends_a_fold_whose_last_part_hangs(server, shard):
    cancellation = Cancellation()

    def cancel(handler):
        cancellation.cancel()
        handler.close_connection = True

    silent = Silent(server, {LAST_READ: cancel})
    result = run(server, shard.task, cancellation=cancellation)
    silent.over.set()
    assert server.count("PUT", "part-1") == 1
    assert result.outcome is Outcome.CANCELLED
    assert result.refusal == Refusal(None, None, None, "Stopped")
    assert "record" not in server.objects


def test_cancelling_while_it_connects_sends_no_part(server):
    """There is no socket yet to shut down."""
    cancellation, access = Cancellation(), Access((server.origin,))

    class Late(http.client.HTTPConnection):
        def connect(self):
            cancellation.cancel()
            super().connect()

    access.connect = lambda address, timeout: Late(address.host, address.port, timeout=timeout)
    with (
        closing(Channel(access, cancellation, time.monotonic() + 60, Patience())) as channel,
        pytest.raises(Refused) as refused,
    ):
        channel.put(server.url("part-1"), UrlKind.PART, b"part")
    assert refused.value.outcome is Outcome.CANCELLED
    assert server.objects.get("part-1") != b"part"  # this server stores what came, a real one nothing


def test_a_slow_upload_is_noticed_before_the_next_part_takes_the_rest_of_the_budget(server, shard, monkeypatch):
    """How slow is not known when part 2 is begun. Were it gone on with, the record of part 1 could come too late."""

    class Slow(Uploader):
        def _work(self, part, body):
            super()._work(part, body)
            self.slowest = 1.0

    monkeypatch.setattr(reduce_module, "Uploader", Slow)
    held = Held(server)
    result = run(server, replace(shard.task, budget_seconds=600.0))
    assert held.overlapped
    assert result.outcome is Outcome.PARTIAL
    assert [part.number for part in result.parts] == [1]
    assert ReduceResult.from_json(server.objects["record"]) == result
    assert "part-2" not in server.objects
    rest = run(server, replace(shard.task, parts=shard.task.parts[1:2], header=None))
    assert rest.outcome is Outcome.DONE
    assert server.objects["part-2"] == shard.part_body(2)


def test_a_thread_that_cannot_start_is_too_little_memory(server, shard, monkeypatch):
    start = threading.Thread.start

    def fail(thread):
        if thread.name == "upload":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(MemoryError, match="a thread could not start"):
            run(server, shard.task)
    assert "part-1" not in server.objects
    assert run(server, shard.task).outcome is Outcome.DONE


@pytest.mark.parametrize(
    ("late", "read"),
    [
        (None, None),
        (refuse(404, "NoSuchUpload"), None),
        (refuse(400, "Whatever"), None),
        (refuse(404, "NoSuchUpload"), refuse(412, "PreconditionFailed")),
        (refuse(404, "NoSuchUpload"), refuse(416, "InvalidRange")),
    ],
    ids=["well", "refused", "failed", "both refused", "refused and failed"],
)
def test_memory_goes_back_however_it_ends(server, shard, monkeypatch, late, read):
    """At once: a server's next shard would not fit beside a mapping that waits for the collector."""
    mappings, real = [], mmap.mmap

    def remember(*args, **kwargs):
        mapping = real(*args, **kwargs)
        mappings.append(weakref.ref(mapping))
        return mapping

    monkeypatch.setattr(mmap, "mmap", remember)
    Held(server, late, {LAST_READ: read})
    gc.disable()
    try:
        with suppress(ReducerFailure):
            run(server, shard.task)
        assert [mapping() for mapping in mappings] == [None]
    finally:
        gc.enable()
