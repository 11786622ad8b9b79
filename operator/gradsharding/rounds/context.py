"""What every rule of a pass works with: the round's fixed parts, what this pass has seen, and how a decision is put down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradsharding.errors import RoundFailed
from gradsharding.rounds.collect import Collected
from gradsharding.rounds.dispatch import Calls
from gradsharding.rounds.keys import Keys
from gradsharding.rounds.outcome import Decision, Verdict, all_attempts, nobody_yet, who_took_part
from gradsharding.rounds.plan import LeftOut, Plan
from gradsharding.rounds.progress import Progress
from gradsharding.rounds.scratch import Listing, Scratch
from gradsharding.rounds.spec import RoundSpec
from gradsharding.rounds.step import Counts, Intent, Phase, Step
from gradsharding.store import Bucket


@dataclass(frozen=True, slots=True)
class Context:
    """One round, for all its passes."""

    spec: RoundSpec
    uid: str
    updates: Bucket
    output: Bucket
    keys: Keys
    scratch: Scratch
    clock: Callable[[], float]

    @property
    def exclude(self) -> bool:
        """Leave clients at fault out, instead of failing the round."""
        return self.spec.aggregation.invalid_update_policy == "Exclude"


@dataclass(frozen=True, slots=True)
class Look:
    """One pass: the listing it began with, what was decided on the highest revision, the calls, and what the user wants."""

    listing: Listing
    decided: Decision | None
    calls: Calls
    intent: Intent


@dataclass(frozen=True, slots=True)
class Revision:
    """The plan that is being worked on, with its digest, and what its records say."""

    plan: Plan
    digest: str
    state: Progress

    @property
    def counts(self) -> Counts:
        """For people."""
        accepted = len(self.plan.participants) + len(self.plan.excluded) + len(self.plan.surplus)
        return Counts(
            found=accepted + len(self.plan.rejected),
            accepted=accepted,
            rejected=len(self.plan.rejected),
            excluded=len(self.plan.excluded),
            participants=len(self.plan.participants),
            shards=self.state.shards,
            shards_answered=self.state.shards_answered,
            parts_answered=len(self.state.answered),
        )


def fail(
    context: Context, look: Look, why: RoundFailed, drop: Sequence[LeftOut] = (), collected: Collected | None = None
) -> Step:
    """Propose that the round has failed: on the highest revision, or behind it when that one is decided already."""
    listing = look.listing
    revision = listing.top + 1 if look.decided is not None else max(listing.top, 1)
    stored = context.scratch.plan(listing.planned[-1]) if listing.planned else None
    if stored is None:
        people, attempts = nobody_yet(context.uid, context.spec.digest(), collected), look.calls.attempts
    else:
        people = who_took_part(stored[0], drop)
        attempts = all_attempts(look.calls.attempts, context.scratch.records(listing, stored[0].revision))
    decision = Decision(Verdict.FAILED, revision, tuple(drop), why.reason, str(why), attempts, context.clock())
    context.scratch.decide(decision, people)
    return Step(Phase.ENDING)


def decide(context: Context, look: Look, verdict: Verdict, revision: Revision, drop: Sequence[LeftOut] = ()) -> Step:
    """Propose what becomes of the revision; the next pass reads what was decided."""
    attempts = all_attempts(look.calls.attempts, revision.state.records)
    decision = Decision(verdict, revision.plan.revision, tuple(drop), attempts=attempts, decided=context.clock())
    context.scratch.decide(decision, {})
    return Step(Phase.REDUCING, plan=revision.plan, counts=revision.counts)
