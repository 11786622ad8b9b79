"""Where each tensor lies in the output, and where each client keeps its bytes. Pure.

Offsets are bytes. *Canonical* ones count from the start of the output's data section.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from gradsharding.errors import UpdateError
from gradsharding.formats import TensorEntry, UpdateHeader, shown
from gradsharding.formats.header import byte_length
from gradsharding_reducer.task import DTYPES, ContractError, Extent, Run, canonical_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

METADATA_BYTES = 64 * 1024
"""The most that clients' ``__metadata__`` may add to the output's header, as JSON."""

OUR_METADATA = "gradsharding."
"""Metadata keys that begin so are the round's own."""

NUM_EXAMPLES = "num_examples"
OUTPUT_NUM_EXAMPLES = "gradsharding.num_examples"
"""The sum of the participants' numbers, in an output: so it can be an update of the next level as it is."""
"""The metadata key of a client's own weight: true of no mean, so never in the output."""


class Tensor(NamedTuple):
    """One tensor of the output: canonical bytes ``[start, end)``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class TensorLayout:
    """The tensors of the output in data order, without gaps. One without tensors, or of empty ones only, is legal."""

    tensors: tuple[Tensor, ...]

    @staticmethod
    def of(kinds: Iterable[tuple[str, str, tuple[int, ...]]]) -> TensorLayout:
        """Lay ``(name, dtype, shape)`` out one after another. Raises UpdateError for a bad shape."""
        tensors = []
        end = 0
        for name, dtype, shape in kinds:
            start, end = end, end + byte_length(dtype, shape, name)
            tensors.append(Tensor(name, dtype, shape, start, end))
        return TensorLayout(tuple(tensors))

    @cached_property
    def size(self) -> int:
        """Bytes of the data section."""
        return self.tensors[-1].end if self.tensors else 0

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Neighbouring tensors of one dtype are one run; a tensor of no elements neither makes nor parts one."""
        runs: list[Run] = []
        for _, dtype, _, start, end in self._filled:
            if runs and runs[-1].dtype == dtype:
                runs[-1] = runs[-1]._replace(end=end)
            else:
                runs.append(Run(dtype, start, end))
        return tuple(runs)

    def tensor_at(self, offset: int) -> Tensor:
        """The tensor that canonical byte ``offset`` belongs to. Raises ValueError beyond the data section."""
        if not 0 <= offset < self.size:
            raise ValueError(f"byte {offset} is outside of the data section of {self.size} bytes")
        return self._filled[bisect_right(self._filled, offset, key=lambda tensor: tensor.start) - 1]

    @cached_property
    def _filled(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.end > tensor.start)

    def to_json(self) -> list[list[Any]]:
        """``[name, dtype, [dimension, …]]`` of each tensor; offsets follow from these."""
        return [[tensor.name, tensor.dtype, list(tensor.shape)] for tensor in self.tensors]

    @staticmethod
    def from_json(document: Any) -> TensorLayout:
        """Read what ``to_json`` gave. Raises ContractError."""
        kinds: list[tuple[str, str, tuple[int, ...]]] = []
        for row in document if isinstance(document, list) else [document]:
            match row:
                case [str(name), str(dtype), list(shape)] if dtype in DTYPES:
                    kinds.append((name, dtype, tuple(shape)))
                case _:
                    raise ContractError("a layout must be a list of [name, dtype, [dimension, …]] of supported dtypes")
        try:
            return TensorLayout.of(kinds)
        except UpdateError as error:
            raise ContractError(f"a layout cannot be read: {error}") from None


