"""The end of a round as one flat object: what ``run --json`` prints and a status shows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradsharding.rounds.step import Finished
from gradsharding_reducer.task import Outcome

ANSWERED = {Outcome.DONE, Outcome.PARTIAL, Outcome.BAD_VALUES}
"""Outcomes of an attempt that was of use; every other attempt is a retry's cause."""


def report(finished: Finished, bucket: str, key: str, seconds: float) -> dict[str, Any]:
    """Built from the manifest, or from the Failed outcome, so that a later run says the same. Sizes in bytes; ``seconds`` of this run."""
    document = finished.document
    attempts = document.get("attempts", [])
    plan = document.get("plan") or {}
    shards = plan.get("shards", [])
    output = document.get("output") or {}
    names = ("participants", "rejected", "surplus", "excluded")
    counts = {name: len(document.get(name, ())) for name in names}
    accepted = counts["participants"] + counts["surplus"] + counts["excluded"]
    return {
        "succeeded": finished.succeeded,
        "reason": finished.reason,
        "message": finished.message,
        "output": {"bucket": bucket, "key": key, "bytes": output.get("bytes"), "etag": output.get("etag")},
        "updates": {
            "found": accepted + counts["rejected"],
            "accepted": accepted,
            "participants": counts["participants"],
            "rejected": _reasons(document, "rejected"),
            "excluded": _reasons(document, "excluded"),
        },
        "shards": {
            "total": len(shards),
            "succeeded": _done(attempts, plan),
            "retried": sum(a["outcome"] not in ANSWERED for a in attempts),
        },
        "bytes_read": sum(a["bytes_read"] for a in attempts),
        "seconds": round(seconds, 3),
        "max_reducer_rss_bytes": max((a["peak_rss_bytes"] for a in attempts), default=0),
        "plan": {
            "revision": plan.get("revision"),
            "parts": plan.get("parts"),
            "part_bytes": plan.get("part_bytes"),
            "range_bytes": plan.get("range_bytes"),
            "prefetch": plan.get("prefetch"),
        },
    }


def _reasons(document: Mapping[str, Any], name: str) -> list[dict[str, str]]:
    return [{"key": row["key"], "reason": row["reason"]} for row in document.get(name, ())]


def _done(attempts: list[Mapping[str, Any]], plan: Mapping[str, Any]) -> int:
    """Shards of the last revision that some attempt finished."""
    return len({a["shard"] for a in attempts if a["outcome"] == Outcome.DONE and a["revision"] == plan.get("revision")})
