"""The command line: one file per command. ``main`` is the entry point and needs the standard library alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

EXTRAS = {
    **dict.fromkeys(("typer", "rich", "minio", "urllib3", "yaml"), "operator"),
    **dict.fromkeys(("boto3", "botocore", "packaging"), "lambda"),
    **dict.fromkeys(("safetensors", "sklearn", "scipy", "joblib", "threadpoolctl", "matplotlib"), "demo"),
}
"""Package → the extra that brings it. The base install is the reducer: it has numpy only."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. ``arguments`` None: those of this process."""
    try:
        from gradsharding.cli.app import execute

        return execute(list(sys.argv[1:] if arguments is None else arguments))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        extra = EXTRAS[package]
        sys.stderr.write(f"error: the package {package} is not installed: pip install 'gradsharding[{extra}]'\n")
        return 2
