"""A committed output, computed once more from the updates that its manifest names, and compared bit by bit.

Memory does not depend on the model or on the number of updates: blocks of the data section go by one after another.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradsharding.errors import ObjectGone, RoundFailed, UpdateError
from gradsharding.formats import FRONT_BYTES, HeaderReader, UpdateHeader, header_reader, safetensors
from gradsharding.rounds import reference
from gradsharding.rounds.collect import is_candidate
from gradsharding.rounds.keys import MANIFEST_SUFFIX
from gradsharding.rounds.layout import TensorLayout, extents
from gradsharding.rounds.output import MAX_HEADER
from gradsharding.rounds.plan import PLAN_TAG
from gradsharding_reducer.task import DTYPES, MAX_WEIGHT, Extent, Run

if TYPE_CHECKING:
    from gradsharding.store import Bucket, ObjectInfo

BLOCK_ELEMENTS = 1 << 20
"""8 MiB as float64, of which numpy takes three."""

READS_AHEAD = 4

Watch = Callable[[int, int], None]
"""Told of the bytes read so far, and of how many there are to read."""


class Difference(NamedTuple):
    """The first element that differs: its tensor, where in it, its value there and by the reference."""

    tensor: str
    position: tuple[int, ...]
    output: str
    reference: str


@dataclass(frozen=True, slots=True)
class Verified:
    """``difference`` None: all bits are equal."""

    participants: int
    bytes_read: int
    output: ObjectInfo
    difference: Difference | None


class _Participant(NamedTuple):
    key: str
    etag: str
    weight: int


def verify(updates: Bucket, output: Bucket, key: str, watch: Watch = lambda _read, _total: None) -> Verified:
    """Compare the output ``key`` with the reference, up to the first difference.

    Raises RoundFailed when that cannot be done: NoManifest, ManifestUnreadable, NoOutput, ForeignOutput, OutputChanged,
    UpdateGone or UpdateUnreadable; and StoreError.
    """
    document = _manifest(output, key)
    people = _participants(document, key)
    info = output.stat(key)
    if info is None:
        raise RoundFailed("NoOutput", f"{output.name}/{key} is gone, only its manifest is there: run the round again")
    header = _output_header(output, info, document, sum(person.weight for person in people))
    layout = TensorLayout.of((tensor.name, tensor.dtype, tensor.shape) for tensor in header.tensors)
    readers = [_update_reader(updates, person, layout) for person in people]
    readers.append(partial(_read_output, output, info, header.data_start))

    weights = [person.weight for person in people]
    jobs = (partial(read, block) for block in _blocks(layout) for read in readers)
    bytes_read = 0
    with closing(_ahead(jobs)) as bodies:
        watched = _watched(bodies, layout.size * len(readers), watch)
        for block in _blocks(layout):
            expected = reference.weighted_mean(block.dtype, islice(watched, len(people)), weights)
            actual = next(watched)
            bytes_read += len(actual) * len(readers)
            at = reference.first_difference(actual, expected)
            if at is not None:
                return Verified(len(people), bytes_read, info, _difference(layout, block, at, actual, expected))
    return Verified(len(people), bytes_read, info, None)


def _manifest(output: Bucket, key: str) -> Mapping[str, Any]:
    body = output.get(key + MANIFEST_SUFFIX)
    where = f"{output.name}/{key}{MANIFEST_SUFFIX}"
    if body is None:
        raise RoundFailed("NoManifest", f"{where} is not there: only a round that is done can be verified")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise _unreadable(where)
    return document


def _unreadable(where: str) -> RoundFailed:
    return RoundFailed("ManifestUnreadable", f"{where} is no manifest of a round: somebody has changed it")


def _participants(document: Mapping[str, Any], key: str) -> list[_Participant]:
    people = []
    rows = document.get("participants")
    for row in rows if isinstance(rows, list) else ():
        match row:
            case {"key": str(name), "etag": str(etag), "weight": int(weight)} if (
                1 <= weight <= MAX_WEIGHT and is_candidate(name)
            ):
                people.append(_Participant(name, etag, weight))
            case _:
                raise _unreadable(key + MANIFEST_SUFFIX)
    if not people:
        raise _unreadable(key + MANIFEST_SUFFIX)
    return people


def _output_header(output: Bucket, info: ObjectInfo, document: Mapping[str, Any], weight: int) -> UpdateHeader:
    """The output's header, which must be the one of the manifest's plan."""
    plan = document.get("plan")
    plan = plan if isinstance(plan, dict) else {}
    tag = f"{document.get('round')}/{plan.get('revision')}/{plan.get('sha256')}"
    try:
        header = _header(output, info, safetensors)
    except ObjectGone:
        raise _output_changed(output, info) from None
    except UpdateError as error:
        raise RoundFailed("ForeignOutput", f"{output.name}/{info.key} is no output of a round: {error}") from None
    if header.metadata.get(PLAN_TAG) != tag or header.metadata.get("gradsharding.num_examples") != str(weight):
        raise RoundFailed(
            "ForeignOutput", f"{output.name}/{info.key} does not name the plan and the weights of its manifest"
        )
    return header


def _header(bucket: Bucket, info: ObjectInfo, reader: HeaderReader) -> UpdateHeader:
    first = bucket.read(info.key, 0, min(FRONT_BYTES, info.size), info.etag)
    length = reader.header_length(first, info.size, MAX_HEADER)
    body = first[:length] if length <= len(first) else bucket.read(info.key, 0, length, info.etag)
    return reader.parse(body, info.size)


def _update_reader(updates: Bucket, person: _Participant, layout: TensorLayout) -> Callable[[Run], bytes]:
    """How to read a block of one participant's update."""
    info, reader = updates.stat(person.key), header_reader(person.key)
    assert reader is not None  # _participants has seen to it
    if info is None or info.etag != person.etag:
        raise _update_gone(person, "is gone" if info is None else "was overwritten")
    try:
        found = extents(layout, _header(updates, info, reader))
    except ObjectGone:
        raise _update_gone(person, "was overwritten") from None
    except UpdateError as error:
        raise RoundFailed("UpdateUnreadable", f"{person.key} does not fit the output: {error}") from None
    return partial(_read_update, updates, person, found)


