"""Parsers of update headers, nothing else.

Each format is a module with the two functions of ``HeaderReader``: a caller reads some bytes from the front of an
object, asks ``header_length`` how many it takes, and gives these to ``parse``. Data is never touched.
"""

from __future__ import annotations

from typing import Protocol

from gradsharding.formats import npy, safetensors
from gradsharding.formats.header import TensorEntry, UpdateHeader, shown

__all__ = ["FRONT_BYTES", "HeaderReader", "TensorEntry", "UpdateHeader", "header_reader", "shown"]

FRONT_BYTES = 64 * 1024
"""A first read of this size holds most headers whole."""


class HeaderReader(Protocol):
    """What a format module offers. Both functions raise UpdateError with the reason, and nothing else, on any bytes."""

    def header_length(self, first: bytes, object_size: int, limit: int) -> int:
        """Bytes from the object's start to its data section; more than ``limit`` or ``object_size`` is an UpdateError.

        ``first`` are at least 12 bytes from the front of the object, or all of a smaller one.
        """
        ...

    def parse(self, header: bytes, object_size: int) -> UpdateHeader:
        """Read ``header_length`` bytes from the object's start; ``object_size`` is that of the whole object."""
        ...


def header_reader(key: str) -> HeaderReader | None:
    """The parser for an object key, by its suffix; None: the object is no update."""
    if key.endswith(".safetensors"):
        return safetensors
    if key.endswith(".npy"):
        return npy
    return None
