"""A mapping of a manifest, read field by field. Every complaint begins with the full path of the field."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, overload

from gradsharding.errors import ManifestError

if TYPE_CHECKING:
    from gradsharding.rounds.names import Rule


class Fields:
    """The fields ``names`` (None: any) of the mapping at ``path``; a null is an unset field, as in Kubernetes.

    Raises ManifestError, also at once for a field that is not among ``names``.
    """

    def __init__(self, value: object, path: str, names: Sequence[str] | None) -> None:
        if not isinstance(value, Mapping):
            with_names = f" with {', '.join(names)}" if names else ""
            raise ManifestError(f"{path or 'the manifest'} must be a mapping{with_names}, not {shown(value)}")
        self._values = value
        self._path = path
        for name in value:
            if names is not None and name not in names:
                raise ManifestError(f"{self.path(name)} is not a field{_suggestion(name, names)}")

    def path(self, name: object) -> str:
        """The full path of a field of this mapping."""
        plain = isinstance(name, str) and re.fullmatch(r"[\w.-]{1,63}", name)
        text = name if plain else shown(name)
        return f"{self._path}.{text}" if self._path else str(text)

    def given(self, name: str) -> bool:
        """Whether the field is set."""
        return self._values.get(name) is not None

    def section(self, name: str, names: Sequence[str] | None, *, required: bool = False) -> Fields:
        """The mapping in a field; empty when it is unset."""
        if required:
            self._require(name)
        return Fields(self._values[name] if self.given(name) else {}, self.path(name), names)

    @overload
    def integer(self, name: str, bounds: range, default: int) -> int: ...
    @overload
    def integer(self, name: str, bounds: range, default: None) -> int | None: ...
    @overload
    def integer(self, name: str, bounds: range) -> int: ...
    def integer(self, name: str, bounds: range, default: object = ...) -> object:
        """An integer within the bounds; required without a default. 8.0 is one: kubectl sends it to the server as 8."""
        if default is not ... and not self.given(name):
            return default
        value = self._require(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value not in bounds:
            raise ManifestError(
                f"{self.path(name)} must be an integer from {bounds[0]} to {bounds[-1]}, not {shown(value)}"
            )
        return value

    @overload
    def text(self, name: str, rules: Sequence[Rule], default: str, *, hide: bool = ...) -> str: ...
    @overload
    def text(self, name: str, rules: Sequence[Rule], default: None, *, hide: bool = ...) -> str | None: ...
    @overload
    def text(self, name: str, rules: Sequence[Rule]) -> str: ...
    def text(self, name: str, rules: Sequence[Rule], default: object = ..., *, hide: bool = False) -> object:
        """A string that obeys the rules; required without a default. ``hide``: it may be a secret."""
        if default is not ... and not self.given(name):
            return default
        value = self._require(name)
        if not isinstance(value, str):
            hint = ": put it in quotes" if isinstance(value, int | float) else ""
            raise ManifestError(f"{self.path(name)} must be a string, not {shown(value)}{hint}")
        for rule in rules:
            if not rule.holds(value):
                raise ManifestError(f"{self.path(name)} {rule.words}" + ("" if hide else f"; it is {shown(value)}"))
        return value

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        """One of a few words."""
        value = self._values[name] if self.given(name) else default
        if not isinstance(value, str) or value not in choices:
            allowed = " or ".join(choices)
            raise ManifestError(f"{self.path(name)} must be {allowed}, not {shown(value)}{_suggestion(value, choices)}")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._values[name] if self.given(name) else default
        if not isinstance(value, bool):
            raise ManifestError(f"{self.path(name)} must be true or false, not {shown(value)}")
        return value

    def _require(self, name: str) -> object:
        if not self.given(name):
            raise ManifestError(f"{self.path(name)} is required")
        return self._values[name]


def shown(value: object) -> str:
    """A value for a message: short, printable, and never walked, since aliases can make it huge."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:60]}... ({len(value)} characters)"
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**64):
        return str(value)
    kinds = ((int, "a number of more than 19 digits"), (Mapping, "a mapping"), (list, "a list"))
    return next((words for kind, words in kinds if isinstance(value, kind)), f"a {type(value).__name__}")


def _suggestion(name: object, names: Sequence[str]) -> str:
    if not isinstance(name, str):
        return ""
    by_lower_case = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name[:80].lower(), by_lower_case, 1)
    return f": did you mean {by_lower_case[close[0]]}?" if close else ""
