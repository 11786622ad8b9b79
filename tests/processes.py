"""A process that runs a round and can be stopped or paused at any of its store operations, its reducers' ones included."""

import asyncio
import threading

from inline_platform import InlinePlatform
from memory_store import MemoryStore
from rounds_kit import Clock, make_round

from gradsharding.rounds.drive import drive
from gradsharding_reducer.cancellation import Cancellation

MIN_PART = 4096


class Crash(BaseException):
    """The process is gone: no handler of it may run."""


class Process:
    """One process on a shared store. ``at=(n, "before" | "after")`` is the operation, counted from 0, at which ``act`` happens."""

    def __init__(self, world, uid="uid-1", at=None, act="crash", begin_anew=True, **options):
        self.store = MemoryStore(min_part=MIN_PART, before=self._before, after=self._after)
        self.store.buckets, self.store.lock, self.store.atomic_complete = (
            world.buckets,
            world.lock,
            world.atomic_complete,
        )
        self.bucket = self.store.bucket("federation")
        self.cancellation = Cancellation()
        self.platform = InlinePlatform(self.store.origin, cancellation=self.cancellation)
        self.operations = []
        self.paused, self.resume = threading.Event(), threading.Event()
        self._at, self._act, self._dead = at, act, False
        self._begin_anew = begin_anew
        self._local = threading.local()
        self._lock = threading.Lock()
        self.round = make_round(self.bucket, uid, wait=False, clock=Clock(step=1.0), **options)
        self.finished = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.resume.set()
        self.store.close()

    def run(self):
        """Run the round to its end, or to the crash."""
        try:
            if self._begin_anew:
                self.round.begin_anew()
            self.finished = asyncio.run(drive(self.round, self.platform))
        except Crash:
            self._dead = True

    @property
    def crashed(self):
        return self._dead

    def _before(self, op, key):
        with self._lock:
            if self._dead:
                raise Crash
            self._local.index = len(self.operations)
            self.operations.append((op, key))
        self._reach("before")

    def _after(self, op, key):
        self._reach("after")

    def _reach(self, moment):
        if self._at != (self._local.index, moment):
            return
        if self._act == "pause":
            self.paused.set()
            assert self.resume.wait(30)
            return
        self._dead = True
        self.cancellation.cancel()
        raise Crash
