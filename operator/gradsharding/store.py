"""What a round asks of an object store. ``Bucket`` is the interface; ``s3.py`` is S3 through minio-py.

ETags are bare, without quotes. Every method may raise StoreUnreachable (no clear answer, retries used up) or
StoreRefused (wrong keys, missing bucket, missing right).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, auto
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object as listed (``version_id`` and ``metadata`` empty) or as asked for by name.

    ``last_modified`` is RFC 3339 UTC in whole seconds, since stores differ in what is below. ``metadata`` is user metadata
    with lower-case names and without the ``x-amz-meta-`` prefix.
    """

    key: str
    size: int
    etag: str
    last_modified: str
    version_id: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


class Completion(Enum):
    """What a store said to CompleteMultipartUpload."""

    COMPLETED = auto()
    KEY_EXISTS = auto()
    """412: the condition ``If-None-Match: *`` did not hold."""
    NO_SUCH_UPLOAD = auto()
    INVALID_PART = auto()
    """A part is missing, has another ETag, or is too small."""
    UNCLEAR = auto()
    """No answer, a 5xx, or a 200 that holds an error: it may have happened."""


class Bucket(Protocol):
    """One bucket of a store."""

    name: str
    origin: str
    """``scheme://host:port`` that presigned URLs start with."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key starts with ``prefix``, in bytewise key order."""
        ...

    def stat(self, key: str) -> ObjectInfo | None:
        """The object's size, ETag, version and metadata (HEAD); None when there is none."""
        ...

    def read(self, key: str, start: int, length: int, etag: str) -> bytes:
        """Exactly bytes ``[start, start + length)`` of the object with this ETag. Raises ObjectGone (404, 412) or, beyond its end,
        StoreRefused."""
        ...

    def get(self, key: str) -> bytes | None:
        """A small object whole; None when there is none."""
        ...

    def put(self, key: str, body: bytes) -> None:
        """Write a small object in one PUT."""
        ...

    def put_new(self, key: str, body: bytes) -> bool:
        """Write only if the key is free (``If-None-Match: *``). False: it is taken. Never repeated after a lost answer:
        StoreUnreachable then."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; missing ones are fine."""
        ...

    def create_upload(self, key: str) -> str:
        """Begin a multipart upload; its id."""
        ...

    def complete_upload(self, key: str, upload: str, etags: Mapping[int, str]) -> Completion:
        """Join the parts, only if the key is free. One request, never repeated."""
        ...

    def abort_upload(self, key: str, upload: str) -> bool:
        """Drop an upload and its parts. False: there was none."""
        ...

    def list_parts(self, key: str, upload: str) -> Mapping[int, Sequence[str]] | None:
        """Part number → its ETags (a store may keep several); None when the upload is gone."""
        ...

    def list_uploads(self, key: str) -> Sequence[str]:
        """Ids of the uploads in progress of exactly this key."""
        ...

    def presign_get(self, key: str, version_id: str | None, lifetime: timedelta) -> str:
        """A URL that reads one object."""
        ...

    def presign_put(self, key: str, lifetime: timedelta) -> str:
        """A URL that writes one object."""
        ...

    def presign_part(self, key: str, upload: str, number: int, lifetime: timedelta) -> str:
        """A URL that writes one part."""
        ...
