"""``gradsharding demo``: federated learning for real, on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from gradsharding.cli.answering import answering
from gradsharding.cli.options import Json

EPILOG = """[bold]Examples[/bold]

  gradsharding demo

  gradsharding demo --quick --output /tmp/demo

It starts an S3 server of its own inside of the output folder, and removes it at the end, however that comes."""


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer rounds, and a smaller large one: under a minute.")
    ] = False,
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the picture goes, and the store's files meanwhile.")
    ] = Path("demo-output"),
    rounds: Annotated[
        int | None, typer.Option(min=1, max=100, help="Rounds of training. Default: 10, or 4 with --quick.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31, help="Of the split, the network and the order of training.")
    ] = 3,
    as_json: Json = False,
) -> int:
    """See federated learning happen: clients train on digits, reducers of 128 MiB average, a picture shows the gain.

    Then a round in which one update alone is larger than a function. Means are compared with plain numpy, bit by bit.
    """
    with answering(as_json) as interrupts:
        from gradsharding.cli.demo_show import Show
        from gradsharding.cli.exits import DONE, Interrupted
        from gradsharding.demo.federation import Setting
        from gradsharding.demo.large import Crowd

        show = Show(interrupts, as_json)
        setting = Setting(rounds=rounds or (4 if quick else 10), seed=seed)
        try:
            crowd = Crowd(3, 256, seed) if quick else Crowd(8, 512, seed)
            show.everything(setting, crowd, output)
        except Interrupted:
            raise Interrupted("the demo's store is stopped and its files are removed") from None
        return DONE
