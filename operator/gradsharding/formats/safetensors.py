"""Headers of ``.safetensors``: 8 bytes of length (little-endian), then a JSON object, then the data.

Stricter than the safetensors library where it guesses (of two equal names it keeps the last) and where a field of
unknown meaning stands beside the known ones. Format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from gradsharding.errors import UpdateError
from gradsharding.formats.header import (
    TensorEntry,
    UpdateHeader,
    byte_length,
    check_data_length,
    check_header_length,
    shown,
    unsupported,
)
from gradsharding_reducer.task import DTYPES

_PREFIX = 8


def header_length(first: bytes, object_size: int, limit: int) -> int:
    """Bytes of prefix and JSON. Raises UpdateError when they do not fit the object or the limit."""
    if len(first) < _PREFIX:
        raise UpdateError(f"the object has {object_size} bytes, too few for a safetensors header")
    return check_header_length(_PREFIX + int.from_bytes(first[:_PREFIX], "little"), object_size, limit)


def parse(header: bytes, object_size: int) -> UpdateHeader:
    """The tensors in data order (empty ones at the same place by name) and ``__metadata__``. Raises UpdateError."""
    data_start = header_length(header, object_size, object_size)
    if len(header) < data_start:
        raise UpdateError(f"its header of {data_start} bytes ends after {len(header)}")
    document = _document(header[_PREFIX:data_start])
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UpdateError("its __metadata__ is not a JSON object of strings")
    _check_unicode(document, metadata)
    tensors = [_tensor(name, fields) for name, fields in document.items()]
    # Empty tensors at the same place have no order of their own; by name, so that equal data have equal headers.
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end, tensor.name))
    end = 0
    for tensor in tensors:
        if tensor.start != end:
            kind = "a gap" if tensor.start > end else "an overlap"
            raise UpdateError(
                f"there is {kind} before tensor {shown(tensor.name)}: it starts at {tensor.start}, not {end}"
            )
        end = tensor.end
    check_data_length(end, data_start, object_size)
    return UpdateHeader(data_start, tuple(tensors), metadata)


def _document(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise UpdateError("its header is not a JSON object")
    try:
        document = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise UpdateError("its header is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise UpdateError(f"its header is not JSON: {error}") from None
    except RecursionError:
        raise UpdateError("its header is nested too deeply") from None
    except ValueError:  # from int(): more than sys.get_int_max_str_digits()
        raise UpdateError("its header holds a number of too many digits") from None
    assert isinstance(document, dict)  # it starts with a brace
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise UpdateError(f"its header names {shown(name)} twice")
    return fields


def _no_constant(constant: str) -> NoReturn:
    raise UpdateError(f"its header is not JSON: {constant} is no number")


def _check_unicode(document: dict[str, Any], metadata: dict[str, str]) -> None:
    """Refuse half surrogate pairs, which Python reads from ``\\ud800`` but no UTF-8 output can hold."""
    try:
        "".join([*document, *metadata, *metadata.values()]).encode()
    except UnicodeEncodeError:
        raise UpdateError("its header holds text that is not Unicode: half of a surrogate pair") from None


_FIELDS = {"dtype", "shape", "data_offsets"}


def _tensor(name: str, fields: Any) -> TensorEntry:
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise UpdateError(f"tensor {shown(name)} is not an object of exactly dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str):
        raise UpdateError(f"the dtype of tensor {shown(name)} is not a string")
    if dtype not in DTYPES:
        raise unsupported(dtype, name)
    if not isinstance(shape, list):
        raise UpdateError(f"the shape of tensor {shown(name)} is not a list of integers from 0 to 2^63 - 1")
    length = byte_length(dtype, shape, name)
    if not isinstance(offsets, list) or len(offsets) != 2 or not type(offsets[0]) is type(offsets[1]) is int:
        raise UpdateError(f"the data_offsets of tensor {shown(name)} are not two integers")
    start, end = offsets
    if start < 0 or end - start != length:
        raise UpdateError(
            f"the data_offsets of tensor {shown(name)} do not fit its shape and dtype, which take {length} bytes"
        )
    return TensorEntry(name, dtype, tuple(shape), start, end)
