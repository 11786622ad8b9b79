"""The network in plain numpy and the uneven split."""

import itertools

import numpy as np
import pytest

from gradsharding.demo import training
from gradsharding.demo.training import Examples, Schedule

SMALL = (64, 32, 24, 10)


@pytest.fixture(scope="module")
def digits():
    return training.load_digits(seed=1)


def cross_entropy(weights, examples):
    values = examples.x.astype(np.float64)
    for layer in range(1, len(weights) // 2 + 1):
        values = values @ weights[f"layer{layer}.weight"] + weights[f"layer{layer}.bias"]
        if layer < len(weights) // 2:
            values = np.maximum(values, 0)
    values -= values.max(axis=1, keepdims=True)
    logs = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    return -logs[np.arange(len(examples)), examples.y].mean()


def test_network_is_large_enough_for_four_reducers():
    """S3 takes no part under 5 MiB, so four shards need more than 20 MiB."""
    parameters = sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(training.SHAPE))
    assert parameters >= 6_000_000
    assert sum(values.size for values in training.initial(training.SHAPE, seed=0).values()) == parameters


def test_digits_are_shuffled_and_kept_apart(digits):
    train, test = digits
    assert (len(train), len(test)) == (1437, 360)
    assert (train.x.dtype, float(train.x.min()), float(train.x.max())) == (np.float32, 0.0, 1.0)
    assert set(test.y.tolist()) == set(range(10))


def test_split_deals_out_everything_once(digits):
    train, _ = digits
    split = training.dirichlet_split(train.y, clients=10, alpha=0.2, seed=5)
    assert np.array_equal(np.sort(np.concatenate(split)), np.arange(len(train)))
    assert min(map(len, split)) >= training.FEWEST_EXAMPLES


def test_split_is_uneven_where_alpha_is_small(digits):
    """How much of a client's examples are of its commonest digit: a tenth would be even."""

    def dominance(alpha):
        split = training.dirichlet_split(digits[0].y, clients=10, alpha=alpha, seed=5)
        return np.mean([np.bincount(digits[0].y[client]).max() / len(client) for client in split])

    assert dominance(0.2) > 0.3
    assert dominance(1000.0) < 0.15


def test_split_follows_from_its_seed(digits):
    one, same, other = (training.dirichlet_split(digits[0].y, 10, 0.2, seed) for seed in (5, 5, 6))
    assert all(map(np.array_equal, one, same))
    assert not all(map(np.array_equal, one, other))


def test_split_refuses_what_luck_cannot_give(digits):
    with pytest.raises(ValueError, match="too many"):
        training.dirichlet_split(digits[0].y, clients=10, alpha=0.2, seed=0, fewest=140)


def test_one_step_goes_down_the_gradient():
    """Against differences of the loss in float64, for some weights of every tensor."""
    random = np.random.default_rng(2)
    examples = Examples(random.random((7, 6), dtype=np.float32), random.integers(0, 4, 7))
    before = training.initial((6, 5, 8, 4), seed=2)
    rate, step = 0.01, 1e-3
    after = training.train(before, examples, Schedule(epochs=1, batch=7, rate=rate), (0,))
    for name, values in before.items():
        for at in random.integers(0, values.size, 5):
            losses = []
            for sign in (-1, 1):
                moved = {key: value.astype(np.float64) for key, value in before.items()}
                moved[name].reshape(-1)[at] += sign * step
                losses.append(cross_entropy(moved, examples))
            slope = (losses[1] - losses[0]) / (2 * step)
            got = (values.reshape(-1)[at] - after[name].reshape(-1)[at]) / rate
            assert got == pytest.approx(slope, abs=2e-3), (name, at)


def test_training_learns_and_leaves_the_old_weights(digits):
    train, test = digits
    before = training.initial(SMALL, seed=0)
    kept = {name: values.copy() for name, values in before.items()}
    after = training.train(before, train, Schedule(epochs=10, batch=32, rate=0.1), (0,))
    assert training.accuracy(before, test) < 0.4
    assert training.accuracy(after, test) > 0.85
    assert all(np.array_equal(before[name], kept[name]) for name in kept)


def test_training_follows_from_its_seed(digits):
    train = digits[0].take(np.arange(100))
    start = training.initial(SMALL, seed=0)
    one, same, other = (training.train(start, train, Schedule(), seed) for seed in ((1, 2), (1, 2), (1, 3)))
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not all(np.array_equal(one[name], other[name]) for name in one)
