"""Pages against the code: links lead somewhere, tables miss nothing, examples compute what they say."""

import ast
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from inline_platform import InlinePlatform
from memory_store import MemoryStore
from rounds_kit import document, make_round, run, tensors, upload

from gradsharding.kube.metrics import Metrics
from gradsharding.kube.settings import PREFIX, read_settings
from gradsharding.rounds import memory, reference
from gradsharding.rounds.progress import BAD_WORDS
from gradsharding.rounds.step import Phase

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CODE = ROOT / "operator" / "gradsharding"
PAGES = sorted(
    page for page in ROOT.rglob("*.md") if not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
)
MIB = 1 << 20


def text(name):
    return (DOCS / name).read_text()


def prose(page):
    """Without blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ +(.+?)\s*$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def in_backticks(page_text):
    return set(re.findall(r"`([^`\n]+)`", page_text))


def rows(page_text, head):
    """The cells of the table that begins with this head line."""
    lines = page_text.partition(head + "\n")[2].splitlines()[1:]
    table = []
    for line in lines:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    assert table, f"there is no table {head}"
    return table


def parsed(*folders):
    return [ast.parse(file.read_text()) for folder in folders for file in sorted((CODE / folder).glob("*.py"))]


def calls(tree, *names):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in names:
            yield node


def constant(node):
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def template(node):
    """A string of the code, with … where it puts something in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(constant(piece) or "…" for piece in node.values)
    return constant(node)


# All pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


