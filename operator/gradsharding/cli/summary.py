"""The end of a round as rows of a table. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradsharding.cli.terminal import in_bytes, in_mib
from gradsharding.rounds.keys import MANIFEST_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_MOST_NAMED = 20
"""So many of those who are left out are named; the manifest names all."""


def summary(result: Mapping[str, Any], document: Mapping[str, Any], memory_mib: int) -> Iterator[tuple[str, str]]:
    """Of what ``report`` made of a finished round and its ``document``, the manifest or the Failed outcome."""
    updates, output, shards = result["updates"], result["output"], result["shards"]
    yield "result", f"{result['reason']}: {result['message']}" if result["succeeded"] else str(result["reason"])
    yield "participants", f"{updates['participants']} of {updates['found']} updates found"
    yield from people("rejected", updates["rejected"])
    yield from people("excluded", updates["excluded"])
    if shards["total"]:
        again = f", {shards['retried']} calls repeated" if shards["retried"] else ""
        yield "shards", f"{shards['succeeded']} of {shards['total']} done{again}"
    attempts = document.get("attempts", [])
    if result["bytes_read"]:
        yield "read", f"{in_bytes(result['bytes_read'])}{_rate(result['bytes_read'], attempts)}"
    if result["max_reducer_rss_bytes"]:
        kinds = sorted({a["memory_cap"] for a in attempts if a["memory_cap"]})
        cap = f" ({', '.join(kinds)})" if kinds else ""
        yield "peak reducer memory", f"{in_mib(result['max_reducer_rss_bytes'])} of {memory_mib} MiB{cap}"
    if output["bytes"] is not None:
        where = f"{output['bucket']}/{output['key']}"
        yield "output", f"{where}, {in_bytes(output['bytes'])}"
        yield "manifest", where + MANIFEST_SUFFIX
    if cost := document.get("cost"):
        yield "cost", f"${cost['usd_x86_64']:.6f} on x86 (arm ${cost['usd_arm64']:.6f}), {cost['gb_seconds']:.1f} GB-s"
    yield "time", f"{result['seconds']:.1f} s"


def people(name: str, rows: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    """How many, then each with the reason."""
    if not rows:
        return
    yield name, str(len(rows))
    for row in rows[:_MOST_NAMED]:
        yield "", f"{row['key']}: {row['reason']}"
    if len(rows) > _MOST_NAMED:
        yield "", f"and {len(rows) - _MOST_NAMED} more"


def _rate(count: int, attempts: Sequence[Mapping[str, Any]]) -> str:
    """Over the time from the first call's start to the last one's end."""
    times = [(a["started"], a["finished"]) for a in attempts if a["started"]]
    seconds = max(end for _, end in times) - min(start for start, _ in times) if times else 0.0
    return f" in {seconds:.1f} s, {in_bytes(count / seconds)}/s" if seconds > 0 else ""
