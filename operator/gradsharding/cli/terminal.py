"""What reaches the terminal. Text of stores and files is somebody else's: it must not move the cursor or pass for ours.

Messages and progress go to stderr, results to stdout.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.console import Console

_SECRETS = re.compile(r"(X-Amz-(?:Signature|Credential|Security-Token)=)[^&\s'\"]+", re.IGNORECASE)


def printable(text: object) -> str:
    """One line without anything that a terminal acts upon: ESC, line ends, text direction and the like are escaped.

    Markup of rich needs no escape, since no console of ours reads it.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def console(*, stderr: bool = True) -> Console:
    """A console that takes all text literally: no markup, no emoji codes, nothing guessed from a text's looks."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def say(text: str) -> None:
    """A message of one line on stderr."""
    console().print(printable(text), soft_wrap=True)


def complain(kind: str, message: str) -> None:
    """``error: …`` on stderr, red on a terminal. Further lines, a server's log say, are set in."""
    from rich.text import Text

    first, *rest = message.splitlines() or [""]
    lines = [printable(first), *(f"  {printable(line)}" for line in rest)]
    console().print(Text.assemble((f"{kind}: ", "bold red"), "\n".join(lines)), soft_wrap=True)


def show_traceback(error: BaseException) -> None:
    """For ``--debug``: on stderr, without signatures of URLs."""
    for line in "".join(traceback.format_exception(error)).splitlines():
        sys.stderr.write(printable(_SECRETS.sub(r"\1...", line)) + "\n")


def print_json(document: Mapping[str, Any]) -> None:
    """One object on one line of stdout, at once; in ASCII, so that nothing in it acts on a terminal."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def print_table(rows: Iterable[tuple[str, str]]) -> None:
    """Names and values on stdout; a name of "" continues the row above. Values are never cut: people copy them."""
    from rich.text import Text

    table = list(rows)
    width = max(len(name) for name, _ in table)
    to = console(stderr=False)
    for name, value in table:
        to.print(Text.assemble((name.ljust(width), "bold"), "  ", printable(value)), soft_wrap=True)


def in_bytes(count: float) -> str:
    """A number of bytes for people, in decimal units as disks and networks have them: ``1.2 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def in_mib(count: float) -> str:
    """A number of bytes in MiB, as memory has them."""
    return f"{count / 2**20:.0f} MiB"
