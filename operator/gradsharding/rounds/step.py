"""What one pass over a round asks its driver to do, and what it saw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Any

from gradsharding.rounds.memory import Sizing
from gradsharding.rounds.plan import Plan, PlannedPart


class Intent(Enum):
    """What the user wants of a round."""

    RUN = auto()
    SUSPEND = auto()
    """No new call is made; running ones finish and count."""
    DELETE = auto()
    """Leave nothing; but what is decided to complete, completes."""


class Phase(StrEnum):
    """Where a round is. For people: the truth is in the store."""

    COLLECTING = "Collecting"
    REDUCING = "Reducing"
    COMPLETING = "Completing"
    ENDING = "Ending"


@dataclass(frozen=True, slots=True)
class Counts:
    """Of updates and shards, as far as this pass knows; None: not looked at."""

    found: int | None = None
    accepted: int | None = None
    rejected: int | None = None
    excluded: int | None = None
    participants: int | None = None
    shards: int | None = None
    shards_answered: int | None = None
    parts_answered: int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a round. ``document`` is the manifest, or the Failed outcome in the same shape."""

    succeeded: bool
    reason: str
    message: str
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One pass's wishes: call what is missing, or stop all calls; then pass again after ``delay`` seconds, or when a call ends."""

    phase: Phase
    delay: float = 0.0
    message: str = ""
    counts: Counts = field(default_factory=Counts)
    plan: Plan | None = None
    digest: str = ""
    missing: Mapping[int, tuple[PlannedPart, ...]] = field(default_factory=dict)
    """Shards to call, unless they are being called."""
    sizing: Sizing | None = None
    """How to read: the plan's sizing, lowered to the present memory cap where that is another one now."""
    release: frozenset[int] = frozenset()
    """Shards whose reason to hold turned out void."""
    stop: bool = False
    """Stop all calls before the next pass."""
    finished: Finished | None = None
