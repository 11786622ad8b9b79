"""The kernel gives the bits of the plain reference, and finds every bad value."""

from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.reducer.reference import NUMPY, nearest_bf16, reference_mean

from gradsharding_reducer import kernel
from gradsharding_reducer.task import DTYPES

FLOATS = ("F64", "F32", "F16", "BF16")


def average(arrays, weights, dtype, shift=0):
    """The mean by the kernel as bytes, and what it found; every buffer begins ``shift`` bytes off alignment."""
    scratch = kernel.Scratch()
    accumulator = np.full(len(arrays[0]), np.nan)
    findings = []
    for i, (array, weight) in enumerate(zip(arrays, weights, strict=True)):
        source = np.zeros(array.nbytes + shift, np.uint8)
        source[shift:] = array.view(np.uint8)
        findings.append(kernel.fold(dtype, source[shift:], accumulator, weight, i == 0, scratch))
    out = np.zeros(arrays[0].nbytes + shift, np.uint8)
    overflow = kernel.finish(dtype, accumulator, sum(weights), out[shift:], scratch)
    return out[shift:].tobytes(), findings, overflow


def valid(raw, dtype):
    """Any bytes, made valid values of this dtype."""
    array = np.frombuffer(raw, NUMPY[dtype]).copy()
    if dtype in FLOATS:
        array[~np.isfinite(array)] = ml_dtypes.finfo(NUMPY[dtype]).max
    elif dtype == "BOOL":
        array &= 1
    elif dtype == "I64":
        array = np.clip(array, -(2**53), 2**53)
    elif dtype == "U64":
        array = np.minimum(array, np.uint64(2**53))
    return array


@st.composite
def cases(draw):
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    elements = draw(st.integers(1, 40))
    sources = draw(st.integers(1, 5))
    size = elements * DTYPES[dtype]
    arrays = [valid(draw(st.binary(min_size=size, max_size=size)), dtype) for _ in range(sources)]
    if dtype == "BOOL":
        arrays = [arrays[0]] * sources
    weights = draw(st.lists(st.integers(1, 100) | st.integers(1, 2**53), min_size=sources, max_size=sources))
    return dtype, arrays, weights


@settings(max_examples=400, deadline=None)
@given(cases(), st.sampled_from([2, 8, kernel.TILE]), st.integers(0, 7))
def test_any_values_weights_tiles_and_alignments_give_the_bits_of_the_reference(case, tile, shift):
    dtype, arrays, weights = case
    expected = reference_mean(arrays, weights, dtype)
    # An F64 product or sum may overflow, which is a fault and has no bits.
    broken = ~np.isfinite(expected) if dtype == "F64" else np.zeros(len(expected), bool)
    with mock.patch.object(kernel, "TILE", tile):
        result, findings, overflow = average(arrays, weights, dtype, shift)
    assert findings == [kernel.Finding()] * len(arrays)
    assert overflow == (int(broken.argmax()) if broken.any() else None)
    if not broken.any():
        assert result == expected.tobytes()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_extremes_that_agree_come_out_unchanged(dtype):
    if dtype in FLOATS:
        info = ml_dtypes.finfo(NUMPY[dtype])
        tiny = info.smallest_subnormal
        array = np.array([info.max, info.min, tiny, -tiny, info.smallest_normal, 1.0, 0.0, -0.0]).astype(NUMPY[dtype])
    elif dtype == "BOOL":
        array = np.array([0, 1], np.uint8)
    else:
        info = np.iinfo(NUMPY[dtype])
        array = np.array([max(info.min, -(2**53)), min(info.max, 2**53), 0, 1]).astype(NUMPY[dtype])
    weights = [3, 1000, 1] if dtype != "F64" else [1]
    result, findings, overflow = average([array] * len(weights), weights, dtype)
    assert result == array.tobytes()
    assert overflow is None
    assert findings == [kernel.Finding()] * len(weights)


