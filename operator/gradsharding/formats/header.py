"""What the header of an update says, in whichever format it was written."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gradsharding.errors import UpdateError
from gradsharding_reducer.task import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_DIMENSIONS = 64
"""As in NumPy and PyTorch. Without a bound the product of a hostile shape takes quadratic time."""

MAX_EXTENT = 2**63 - 1
"""Sizes and offsets above it are nobody's."""


class TensorEntry(NamedTuple):
    """One tensor: bytes ``[start, end)`` of the data section. ``dtype`` is a key of ``DTYPES``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class UpdateHeader:
    """The tensors in the order of their data, which fill the object from byte ``data_start`` to its end without a gap.

    Offsets of tensors count from ``data_start``, so that clients whose headers differ only in length or metadata have
    equal ``tensors``.
    """

    data_start: int
    tensors: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]


def shown(text: str) -> str:
    """A client's text for a message: quoted, control characters escaped, cut to 80 characters."""
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}…"


def unsupported(dtype: str, name: str) -> UpdateError:
    """The refusal of an element type."""
    plain = dtype if re.fullmatch(r"[<>|=]?\w{1,20}", dtype, re.ASCII) else shown(dtype)
    return UpdateError(f"unsupported dtype {plain} of tensor {shown(name)}")


def byte_length(dtype: str, shape: list[Any] | tuple[Any, ...], name: str) -> int:
    """Bytes that a tensor of a supported dtype takes. Raises UpdateError for a shape that is not one."""
    if len(shape) > MAX_DIMENSIONS:
        raise UpdateError(f"tensor {shown(name)} has {len(shape)} dimensions; at most {MAX_DIMENSIONS} are supported")
    for dimension in shape:
        if type(dimension) is not int or not 0 <= dimension <= MAX_EXTENT:  # bool is an int to isinstance
            raise UpdateError(f"the shape of tensor {shown(name)} is not a list of integers from 0 to 2^63 - 1")
    length: int = math.prod(shape) * DTYPES[dtype]
    if length > MAX_EXTENT:
        raise UpdateError(f"the shape of tensor {shown(name)} is beyond any size: more than 2^63 - 1 bytes")
    return length


def check_header_length(length: int, object_size: int, limit: int) -> int:
    """``length``, once it fits into both the object and the limit."""
    if length > object_size:
        raise UpdateError(
            f"its header would be {length} bytes long, but the object has {object_size}: "
            "it is truncated, or of another format"
        )
    if length > limit:
        raise UpdateError(f"its header of {length} bytes is over the limit of {limit}")
    return length


def check_data_length(needed: int, data_start: int, object_size: int) -> None:
    """The tensors must fill the data section to its last byte."""
    held = object_size - data_start
    if held < needed:
        raise UpdateError(f"the object is truncated: its tensors need {needed} bytes of data, it holds {held}")
    if held > needed:
        raise UpdateError(f"{held - needed} bytes follow the data of the last tensor")
