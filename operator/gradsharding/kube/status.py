"""What a pass saw → the status of the round. Pure: the store is the truth, and status a projection of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from gradsharding.rounds.report import report
from gradsharding.rounds.step import Counts, Finished, Phase

COUNTERS_EVERY = 5.0
"""Seconds between writes of what only counts. Conditions are written at once."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Seen:
    """One pass, as far as the status is concerned. ``trouble`` is a reason and a sentence that the user can act on."""

    phase: Phase
    counts: Counts = field(default_factory=Counts)
    message: str = ""
    revision: int | None = None
    digest: str = ""
    active: int = 0
    retried: int = 0
    suspended: bool = False
    trouble: tuple[str, str] | None = None
    finished: Finished | None = None


def project(old: Mapping[str, Any], seen: Seen, spec: Mapping[str, Any], generation: int, now: float) -> Json:
    """The whole new status. What this pass does not know stays as it was."""
    moment = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    status: Json = {key: value for key, value in old.items() if key in _FIELDS}
    status["observedGeneration"] = generation
    status.setdefault("startTime", moment)
    updates = {
        **status.get("updates", {}),
        **_known(seen.counts, ("found", "accepted", "rejected", "excluded", "participants")),
    }
    if updates:
        status["updates"] = updates
    if seen.counts.shards is not None:
        done, total = seen.counts.shards_answered or 0, seen.counts.shards
        status["shards"] = {"total": total, "succeeded": done, "progress": f"{done}/{total}"}
    if "shards" in status:
        # Attempts before a restart of the operator are known to the old status only.
        retried = max(seen.retried, old.get("shards", {}).get("retried", 0))
        status["shards"] = {**status["shards"], "active": seen.active, "retried": retried}
    if seen.revision is not None:
        status["plan"] = {"revision": seen.revision, "sha256": seen.digest}
    if seen.finished is not None:
        _finish(status, seen.finished, spec, moment)
    status["conditions"] = _conditions(status, old.get("conditions", []), seen, generation, moment)
    return status


_FIELDS = {"conditions", "observedGeneration", "updates", "shards", "plan", "output", "startTime", "completionTime"}


def _known(counts: Counts, names: tuple[str, ...]) -> Json:
    return {name: value for name in names if (value := getattr(counts, name)) is not None}


def _finish(status: Json, finished: Finished, spec: Mapping[str, Any], moment: str) -> None:
    output = spec["output"]
    told = report(finished, output["bucket"], output["key"], 0.0)
    status["completionTime"] = moment
    updates, shards = told["updates"], told["shards"]
    status["updates"] = {
        "found": updates["found"],
        "accepted": updates["accepted"],
        "participants": updates["participants"],
        "rejected": len(updates["rejected"]),
        "excluded": len(updates["excluded"]),
    }
    if shards["total"]:
        status["shards"] = {**shards, "active": 0, "progress": f"{shards['succeeded']}/{shards['total']}"}
    if finished.succeeded:
        status["output"] = {
            "bytes": told["output"]["bytes"],
            "etag": told["output"]["etag"],
            "manifest": f"{output['key']}.manifest.json",
        }


def _conditions(status: Json, old: list[Json], seen: Seen, generation: int, moment: str) -> list[Json]:
    planned, ended = "plan" in status or bool(status.get("shards")), seen.finished
    shards = status.get("shards", {})
    reduced = bool(shards) and shards["succeeded"] == shards["total"]
    if ended is not None and ended.succeeded:
        planned = reduced = True
    rows = [
        ("Collected", planned, "QuorumMet", "Collecting", _collected(status)),
        ("Planned", planned, "PlanStored", "NoPlanYet", ""),
        ("Reduced", reduced, "AllShardsDone", "ShardsMissing", shards.get("progress", "")),
    ]
    wanted = [
        _condition(kind, "True", yes, message)
        if holds
        else _condition(kind, "False", "RoundEnded" if ended else no, message)
        for kind, holds, yes, no, message in rows
    ]
    if ended is not None:
        wanted.append(_condition("Succeeded", "True" if ended.succeeded else "False", ended.reason, ended.message))
    elif seen.trouble is not None:
        wanted.append(_condition("Succeeded", "Unknown", *seen.trouble))
    else:
        wanted.append(
            _condition("Succeeded", "Unknown", "Suspended" if seen.suspended else seen.phase.value, seen.message)
        )
    if seen.suspended or any(c["type"] == "Suspended" for c in old):
        state, reason = ("True", "Suspended") if seen.suspended else ("False", "Resumed")
        wanted.append(_condition("Suspended", state, reason, "no new call is made" if seen.suspended else ""))
    before = {c["type"]: c for c in old}
    for condition in wanted:
        last = before.get(condition["type"])
        same = last is not None and last["status"] == condition["status"]
        condition["lastTransitionTime"] = last["lastTransitionTime"] if last is not None and same else moment
        condition["observedGeneration"] = generation
    return wanted


def _condition(kind: str, state: str, reason: str, message: str) -> Json:
    return {"type": kind, "status": state, "reason": reason, "message": message[:32768]}


def _collected(status: Mapping[str, Any]) -> str:
    updates = status.get("updates", {})
    return f"{updates['accepted']} accepted, {updates.get('rejected', 0)} rejected" if "accepted" in updates else ""


def must_write(old: Mapping[str, Any], new: Mapping[str, Any], since_last: float) -> bool:
    """Conditions at once; what only counts, every few seconds; nothing when nothing changed."""
    if dict(old) == dict(new):
        return False
    return _states(old) != _states(new) or since_last >= COUNTERS_EVERY


def _states(status: Mapping[str, Any]) -> set[tuple[str, str, str]]:
    return {(c["type"], c["status"], c["reason"]) for c in status.get("conditions", [])}


def is_terminal(status: Mapping[str, Any]) -> bool:
    """The round has ended, well or not."""
    return any(c["type"] == "Succeeded" and c["status"] in ("True", "False") for c in status.get("conditions", []))


def collecting_since(status: Mapping[str, Any], created: float, now: float) -> float:
    """Where the collecting deadline of a round that is not suspended begins, in Unix seconds: creation, or the last resume.

    A status that still calls the round suspended was written before the resume, which is this moment then.
    """
    for condition in status.get("conditions", []):
        if condition["type"] == "Suspended":
            return now if condition["status"] == "True" else parse_time(condition["lastTransitionTime"])
    return created


def parse_time(text: str) -> float:
    """Unix seconds of a Kubernetes timestamp."""
    return datetime.fromisoformat(text).timestamp()
