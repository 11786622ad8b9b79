"""What the demo checks the reducers against, and how it counts them."""

import numpy as np
import pytest

from gradsharding.demo import averaging
from gradsharding.demo.federation import check_mean
from gradsharding.errors import RoundFailed


def test_mean_of_equal_models_is_that_model():
    model = np.random.default_rng(0).standard_normal((1000, 300), np.float32)
    model[0, :3] = -0.0, 1e-40, 3e38
    mean = averaging.weighted_mean([model] * 7, [3, 1, 4, 1, 5, 9, 2])
    assert averaging.same_bits(mean, model)


def test_mean_is_weighted_by_examples():
    mean = averaging.weighted_mean([np.float32([1, 0]), np.float32([4, 0])], [2, 1])
    assert mean.tolist() == [2.0, 0.0]


def test_one_bit_is_a_difference():
    model = {"w": np.float32([1.0, 2.0])}
    check_mean(model, [model, model], [1, 2])
    wrong = {"w": np.nextafter(model["w"], np.float32(9))}
    with pytest.raises(RoundFailed, match="'w' differs"):
        check_mean(wrong, [model, model], [1, 2])
    with pytest.raises(RoundFailed, match="other tensors"):
        check_mean({**model, "v": model["w"]}, [model, model], [1, 2])
    assert not averaging.same_bits(np.float32([0.0]), np.float32([-0.0]))


@pytest.mark.parametrize(
    ("intervals", "most"),
    [([], 0), ([(0, 2)], 1), ([(0, 2), (2, 4)], 1), ([(0, 3), (1, 2), (2, 5), (2.5, 4)], 3)],
)
def test_most_at_once(intervals, most):
    assert averaging.most_at_once(intervals) == most


def test_manifest_asks_for_four_reducers_of_128_mib():
    spec = averaging.round_spec("http://127.0.0.1:9000", "us-east-1", "digits", "digits/3", 10)
    assert (spec.function.memory_mib, spec.function.shards, spec.function.max_concurrency) == (128, 4, 4)
    assert (spec.updates.prefix, spec.output.key) == ("digits/3/updates/", "digits/3/model.safetensors")
    assert (spec.updates.min_count, spec.updates.max_count) == (10, 10)
