"""The demo as it is told on the terminal: what happens, in which order, and the tables."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minio import Minio
from rich.text import Text

from gradsharding.cli.display import byte_bar, display
from gradsharding.cli.round_on import run_round
from gradsharding.cli.terminal import console, in_bytes, in_mib, print_json, printable
from gradsharding.demo import averaging, figure, large
from gradsharding.demo.federation import Federation
from gradsharding.embedded import EmbeddedStore
from gradsharding.errors import StoreRefused
from gradsharding.platforms.local import LocalPlatform

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradsharding.cli.answering import Interrupts
    from gradsharding.cli.display import Display
    from gradsharding.demo.federation import FederatedRound, Setting
    from gradsharding.rounds.dispatch import Calls
    from gradsharding.rounds.spec import RoundSpec
    from gradsharding.rounds.step import Finished, Step
    from gradsharding.store import Bucket

DIGITS, LARGE = "digits", "large"
"""Buckets: removing one gives its disk space back."""

SAMPLE = 24
"""So many pieces of the large mean are compared."""

COLUMNS = (
    ("round", 5), ("averaged", 8), ("shards", 6), ("processes", 9), ("memory", 7), ("cap", 20), ("accuracy", 8),
)  # fmt: skip
"""All lines of the demo fit into 80 columns."""

MOST_COLUMNS = 10
"""Rounds in the table of accuracies; of more, some are left out."""

NEXT = (
    ("gradsharding store --dir s3 --bucket federation", "a store of your own"),
    ("gradsharding run round.yaml", "average what is in it"),
    ("docs/protocol.md, docs/performance.md", "how it works, what it costs"),
)


class Show:
    """One demo. With ``as_json`` the story goes to stderr, and one object to stdout."""

    def __init__(self, interrupts: Interrupts, as_json: bool) -> None:
        self._interrupts = interrupts
        self._as_json = as_json
        self._console = console(stderr=as_json)

    def everything(self, setting: Setting, crowd: large.Crowd, output: Path) -> None:
        """Both parts, in a store that is gone afterwards. ``crowd`` are the clients of the large round.

        Raises RoundFailed and StoreError.
        """
        started = time.monotonic()
        federation = Federation(setting)
        directory = folder(output, setting.disk_bytes)
        self._line(f"Starting an S3 server (SeaweedFS) with its files in {directory}")
        with (
            tempfile.TemporaryDirectory(prefix=".store-", dir=directory, ignore_cleanup_errors=True) as scratch,
            EmbeddedStore.start(Path(scratch)) as store,
        ):
            rounds = self._federation(federation, store)
            self._accuracies(rounds, federation, directory / "accuracy.png")
            store.remove_bucket(DIGITS)
            free = shutil.disk_usage(directory).free
            ran = self._large(crowd, store) if free > crowd.disk_bytes else None
        if ran is None:
            self._heading("\nThe round bigger than its functions is left out: the disk is short")
            self._line(f"  It takes {in_bytes(crowd.disk_bytes)} in {directory}, and {in_bytes(free)} are free.")
        seconds = time.monotonic() - started
        self._heading(f"\nDone in {seconds:.0f} s; the server and its files are gone. What to try next:")
        for command, why in NEXT:
            self._line(f"  {command:<49}{why}")
        if self._as_json:
            print_json(result(rounds, ran, directory / "accuracy.png", seconds))

    def _federation(self, federation: Federation, store: EmbeddedStore) -> list[FederatedRound]:
        setting, examples = federation.setting, federation.examples
        self._heading(f"\nFederated learning: {setting.clients} clients, {len(federation.train):,} handwritten digits")
        for line in (
            f"The clients have {min(examples)} to {max(examples)} digits each, mostly of a few kinds. In every",
            f"round each trains {setting.parameters:,} parameters and puts its update, a",
            f"safetensors file of {in_mib(setting.update_bytes)}, into the store. Accuracy is that of their mean",
            f"on {len(federation.test)} other digits.",
        ):
            self._line(f"  {line}")
        self._heading("\n  " + row([name for name, _ in COLUMNS]))
        bucket, done = store.create_bucket(DIGITS), []

        def spec_of(folder: str) -> RoundSpec:
            return spec_at(store, DIGITS, folder, setting.clients)

        for each in federation.rounds(bucket, spec_of, self._average(bucket)):
            ran, cap = each.ran, f"{averaging.MEMORY_MIB} MiB {each.ran.cap}"
            cells = [str(each.number), f"{ran.seconds:.1f} s", str(ran.shards), str(ran.at_once)]
            self._line("  " + row([*cells, in_mib(ran.peak_bytes), cap, f"{each.accuracies.federated:.1%}"]))
            done.append(each)
        self._line("  bits verified: every mean is what plain numpy computes of the same updates")
        return done

    def _accuracies(self, rounds: Sequence[FederatedRound], federation: Federation, picture: Path) -> None:
        most = max(federation.examples)
        self._line("")
        for line in accuracy_table(rounds, f"alone, {most} digits"):
            self._line(f"  {line}")
        each = [one.accuracies for one in rounds]
        figure.draw(picture, each, federation.setting.clients, most, len(federation.train))
        self._line(f"  picture: {picture}")

    def _large(self, crowd: large.Crowd, store: EmbeddedStore) -> averaging.Ran:
        size = f"{crowd.clients} x {crowd.mib} MiB"
        self._heading(f"\nA round bigger than its functions: {size} by {averaging.MEMORY_MIB} MiB reducers")
        bucket = store.create_bucket(LARGE)
        spec = spec_at(store, LARGE, "large", crowd.clients)
        host = store.endpoint.removeprefix("http://")
        client = Minio(host, store.access_key, store.secret_key, secure=False, region=store.region)
        started = time.monotonic()
        with byte_bar(f"uploading {size}") as watch:
            large.upload(crowd, client, LARGE, spec.updates.prefix, watch)
        self._fact("uploaded", f"{in_bytes(crowd.total_bytes)} in {time.monotonic() - started:.1f} s")
        with display() as shown:
            ran = averaging.run(spec, self._average(bucket, shown))
        where = f"{ran.shards} shards, {ran.at_once} processes at once"
        self._fact("averaged", f"{in_bytes(ran.bytes_read)} in {ran.seconds:.1f} s, {where}")
        cap = f"the cap is {averaging.MEMORY_MIB} MiB, {ran.cap}"
        self._fact("memory", f"at most {in_mib(ran.peak_bytes)} in any of them (measured; {cap})")
        whole = in_mib(crowd.in_memory_bytes)
        self._fact("otherwise", f"{whole} in one process that holds N + 2 models (computed)")
        pieces = large.sample(crowd, SAMPLE)
        large.check(crowd, bucket, spec.output.key, pieces)
        self._fact("the mean", f"bits verified, {len(pieces)} samples of {in_mib(large.PIECE)} against plain numpy")
        return ran

    def _average(self, bucket: Bucket, shown: Display | None = None) -> averaging.Average:
        """What ``gradsharding run`` does with a manifest."""

        def average(spec: RoundSpec) -> Finished:
            platform = LocalPlatform(on_progress=shown.read) if shown else LocalPlatform()
            watch = shown.watch if shown else nobody
            return self._interrupts.run(run_round(spec, bucket, bucket, platform, True, watch), "")

        return average

    def _fact(self, name: str, text: str) -> None:
        self._line(f"  {name:<11}{text}")

    def _heading(self, text: str) -> None:
        self._line(text, "bold")

    def _line(self, text: str, style: str = "") -> None:
        for line in text.split("\n"):
            self._console.print(Text(printable(line), style), soft_wrap=True)


def nobody(_step: Step, _calls: Calls) -> None:
    """Watches nothing: small rounds are over before there is anything to see."""


def spec_at(store: EmbeddedStore, bucket: str, folder: str, clients: int) -> RoundSpec:
    """The round of a folder in a bucket of this store."""
    return averaging.round_spec(store.endpoint, store.region, bucket, folder, clients)


def row(cells: Sequence[str]) -> str:
    """Cells to the right, each as wide as its column."""
    return "  ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))


def accuracy_table(rounds: Sequence[FederatedRound], alone: str) -> list[str]:
    """Lines with the accuracies of the three models by round. ``alone`` names the client who trains by itself."""
    most = min(len(rounds), MOST_COLUMNS)
    shown = [rounds[round(index * (len(rounds) - 1) / max(1, most - 1))] for index in range(most)]
    table = (
        ("accuracy in %, round", [str(each.number) for each in shown]),
        ("all data in one place", [f"{100 * each.accuracies.central:.1f}" for each in shown]),
        ("federated", [f"{100 * each.accuracies.federated:.1f}" for each in shown]),
        (alone, [f"{100 * each.accuracies.alone:.1f}" for each in shown]),
    )
    return [f"{name:<21}" + "".join(f"{value:>5}" for value in values) for name, values in table]


def folder(output: Path, needed: int) -> Path:
    """The output folder, made if need be. Raises StoreRefused when it cannot be, or lacks space."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(output).free
    except OSError as error:
        raise StoreRefused(f"{output} cannot be used ({error.strerror}): give another folder with --output.") from None
    if free < needed:
        raise StoreRefused(
            f"The demo's store takes {in_bytes(needed)} in {output}, and {in_bytes(free)} are free: "
            "give another folder with --output, or fewer --rounds."
        )
    return output


def result(
    rounds: Sequence[FederatedRound], ran: averaging.Ran | None, picture: Path, seconds: float
) -> dict[str, Any]:
    """What ``--json`` prints. ``large`` is null when the disk was short."""
    return {
        "succeeded": True,
        "rounds": [asdict(each) for each in rounds],
        "large": asdict(ran) if ran else None,
        "picture": str(picture),
        "seconds": round(seconds, 3),
    }
