"""``gradsharding run``: one round from its first update to its manifest, on processes of this machine or on AWS Lambda."""

from typing import Annotated, Literal

import typer

from gradsharding.cli.answering import answering
from gradsharding.cli.options import Endpoint, Json, OutputKey, Profile, RoundFile

EPILOG = """[bold]Examples[/bold]

  gradsharding run round.yaml

  gradsharding run round.yaml --no-wait --json > result.json

  gradsharding run round.yaml --platform lambda

  gradsharding run round.yaml --endpoint http://127.0.0.1:9000   [dim]# a port-forward[/dim]

Interrupted? The same command goes on where it stopped. Done before? It prints the stored result, unless an update \
is new or changed since."""

AGAIN = "run the same command again to continue"


def run(
    round_file: RoundFile,
    platform: Annotated[
        Literal["local", "lambda"],
        typer.Option(
            help="Where the functions run, whatever spec.function.platform says: processes of this machine, or the "
            "AWS Lambda function of spec.function.lambda."
        ),
    ] = "local",
    as_json: Json = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Start with the updates that are there, if they are at least minCount.")
    ] = False,
    output_key: OutputKey = None,
    profile: Profile = None,
    endpoint: Endpoint = None,
) -> int:
    """Run a round: wait for updates, average them, write the output and its manifest.

    Each shard is averaged by a process of its own that is held to spec.function.memoryMiB by the kernel, or by one call
    of an AWS Lambda function.
    """
    with answering(as_json) as interrupts:
        import time

        from gradsharding.cli import opening
        from gradsharding.cli.display import display
        from gradsharding.cli.exits import DONE, FAILED
        from gradsharding.cli.round_on import run_round
        from gradsharding.cli.summary import summary
        from gradsharding.cli.terminal import complain, print_json, print_table
        from gradsharding.errors import StoreUnreachable
        from gradsharding.platforms.local import LocalPlatform
        from gradsharding.rounds.report import report

        started = time.monotonic()
        spec = opening.read_round(round_file, output_key)
        updates, output = opening.open_buckets(spec, profile, endpoint)
        chosen = opening.open_lambda(spec, profile) if platform == "lambda" else None
        try:
            with display() as shown:
                work = run_round(
                    spec,
                    updates,
                    output,
                    chosen or LocalPlatform(on_progress=shown.read),
                    not no_wait,
                    shown.watch,
                    opening.certificates(),
                )
                finished = interrupts.run(work, AGAIN)
        except StoreUnreachable as error:
            raise opening.advised(error, spec, endpoint) from None
        result = report(finished, spec.output.bucket, spec.output.key, time.monotonic() - started)
    if as_json:
        print_json(result)
    else:
        print_table(summary(result, finished.document, spec.function.memory_mib))
    if not finished.succeeded:
        complain("error", f"{finished.reason}: {finished.message}")
    return DONE if finished.succeeded else FAILED
