"""Folds over one run of one dtype: the bit contract, and nothing that does I/O.

For every element: ``p = fl64(n_i * x_i)``, ``acc = fl64(acc + p)`` in the order of the calls, the first source assigns;
at the end one division by ``fl64(sum n)`` and one rounding to the dtype, to nearest even. Multiply and add are two
numpy calls: a fused multiply-add or BLAS would round once where the contract rounds twice. Work goes in tiles that stay
in the second-level cache.

Bad values are found in the same pass, and never stop it: a bad source spoils the accumulator, but each source is judged
by its own bytes, so nobody is blamed for somebody else's NaN. Faults (BOOL disagreement, F64 overflow) are seen in what
is spoilt too, hence they mean something only where no source is bad.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from gradsharding_reducer.task import DTYPES, BadKind

if TYPE_CHECKING:  # numpy.typing takes 6 ms
    from numpy.typing import NDArray

    Bytes: TypeAlias = NDArray[np.uint8]
    Doubles: TypeAlias = NDArray[np.float64]

TILE = 64 * 1024
"""Elements worked on at once; 1 MiB of float64."""

_EXACT = 2**53
_NUMPY: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("u1"),
}  # fmt: skip
_EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80}
"""All exponent bits set: infinity or NaN. numpy's isfinite is 20 times slower on float16 than this mask."""

BAD_KIND = {
    **dict.fromkeys(("F64", "F32", "F16", "BF16"), BadKind.NON_FINITE),
    **dict.fromkeys(("I64", "U64"), BadKind.OUT_OF_RANGE),
    "BOOL": BadKind.NOT_BOOL,
}
"""What is wrong with a bad value of this dtype; narrow integers have none."""


def width(dtype: str) -> int:
    """Bytes per element."""
    return DTYPES[dtype]


class Finding(NamedTuple):
    """Element indices within the run: the source's first bad value, and the first disagreement with earlier sources
    (BOOL)."""

    bad: int | None = None
    disagreement: int | None = None


SCRATCH_BYTES = TILE * 12


class Scratch:
    """The kernel's own memory, used for every tile: one of float64, one of 32 bits."""

    def __init__(self, memory: Bytes | None = None) -> None:
        """``memory``: SCRATCH_BYTES, aligned to 8."""
        memory = np.empty(SCRATCH_BYTES, np.uint8) if memory is None else memory
        self.wide = memory[: TILE * 8].view(np.float64)
        self.small = memory[TILE * 8 : TILE * 12].view(np.uint32)
        self.flags = self.small.view(np.bool_)[:TILE]
        self.half = self.small.view(np.uint16)[:TILE]


def fold(dtype: str, source: Bytes, accumulator: Doubles, weight: int, first: bool, scratch: Scratch) -> Finding:
    """Add ``weight`` times the source's elements to ``accumulator`` (one float64 per element; BOOL keeps its byte there
    instead).

    ``source`` holds the elements little-endian and need not be aligned.
    """
    values = source.view(_NUMPY[dtype])
    bad: int | None = None
    disagreement: int | None = None
    with np.errstate(all="ignore"):
        for start in range(0, len(values), TILE):
            x = values[start : start + TILE]
            if bad is None:
                found = _first_bad(dtype, x, scratch)
                bad = None if found is None else start + found
            if dtype == "BOOL":
                kept = _bytes_of(accumulator)[start : start + len(x)]
                if first:
                    kept[:] = x
                elif disagreement is None:
                    found = _first(np.not_equal(kept, x, out=scratch.flags[: len(x)]))
                    disagreement = None if found is None else start + found
            else:
                _accumulate(dtype, x, accumulator[start : start + len(x)], float(weight), first, scratch)
    return Finding(bad, disagreement)


