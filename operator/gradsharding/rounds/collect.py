"""The prefix of a round → the updates that fit together, the rest with reasons, and whether they are enough.

Reads headers only.
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from gradsharding.errors import ObjectGone, StoreRefused, UpdateError
from gradsharding.formats import FRONT_BYTES, HeaderReader, TensorEntry, UpdateHeader, header_reader, shown
from gradsharding.rounds.layout import (
    NUM_EXAMPLES,
    OUTPUT_NUM_EXAMPLES,
    TensorLayout,
    canonical_layout,
    passed_on,
    pieces,
    shifted,
)
from gradsharding_reducer.task import MAX_WEIGHT, Extent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gradsharding.store import Bucket, ObjectInfo


NUM_EXAMPLES_OBJECT_METADATA = "num-examples"
"""With a hyphen: proxies drop HTTP header names that have underscores."""


@dataclass(frozen=True, slots=True)
class Update:
    """One client's object whose header is sound. ``num_examples`` is None when there is none that is valid.

    ``header.metadata`` is what ``passed_on`` lets through.
    """

    key: str
    etag: str
    version_id: str | None
    last_modified: str
    size: int
    num_examples: int | None
    header: UpdateHeader


@dataclass(frozen=True, slots=True)
class Rejection:
    """A candidate that cannot take part, and why. ``etag`` is that of the listing."""

    key: str
    etag: str
    reason: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """An update that fits the layout: its integer weight, and where in the object the canonical bytes are."""

    update: Update
    weight: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Collected:
    """One whole listing: ``found`` candidates, each accepted or rejected, both in bytewise key order.

    ``layout`` is None when no header is sound.
    """

    found: int
    layout: TensorLayout | None
    accepted: tuple[Accepted, ...]
    rejected: tuple[Rejection, ...]


class Quorum(Enum):
    """What the number of accepted updates means."""

    START = auto()
    WAIT = auto()
    FAILED = auto()


def quorum(accepted: int, min_count: int, max_count: int | None, seconds_left: float) -> Quorum:
    """Start at ``max_count``, or with at least ``min_count`` at the deadline; a quorum can fail only then."""
    if max_count is not None and accepted >= max_count:
        return Quorum.START
    if seconds_left > 0:
        return Quorum.WAIT
    return Quorum.START if accepted >= min_count else Quorum.FAILED


def select(collected: Collected, max_count: int | None) -> tuple[tuple[Accepted, ...], tuple[Accepted, ...]]:
    """The participants, the first ``max_count`` in key order, and the surplus."""
    count = len(collected.accepted) if max_count is None else max_count
    return collected.accepted[:count], collected.accepted[count:]


def is_candidate(key: str) -> bool:
    """By its name alone: objects of other kinds under the prefix are nobody's update."""
    return header_reader(key) is not None


class _Seen(NamedTuple):
    """What was found in the object that was listed with this ETag and time."""

    etag: str
    last_modified: str
    found: Update | Rejection