def _update_gone(person: _Participant, what: str) -> RoundFailed:
    return RoundFailed(
        "UpdateGone", f"{person.key} {what} since the round, and so the output cannot be verified any more"
    )


def _output_changed(output: Bucket, info: ObjectInfo) -> RoundFailed:
    return RoundFailed("OutputChanged", f"{output.name}/{info.key} was replaced while it was read: verify again")


def _read_update(updates: Bucket, person: _Participant, found: Sequence[Extent], block: Run) -> bytes:
    pieces = []
    at = bisect_right(found, block.start, key=lambda extent: extent.start) - 1
    for extent in islice(found, at, None):
        start, end = max(block.start, extent.start), min(block.end, extent.start + extent.length)
        if start >= end:
            break
        pieces.append((extent.offset + start - extent.start, end - start))
    try:
        return b"".join(updates.read(person.key, offset, length, person.etag) for offset, length in pieces)
    except ObjectGone as error:
        raise _update_gone(person, "is gone" if error.status == 404 else "was overwritten") from None


def _read_output(output: Bucket, info: ObjectInfo, data_start: int, block: Run) -> bytes:
    try:
        return output.read(info.key, data_start + block.start, block.end - block.start, info.etag)
    except ObjectGone:
        raise _output_changed(output, info) from None


def _blocks(layout: TensorLayout) -> Iterator[Run]:
    """The runs of the layout, cut."""
    for run in layout.runs:
        step = BLOCK_ELEMENTS * DTYPES[run.dtype]
        for start in range(run.start, run.end, step):
            yield Run(run.dtype, start, min(start + step, run.end))


def _ahead(jobs: Iterable[Callable[[], bytes]]) -> Generator[bytes]:
    """The jobs' results in order, a few of them under way."""
    pool = ThreadPoolExecutor(READS_AHEAD, thread_name_prefix="verify")
    waiting: deque[Future[bytes]] = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(job))
            if len(waiting) > READS_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _watched(bodies: Iterable[bytes], total: int, watch: Watch) -> Iterator[bytes]:
    read = 0
    for body in bodies:
        read += len(body)
        watch(read, total)
        yield body


def _difference(layout: TensorLayout, block: Run, at: int, actual: bytes, expected: bytes) -> Difference:
    tensor = layout.tensor_at(block.start + at)
    width = DTYPES[tensor.dtype]
    first = at // width * width  # a block begins with an element
    number = (block.start + first - tensor.start) // width
    position = tuple(int(i) for i in np.unravel_index(number, tensor.shape))
    values = (reference.element(tensor.dtype, data[first : first + width]) for data in (actual, expected))
    return Difference(tensor.name, position, *values)
