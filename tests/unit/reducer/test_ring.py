"""The ring hands ranges out in the order of the jobs, whatever the threads do."""

import hashlib
import random
import sys
import threading
import time

import pytest

from gradsharding_reducer.cancellation import Cancellation
from gradsharding_reducer.failures import Refused
from gradsharding_reducer.ranges import Ring

JOBS, THREADS, SLOT = 40, 4, 64


def slots(count):
    return [memoryview(bytearray(SLOT)) for _ in range(count)]


def content(job):
    return hashlib.sha512(str(job).encode()).digest()


@pytest.fixture
def pressure():
    """Threads that fight for the interpreter lock, so that prefetch threads overtake one another."""
    stop = threading.Event()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def spin():
        while not stop.is_set():
            sum(range(500))

    threads = [threading.Thread(target=spin) for _ in range(2)]
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("repeat", range(36))
def test_the_digest_of_all_ranges_is_the_same_under_cpu_pressure(pressure, repeat):
    """With the job number taken before the slot, this stalls or yields another digest within a few repeats."""
    rng = random.Random(repeat)
    waits = [rng.choice([0, 0, 0, 0.0005]) for _ in range(JOBS)]

    def fill(job, slot):
        slot[:32] = content(job)[:32]
        if waits[job]:
            time.sleep(waits[job])
        slot[32:] = content(job)[32:]

    digest, expected = hashlib.sha256(), hashlib.sha256()
    with Ring([fill] * THREADS, JOBS, slots(THREADS + 1), Cancellation()) as ring:
        for job in range(JOBS):
            slot = ring.take()
            digest.update(slot)
            expected.update(content(job))
            ring.release(slot)
    assert digest.digest() == expected.digest()


def test_a_stalled_thread_is_waited_for_and_the_others_stay_within_the_ring():
    go = threading.Event()
    filled = []

    def fill(job, slot):
        if job == 0:
            go.wait()
        filled.append(job)
        slot[:] = content(job)

    with Ring([fill] * THREADS, JOBS, slots(THREADS + 1), Cancellation()) as ring:
        while len(filled) < THREADS:
            time.sleep(0.001)
        assert sorted(filled) == list(range(1, THREADS + 1))  # one slot is held by job 0, and no other is free
        go.set()
        for job in range(JOBS):
            slot = ring.take()
            assert slot == content(job)
            ring.release(slot)


def test_an_error_comes_out_in_its_turn():
    def fill(job, slot):
        if job == 3:
            raise KeyError("job 3")
        slot[0] = job

    with Ring([fill] * THREADS, JOBS, slots(THREADS + 1), Cancellation()) as ring:
        for job in range(3):
            slot = ring.take()
            assert slot[0] == job
            ring.release(slot)
        with pytest.raises(KeyError, match="job 3"):
            ring.take()


def test_cancelling_wakes_the_folding_thread_and_ends_the_others():
    before = threading.active_count()
    stop = Cancellation()

    def fill(job, slot):
        stop.sleep(60)

    with Ring([fill] * THREADS, JOBS, slots(THREADS + 1), stop) as ring:
        threading.Timer(0.05, stop.cancel).start()
        with pytest.raises(Refused):
            ring.take()
    while threading.active_count() > before:  # the timer's own thread
        time.sleep(0.001)


def test_a_thread_that_cannot_start_is_a_lack_of_memory(monkeypatch):
    started = []
    start = threading.Thread.start

    def refuse(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    size = threading.stack_size()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(MemoryError), Ring([lambda job, slot: None] * 2, 9, slots(3), Cancellation()):
        pass
    assert not started[0].is_alive()
    assert threading.stack_size() == size
