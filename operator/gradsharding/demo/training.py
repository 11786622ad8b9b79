"""A small network in plain numpy, and scikit-learn's digits dealt out unevenly to clients.

The network is far wider than 8x8 digits need: an update of 24.6 MiB is work for four reducers, since S3 takes no part
under 5 MiB. Everything is float32, and follows from the seeds given.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Weights = Mapping[str, F32]
"""Tensor name → values: ``layer<i>.weight`` of shape (inputs, outputs) and ``layer<i>.bias`` of shape (outputs,)."""

CLASSES = 10
SHAPE = (64, 2048, 3072, CLASSES)
"""Units per layer: 6,458,378 parameters."""

TEST_EXAMPLES = 360
FEWEST_EXAMPLES = 20
"""No client gets fewer: a mini-batch of hardly any examples teaches nothing."""


@dataclass(frozen=True, slots=True)
class Examples:
    """``x`` are rows of pixels from 0 to 1, float32; ``y`` the digit of each."""

    x: F32
    y: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.y)

    def take(self, indices: NDArray[np.int64]) -> Examples:
        """Only these."""
        return Examples(self.x[indices], self.y[indices])


@dataclass(frozen=True, slots=True)
class Schedule:
    """How one client trains in one round: plain stochastic gradient descent."""

    epochs: int = 2
    batch: int = 48
    rate: float = 0.1


def load_digits(seed: int) -> tuple[Examples, Examples]:
    """scikit-learn's 1,797 digits as a training and a test set, in random order."""
    from sklearn import datasets

    digits = datasets.load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    every = Examples((digits.data[order] / 16).astype(np.float32), digits.target[order].astype(np.int64))
    cut = np.arange(len(every))
    return every.take(cut[TEST_EXAMPLES:]), every.take(cut[:TEST_EXAMPLES])


def dirichlet_split(
    labels: NDArray[np.int64], clients: int, alpha: float, seed: int, fewest: int = FEWEST_EXAMPLES
) -> list[NDArray[np.int64]]:
    """Indices of each client's examples: every class is dealt out in proportions drawn from Dirichlet(alpha).

    The smaller alpha, the fewer digits a client knows (Hsu, Qi, Brown 2019, arXiv 1909.06335). Drawn again until every
    client has ``fewest``, which must leave room for luck: at most half of an even share.
    """
    if not 0 <= fewest <= len(labels) // (2 * clients):
        raise ValueError(f"{fewest} examples for each of {clients} clients are too many of {len(labels)}")
    random = np.random.default_rng(seed)
    while True:
        shares: list[list[NDArray[np.int64]]] = [[] for _ in range(clients)]
        for label in np.unique(labels):
            members = random.permutation(np.flatnonzero(labels == label))
            borders = np.cumsum(random.dirichlet([alpha] * clients))[:-1] * len(members)
            for share, piece in zip(shares, np.split(members, borders.astype(np.int64)), strict=True):
                share.append(piece)
        split = [np.sort(np.concatenate(share)) for share in shares]
        if min(map(len, split)) >= fewest:
            return split


def initial(shape: Sequence[int], seed: int) -> Weights:
    """Random weights after He et al. 2015 (arXiv 1502.01852), the last layer smaller so that it starts undecided."""
    random = np.random.default_rng(seed)
    weights = {}
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(shape), start=1):
        scale = np.sqrt(2 / inputs) * (0.1 if layer == len(shape) - 1 else 1)
        weights[f"layer{layer}.weight"] = random.standard_normal((inputs, outputs), np.float32) * np.float32(scale)
        weights[f"layer{layer}.bias"] = np.zeros(outputs, np.float32)
    return weights


def accuracy(weights: Weights, examples: Examples) -> float:
    """The share of examples whose digit the network finds, from 0 to 1."""
    return float(np.mean(_activations(weights, examples.x)[-1].argmax(axis=1) == examples.y))


def train(weights: Weights, examples: Examples, schedule: Schedule, seed: Sequence[int]) -> Weights:
    """New weights after some epochs on these examples; the ones given stay as they are."""
    random = np.random.default_rng(seed)
    new = {name: values.copy() for name, values in weights.items()}
    room = {name: np.empty_like(values) for name, values in weights.items()}
    for _ in range(schedule.epochs):
        order = random.permutation(len(examples))
        for start in range(0, len(order), schedule.batch):
            _descend(new, examples.take(order[start : start + schedule.batch]), schedule.rate, room)
    return new


def _activations(weights: Weights, x: F32) -> list[F32]:
    """The input, what every hidden layer makes of it (ReLU), and the logits."""
    layers = len(weights) // 2
    values = [x]
    for layer in range(1, layers + 1):
        raw = values[-1] @ weights[f"layer{layer}.weight"] + weights[f"layer{layer}.bias"]
        values.append(np.maximum(raw, 0, out=raw) if layer < layers else raw)
    return values


def _descend(weights: Weights, batch: Examples, rate: float, room: Weights) -> None:
    """One step against the gradient of the mean cross-entropy, in place. ``room`` is scratch of the weights' shapes.

    The rate goes into the error of the logits, so that no gradient of 24 MiB has to be scaled afterwards.
    """
    values = _activations(weights, batch.x)
    error = np.exp(values[-1] - values[-1].max(axis=1, keepdims=True))
    error /= error.sum(axis=1, keepdims=True)
    error[np.arange(len(batch)), batch.y] -= 1
    error *= np.float32(rate / len(batch))
    for layer in range(len(values) - 1, 0, -1):
        name, below = f"layer{layer}", values[layer - 1]
        gradient = np.matmul(below.T, error, out=room[f"{name}.weight"])
        bias = error.sum(axis=0)
        if layer > 1:
            error = error @ weights[f"{name}.weight"].T
            error *= below > 0
        np.subtract(weights[f"{name}.weight"], gradient, out=weights[f"{name}.weight"])
        np.subtract(weights[f"{name}.bias"], bias, out=weights[f"{name}.bias"])
