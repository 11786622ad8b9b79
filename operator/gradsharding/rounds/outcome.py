"""What becomes of a revision, decided once by a conditional PUT, and the manifest that commits a round. Plain data, and its JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from gradsharding import __version__
from gradsharding.rounds.collect import Collected
from gradsharding.rounds.cost import measured_cost
from gradsharding.rounds.plan import LeftOut, Plan
from gradsharding.rounds.progress import Progress
from gradsharding_reducer.task import ContractError, ReduceResult, canonical_json

VERSION = 1


class Verdict(StrEnum):
    """What becomes of a revision."""

    COMPLETE = "Complete"
    NEXT = "Next"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One invocation, as far as it is known. ``outcome`` is a reducer's Outcome, or the name of an InvocationError."""

    revision: int
    shard: int
    first_part: int
    last_part: int
    outcome: str
    detail: str
    started: float
    finished: float
    bytes_read: int
    bytes_written: int
    retries: int
    seconds: Mapping[str, float]
    peak_rss_bytes: int
    range_bytes: int
    prefetch: int
    platform: str
    request_id: str
    memory_cap: str
    billed_ms: int = 0
    """What the platform bills for it, where it bills by time; 0 when it did not say."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of revision ``revision``. ``drop`` goes with Next; ``reason`` and ``message`` with Failed."""

    verdict: Verdict
    revision: int
    drop: tuple[LeftOut, ...] = ()
    reason: str = ""
    message: str = ""
    attempts: tuple[Attempt, ...] = ()
    decided: float = 0.0

    def to_json(self, people: Mapping[str, Any]) -> bytes:
        """The stored form. ``people`` is what ``who_took_part`` says, so that a Failed outcome tells as much as a manifest does."""
        document = {
            **people,
            "version": VERSION,
            "outcome": self.verdict.value,
            "revision": self.revision,
            "drop": [list(row) for row in self.drop],
            "reason": self.reason,
            "message": self.message,
            "attempts": [asdict(a) for a in self.attempts],
            "decided": self.decided,
        }
        return canonical_json(document)

    @staticmethod
    def from_json(body: bytes) -> Decision:
        """Read a stored outcome. Raises ContractError."""
        try:
            document = json.loads(body)
            if document["version"] != VERSION:
                raise ContractError(
                    f"the stored outcome has version {document['version']!r:.20}, this build knows {VERSION}"
                )
            return Decision(
                Verdict(document["outcome"]),
                document["revision"],
                tuple(LeftOut(*row) for row in document["drop"]),
                document["reason"],
                document["message"],
                tuple(Attempt(**a) for a in document["attempts"]),
                document["decided"],
            )
        except ContractError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ContractError(f"the stored outcome cannot be read: {type(error).__name__}") from None


def attempt_of(
    result: ReduceResult, first_part: int, last_part: int, range_bytes: int = 0, prefetch: int = 0, detail: str = ""
) -> Attempt:
    """An answered invocation as an attempt."""
    return Attempt(
        revision=result.revision,
        shard=result.shard,
        first_part=first_part,
        last_part=last_part,
        outcome=result.outcome.value,
        detail=detail or (result.refusal.code if result.refusal else ""),
        started=result.started,
        finished=result.finished,
        bytes_read=result.bytes_read,
        bytes_written=result.bytes_written,
        retries=result.retries,
        seconds=dict(result.seconds),
        peak_rss_bytes=result.peak_rss_bytes,
        range_bytes=range_bytes,
        prefetch=prefetch,
        platform=result.runtime.platform,
        request_id=result.runtime.request_id,
        memory_cap=result.runtime.memory_cap,
        billed_ms=result.runtime.billed_ms,
    )


def all_attempts(known: Sequence[Attempt], records: Sequence[ReduceResult]) -> tuple[Attempt, ...]:
    """What was seen, by this process or one before it, and what the store recorded; each once, in order of time."""
    recorded = [attempt_of(r, r.parts[0].number, r.parts[-1].number) for r in records if r.parts]
    merged = {(a.revision, a.shard, a.started): a for a in [*recorded, *known]}
    return tuple(merged[key] for key in sorted(merged))


def who_took_part(plan: Plan, drop: Sequence[LeftOut] = ()) -> dict[str, Any]:
    """The people of a plan, as manifest and Failed outcome show them."""
    plan = replace(plan, excluded=plan.excluded + tuple(drop))
    return {
        "round": plan.round,
        "spec_digest": plan.spec_digest,
        "method": {"name": plan.method.name, "parameters": dict(plan.method.parameters)},
        "participants": [
            {"key": p.key, "etag": p.etag, "version_id": p.version_id, "weight": p.weight} for p in plan.participants
        ],
        "rejected": [row._asdict() for row in plan.rejected],
        "surplus": [row._asdict() for row in plan.surplus],
        "excluded": [row._asdict() for row in plan.excluded],
        "plan": {
            "revision": plan.revision,
            "sha256": plan.digest,
            "parts": len(plan.parts),
            "shards": [list(shard) for shard in plan.shards],
            "part_bytes": plan.sizing.part_bytes,
            "range_bytes": plan.sizing.range_bytes,
            "prefetch": plan.sizing.prefetch,
        },
        "versions": versions(),
    }


def nobody_yet(uid: str, spec_digest: str, collected: Collected | None = None) -> dict[str, Any]:
    """The same of a round that never got to a plan."""
    rejected = [LeftOut(r.key, r.etag, r.reason) for r in collected.rejected] if collected else []
    waiting = [LeftOut(a.update.key, a.update.etag, "no quorum") for a in collected.accepted] if collected else []
    return {
        "round": uid,
        "spec_digest": spec_digest,
        "participants": [],
        "rejected": [row._asdict() for row in rejected],
        "surplus": [row._asdict() for row in waiting],
        "excluded": [],
        "plan": None,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of what decided; each attempt's own are in its record."""
    return {"gradsharding": __version__, "python": platform.python_version()}


def manifest(plan: Plan, state: Progress, attempts: Sequence[Attempt], size: int, etag: str, committed: float) -> bytes:
    """The commit record: who took part with which weight, who was left out and why, and how it was made."""
    started = min((a.started for a in attempts if a.started), default=committed)
    document = {
        "version": VERSION,
        "outcome": "Succeeded",
        **who_took_part(plan),
        "output": {"key": plan.output_key, "bytes": size, "etag": etag},
        "parts": [
            {"number": p.number, "bytes": p.bytes, "etag": p.etag, "sha256": p.sha256}
            for _, p in sorted(state.answered.items())
        ],
        "attempts": [asdict(a) for a in attempts],
        "bytes_read": sum(a.bytes_read for a in attempts),
        "max_reducer_rss_bytes": max((a.peak_rss_bytes for a in attempts), default=0),
        "reduce_started": started,
        "committed": committed,
    }
    cost = measured_cost(document)
    return canonical_json(document | {"cost": cost} if cost else document)
