"""The bit contract in plain numpy: what every output is compared with. It shares nothing with the reducer's kernel.

With integer weights n_i and clients in canonical order, per element: acc = fl64(n_1 · x_1), then acc = fl64(acc +
fl64(n_i · x_i)), at the end one division by fl64(sum n_i) and one rounding to the dtype, ties to even. Booleans
agree, so they are the first client's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "u1",
}  # fmt: skip


def weighted_mean(dtype: str, clients: Iterable[bytes], weights: Sequence[int]) -> bytes:
    """The mean's elements, little-endian. ``clients`` gives each client's in turn, so that memory holds one."""
    clients = iter(clients)
    first = next(clients)
    if dtype == "BOOL":
        for _ in clients:
            pass
        return first
    with np.errstate(all="ignore"):
        total = np.float64(weights[0]) * widen(dtype, first)
        for weight, data in zip(weights[1:], clients, strict=True):
            total = total + np.float64(weight) * widen(dtype, data)
        return narrow(dtype, total / np.float64(sum(weights)))


def widen(dtype: str, data: bytes) -> NDArray[np.float64]:
    """Little-endian elements as float64, exactly (integers up to 2^53)."""
    if dtype == "BF16":  # the upper half of a float32
        upper = np.frombuffer(data, "<u2").astype(np.uint32)
        return (upper << np.uint32(16)).view(np.float32).astype(np.float64)
    return np.frombuffer(data, _NUMPY[dtype]).astype(np.float64)


def narrow(dtype: str, mean: NDArray[np.float64]) -> bytes:
    """Finite float64 rounded once to the dtype, to nearest even, as little-endian bytes."""
    if dtype == "BF16":
        return _to_bfloat16(mean).tobytes()
    rounded: NDArray[Any] = np.rint(mean) if dtype[0] in "IU" else mean
    return rounded.astype(_NUMPY[dtype]).tobytes()


def _to_bfloat16(mean: NDArray[np.float64]) -> NDArray[np.uint16]:
    """A bfloat16 has 8 significant bits, none below 2^-133. Scaling by powers of two is exact: only ``rint`` rounds."""
    _, exponent = np.frexp(mean)
    unit = np.maximum(exponent - 8, -133)
    nearest = np.ldexp(np.rint(np.ldexp(mean, -unit)), unit)
    # Now each value is a float32 whose lower half is zero.
    upper: NDArray[np.uint16] = (nearest.astype("<f4").view("<u4") >> np.uint32(16)).astype("<u2")
    return upper


def first_difference(left: bytes, right: bytes) -> int | None:
    """Index of the first byte that differs, of two equally long strings."""
    different = np.frombuffer(left, np.uint8) != np.frombuffer(right, np.uint8)
    return int(different.argmax()) if different.any() else None


def element(dtype: str, data: bytes) -> str:
    """One element for people: its value, and its bits in hexadecimal."""
    bits = f"0x{int.from_bytes(data, 'little'):0{2 * len(data)}x}"
    if dtype == "BF16":
        return f"{float(widen(dtype, data)[0])!r} ({bits})"
    return f"{np.frombuffer(data, _NUMPY[dtype])[0]!s} ({bits})"
