"""Write the table of values into the chart's README, from values.yaml and its comments: python scripts/chart_readme.py."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

CHART = Path(__file__).parents[1] / "helm" / "gradsharding"
BEGIN, END = "<!-- values: made by scripts/chart_readme.py -->\n", "<!-- end of values -->\n"


class Value(NamedTuple):
    """One setting: its dotted path, its default as written, and the comment above it (empty: there is none)."""

    path: str
    default: str
    comment: str


def values(text: str) -> list[Value]:
    """All settings of a values.yaml. A mapping written in braces is one setting, a block mapping is many."""
    lines = text.splitlines()
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise TypeError("values.yaml must hold a mapping")
    return list(_walk(root, "", lines))


def _walk(mapping: yaml.MappingNode, parent: str, lines: list[str]) -> Iterator[Value]:
    for key, value in mapping.value:
        path = f"{parent}{key.value}"
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from _walk(value, f"{path}.", lines)
        else:
            yield Value(path, _default(value, lines), _comment(key.start_mark.line, lines))


def _default(node: yaml.Node, lines: list[str]) -> str:
    if isinstance(node, yaml.SequenceNode) and not node.flow_style:
        return f"[{', '.join(_default(item, lines) for item in node.value)}]"
    return lines[node.start_mark.line][node.start_mark.column : node.end_mark.column]


def _comment(line: int, lines: list[str]) -> str:
    """The comment lines directly above, up to a blank line or another value."""
    first = line
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return " ".join(text.strip().removeprefix("#").strip() for text in lines[first:line])


def table(found: list[Value]) -> str:
    """As Markdown."""
    rows = [(f"`{v.path}`", f"`{v.default}`", v.comment) for v in found]
    cells = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows)
    return "| value | default | meaning |\n|---|---|---|\n" + "".join(f"| {row} |\n" for row in cells)


def with_table(readme: str, found: list[Value]) -> str:
    """The README with the table put between its two marks."""
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not pattern.search(readme):
        raise ValueError(f"README.md must hold the lines {BEGIN.strip()} and {END.strip()}")
    return pattern.sub(lambda _: f"{BEGIN}\n{table(found)}\n{END}", readme)


def main() -> int:
    """Write it."""
    readme = CHART / "README.md"
    readme.write_text(with_table(readme.read_text(), values((CHART / "values.yaml").read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
