"""The bit contract in ten lines of plain numpy: obviously right, slow, and shares nothing with the reducer."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np

NUMPY = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
    "BOOL": np.uint8,
}  # fmt: skip
"""Little-endian hosts only."""


def reference_mean(arrays, weights, dtype):
    """The weighted mean of equally shaped arrays, in their order; ``dtype`` by its safetensors name, BOOL as bytes."""
    if dtype == "BOOL":
        return np.array(arrays[0])
    with np.errstate(all="ignore"):
        total = np.float64(weights[0]) * arrays[0].astype(np.float64)
        for array, weight in zip(arrays[1:], weights[1:], strict=True):
            total = total + np.float64(weight) * array.astype(np.float64)
        mean = total / np.float64(sum(int(w) for w in weights))
        if dtype == "BF16":
            return (
                np.array([nearest_bf16(x) for x in mean.flat], np.uint16).view(ml_dtypes.bfloat16).reshape(mean.shape)
            )
        if dtype[0] in "IU":
            mean = np.rint(mean)
        return mean.astype(NUMPY[dtype])


def nearest_bf16(x):
    """The bits of the bfloat16 nearest to a finite float64, ties to even, in exact arithmetic."""
    sign = 0x8000 if math.copysign(1.0, x) < 0 else 0
    if x == 0:
        return sign
    exponent = max(math.frexp(x)[1] - 8, -133)  # 8 significant bits, and nothing finer than the smallest subnormal
    steps = round(Fraction(abs(float(x))) / Fraction(2) ** exponent)  # Python rounds a Fraction's ties to even
    # A subnormal has exponent field 0; each step up of a normal number carries into the exponent by itself.
    return sign | (steps if exponent == -133 else ((exponent + 133) << 7) + steps)
