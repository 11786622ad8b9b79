"""Headers of ``.npy``, versions 1 to 3: magic, version, length, then a Python dictionary literal.

The literal is read with a regular expression, not with ``ast.literal_eval``: no recursion, no warnings, nothing but
the three items that the format has. Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import re

from gradsharding.errors import UpdateError
from gradsharding.formats.header import (
    TensorEntry,
    UpdateHeader,
    byte_length,
    check_data_length,
    check_header_length,
    unsupported,
)

TENSOR_NAME = "array"
"""The name of the one tensor of an ``.npy`` object."""

_MAGIC = b"\x93NUMPY"
_LENGTH_BYTES = {1: 2, 2: 4, 3: 4}
"""Width of the length field by major version."""

_DTYPES = {
    "<f8": "F64", "<f4": "F32", "<f2": "F16",
    "<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8",
    "<u8": "U64", "<u4": "U32", "<u2": "U16", "|u1": "U8",
    "|b1": "BOOL",
}  # fmt: skip

_LITERAL_BYTES = 10_000
"""``np.load`` refuses longer headers too; a plain array needs about 120 bytes."""

_ITEM = re.compile(
    r"""\s* (?P<quote>['"]) (?P<name>descr|fortran_order|shape) (?P=quote) \s* : \s* (?:
    (?: (?P<mark>['"]) (?P<text>[^'"\\]*) (?P=mark) | (?P<flag>True|False) | \( (?P<shape>[^()]*) \) )
    \s* (?: , \s* | (?=\}) ) | (?P<nested>[\[(]) )""",
    re.VERBOSE,
)
_DIMENSION = re.compile(r"0|[1-9][0-9]{0,18}")


def header_length(first: bytes, object_size: int, limit: int) -> int:
    """Bytes of magic, version, length and literal. Raises UpdateError when they do not fit the object or the limit."""
    if not first.startswith(_MAGIC) or len(first) < 8:
        raise UpdateError("it does not begin as an .npy file does")
    major, minor = first[6], first[7]
    if major not in _LENGTH_BYTES or minor != 0:
        raise UpdateError(f"it is an .npy file of version {major}.{minor}; 1.0, 2.0 and 3.0 are supported")
    start = 8 + _LENGTH_BYTES[major]
    if len(first) < start:
        raise UpdateError(f"the object has {object_size} bytes, too few for an .npy header")
    length = start + int.from_bytes(first[8:start], "little")
    return check_header_length(length, object_size, min(limit, start + _LITERAL_BYTES))


def parse(header: bytes, object_size: int) -> UpdateHeader:
    """One tensor named ``array``, no metadata. Raises UpdateError, also for Fortran order and big-endian elements."""
    data_start = header_length(header, object_size, object_size)
    if len(header) < data_start:
        raise UpdateError(f"its header of {data_start} bytes ends after {len(header)}")
    literal = header[8 + _LENGTH_BYTES[header[6]] : data_start]
    dtype, shape = _array(_items(literal))
    length = byte_length(dtype, shape, TENSOR_NAME)
    check_data_length(length, data_start, object_size)
    return UpdateHeader(data_start, (TensorEntry(TENSOR_NAME, dtype, shape, 0, length),), {})


def _items(literal: bytes) -> dict[str, re.Match[str]]:
    text = literal.decode("latin-1").strip()  # version 3 is UTF-8, but what is legal here is ASCII in both
    items: dict[str, re.Match[str]] = {}
    position = 1
    while text.startswith("{") and (item := _ITEM.match(text, position)):
        if item["name"] in items:
            raise UpdateError(f"its header names {item['name']} twice")
        items[item["name"]] = item
        if item["nested"]:
            break
        position = item.end()
    if "descr" in items and items["descr"]["nested"]:
        raise unsupported("structured", TENSOR_NAME)
    if len(items) != 3 or text[position:] != "}":
        raise UpdateError("its header is not a dictionary of exactly descr, fortran_order and shape")
    return items


def _array(items: dict[str, re.Match[str]]) -> tuple[str, tuple[int, ...]]:
    descr, order, shape = items["descr"]["text"], items["fortran_order"]["flag"], items["shape"]["shape"]
    if descr is None:
        raise UpdateError("the descr of its header is not a string")
    if descr not in _DTYPES:
        raise unsupported(descr, TENSOR_NAME)
    if order is None:
        raise UpdateError("the fortran_order of its header is neither True nor False")
    if order == "True":
        raise UpdateError("it is in Fortran order: save np.ascontiguousarray(array) instead")
    return _DTYPES[descr], _dimensions(shape)


def _dimensions(text: str | None) -> tuple[int, ...]:
    """What stands between the parentheses: nothing, ``3,`` or ``3, 4``."""
    if text is None:
        raise UpdateError(_BAD_SHAPE)
    *dimensions, last = (piece.strip() for piece in text.split(","))
    if last:
        dimensions.append(last)
    if (text.strip() and "," not in text) or not all(_DIMENSION.fullmatch(dimension) for dimension in dimensions):
        raise UpdateError(_BAD_SHAPE)
    return tuple(int(dimension) for dimension in dimensions)


_BAD_SHAPE = "the shape of its header is not a tuple of integers from 0 to 2^63 - 1"
