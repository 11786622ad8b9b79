"""A running round on stderr: a bar on a terminal, a line per milestone elsewhere."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from gradsharding.cli.picture import Picture, picture
from gradsharding.cli.terminal import console, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console, RenderableType
    from rich.progress import Progress

    from gradsharding.rounds.dispatch import Calls
    from gradsharding.rounds.step import Step


class Display:
    """Fed by the loop that drives a round, ``watch`` after every pass and ``read`` meanwhile; both in one thread."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._step: Step | None = None
        self._reading: dict[int, int] = {}
        self._told: set[str] = set()

    def watch(self, step: Step, calls: Calls) -> None:
        """After a pass. What a call has read counts until it has ended: then its record does."""
        self._step = step
        self._reading = {shard: count for shard, count in self._reading.items() if shard in calls.running}
        if step.finished is None:
            self._show()

    def read(self, shard: int, count: int) -> None:
        """A call has read ``count`` bytes so far."""
        self._reading[shard] = count
        if self._step is not None:
            self._show()

    def _show(self) -> None:
        assert self._step is not None
        shown = picture(self._step, self._reading)
        for row in shown.left_out:
            if row.key not in self._told:
                self._told.add(row.key)
                self._view.note(f"going on without {row.key}: it {row.reason}")
        self._view.show(shown)


class View(Protocol):
    """Where a picture is shown."""

    def note(self, text: str) -> None:
        """Say something that stays."""
        ...

    def show(self, shown: Picture) -> None:
        """Replace what was shown before."""
        ...


class Lines:
    """For files and pipes."""

    def __init__(self, to: Console) -> None:
        self._to = to
        self._milestone: tuple[object, ...] = ()

    def note(self, text: str) -> None:
        """A line."""
        self._to.print(printable(text), soft_wrap=True)

    def show(self, shown: Picture) -> None:
        """A line when there is news."""
        if shown.milestone != self._milestone:
            self._milestone = shown.milestone
            self.note(shown.line)


class Bar:
    """For terminals."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None, shards="")
        self._total = 0

    def note(self, text: str) -> None:
        """A line above the bar."""
        self._progress.console.print(printable(text), soft_wrap=True)

    def show(self, shown: Picture) -> None:
        """Move the bar."""
        if shown.total and shown.total != self._total:  # another revision reads anew
            self._progress.reset(self._task, total=shown.total)
            self._total = shown.total
        shards = f"{shown.shards_done}/{shown.shards} shards" if shown.shards else ""
        completed = shown.done if shown.total else None  # None: as it is
        self._progress.update(self._task, description=printable(shown.line), completed=completed, shards=shards)


@contextmanager
def display() -> Iterator[Display]:
    """A display for one run."""
    to = console()
    if not to.is_terminal:
        yield Display(Lines(to))
        return
    with _bar(to, "{task.fields[shards]}") as progress:
        yield Display(Bar(progress))


@contextmanager
def byte_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for a plain job, told of the bytes done and of all. Without a terminal, one line says that it begins."""
    to = console()
    if not to.is_terminal:
        Lines(to).note(what)
        yield lambda _done, _total: None
        return
    with _bar(to) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _bar(to: Console, *more: str) -> Progress:
    """What happens, and below it how far: bytes, rate, time left."""
    from rich import progress as parts
    from rich.text import Text

    class LineAndBar(parts.Progress):
        def get_renderables(self) -> Iterator[RenderableType]:
            for task in self.tasks:
                yield Text(task.description, no_wrap=True, overflow="ellipsis")
                if task.total:
                    yield self.make_tasks_table([task])

    return LineAndBar(
        parts.BarColumn(bar_width=24),
        parts.DownloadColumn(),
        parts.TransferSpeedColumn(),
        *(parts.TextColumn(text, markup=False) for text in more),
        parts.TimeRemainingColumn(),
        console=to,
        transient=True,
    )
