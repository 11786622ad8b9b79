"""The deployment package: what is in it, how it is pinned, and that its bytes repeat."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gradsharding.deploy import package
from gradsharding.deploy.package import LIMIT, PYTHONS, Target, build, lock_file, pinned, reducer_files, write_zip
from gradsharding.errors import DeployFailed

BUILT_ONCE = pytest.mark.xdist_group("lambda-package")

LOCK = """numpy==2.4.6 ; python_full_version < '3.12' \\
    --hash=sha256:aa \\
    --hash=sha256:bb
    # via gradsharding (pyproject.toml)
numpy==2.5.5 ; python_full_version >= '3.12' \\
    --hash=sha256:cc
# a comment
other==1 \\
    --hash=sha256:dd
"""


def test_pins_are_those_of_the_functions_python_whatever_runs_here():
    hashes = {"numpy==2.4.6": ("sha256:aa", "sha256:bb"), "numpy==2.5.5": ("sha256:cc",), "other==1": ("sha256:dd",)}
    assert pinned(LOCK, "3.11") == {name: hashes[name] for name in ("numpy==2.4.6", "other==1")}
    assert pinned(LOCK, "3.14") == {name: hashes[name] for name in ("numpy==2.5.5", "other==1")}


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_pins_numpy_and_nothing_else_for_each_runtime(python):
    ((name, hashes),) = pinned(lock_file().read_text(), python).items()
    assert name.startswith("numpy==")
    assert len(hashes) > 20
    assert all(len(digest) == len("sha256:") + 64 for digest in hashes)


def test_the_same_entries_give_the_same_bytes_in_whichever_order_and_at_whichever_time(tmp_path):
    entries = {"b/c.py": b"x" * 1000, "a.py": b""}
    write_zip(tmp_path / "1.zip", entries)
    write_zip(tmp_path / "2.zip", dict(reversed(entries.items())))
    assert (tmp_path / "1.zip").read_bytes() == (tmp_path / "2.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "1.zip") as archive:
        assert [info.filename for info in archive.infolist()] == ["a.py", "b/c.py"]
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert {info.external_attr >> 16 for info in archive.infolist()} == {0o100644}
        assert archive.read("b/c.py") == b"x" * 1000


@pytest.mark.slow
@BUILT_ONCE
def test_the_package_holds_the_reducer_and_numpy_and_nothing_else(package_here):
    with zipfile.ZipFile(package_here.path) as archive:
        names = archive.namelist()
        assert {archive.read(name) for name in names if name.startswith("gradsharding_reducer/")} == set(
            reducer_files().values()
        )
    tops = {name.partition("/")[0] for name in names}
    version = package_here.pins[0].partition("==")[2]
    assert tops == {"gradsharding_reducer", "numpy", "numpy.libs", f"numpy-{version}.dist-info"}
    assert not [n for n in names if "/tests/" in n or "__pycache__" in n or n.endswith((".pyi", ".h", ".a", ".pyc"))]
    assert [n for n in names if "LICENSE" in n]
    assert package_here.size < LIMIT


@pytest.mark.slow
@BUILT_ONCE
def test_the_unzipped_package_runs_without_any_other_package(task_root):
    """Under the Python that runs the tests, isolated from its site-packages; every public module of numpy is there."""
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import gradsharding_reducer.aws_lambda, numpy
import numpy.fft, numpy.linalg, numpy.ma, numpy.polynomial, numpy.random, numpy.testing, numpy.typing
assert numpy.linalg.inv(numpy.eye(3)).trace() == 3
foreign = [m.__file__ for m in list(sys.modules.values()) if "site-packages" in (getattr(m, "__file__", None) or "")]
assert not foreign, foreign
assert numpy.__file__.startswith(sys.argv[1])
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(task_root)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@BUILT_ONCE
def test_building_twice_gives_the_same_bytes(package_here, tmp_path):
    again = build(tmp_path / "made", package_here.target)
    assert again.path.read_bytes() == package_here.path.read_bytes()
    assert again.code_sha256 == package_here.code_sha256


def test_a_wheel_with_another_hash_is_refused(tmp_path, monkeypatch):
    name = "numpy-2.5.5-cp314-cp314-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        wheel.writestr("numpy-2.5.5.dist-info/METADATA", "Metadata-Version: 2.1\nName: numpy\nVersion: 2.5.5\n")
        wheel.writestr("numpy-2.5.5.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        wheel.writestr("numpy-2.5.5.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / "into").mkdir()
    with pytest.raises(DeployFailed, match=r"pip cannot download numpy==2\.5\.5 for python3\.14 on x86_64: ") as caught:
        package.download({"numpy==2.5.5": ["sha256:" + "0" * 64]}, Target("3.14"), tmp_path / "into")
    assert caught.value.reason == "WheelsUnavailable"
    assert "do not match the hashes" in str(caught.value).lower()


def test_what_pip_says_is_told_without_addresses():
    said = "WARNING: x\nERROR: Could not fetch https://user:secret@index.example/simple/ for numpy\nERROR: more\n"
    assert package._why(said) == "Could not fetch [URL removed] for numpy"
    assert package._why("ERROR: Exception:\nTraceback\n  x\nOSError: no space\n") == "OSError: no space"


def test_a_package_over_lambdas_limit_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(package, "download", lambda pins, target, directory: None)
    monkeypatch.setattr(package, "LIMIT", 10)
    with pytest.raises(DeployFailed, match="Lambda takes less than 10"):
        build(tmp_path, Target())


def test_a_directory_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(package, "download", lambda pins, target, directory: None)
    (tmp_path / "file").write_text("")
    with pytest.raises(DeployFailed, match=r"file/.*\.zip cannot be written"):
        build(tmp_path / "file", Target())


def test_the_command_offers_the_runtimes_that_numpys_wheels_run_on():
    from typing import get_args

    from gradsharding.cli import aws_lambda

    assert get_args(aws_lambda.Python) == PYTHONS
    assert get_args(aws_lambda.Arch) == tuple(package.ARCHITECTURES)
    assert Path(lock_file()).name == "reducer.lock"
