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
    from gradsharding.cli.answering import Interrupts
    from gradsharding.demo.federation import FederatedRound, Setting
    from gradsharding.rounds.drive import Watch
    from gradsharding.rounds.spec import RoundSpec
    from gradsharding.rounds.step import Finished
    from gradsharding.store import Bucket

DIGITS, LARGE = "digits", "large"
"""Buckets: removing one gives its disk space back."""

SAMPLE = 24
"""So many pieces of the large mean are compared."""

ADVICE = ""

COLUMNS = (
    ("round", 5), ("training", 8), ("averaging", 9), ("shards", 6), ("processes", 9), ("peak memory of 128 MiB", 22),
    ("mean", 13), ("alone", 6), ("federated", 9), ("central", 7),
)  # fmt: skip

NEXT = (
    ("gradsharding store --dir s3 --bucket federation", "an S3 server of your own, with its keys to paste"),
    ("gradsharding run round.yaml", "average what your clients have put there"),
    ("docs/protocol.md, docs/performance.md", "how a round survives faults, and what it costs"),
)


class Show:
    """One demo. With ``as_json`` the story goes to stderr, and one object to stdout."""

    def __init__(self, interrupts: Interrupts, as_json: bool) -> None:
        self._interrupts = interrupts
        self._as_json = as_json
        self._console = console(stderr=as_json)

    def everything(self, setting: Setting, crowd: tuple[int, int], output: Path) -> None:
        """Both parts, in a store that is gone afterwards. ``crowd``: clients of the large round, MiB of each update.

        Raises RoundFailed and StoreError.
        """
        started = time.monotonic()
        federation = Federation(setting)
        bulky = large.Crowd(*crowd, seed=setting.seed)
        directory = folder(output, setting.parameters * 4 * (setting.clients + 1) * setting.rounds * 11 // 10)
        with (
            tempfile.TemporaryDirectory(prefix=".store-", dir=directory, ignore_cleanup_errors=True) as scratch,
            EmbeddedStore.start(Path(scratch)) as store,
        ):
            rounds = self._federation(federation, store)
            picture = directory / "accuracy.png"
            examples = federation.examples[federation.largest]
            figure.draw(picture, [r.accuracies for r in rounds], setting.clients, examples, len(federation.train))
            self._line(f"  picture: {picture}")
            store.remove_bucket(DIGITS)
            free = shutil.disk_usage(directory).free
            ran = self._large(bulky, store) if free > bulky.disk_bytes else None
        if ran is None:
            needed, there = in_bytes(bulky.disk_bytes), in_bytes(free)
            self._line(
                f"\nThe large round is left out: it takes {needed} of disk in {directory}, and {there} are free."
            )
        seconds = time.monotonic() - started
        self._line(f"\nDone in {seconds:.0f} s. What to try next:", bold=True)
        for command, why in NEXT:
            self._line(f"  {command:<50}{why}")
        if self._as_json:
            print_json(result(rounds, ran, picture, seconds))

    def _federation(self, federation: Federation, store: EmbeddedStore) -> list[FederatedRound]:
        setting, largest = federation.setting, federation.largest
        update = in_mib(setting.parameters * 4)
        self._line(
            f"Federated learning: {setting.clients} clients, {len(federation.train):,} handwritten digits", bold=True
        )
        for line in (
            f"Every client knows a few digits well, from {min(federation.examples)} to {max(federation.examples)} "
            f"examples. In every round each trains {setting.parameters:,} parameters",
            f"and puts an update of {update} into the store at {store.endpoint}; {averaging.REDUCERS} reducers average.",
            f"Accuracy is on {len(federation.test)} other digits: alone is client {largest}, who has the most examples; "
            "central has all of them in one place.",
            "",
        ):
            self._line(f"  {line}")
        self._line("  " + row([name for name, _ in COLUMNS]), bold=True)
        bucket = store.create_bucket(DIGITS)
        done = []
        for each in federation.rounds(
            bucket, lambda at: self._spec(store, DIGITS, at, setting.clients), self._average(bucket)
        ):
            ran, good = each.ran, each.accuracies
            cells = [str(each.number), f"{each.train_seconds:.1f} s", f"{ran.seconds:.1f} s"]
            cells += [str(ran.shards), str(ran.at_once), f"{in_mib(ran.peak_bytes)}, {ran.cap}", "bits verified"]
            cells += [f"{accuracy:.1%}" for accuracy in (good.alone, good.federated, good.central)]
            self._line("  " + row(cells))
            done.append(each)
        return done

    def _large(self, crowd: large.Crowd, store: EmbeddedStore) -> averaging.Ran:
        size = f"{crowd.clients} x {crowd.mib} MiB"
        self._line(
            f"\nA round bigger than its functions: {size} through reducers of {averaging.MEMORY_MIB} MiB", bold=True
        )
        bucket = store.create_bucket(LARGE)
        spec = self._spec(store, LARGE, "large", crowd.clients)
        client = Minio(
            store.endpoint.removeprefix("http://"),
            store.access_key,
            store.secret_key,
            secure=False,
            region=store.region,
        )
        started = time.monotonic()
        with byte_bar(f"uploading {size}") as watch:
            large.upload(crowd, client, LARGE, spec.updates.prefix, watch)
        seconds = time.monotonic() - started
        total = crowd.clients * crowd.mib * large.MIB
        self._line(f"  uploaded    {in_bytes(total)} in {seconds:.1f} s, {in_bytes(total / seconds)}/s")
        with display() as shown:
            ran = averaging.run(spec, self._average(bucket, shown.watch))
        self._line(
            f"  averaged    {in_bytes(ran.bytes_read)} in {ran.seconds:.1f} s, "
            f"{ran.shards} shards, {ran.at_once} processes at once"
        )
        self._line(
            f"  memory      at most {in_mib(ran.peak_bytes)} in any of them, measured; "
            f"the cap is {averaging.MEMORY_MIB} MiB ({ran.cap})"
        )
        self._line(
            f"  in memory   averaging {crowd.clients} whole models in one process takes N + 2 of them, "
            f"{in_mib(crowd.in_memory_bytes)}: computed, not measured"
        )
        pieces = large.sample(crowd, SAMPLE)
        large.check(crowd, bucket, spec.output.key, pieces)
        self._line(f"  mean        bits verified in {len(pieces)} places of {in_bytes(large.PIECE)}")
        return ran

    def _spec(self, store: EmbeddedStore, bucket: str, at: str, clients: int) -> RoundSpec:
        return averaging.round_spec(store.endpoint, store.region, bucket, at, clients)

    def _average(self, bucket: Bucket, watch: Watch = lambda _step, _calls: None) -> averaging.Average:
        """What ``gradsharding run`` does with a manifest."""

        def average(spec: RoundSpec) -> Finished:
            return self._interrupts.run(run_round(spec, bucket, bucket, LocalPlatform(), True, watch), ADVICE)

        return average

    def _line(self, text: str, *, bold: bool = False) -> None:
        for line in text.split("\n"):
            self._console.print(Text(printable(line), "bold" if bold else ""), soft_wrap=True)


def row(cells: list[str]) -> str:
    """Cells to the right, each as wide as its column."""
    return "  ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))


def folder(output: Path, needed: int) -> Path:
    """The output folder, made if need be. Raises StoreRefused when it cannot be, or lacks space."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(output).free
    except OSError as error:
        raise StoreRefused(f"{output} cannot be used ({error.strerror}): give another folder with --output.") from None
    if free < needed:
        raise StoreRefused(
            f"The demo's store takes {in_bytes(needed)} in {output}, and {in_bytes(free)} are free: give another "
            "folder with --output, or fewer --rounds."
        )
    return output


def result(rounds: list[FederatedRound], ran: averaging.Ran | None, picture: Path, seconds: float) -> dict[str, Any]:
    """What ``--json`` prints. ``large`` is null when the disk was short."""
    return {
        "succeeded": True,
        "rounds": [asdict(each) for each in rounds],
        "large": asdict(ran) if ran else None,
        "picture": str(picture),
        "seconds": round(seconds, 3),
    }
