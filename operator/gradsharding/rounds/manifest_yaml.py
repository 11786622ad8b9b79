"""YAML text, perhaps hostile, to one document of plain mappings, lists, strings, numbers, booleans and nulls."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.constructor import ConstructorError

from gradsharding.errors import ManifestError
from gradsharding.rounds.fields import shown

MAX_CHARACTERS = 64 * 1024
MAX_DEPTH = 20


def read_document(text: str, where: str) -> object:
    """The one document of ``text``. Raises ManifestError, which names ``where``, line and column.

    Refused, besides what is no YAML: anchors on mappings and lists (with them and merge keys a few lines grow without
    end), tags (they ask for types that JSON does not have), names that occur twice, deep nesting, more than 64 Ki
    characters. A merge key is a plain name, ``<<``.
    """
    if len(text) > MAX_CHARACTERS:
        raise ManifestError(f"{where} has {len(text)} characters; a manifest has at most {MAX_CHARACTERS}")
    try:
        _check_events(text)
        return yaml.load(text, _PlainLoader)  # noqa: S506 - a SafeLoader
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise ManifestError(
            f"{where}, line {line}, column {column}: a character that YAML does not allow, {_code(error)}"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ManifestError(f"{where}{place}: {error.problem or error.context or 'not YAML'}") from None


def _code(error: yaml.reader.ReaderError) -> str:
    character: Any = error.character
    return f"U+{character if isinstance(character, int) else ord(character):04X}"


def _check_events(text: str) -> None:
    """What is refused for its form. Events come one by one: nothing is built and nothing recurses."""
    depth = documents = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise _refuse("a second document begins: give one AggregationRound per file", event)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if event.anchor is not None:
                raise _refuse("anchors on mappings and lists are not supported: write the fields out", event)
            if depth > MAX_DEPTH:
                raise _refuse("nested too deep", event)
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if isinstance(event, yaml.CollectionStartEvent | yaml.ScalarEvent) and event.tag is not None:
            raise _refuse("tags (!) are not supported: write plain values", event)


def _refuse(problem: str, event: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


_NOT_JSON = {"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:merge", "tag:yaml.org,2002:value"}


class _PlainLoader(yaml.SafeLoader):
    """A SafeLoader that lets no name occur twice, has no merge keys, and leaves dates strings, as kubectl does."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML declares it so
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NOT_JSON]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConstructorError(problem="a name must be a plain string", problem_mark=key.start_mark)
            if key.value in names:
                raise ConstructorError(problem=f"{shown(key.value)} occurs twice", problem_mark=key.start_mark)
            names.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError:  # what looks like a number and is none, such as 0x_, or has more than 4300 digits
            raise ConstructorError(problem="not a number: put it in quotes", problem_mark=node.start_mark) from None