@pytest.mark.parametrize(
    ("dtype", "pair", "mean"),
    [
        ("I32", (0, 1), 0),  # ties go to even
        ("I32", (1, 2), 2),
        ("I32", (-1, -2), -2),
        ("U8", (254, 255), 254),
        ("F32", (1.0, 1.0 + 2**-23), 1.0),
        ("F32", (1.0 + 2**-23, 1.0 + 2**-22), 1.0 + 2**-22),
        ("F16", (1.0, 1.0 + 2**-10), 1.0),
        ("BF16", (1.0, 1.0 + 2**-7), 1.0),
        ("BF16", (1.0 + 2**-7, 1.0 + 2**-6), 1.0 + 2**-6),
        ("BF16", (0.0, 2.0**-133), 0.0),
        ("BF16", (2.0**-133, 2.0**-132), 2.0**-132),
    ],
)
def test_ties_go_to_even(dtype, pair, mean):
    arrays = [np.array([value]).astype(NUMPY[dtype]) for value in pair]
    assert average(arrays, [1, 1], dtype)[0] == np.array([mean]).astype(NUMPY[dtype]).tobytes()


def test_bf16_is_rounded_once():
    """A mean just above a bf16 tie: float32 would round it onto the tie, and the second rounding then down to even."""
    weights = [2**40 - 1, 1]
    arrays = [np.array([x], ml_dtypes.bfloat16) for x in (1.0, 1.0)]
    just_above = 1.0 + 2**-8 + 2**-40
    assert nearest_bf16(just_above) != int(np.float32(just_above).astype(ml_dtypes.bfloat16).view(np.uint16))
    accumulator = np.array([just_above, -just_above, 2.0**-127 + 2.0**-134 + 2.0**-170])
    expected = [nearest_bf16(x) for x in accumulator]
    out = np.zeros(6, np.uint8)
    kernel.finish("BF16", accumulator, 1, out, kernel.Scratch())
    assert list(out.view(np.uint16)) == expected
    assert average(arrays, weights, "BF16")[0] == arrays[0].tobytes()


def test_the_independent_bf16_rounding_agrees_with_ml_dtypes_on_all_of_float32s_neighbours():
    bits = np.arange(0, 0x7F80, 7, np.uint16)
    exact = bits.view(ml_dtypes.bfloat16).astype(np.float64)
    for x in (exact, -exact, np.nextafter(exact.astype(np.float32), np.float32(1)).astype(np.float64)):
        assert [nearest_bf16(v) for v in x] == list(x.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16))


BAD = [
    ("F64", np.nan), ("F64", np.inf), ("F32", np.nan), ("F32", -np.inf), ("F16", np.inf), ("F16", np.nan),
    ("BF16", np.nan), ("BF16", -np.inf), ("I64", 2**53 + 1), ("I64", -(2**63)), ("I64", -(2**53) - 1),
    ("U64", 2**53 + 1), ("U64", 2**64 - 1), ("BOOL", 2), ("BOOL", 255),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "value"), BAD)
@pytest.mark.parametrize("places", [[0], [5, 6], [9, 3]])
def test_the_first_bad_value_of_each_source_is_found_and_nobody_else_is_blamed(dtype, value, places):
    good = np.ones(10, NUMPY[dtype])
    bad = good.copy()
    bad[places] = np.array([value]).astype(NUMPY[dtype])
    with mock.patch.object(kernel, "TILE", 4):
        _, findings, _ = average([good, bad, good, bad], [1, 2, 3, 4], dtype)
    assert [finding.bad for finding in findings] == [None, min(places), None, min(places)]
    assert kernel.BAD_KIND[dtype]


def test_the_first_disagreement_among_bools_is_found():
    a, b = np.array([0, 1, 1, 0, 1], np.uint8), np.array([0, 1, 0, 1, 1], np.uint8)
    with mock.patch.object(kernel, "TILE", 2):
        _, findings, _ = average([a, a, b], [1, 1, 1], "BOOL")
    assert findings == [kernel.Finding(), kernel.Finding(), kernel.Finding(None, 2)]


def test_an_f64_overflow_from_finite_values_is_a_fault_at_its_first_element():
    a = np.array([1.0, 2.0, 1.7e308, 1.7e308])
    with mock.patch.object(kernel, "TILE", 2):
        _, findings, overflow = average([a, a], [1, 1], "F64")
    assert findings == [kernel.Finding(), kernel.Finding()]
    assert overflow == 2
