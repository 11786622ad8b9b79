"""How the tree must look, beyond what ruff, mypy and import-linter see."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "operator/gradsharding", ROOT / "reducer_image/gradsharding_reducer"]
MODULES = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()

VAGUE = {"utils", "util", "helpers", "common", "manager", "misc"}
SHADOWING = {"http", "types", "select", "queue", "round"}


def test_the_folder_operator_is_no_package():
    """With an __init__.py it would shadow the standard library's operator for every Python started at the root."""
    assert not (ROOT / "operator/__init__.py").exists()
    assert list((ROOT / "operator").glob("*.py")) == []
    done = subprocess.run([sys.executable, "-c", "import operator; operator.add"], cwd=ROOT, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module(path):
    assert path.stem not in VAGUE
    assert path.stem not in SHADOWING
    text = path.read_text()
    assert len(text.splitlines()) <= 450, "one idea a file"
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module says what it is"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not {"pickle", "shelve", "marshal"} & {name.split(".")[0] for name in names}
            # Private parts of Kopf change without notice.
            assert not any(name.startswith("kopf._") for name in names)


def test_the_reducer_imports_the_standard_library_and_numpy_only():
    allowed = set(sys.stdlib_module_names) | {"numpy", "gradsharding_reducer"}
    for path in MODULES:
        if "gradsharding_reducer" in path.parts:
            for node in ast.walk(ast.parse(path.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                assert {name.split(".")[0] for name in names} <= allowed, path


def test_nothing_here_names_a_registry_or_this_machine():
    """The tree must work anywhere: addresses of package hosts and home folders belong in nobody's repository."""
    forbidden = re.compile(r"pypi\.org|pythonhosted|proxy\.golang|registry\.npmjs|/root/|/home/[a-z]")
    for name in TRACKED:
        path = ROOT / name
        if path.suffix in {".pem", ".png"} or not path.is_file() or path.name in {"test_layout.py", "test_docs.py"}:
            continue
        found = forbidden.search(path.read_text(errors="replace"))
        assert found is None, f"{name}: {found and found.group()}"


def test_the_reducers_lock_installs_numpy_only():
    lock = (ROOT / "requirements/reducer.lock").read_text()
    assert set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE)) == {"numpy"}
