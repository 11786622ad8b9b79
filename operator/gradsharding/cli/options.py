"""Arguments and options that several commands share."""

# No `from __future__ import annotations` in files that typer reads: it looks at the types themselves.
from pathlib import Path
from typing import Annotated

import typer

RoundFile = Annotated[
    Path, typer.Argument(metavar="ROUND.yaml", help="The AggregationRound, the same file as for kubectl.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of tables.")]
OutputKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY", help="Write to this key instead of spec.output.key: another round, with its own result."
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Take the store's keys from this profile of the AWS credentials file. "
        "Default: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, else the file's default profile.",
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Reach the store here, not at spec.store.endpoint, for instance through a port-forward. "
        "The round remains the same one.",
    ),
]
