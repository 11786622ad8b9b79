"""Clients that train on what each of them has, and meet once per round in a store; and, to compare, two who do not."""

from __future__ import annotations

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import safetensors.numpy
from threadpoolctl import threadpool_limits

from gradsharding.demo import averaging, training
from gradsharding.demo.training import Examples, Schedule, Weights
from gradsharding.errors import ObjectGone, RoundFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gradsharding.demo.averaging import Average, Ran
    from gradsharding.rounds.spec import RoundSpec
    from gradsharding.store import Bucket

ALONE, CENTRAL = 1001, 1002
"""Beside the numbers of clients, in the seeds of training."""

MOST_THREADS = 4
"""Each holds three copies of the weights."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Who trains what, how often. ``alpha`` is the concentration of the Dirichlet split: small is uneven."""

    rounds: int = 10
    clients: int = 10
    alpha: float = 0.2
    seed: int = 3
    shape: Sequence[int] = training.SHAPE
    schedule: Schedule = field(default_factory=Schedule)

    @property
    def parameters(self) -> int:
        """Of the network."""
        return sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(self.shape))

    @property
    def update_bytes(self) -> int:
        """The data section of one update."""
        return 4 * self.parameters

    @property
    def disk_bytes(self) -> int:
        """All updates and means, and a tenth on top for what the store keeps beside them."""
        return self.rounds * (self.clients + 1) * self.update_bytes * 11 // 10


@dataclass(frozen=True, slots=True)
class Accuracies:
    """On the test set, from 0 to 1: the federation, the largest client alone, all data in one place."""

    federated: float
    alone: float
    central: float


@dataclass(frozen=True, slots=True)
class FederatedRound:
    """One round: what its averaging took, seconds of training and uploading, and how good the models are."""

    number: int
    ran: Ran
    train_seconds: float
    accuracies: Accuracies


class Federation:
    """The clients, their data, and the model that they share."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.train, self.test = training.load_digits(setting.seed)
        split = training.dirichlet_split(self.train.y, setting.clients, setting.alpha, setting.seed)
        self.clients: Sequence[Examples] = [self.train.take(indices) for indices in split]
        self.largest = max(range(setting.clients), key=lambda client: len(self.clients[client]))
        """The client with the most examples: the one who is best off alone."""
        self.examples = [len(client) for client in self.clients]

    def rounds(self, bucket: Bucket, spec_of: Callable[[str], RoundSpec], average: Average) -> Iterator[FederatedRound]:
        """Train, upload, average, download, as often as the setting says. ``spec_of`` makes the round of a folder.

        Every mean is compared with plain numpy. Raises RoundFailed (WrongBits when that differs) and StoreError.
        """
        shared = alone = central = training.initial(self.setting.shape, self.setting.seed)
        for number in range(1, self.setting.rounds + 1):
            started, spec = time.monotonic(), spec_of(f"digits/{number}")
            train = partial(self._train, number)
            with at_once() as pool:
                # The longest first, so that no thread is left with it at the end.
                centrally = pool.submit(train, central, self.train, CENTRAL)
                by_itself = pool.submit(train, alone, self.clients[self.largest], ALONE)
                take_part = partial(self._take_part, bucket, spec.updates.prefix, number, shared)
                updates = list(pool.map(take_part, range(len(self.clients))))
                alone, central = by_itself.result(), centrally.result()
            trained = time.monotonic() - started
            ran = averaging.run(spec, average)
            shared = download(bucket, spec.output.key)
            check_mean(shared, updates, self.examples)
            accuracies = Accuracies(*(training.accuracy(model, self.test) for model in (shared, alone, central)))
            yield FederatedRound(number, ran, trained, accuracies)

    def _take_part(self, bucket: Bucket, prefix: str, number: int, shared: Weights, client: int) -> Weights:
        """What one client does in a round: train on its own, upload."""
        examples = self.clients[client]
        update = self._train(number, shared, examples, client)
        body = safetensors.numpy.save(dict(update), metadata={"num_examples": str(len(examples))})
        bucket.put(f"{prefix}client-{client:02}.safetensors", body)
        return update

    def _train(self, number: int, weights: Weights, examples: Examples, who: int) -> Weights:
        return training.train(weights, examples, self.setting.schedule, (self.setting.seed, number, who))


@contextmanager
def at_once() -> Iterator[ThreadPoolExecutor]:
    """Threads for several trainings, each with a BLAS of one thread: 3 times as fast as one after another with all cores.

    (Measured on 2 busy cores. The threads of one BLAS wait for each other many times per step.) An error or Ctrl-C
    waits for what has begun, and no more.
    """
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def download(bucket: Bucket, key: str) -> Weights:
    """A model from the store. Raises StoreError."""
    info = bucket.stat(key)
    if info is None:
        raise ObjectGone(f"The model {key!r} is not in bucket {bucket.name!r}: it was removed.", 404)
    return safetensors.numpy.load(bucket.read(key, 0, info.size, info.etag))


def check_mean(mean: Weights, updates: Sequence[Weights], examples: Sequence[int]) -> None:
    """Raises RoundFailed unless every tensor has the bits of plain numpy."""
    if set(mean) != set(updates[0]):
        raise RoundFailed("WrongBits", "the mean has other tensors than the updates")
    for name, values in mean.items():
        if not averaging.same_bits(values, averaging.weighted_mean([update[name] for update in updates], examples)):
            raise RoundFailed("WrongBits", f"the mean of tensor {name!r} differs from what plain numpy computes")
