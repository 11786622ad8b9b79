"""A round that is bigger than its functions: updates of which no reducer could hold one, made up piece by piece."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gradsharding.demo import averaging
from gradsharding.errors import ObjectGone, RoundFailed, StoreUnreachable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import WriteableBuffer
    from minio import Minio

    from gradsharding.demo.training import F32
    from gradsharding.store import Bucket

MIB = 1 << 20
PIECE = 4 * MIB
"""Bytes that are made, sent and checked in one go."""
TENSOR_MIB = 64
PART = 16 * MIB
UPLOADS_AT_ONCE = 2

Watch = Callable[[int, int], None]
"""Told of the bytes done, and of all."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """``clients`` with one update of ``mib`` MiB each, whose values follow from seed, client and place.

    All values are slices of one random block, scaled and shifted: as fast as memory, and no two pieces are alike.
    """

    clients: int
    mib: int
    seed: int

    @property
    def examples(self) -> list[int]:
        """Each client's weight."""
        return [100 + 10 * client for client in range(self.clients)]

    @property
    def pieces(self) -> int:
        """Of one update."""
        return self.mib * MIB // PIECE

    @property
    def total_bytes(self) -> int:
        """Of all data sections."""
        return self.clients * self.mib * MIB

    @property
    def disk_bytes(self) -> int:
        """Of all updates and the mean, and a tenth on top for what the store keeps beside them."""
        return (self.clients + 1) * self.mib * MIB * 11 // 10

    @property
    def in_memory_bytes(self) -> int:
        """Computed, not measured: to average with all models in memory takes theirs, a sum and a product."""
        return (self.clients + 2) * self.mib * MIB

    def block(self) -> F32:
        """What all pieces are cut from."""
        return np.random.default_rng(self.seed).standard_normal(2 * PIECE // 4, np.float32)

    def piece(self, block: F32, client: int, index: int) -> F32:
        """Piece ``index`` of a client's data section."""
        start = (7919 * client + 104_729 * index) % (PIECE // 4)
        values = block[start : start + PIECE // 4] * np.float32(1 + client / 8)
        values += np.float32(index / 64 - client)
        return values

    def header(self, client: int) -> bytes:
        """The safetensors header: square layers of 64 MiB."""
        tensors = self.mib // TENSOR_MIB
        document: dict[str, object] = {"__metadata__": {"num_examples": str(self.examples[client])}}
        for layer in range(tensors):
            offsets = [layer * TENSOR_MIB * MIB, (layer + 1) * TENSOR_MIB * MIB]
            document[f"layer{layer}.weight"] = {"dtype": "F32", "shape": [4096, 4096], "data_offsets": offsets}
        text = json.dumps(document).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def upload(crowd: Crowd, store: Minio, bucket: str, prefix: str, watch: Watch) -> None:
    """Put all updates as any S3 client does: one object each, streamed in parts. Raises StoreUnreachable."""
    from minio.error import MinioException
    from urllib3.exceptions import HTTPError

    block, total = crowd.block(), crowd.total_bytes
    for client in range(crowd.clients):

        def pieces(client: int = client) -> Iterator[memoryview]:
            yield memoryview(crowd.header(client))
            for index in range(crowd.pieces):
                watch((client * crowd.pieces + index) * PIECE, total)
                yield crowd.piece(block, client, index).data.cast("B")

        length = len(crowd.header(client)) + crowd.pieces * PIECE
        key = f"{prefix}client-{client:02}.safetensors"
        try:
            stream = io.BufferedReader(_Stream(pieces()), PIECE)
            store.put_object(bucket, key, stream, length, part_size=PART, num_parallel_uploads=UPLOADS_AT_ONCE)
        except (MinioException, HTTPError, OSError) as error:
            raise StoreUnreachable(
                f"The embedded store did not take {key!r} ({type(error).__name__}): look whether its disk is full."
            ) from None
    watch(total, total)


class _Stream(io.RawIOBase):
    """Chunks as a file to read."""

    def __init__(self, chunks: Iterator[memoryview]) -> None:
        self._chunks = chunks
        self._left = memoryview(b"")

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """From the chunk at hand, or the next one."""
        while not self._left:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._left = chunk
        room = memoryview(buffer)
        count = min(len(room), len(self._left))
        room[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def check(crowd: Crowd, bucket: Bucket, key: str, pieces: Sequence[int]) -> None:
    """Compare these pieces of the mean with plain numpy. Raises RoundFailed with reason WrongBits, and StoreError."""
    info = bucket.stat(key)
    if info is None:
        raise ObjectGone(f"The mean {key!r} is not in bucket {bucket.name!r}: it was removed.", 404)
    data = 8 + int.from_bytes(bucket.read(key, 0, 8, info.etag), "little")
    block = crowd.block()
    for index in pieces:
        got = np.frombuffer(bucket.read(key, data + index * PIECE, PIECE, info.etag), np.float32)
        values = [crowd.piece(block, client, index) for client in range(crowd.clients)]
        if not averaging.same_bits(got, averaging.weighted_mean(values, crowd.examples)):
            raise RoundFailed(
                "WrongBits", f"the mean of the large round differs from plain numpy behind byte {index * PIECE}"
            )


def sample(crowd: Crowd, count: int) -> list[int]:
    """Some pieces: the first, the last, and others at random."""
    middle = np.random.default_rng(crowd.seed).choice(crowd.pieces, min(count, crowd.pieces), replace=False)
    return sorted({0, crowd.pieces - 1, *(int(index) for index in middle)})
