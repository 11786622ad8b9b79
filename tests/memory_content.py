"""What a memory store holds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime


@dataclass
class Stored:
    body: bytes
    etag: str
    last_modified: datetime
    version_id: str | None
    metadata: Mapping[str, str]


@dataclass
class Upload:
    key: str
    parts: dict[int, list[tuple[str, bytes]]] = field(default_factory=dict)
    """By number, in the order of arrival: (ETag, body)."""


@dataclass
class Content:
    """What one bucket holds."""

    objects: dict[str, Stored] = field(default_factory=dict)
    versions: dict[tuple[str, str], Stored] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)

    def upload(self, upload: str, key: str) -> Upload | None:
        """The upload in progress, if it is one of this key."""
        begun = self.uploads.get(upload)
        return begun if begun is not None and begun.key == key else None


def md5(body: bytes) -> str:
    return hashlib.md5(body).hexdigest()
