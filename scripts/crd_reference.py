"""docs/crd.md, made of the CRD: ``python scripts/crd_reference.py`` prints it, with ``--write`` it is written.

tests/unit/test_docs.py fails when the file and the CRD differ.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CRD = ROOT / "crds" / "aggregationrounds.yaml"
PAGE = ROOT / "docs" / "crd.md"

RULES = "x-kubernetes-validations"

HEAD = """# AggregationRound

Made of `crds/aggregationrounds.yaml` by `python scripts/crd_reference.py --write`: change that file, not this one. The same on a
cluster: `kubectl explain agground.spec --recursive`. Reasons of conditions are in [conditions](conditions.md).

`apiVersion: {group}/{version}`, `kind: {kind}`, `kubectl get {short}`.
"""


def reference(crd: Mapping[str, Any]) -> str:
    """The whole page."""
    spec = crd["spec"]
    (version,) = spec["versions"]
    names = spec["names"]
    root = version["schema"]["openAPIV3Schema"]
    lines = [
        HEAD.format(group=spec["group"], version=version["name"], kind=names["kind"], short=names["shortNames"][0])
    ]
    lines += [f"{rule['message']}.\n" for rule in root.get(RULES, ())]
    for name in ("spec", "status"):
        lines += section(name, root["properties"][name])
    lines += ["## Columns of kubectl get", "", "| column | shows | with |", "|---|---|---|"]
    for column in version["additionalPrinterColumns"]:
        wide = "`-o wide`" if column.get("priority") else ""
        lines.append(f"| {column['name']} | {column.get('description', '')} | {wide} |")
    return "\n".join(lines) + "\n"


def section(path: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """One object: its description, its fields, its rules, then the objects in it."""
    yield f"## {path}\n"
    yield f"{schema['description']}\n"
    required = schema.get("required", ())
    yield "| field | type | default | |"
    yield "|---|---|---|---|"
    inner = []
    for name, field in schema["properties"].items():
        below = field.get("items", {}) if field["type"] == "array" else field
        if "properties" in below:
            inner.append((f"{path}.{name}" + ("[]" if below is not field else ""), below))
        yield f"| `{name}` | {kind(field)} | {unset(field, name in required)} | {cell(field['description'])} |"
    yield ""
    rules = [(rule.get("fieldPath", "").lstrip("."), rule["message"]) for rule in schema.get(RULES, ())]
    for name, field in schema["properties"].items():
        if "properties" not in field:
            rules += [(name, rule["message"]) for rule in field.get(RULES, ())]
    for place, message in rules:
        yield f"* `{place or path}` {cell(message)}"
    if rules:
        yield ""
    for place, below in inner:
        yield from section(place, below)


def kind(field: Mapping[str, Any]) -> str:
    """The type, with its bounds or choices."""
    if "enum" in field:
        return " or ".join(f"`{choice}`" for choice in field["enum"])
    if "minimum" in field and "maximum" in field:
        return f"integer, {field['minimum']} to {field['maximum']}"
    return str(field.get("format", field["type"])) if field["type"] == "string" else str(field["type"])


def unset(field: Mapping[str, Any], required: bool) -> str:
    """The default, or that there is none."""
    if required:
        return "required"
    default = field.get("default")
    if default is None or isinstance(default, dict):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def cell(text: str) -> str:
    """Text of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ").strip()


def main() -> int:
    """Print the page, or write it."""
    page = reference(yaml.safe_load(CRD.read_text()))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page)
    else:
        sys.stdout.write(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