FOREIGN = re.compile(
    r"/(work|root|home)/|\b10\.99\.|\b(pypi\.org|pythonhosted\.org|proxy\.golang\.org|registry\.npmjs\.org|static\.crates\.io|"
    r"repo1?\.maven\.org|deb\.debian\.org)\b|--(extra-)?index-url|GOPROXY"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_nothing_of_this_machine(page):
    assert not FOREIGN.search(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_compile(page):
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        compile(block, page.name, "exec")


def test_pages_that_the_code_names_are_there():
    named = set()
    for file in [*CODE.rglob("*.py"), *(ROOT / "reducer_image").rglob("*.py")]:
        named |= set(re.findall(r"docs/[\w/-]+\.(?:md|json)", file.read_text()))
    assert named
    missing = {name for name in named if not (ROOT / name).exists()}
    assert not missing


# Made from the code


def test_the_crd_reference_is_the_crd():
    script = importlib.util.spec_from_file_location("crd_reference", ROOT / "scripts" / "crd_reference.py")
    made = importlib.util.module_from_spec(script)
    script.loader.exec_module(made)
    crd = yaml.safe_load(made.CRD.read_text())
    assert text("crd.md") == made.reference(crd), "run: python scripts/crd_reference.py --write"


def test_the_sizing_table_is_the_planners():
    head = "| memoryMiB | part, MiB | range, MiB | in flight | predicted peak, MiB |"
    for mib, *told in rows(text("operations.md"), head):
        made = memory.choose(int(mib), size=5 << 30, header_bytes=20_000, shards=16, sources=20, timeout_seconds=300)
        peak = memory.predict_peak(made, header_bytes=20_000, sources=20)
        shown = [
            f"{made.part_bytes / MIB:.1f}",
            f"{made.range_bytes / MIB:.1f}",
            str(made.prefetch),
            f"{peak / MIB:.0f}",
        ]
        assert told == shown, mib


# Held against the code


CAMEL = re.compile(r"[A-Z][a-z]+(?:[A-Z][A-Za-z]*)*")


def reasons():
    """Every reason that a condition or an Event of a round can have."""
    found = {phase.value for phase in Phase}
    for tree in parsed("rounds", "platforms", "kube"):
        for call in calls(tree, "RoundFailed", "Refusal"):
            found.add(constant(call.args[0]) if call.args else None)
        for call in calls(tree, "Finished", "_troubled"):
            found.add(constant(call.args[1]))
        for call in calls(tree, "event"):
            found |= {constant(word.value) for word in call.keywords if word.arg == "reason"}
    # A reason and its sentence, as a pair: of the faults of a plan, of trouble, of Events.
    for file in (
        "rounds/progress.py",
        "kube/driver.py",
        "kube/operator.py",
        "platforms/__init__.py",
        "platforms/knative.py",
    ):
        for node in ast.walk(ast.parse((CODE / file).read_text())):
            if isinstance(node, ast.Tuple) and len(node.elts) in (2, 3):
                word = constant(node.elts[-2])
                found |= {word} if word and CAMEL.fullmatch(word) else set()
    status = ast.parse((CODE / "kube/status.py").read_text())
    for function in ast.walk(status):
        if isinstance(function, ast.FunctionDef) and function.name == "_conditions":
            words = {constant(node) for node in ast.walk(function)}
            found |= {word for word in words if word and CAMEL.fullmatch(word)}
    return found - {None, "True", "False", "Unknown"}


VERIFYING = {
    constant(call.args[0]) for call in calls(ast.parse((CODE / "rounds/verify.py").read_text()), "RoundFailed")
}


def test_every_reason_is_explained():
    known = reasons()
    assert {"QuorumNotMet", "BoolDisagrees", "FunctionsNotStarting", "CleanupIncomplete", "QuorumMet"} <= known
    assert sorted(known - VERIFYING - in_backticks(text("conditions.md"))) == []


def test_no_reason_is_invented():
    page = text("conditions.md").partition("\n## While it runs")[2].partition("\n## Why an update")[0]
    told = {word for row in re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE) for word in in_backticks(row)}
    assert len(told) > 40
    assert sorted(told - reasons()) == []


def test_every_verdict_of_verify_is_explained():
    told = {word for row in rows(text("manifest.md"), "| reason of `verify` | what |") for word in in_backticks(row[0])}
    assert told == VERIFYING | {"Equal", "Different"}


def test_every_rejection_is_listed():
    sentences = set()
    for tree in parsed("formats"):
        sentences |= {template(call.args[0]) for call in calls(tree, "UpdateError")}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").startswith("_BAD"):
                sentences.add(template(node.value))
    collect, layout = (ast.parse((CODE / "rounds" / file).read_text()) for file in ("collect.py", "layout.py"))
    for call in calls(collect, "UpdateError", "Rejection"):
        sentences.add(template(call.args[-1]))
    for call in calls(layout, "append"):
        sentences.add(template(call.args[0]))
    sentences -= {None}
    assert len(sentences) > 35
    told = in_backticks(text("clients.md"))
    assert sorted(sentences - told) == []
    # Whatever looks like one must be one; what is not found so is a list comprehension of layout.py.
    assert sorted(sentence for sentence in told if "…" in sentence and sentence not in sentences | {"…"}) == [
        "tensor … is not in most updates"
    ]


def test_every_exclusion_is_listed():
    page = text("conditions.md")
    for words in BAD_WORDS.values():
        assert words in page
    for call in calls(ast.parse((CODE / "rounds/revise.py").read_text()), "LeftOut"):
        assert constant(call.args[2]) is None or constant(call.args[2]) in page


def test_every_metric_is_listed():
    registered = {}
    for family in Metrics().registry.collect():
        registered[family.name + ("_total" if family.type == "counter" else "")] = family.type
    told = {name.strip("`"): kind for name, kind, *_ in rows(text("metrics.md"), "| metric | type | labels | what |")}
    assert told == registered


class Asked(dict):
    """An environment that remembers what it was asked for."""

    def __init__(self, *values):
        super().__init__(*values)
        self.names = set()

    def get(self, name, default=None):
        self.names.add(name)
        return super().get(name, default)


def test_every_setting_is_listed_with_its_default():
    image = {PREFIX + "REDUCER_IMAGE": "registry.example/reducer:1"}
    environment = Asked(image)
    unset = read_settings(environment)
    table = {
        name.strip("`"): default.strip("`")
        for name, default, _ in rows(text("operations.md"), "| variable | unset | what |")
    }
    assert table.keys() == environment.names
    assert table.pop(PREFIX + "REDUCER_IMAGE") == "required"
    assert read_settings(image | table) == unset


def test_every_field_of_a_manifest_is_listed():
    page = text("manifest.md")
    with MemoryStore() as store:
        bucket = store.bucket("federation")
        for name in ("a.safetensors", "b.safetensors"):
            upload(bucket, name, tensors(seed=1))
        assert run(make_round(bucket, wait=False), InlinePlatform(store.origin)).succeeded
        manifest = document(bucket)
    top = {word for row in rows(page, "| field | what |") for word in in_backticks(row[0])}
    assert top == {*manifest, "cost"}
    attempt = page.partition("An attempt:\n\n")[2]
    told = {word for row in rows(attempt, "| field | what |") for word in in_backticks(row[0])}
    assert told == manifest["attempts"][0].keys()


def block(page_text, name):
    found = re.search(rf"^```python\n((?:(?!```).)*def {name}\(.*?)^```", page_text, re.DOTALL | re.MULTILINE)
    return found[1]


@pytest.mark.parametrize("dtype", sorted(set(reference._NUMPY) - {"BOOL"}))
def test_the_ten_lines_are_the_reference(dtype):
    space = {}
    exec(block(text("what-is-averaged.md"), "weighted_mean"), space)
    random = np.random.default_rng(7)
    kind = np.dtype(reference._NUMPY[dtype])
    weights = [3, 1000, 17]
    values = [random.standard_normal(999) * 50 for _ in weights]
    updates = [(np.abs(value) if kind.kind == "u" else value).astype(kind) for value in values]
    told = space["weighted_mean"](updates, weights)
    assert told.tobytes() == reference.weighted_mean(dtype, [update.tobytes() for update in updates], weights)
