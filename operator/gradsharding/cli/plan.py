"""``gradsharding plan``: what ``run`` would do now, without moving data or writing anything."""

from typing import Annotated

import typer

from gradsharding.cli.answering import answering
from gradsharding.cli.options import Endpoint, Json, OutputKey, Profile, RoundFile

EPILOG = """[bold]Examples[/bold]

  gradsharding plan round.yaml

  gradsharding plan round.yaml --json | jq .updates.rejected

  gradsharding plan round.yaml --compare

Only headers of updates are read; the store is not written to."""


def plan(
    round_file: RoundFile,
    as_json: Json = False,
    output_key: OutputKey = None,
    profile: Profile = None,
    endpoint: Endpoint = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="What other memories and numbers of shards would take on AWS Lambda: time and cost."
        ),
    ] = False,
) -> int:
    """Show what a round would do: who takes part, how it is cut, and how much memory a function needs."""
    with answering(as_json):
        from gradsharding.cli import opening
        from gradsharding.cli.compared import print_comparison
        from gradsharding.cli.exits import DONE
        from gradsharding.cli.preview import preview, rows
        from gradsharding.cli.terminal import print_json, print_table
        from gradsharding.errors import StoreUnreachable

        spec = opening.read_round(round_file, output_key)
        updates, output = opening.open_buckets(spec, profile, endpoint)
        try:
            found = preview(spec, updates, output, advise=compare)
        except StoreUnreachable as error:
            raise opening.advised(error, spec, endpoint) from None
    if as_json:
        print_json(found)
    else:
        print_table(rows(found))
        if compare:
            print_comparison(found["comparison"])
    return DONE