def canonical_layout(headers: Mapping[str, UpdateHeader]) -> TensorLayout:
    """What most clients agree on, of at least one header by object key.

    The set of (name, dtype, shape) that most clients have wins, and among these the data order that most have. In a tie
    it is the one that holds the first key, bytewise. Raises ValueError without headers.
    """
    # Headers that share their tensors, as a Collector's do, are compared once: a thousand clients have one layout.
    shared: dict[int, tuple[tuple[TensorEntry, ...], int]] = {}
    for key in sorted(headers):  # code points sort as their UTF-8 bytes do
        tensors = headers[key].tensors
        shared[id(tensors)] = (tensors, shared.get(id(tensors), (tensors, 0))[1] + 1)
    orders_by_set: dict[frozenset[Any], Counter[Any]] = {}
    for tensors, clients in shared.values():
        order = tuple(tensor[:3] for tensor in tensors)
        orders_by_set.setdefault(frozenset(order), Counter())[order] += clients
    # Both dicts are in the order of their first key, and max() keeps the first of equals.
    orders = max(orders_by_set.values(), key=Counter.total)
    return TensorLayout.of(max(orders, key=orders.__getitem__))


def extents(layout: TensorLayout, header: UpdateHeader) -> tuple[Extent, ...]:
    """Where the object with this header keeps the canonical bytes: in one piece when the order is the same.

    Raises UpdateError that names tensors which are missing, unknown, or of another dtype or shape.
    """
    return shifted(pieces(layout, header.tensors), header.data_start)


def shifted(relative: tuple[Extent, ...], data_start: int) -> tuple[Extent, ...]:
    """Extents that count from the object's start, of those that count from its data section."""
    return tuple(extent._replace(offset=extent.offset + data_start) for extent in relative)


def pieces(layout: TensorLayout, tensors: tuple[TensorEntry, ...]) -> tuple[Extent, ...]:
    """``extents``, with offsets that count from the start of the object's data section."""
    found = {tensor.name: tensor for tensor in tensors}
    problems: list[str] = []
    merged: list[Extent] = []
    for name, dtype, shape, start, end in layout.tensors:
        tensor = found.pop(name, None)
        if tensor is None:
            problems.append(f"tensor {shown(name)} is missing")
        elif tensor.dtype != dtype:
            problems.append(f"tensor {shown(name)} is {tensor.dtype}, but {dtype} in most updates")
        elif tensor.shape != shape:
            problems.append(
                f"tensor {shown(name)} has shape {_shape(tensor.shape)}, but {_shape(shape)} in most updates"
            )
        elif start == end:
            pass
        elif merged and merged[-1].offset + merged[-1].length == tensor.start:
            merged[-1] = merged[-1]._replace(length=merged[-1].length + end - start)
        else:
            merged.append(Extent(start, end - start, 0, tensor.start))
    problems += [f"tensor {shown(name)} is not in most updates" for name in found]
    if problems:
        rest = len(problems) - 3
        more = f", and {rest} more difference{'s' * (rest > 1)}" if rest > 0 else ""
        raise UpdateError(", ".join(problems[:3]) + more)
    return tuple(merged)


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape[:8]))}{', …' if len(shape) > 8 else ''}]"


def passed_on(metadata: Mapping[str, str]) -> dict[str, str]:
    """What of one client's ``__metadata__`` may reach the output: not its number of examples, not keys that are ours.

    Of the rest, in key order, whatever still fits into METADATA_BYTES as JSON.
    """
    kept: dict[str, str] = {}
    room = METADATA_BYTES
    for key in sorted(metadata):
        if key.startswith(OUR_METADATA) or key == NUM_EXAMPLES:
            continue
        length = len(canonical_json({key: metadata[key]}))
        if length <= room:
            kept[key] = metadata[key]
            room -= length
    return kept


def merge_metadata(headers: Iterable[UpdateHeader]) -> dict[str, str]:
    """The output's share of the clients' ``__metadata__``: what ``passed_on`` lets through and is equal in all."""
    clients = iter(headers)
    merged = {key: value for header in islice(clients, 1) for key, value in passed_on(header.metadata).items()}
    for header in clients:
        theirs = passed_on(header.metadata)
        merged = {key: value for key, value in merged.items() if theirs.get(key) == value}
    return merged