class Collector:
    """Collects one round, pass after pass; an object is read again only when its ETag or time of change differs.

    Of one listing ``workers`` objects are looked at at once, and unparsed headers of at most ``header_bytes_in_flight``
    are in memory. One instance may be used by one thread at a time.
    """

    def __init__(
        self,
        bucket: Bucket,
        prefix: str,
        weighting: str,
        max_num_examples: int = MAX_WEIGHT,
        *,
        header_limit: int = 16 * 1024**2,
        workers: int = 64,
        header_bytes_in_flight: int = 64 * 1024**2,
    ) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._weighting = weighting
        self._max_num_examples = max_num_examples
        self._header_limit = header_limit
        self._workers = workers
        self._in_flight = _ByteBudget(header_bytes_in_flight)
        # One parse at a time: threads gain nothing under the interpreter lock, and a hostile 16 MiB takes 350 MiB.
        self._parsing = threading.Lock()
        self._seen: dict[str, _Seen] = {}
        self._shared: dict[tuple[TensorEntry, ...], tuple[TensorEntry, ...]] = {}

    def collect(self) -> Collected:
        """List once, look at what is new or changed. Raises StoreError.

        An object that changes or vanishes meanwhile is rejected in this pass only.
        """
        listed = {info.key: info for info in self._bucket.list(self._prefix) if is_candidate(info.key)}
        self._forget(listed)
        changed = self._inspect_all([info for key, info in listed.items() if key not in self._seen])
        inspected = [*(seen.found for seen in self._seen.values()), *changed]
        # Code points sort as their UTF-8 bytes do.
        return _collected(sorted(inspected, key=lambda found: found.key), self._weighting)

    def _forget(self, listed: Mapping[str, ObjectInfo]) -> None:
        """Drop what is known of objects that have vanished or changed, and tensors that nobody has any more."""
        kept = {
            key: seen
            for key, seen in self._seen.items()
            if key in listed and seen[:2] == (listed[key].etag, listed[key].last_modified)
        }
        if len(kept) < len(self._seen):
            used = {id(seen.found.header.tensors) for seen in kept.values() if isinstance(seen.found, Update)}
            self._shared = {tensors: tensors for tensors in self._shared.values() if id(tensors) in used}
        self._seen = kept

    def _inspect_all(self, new: Sequence[ObjectInfo]) -> list[Rejection]:
        """Remember what is found in these objects; those that are not what was listed any more are returned."""
        changed: list[Rejection] = []
        with ThreadPoolExecutor(self._workers, thread_name_prefix="inspect") as pool:
            # When one raises, map() cancels what has not begun; what came before it is remembered.
            for info, found in zip(new, pool.map(self._inspect, new), strict=True):
                if found is None:
                    changed.append(Rejection(info.key, info.etag, "it changed or vanished while it was being read"))
                else:
                    self._seen[info.key] = _Seen(info.etag, info.last_modified, found)
        return changed

    def _inspect(self, listed: ObjectInfo) -> Update | Rejection | None:
        """None: it is not what was listed any more."""
        key = listed.key
        try:
            info = self._bucket.stat(key)
        except StoreRefused as error:
            if error.code != "InvalidKey":
                raise
            # One client's odd name must not stop everybody's round.
            return Rejection(
                key, listed.etag, "its key has a segment that S3 clients refuse, such as a lone dot: rename it"
            )
        if info is None or (info.etag, info.size) != (listed.etag, listed.size):
            return None
        reader = header_reader(key)
        assert reader is not None  # it is a candidate
        try:
            header = self._header(info, reader)
            num_examples = self._num_examples(header.metadata, info.metadata)
        except ObjectGone:
            return None
        except UpdateError as error:
            return Rejection(key, info.etag, str(error))
        kept = replace(header, metadata=passed_on(header.metadata))
        return Update(key, info.etag, info.version_id, info.last_modified, info.size, num_examples, kept)

    def _header(self, info: ObjectInfo, reader: HeaderReader) -> UpdateHeader:
        front = min(FRONT_BYTES, info.size)
        with self._in_flight.take(front):
            first = self._bucket.read(info.key, 0, front, info.etag) if front else b""
            length = reader.header_length(first, info.size, self._header_limit)
            if length <= front:
                return self._parsed(reader, first[:length], info.size)
            del first
        # The front is read once more: who held it while waiting for room could wait for others who do the same.
        with self._in_flight.take(length):
            return self._parsed(reader, self._bucket.read(info.key, 0, length, info.etag), info.size)

    def _parsed(self, reader: HeaderReader, header: bytes, object_size: int) -> UpdateHeader:
        """Parse; equal tensors of different clients become one object."""
        with self._parsing:
            parsed = reader.parse(header, object_size)
            return replace(parsed, tensors=self._shared.setdefault(parsed.tensors, parsed.tensors))

    def _num_examples(self, in_file: Mapping[str, str], on_object: Mapping[str, str]) -> int | None:
        """The client's own number. Raises UpdateError for a contradiction, or when it is no weight but has to be."""
        told = (
            in_file.get(NUM_EXAMPLES, in_file.get(OUTPUT_NUM_EXAMPLES)),
            on_object.get(NUM_EXAMPLES_OBJECT_METADATA),
        )
        texts = [text for text in told if text is not None]
        if len({_count(text) or text for text in texts}) > 1:
            raise UpdateError(
                f"num_examples is {shown(texts[0])} in its __metadata__ but {shown(texts[1])} in its object metadata"
            )
        count = _count(texts[0]) if texts else None
        if self._weighting == "NumExamples":
            if not texts:
                raise UpdateError(
                    "num_examples is neither in its __metadata__ nor, as num-examples, in its object metadata"
                )
            if count is None:
                raise UpdateError(f"num_examples is {shown(texts[0])}, not a decimal integer from 1 to 2^53")
            if count > self._max_num_examples:
                raise UpdateError(f"num_examples is {count}, above maxNumExamples of {self._max_num_examples}")
        return count


def _count(text: str) -> int | None:
    count = int(text) if re.fullmatch("[0-9]{1,16}", text) else 0
    return count if 1 <= count <= MAX_WEIGHT else None


def _collected(inspected: Sequence[Update | Rejection], weighting: str) -> Collected:
    """Fit sound updates to the layout of most of them; ``inspected`` is in key order."""
    headers = {found.key: found.header for found in inspected if isinstance(found, Update)}
    if not headers:
        return Collected(len(inspected), None, (), tuple(found for found in inspected if isinstance(found, Rejection)))
    layout = canonical_layout(headers)
    # Clients whose tensors are one object fit alike: a thousand of ten thousand tensors are compared once.
    distinct = {id(header.tensors): header.tensors for header in headers.values()}
    fits = {same: _fit(layout, tensors) for same, tensors in distinct.items()}
    accepted: list[Accepted] = []
    rejected: list[Rejection] = []
    for found in inspected:
        if isinstance(found, Rejection):
            rejected.append(found)
            continue
        fit = fits[id(found.header.tensors)]
        if isinstance(fit, str):
            rejected.append(Rejection(found.key, found.etag, fit))
        else:
            weight = found.num_examples if weighting == "NumExamples" and found.num_examples else 1
            accepted.append(Accepted(found, weight, shifted(fit, found.header.data_start)))
    return Collected(len(inspected), layout, tuple(accepted), tuple(rejected))


def _fit(layout: TensorLayout, tensors: tuple[TensorEntry, ...]) -> tuple[Extent, ...] | str:
    try:
        return pieces(layout, tensors)
    except UpdateError as error:
        return str(error)


class _ByteBudget:
    """A semaphore of bytes. A request above its whole size waits until it is alone."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._changed = threading.Condition()

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        count = min(count, self._size)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            with self._changed:
                self._free += count
                self._changed.notify_all()
