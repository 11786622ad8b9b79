"""The reference that ``verify`` compares with, held to the tests' own one, which shares no line with it."""

import ml_dtypes
import numpy as np
import pytest
from unit.reducer.reference import NUMPY, reference_mean

from gradsharding.rounds import reference

WEIGHTS = [3, 2**40 + 1, 77]


def values(dtype, seed, count=5000):
    random = np.random.default_rng(seed)
    kind = np.dtype(NUMPY[dtype])
    if dtype == "BOOL":
        return np.random.default_rng(0).integers(0, 2, count, np.uint8)
    if dtype[0] in "IU":
        limits = np.iinfo(kind)
        return random.integers(max(limits.min, -(2**53)), min(limits.max, 2**53), count, kind, endpoint=True)
    bits = random.integers(0, 256, count * kind.itemsize, np.uint8).view(kind)  # all exponents, subnormal ones too
    with np.errstate(all="ignore"):  # of NaN
        return np.where(np.isfinite(bits.astype(np.float64)), bits, kind.type(1)).astype(kind)


@pytest.mark.parametrize("dtype", sorted(NUMPY))
def test_mean(dtype):
    arrays = [values(dtype, seed) for seed in range(3)]
    got = reference.weighted_mean(dtype, (array.tobytes() for array in arrays), WEIGHTS)
    assert got == reference_mean(arrays, WEIGHTS, dtype).tobytes()


def test_bf16_rounds_to_nearest_even_down_to_the_smallest():
    exact = [
        1 + 2**-8,
        1 + 3 * 2**-8,
        1 + 2**-8 + 2**-50,
        2.0**-133,
        2.0**-134,
        3 * 2.0**-134,
        -(2.0**-134) - 2.0**-180,
    ]
    exact += [0.0, -0.0, 1e-320, float(ml_dtypes.finfo(ml_dtypes.bfloat16).max), -1.5]
    bits = np.frombuffer(reference.narrow("BF16", np.array(exact)), np.uint16)
    expected = [0x3F80, 0x3F82, 0x3F81, 0x0001, 0x0000, 0x0002, 0x8001, 0x0000, 0x8000, 0x0000, 0x7F7F, 0xBFC0]
    assert [hex(b) for b in bits] == [hex(b) for b in expected]


@pytest.mark.parametrize(
    ("dtype", "data", "shown"),
    [
        ("F32", b"\x00\x00\xc0\x3f", "1.5 (0x3fc00000)"),
        ("BF16", b"\xc0\x3f", "1.5 (0x3fc0)"),
        ("I8", b"\xff", "-1 (0xff)"),
        ("BOOL", b"\x01", "1 (0x01)"),
    ],
)
def test_an_element_for_people(dtype, data, shown):
    assert reference.element(dtype, data) == shown


def test_first_difference():
    assert reference.first_difference(b"abc", b"abc") is None
    assert reference.first_difference(b"abc", b"abd") == 2
    assert reference.first_difference(b"xbc", b"abd") == 0
    assert reference.first_difference(b"", b"") is None
