"""``gradsharding store``: an S3 server on this machine, for trying things out."""

from pathlib import Path
from typing import Annotated

import typer

from gradsharding.cli.answering import answering
from gradsharding.cli.options import Json

EPILOG = """[bold]Examples[/bold]

  gradsharding store --dir s3 --port 9000 --bucket federation

  gradsharding store --dir s3 --json | head -1   [dim]# one line for a program, then it serves until it is stopped[/dim]

The same directory gives the same keys and data again. The server listens on 127.0.0.1 only; Ctrl-C stops it."""


def store(
    directory: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where data and keys are kept; made if need be.")
    ],
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="The port to listen on. Default: a free one, another each time."),
    ] = None,
    bucket: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Create this bucket, unless it is there. May be repeated.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Start an S3 server (SeaweedFS), print its endpoint and keys once it answers, serve until stopped."""
    with answering(as_json):
        import time

        from gradsharding.cli.exits import DONE, Interrupted
        from gradsharding.cli.terminal import print_json, say
        from gradsharding.embedded import EmbeddedStore
        from gradsharding.errors import StoreUnreachable

        say(f"starting an S3 server on {directory}")
        with EmbeddedStore.start(directory, port) as server:
            for name in bucket or ():
                server.create_bucket(name)
            if as_json:
                print_json(
                    {
                        "endpoint": server.endpoint,
                        "access_key": server.access_key,
                        "secret_key": server.secret_key,
                        "region": server.region,
                    }
                )
            else:
                _print_exports(server.endpoint, server.access_key, server.secret_key, server.region)
                say("serving; Ctrl-C stops it")
            try:
                while server.running:
                    time.sleep(0.5)
            except Interrupted:
                return DONE
        raise StoreUnreachable(f"The S3 server ended by itself: see {directory / 'weed.log'}.")


def _print_exports(endpoint: str, access_key: str, secret_key: str, region: str) -> None:
    """Lines to paste into a shell; the first is for spec.store of a round."""
    typer.echo(f"# endpoint: {endpoint}")
    for name, value in (
        ("AWS_ACCESS_KEY_ID", access_key),
        ("AWS_SECRET_ACCESS_KEY", secret_key),
        ("AWS_REGION", region),
        ("AWS_ENDPOINT_URL", endpoint),
    ):
        typer.echo(f"export {name}={value}")
