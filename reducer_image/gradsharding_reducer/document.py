"""Reading and writing JSON documents of the contract: every value is taken by name, type and bounds, and none may be left over."""

from __future__ import annotations

import json
from typing import Any, TypeVar

VERSION = 1
"""Of task and result. A reader refuses another one, since guessing would change bits."""


class ContractError(ValueError):
    """A document is not a task or result of this version; the message names the field."""


def canonical_json(document: Any) -> bytes:
    """JSON with sorted keys, no spaces, ASCII only, and no NaN: equal documents have equal bytes."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


T = TypeVar("T")


class Reader:
    """One JSON object of a document being read; every value is taken by name, type and bounds, and none may be left over."""

    def __init__(self, value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise ContractError(f"{path} must be a JSON object, not {type(value).__name__}")
        self._values = dict(value)
        self._path = path

    @staticmethod
    def of(document: bytes | str, path: str) -> Reader:
        try:
            value = json.loads(document)
        except (ValueError, RecursionError) as error:
            raise ContractError(f"{path} is not JSON: {error}") from None
        reader = Reader(value, path)
        version = reader.integer("version", 0)
        if version != VERSION:
            raise ContractError(
                f"{path}.version is {version}; this build knows version {VERSION} only: use a reducer of the operator's release"
            )
        return reader

    def take(self, name: str) -> Any:
        try:
            return self._values.pop(name)
        except KeyError:
            raise ContractError(f"{self._path}.{name} is missing") from None

    def integer(self, name: str, low: int, high: int = 2**63) -> int:
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ContractError(f"{self._path}.{name} must be an integer from {low} to {high}")
        return value

    def number(self, name: str) -> float:
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ContractError(f"{self._path}.{name} must be a number from 0 on")
        return float(value)

    def string(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str):
            raise ContractError(f"{self._path}.{name} must be a string")
        return value

    def choice(self, name: str, kinds: type[T]) -> T:
        value = self.string(name)
        try:
            return kinds(value)  # type: ignore[call-arg]
        except ValueError:
            raise ContractError(f"{self._path}.{name} is {value!r:.80}, which this build does not know") from None

    def optional(self, name: str, read: str, *arguments: Any) -> Any:
        if self._values.get(name, ...) is None:
            self._values.pop(name)
            return None
        return getattr(self, read)(name, *arguments)

    def object(self, name: str) -> Reader:
        return Reader(self.take(name), f"{self._path}.{name}")

    def objects(self, name: str) -> list[Reader]:
        return [Reader(value, f"{self._path}.{name}[{i}]") for i, value in enumerate(self._list(name))]

    def tuples(self, name: str, *types: type) -> list[tuple[Any, ...]]:
        """Lists of fixed length, such as extents; integers among them are from 0 on."""
        rows = self._list(name)
        for i, row in enumerate(rows):
            if not isinstance(row, list) or len(row) != len(types) or not all(map(_is_plain, row, types)):
                raise ContractError(
                    f"{self._path}.{name}[{i}] must be a list of {', '.join(t.__name__ for t in types)}"
                )
        return [tuple(row) for row in rows]

    def _list(self, name: str) -> list[Any]:
        value = self.take(name)
        if not isinstance(value, list):
            raise ContractError(f"{self._path}.{name} must be a list")
        return value

    def mapping(self, name: str, kinds: type | tuple[type, ...]) -> dict[str, Any]:
        value = self.take(name)
        if not isinstance(value, dict) or not all(
            isinstance(v, kinds) and not isinstance(v, bool) for v in value.values()
        ):
            raise ContractError(f"{self._path}.{name} must be an object of plain values")
        return value

    def end(self) -> None:
        if self._values:
            raise ContractError(f"{self._path}.{min(self._values)} is not a field of version {VERSION}")

    def fail(self, message: str) -> ContractError:
        return ContractError(f"{self._path}{message}")


def _is_plain(value: Any, kind: type) -> bool:
    """A string, or an integer from 0 on that is no bool."""
    return type(value) is kind and (not isinstance(value, int) or value >= 0)