def finish(dtype: str, accumulator: Doubles, total_weight: int, out: Bytes, scratch: Scratch) -> int | None:
    """Divide by ``total_weight``, round into ``out`` and spoil the accumulator; the index of the first F64 overflow, if
    any."""
    results = out.view(_NUMPY[dtype])
    if dtype == "BOOL":
        results[:] = _bytes_of(accumulator)[: len(results)]
        return None
    total = float(total_weight)
    overflow: int | None = None
    with np.errstate(all="ignore"):
        for start in range(0, len(results), TILE):
            y = results[start : start + TILE]
            mean = accumulator[start : start + len(y)]
            np.divide(mean, total, out=mean)
            if dtype == "BF16":
                _narrow_bf16(mean, y, scratch)
                continue
            if dtype[0] in "IU":
                np.rint(mean, out=mean)
            np.copyto(y, mean, casting="unsafe")
            if dtype == "F64" and overflow is None:
                found = _first_bad(dtype, mean, scratch)
                overflow = None if found is None else start + found
    return overflow


def _accumulate(dtype: str, x: NDArray[Any], acc: Doubles, weight: float, first: bool, scratch: Scratch) -> None:
    """Widen, multiply, add. Three simple passes over a tile are faster than one mixed-type ufunc, which buffers its
    casts."""
    product = acc if first else scratch.wide[: len(x)]
    if dtype == "BF16":
        wide = scratch.small[: len(x)]
        np.copyto(wide, x)
        np.left_shift(wide, 16, out=wide)
        np.copyto(product, wide.view(np.float32))
    else:
        np.copyto(product, x, casting="unsafe")  # exact: integers beyond 2^53 are reported as bad
    if weight != 1.0:
        np.multiply(product, weight, out=product)
    if not first:
        np.add(acc, product, out=acc)


def _first_bad(dtype: str, x: NDArray[Any], scratch: Scratch) -> int | None:
    if dtype in _EXPONENT:
        mask = _EXPONENT[dtype]
        exponents = np.bitwise_and(x.view(np.uint16), mask, out=scratch.half[: len(x)])
        return int(exponents.argmax()) if exponents.max() == mask else None
    if dtype in ("F64", "F32"):
        flags = np.isfinite(x, out=scratch.flags[: len(x)])
        return None if flags.all() else int(flags.argmin())
    if dtype == "I64" and (x.max() > _EXACT or x.min() < -_EXACT):
        return _first((x > _EXACT) | (x < -_EXACT))
    if dtype == "U64" and x.max() > _EXACT:
        return _first(x > _EXACT)
    if dtype == "BOOL" and x.max() > 1:
        return _first(x > 1)
    return None


def _first(flags: NDArray[np.bool_]) -> int | None:
    index = int(flags.argmax())
    return index if flags[index] else None


def _bytes_of(accumulator: Doubles) -> Bytes:
    return accumulator.view(np.uint8)


_SMALLEST_NORMAL = np.uint64((1023 - 126) << 52)
"""Bits of 2^-126 as float64."""


def _narrow_bf16(mean: Doubles, out: NDArray[np.uint16], scratch: Scratch) -> None:
    """Round float64 to bfloat16 once, on the bits: dropping 45 of 52 fraction bits, and the exponent's bias from 1023
    to 127."""
    step = TILE // 2  # the second scratch array holds half a tile of 64 bits
    for start in range(0, len(mean), step):
        tile = mean[start : start + step]
        y = out[start : start + step]
        bits = tile.view(np.uint64)
        rounded = scratch.wide.view(np.uint64)[: len(tile)]
        other = scratch.small.view(np.uint64)[: len(tile)]
        np.bitwise_and(bits, 2**63 - 1, out=other)
        np.right_shift(other, 45, out=rounded)
        np.bitwise_and(rounded, 1, out=rounded)  # the last bit that stays: ties go to even
        np.add(rounded, other, out=rounded)
        np.add(rounded, 2**44 - 1, out=rounded)
        np.right_shift(rounded, 45, out=rounded)
        np.subtract(rounded, 896 << 7, out=rounded)
        np.minimum(rounded, _EXPONENT["BF16"], out=rounded)
        tiny = np.less(other, _SMALLEST_NORMAL).nonzero()[0]
        if len(tiny):
            # Subnormal: the fraction counts in steps of 2^-133, and scaling by a power of two is exact.
            rounded[tiny] = np.rint(np.abs(tile[tiny]) * 2.0**133).astype(np.uint64)
        np.right_shift(bits, 48, out=other)
        np.bitwise_and(other, 0x8000, out=other)
        np.bitwise_or(rounded, other, out=rounded)
        np.copyto(y, rounded, casting="unsafe")
