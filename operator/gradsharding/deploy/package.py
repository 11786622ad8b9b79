"""The deployment package of the AWS Lambda function: the reducer and numpy in one zip, the same bytes every time.

numpy comes as the wheels that the reducer's lock pins by hash, for the function's Python and processor, whatever runs
here. https://docs.aws.amazon.com/lambda/latest/dg/python-package.html
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from gradsharding.errors import DeployFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

HANDLER = "gradsharding_reducer.aws_lambda.handler"

PYTHONS = ("3.12", "3.13", "3.14")
"""Lambda's runtimes on Amazon Linux 2023. The older ones have glibc 2.26, and numpy's wheels need 2.27.
The last is the default: the newest that awslambdaric, AWS's own runtime client, is released for."""

ARCHITECTURES = {"x86_64": "x86_64", "arm64": "aarch64"}
"""Lambda's name → the one in wheels."""

PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17")
"""What runs with the glibc 2.34 of Amazon Linux 2023, best first."""

LIMIT = 50_000_000
"""Bytes of a zip that may be uploaded directly: https://docs.aws.amazon.com/lambda/latest/dg/gettingstarted-limits.html"""

LEFT_OUT = (
    # Tests, and what only they load.
    "*/tests/*", "*/_tests/*", "*/conftest.py", "*_tests.cpython-*.so", "numpy/_core/_simd.cpython-*.so",
    # For compilers, type checkers and packagers.
    "*.pyi", "*.pxd", "*.h", "*.a", "*.c", "*.pyx", "*.in", "*.pc", "*.ini", "*/py.typed", "numpy/f2py/*",
    "numpy/_pyinstaller/*", "numpy/random/_examples/*", "numpy/_core/lib/*", "numpy/_core/include/*",
    # Untrue once files are left out, or made by whoever imports.
    "*.dist-info/RECORD", "*.dist-info/entry_points.txt", "*/__pycache__/*", "*.pyc",
)  # fmt: skip
"""Of numpy's 54 MB these are 20. Every public module stays but f2py, which compiles Fortran. Licences stay."""

_EPOCH = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644 << 16


@dataclass(frozen=True, slots=True)
class Target:
    """What the package is for. ``python`` is a version such as ``3.14``, ``arch`` Lambda's name of a processor."""

    python: str = PYTHONS[-1]
    arch: str = "x86_64"

    @property
    def runtime(self) -> str:
        """Lambda's identifier."""
        return f"python{self.python}"


@dataclass(frozen=True, slots=True)
class Package:
    """A zip that was built. ``code_sha256`` is base64, as Lambda shows it."""

    path: Path
    size: int
    code_sha256: str
    target: Target
    pins: tuple[str, ...]
    """``numpy==2.5.5``, say."""


def build(directory: Path, target: Target) -> Package:
    """Build ``gradsharding-reducer-<runtime>-<arch>.zip`` in ``directory``, which is made if need be.

    Downloads about 16 MB, or takes it from pip's cache. Raises DeployFailed: ``WheelsUnavailable``, ``PackageTooLarge``
    or ``DirectoryUnusable``.
    """
    pins = pinned(lock_file().read_text(), target.python)
    path = directory / f"gradsharding-reducer-{target.runtime}-{target.arch}.zip"
    with tempfile.TemporaryDirectory(prefix="gradsharding-package-") as wheels:
        download(pins, target, Path(wheels))
        entries = reducer_files() | dict(wheel_files(sorted(Path(wheels).glob("*.whl"))))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_zip(path, entries)
        body = path.read_bytes()
    except OSError as error:
        raise DeployFailed("DirectoryUnusable", f"{path} cannot be written: {error.strerror}") from None
    if len(body) >= LIMIT:
        raise DeployFailed("PackageTooLarge", f"{path} has {len(body)} bytes, Lambda takes less than {LIMIT} at once")
    digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
    return Package(path, len(body), digest, target, tuple(sorted(pins)))


def lock_file() -> Path:
    """The reducer's lock: inside of an installed package, or in the checkout."""
    installed = Path(__file__).with_name("reducer.lock")
    return installed if installed.exists() else Path(__file__).parents[3] / "requirements" / "reducer.lock"


def pinned(lock: str, python: str) -> dict[str, tuple[str, ...]]:
    """Requirement → hashes, of those lines of a lock that hold for this Python.

    pip would ask the markers of the Python that runs it.
    """
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    pins = {}
    for line in lock.replace("\\\n", " ").splitlines():
        words, *hashes = line.partition(" #")[0].split(" --hash=")
        if not words.strip() or words.startswith(("#", " ")):
            continue
        requirement = Requirement(words.strip())
        if requirement.marker is None or requirement.marker.evaluate(environment):
            pins[f"{requirement.name}{requirement.specifier}"] = tuple(h.strip() for h in hashes)
    return pins


def download(pins: Mapping[str, Iterable[str]], target: Target, directory: Path) -> None:
    """Fetch the pinned wheels with pip, which checks their hashes. Raises DeployFailed (WheelsUnavailable)."""
    if importlib.util.find_spec("pip") is None:
        raise DeployFailed("WheelsUnavailable", f"pip is not installed: run {sys.executable} -m ensurepip")
    requirements = directory / "requirements.txt"
    requirements.write_text(
        "".join(" ".join([pin, *(f"--hash={h}" for h in hashes)]) + "\n" for pin, hashes in sorted(pins.items()))
    )
    platforms = [f"--platform={name}_{ARCHITECTURES[target.arch]}" for name in PLATFORMS]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps",
        "--require-hashes", "--only-binary=:all:", "--implementation=cp", f"--python-version={target.python}",
        *platforms, f"--dest={directory}", f"--requirement={requirements}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise DeployFailed(
            "WheelsUnavailable",
            f"pip cannot download {', '.join(sorted(pins))} for {target.runtime} on {target.arch}: {_why(done.stderr)}",
        )


def wheel_files(wheels: Iterable[Path]) -> Iterable[tuple[str, bytes]]:
    """Names and contents of what a function needs of these wheels."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                if not info.is_dir() and not any(fnmatchcase(info.filename, glob) for glob in LEFT_OUT):
                    yield info.filename, archive.read(info)


def reducer_files() -> dict[str, bytes]:
    """Names and contents of the reducer's own code."""
    spec = importlib.util.find_spec("gradsharding_reducer")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    return {f"{folder.name}/{file.relative_to(folder).as_posix()}": file.read_bytes() for file in folder.rglob("*.py")}


def write_zip(path: Path, entries: Mapping[str, bytes]) -> None:
    """A zip whose bytes depend on the entries alone, and on zlib: sorted names, one date, one mode (rw-r--r--)."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, body in sorted(entries.items()):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.external_attr = _MODE
            info.create_system = 3  # Unix, wherever this runs
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, body, compresslevel=6)


def _why(stderr: str) -> str:
    """pip's own words, without the address of an index: it may hold a password."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["pip gave no reason"]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ") and "Exception:" not in line]
    words = (errors[0] if errors else lines[-1]).split()
    return " ".join("[URL removed]" if "://" in word else word for word in words)[:500]
