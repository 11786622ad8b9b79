"""Whose output is it? The header of an output names the plan that made it; everything else about ownership follows from that."""

from __future__ import annotations

import json
from dataclasses import dataclass

from gradsharding.errors import ObjectGone, StoreRefused
from gradsharding.rounds.plan import PLAN_TAG
from gradsharding.store import Bucket, ObjectInfo

MAX_HEADER = 64 << 20
"""Beyond it an output is foreign: ours are at most the 16 MiB of an update's header and our own metadata."""


@dataclass(frozen=True, slots=True)
class Output:
    """The object under the output key. ``plan`` is ``(uid, revision, digest)``, None when its header names no plan."""

    info: ObjectInfo
    plan: tuple[str, int, str] | None


def read_output(bucket: Bucket, key: str) -> Output | None:
    """The output as it is now; None when there is none, or when it changes while it is read (ask again)."""
    info = bucket.stat(key)
    if info is None:
        return None
    try:
        return Output(info, _plan_tag(bucket, info))
    except ObjectGone:
        return None


def _plan_tag(bucket: Bucket, info: ObjectInfo) -> tuple[str, int, str] | None:
    if info.size < 8:
        return None
    try:
        length = int.from_bytes(bucket.read(info.key, 0, 8, info.etag), "little")
        if not 2 <= length <= min(info.size - 8, MAX_HEADER):
            return None
        document = json.loads(bucket.read(info.key, 8, length, info.etag))
        uid, revision, digest = document["__metadata__"][PLAN_TAG].split("/")
        return uid, int(revision), digest
    except StoreRefused:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # not safetensors, or not one of ours: foreign either way
