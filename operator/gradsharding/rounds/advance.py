"""One pass over a round: look at the store, take the next step. The one loop that CLI and operator share.

The store is the only durable truth. A pass may be cut off before or after any operation, run twice, or beside another
operator's: what is decided is decided by a conditional PUT, and every rule below starts from what is stored. The rules are
asked in this order; docs/protocol.md says why.

0. a manifest of mine whose output is there and names its plan → clean up, Succeeded
1. the highest revision's outcome is Failed → finish the clean-up, Failed
2. the output names a stored plan of mine, of whichever revision → write its manifest
3. the output key is taken otherwise → AlreadyCommitted, or fail OutputExists
4. a plan exists → go on with the highest revision
5. collect; at quorum create the upload, put the plan, read it back
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gradsharding.errors import RoundFailed
from gradsharding.rounds.collect import Collector, Quorum, is_candidate, quorum
from gradsharding.rounds.context import Context, Look, Revision, fail
from gradsharding.rounds.dispatch import Calls
from gradsharding.rounds.ending import remove_scratch, sweep_uploads
from gradsharding.rounds.keys import Keys
from gradsharding.rounds.outcome import Decision, Verdict, all_attempts, manifest, nobody_yet
from gradsharding.rounds.output import Output, read_output
from gradsharding.rounds.plan import Plan
from gradsharding.rounds.progress import progress
from gradsharding.rounds.propose import no_quorum, propose
from gradsharding.rounds.revise import put_plan, reduce, revise
from gradsharding.rounds.scratch import Scratch
from gradsharding.rounds.spec import RoundSpec
from gradsharding.rounds.step import Counts, Finished, Intent, Phase, Step
from gradsharding.rounds.stitch import Stitching
from gradsharding.store import Bucket
from gradsharding_reducer.task import ContractError

POLL_SECONDS = 2.0
"""Between listings while updates are waited for."""


LOOK_AGAIN = 3
"""Passes before a manifest is written although records are missing: somebody removed them."""


class Round:
    """One round, as one process sees it. ``advance`` is synchronous and touches nothing but the store; one thread at a time.

    ``started`` (Unix seconds) begins the collecting deadline, ``created`` the active deadline. ``wait=False``: the deadline is
    now. ``rerun``: the round may have been run under this uid before, so when a first pass finds it committed, it succeeds
    only if no update is new or changed since. ``check_store`` raises StoreUnsupported; it is called before the first plan.
    """

    def __init__(
        self,
        spec: RoundSpec,
        uid: str,
        updates: Bucket,
        output: Bucket,
        *,
        started: float,
        created: float | None = None,
        wait: bool = True,
        rerun: bool = False,
        check_store: Callable[[Bucket, str], None] = lambda _bucket, _prefix: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        keys = Keys(spec.output.key, uid)
        self.context = Context(spec, uid, updates, output, keys, Scratch(output, keys), clock)
        self.started = started
        self._created = started if created is None else created
        self._wait = wait
        self._rerun = rerun
        self._check_store = check_store
        self._collector = Collector(
            updates, spec.updates.prefix, spec.aggregation.weighting, spec.updates.max_num_examples
        )
        self._stitching = Stitching(self.context)
        self._stop_asked = False
        self._incomplete = 0

    def begin_anew(self) -> None:
        """Forget an earlier end of this round, before a first pass: a failure, or a result whose output the user removed."""
        output, keys, scratch = self.context.output, self.context.keys, self.context.scratch
        document = scratch.document(keys.manifest)
        if document is not None and document.get("round") == self.context.uid and output.stat(keys.output) is None:
            remove_scratch(output, keys)
            output.delete([keys.manifest])
        listing = scratch.look()
        decided = scratch.outcome(listing, listing.top) if listing.top else None
        if decided is not None and decided.verdict is Verdict.FAILED:
            sweep_uploads(output, keys)
            remove_scratch(output, keys)

    def advance(self, calls: Calls, intent: Intent = Intent.RUN) -> Step:
        """One pass. Raises StoreError: pass again later; nothing is lost."""
        try:
            return self._pass(calls, intent)
        except ContractError as error:
            # Written by another release: it may be half done, and only that release knows how to go on.
            remedy = (
                f"finish the round with the release that began it, or delete what is under {self.context.keys.scratch}"
            )
            people = nobody_yet(self.context.uid, self.context.spec.digest())
            return Step(Phase.ENDING, finished=Finished(False, "IncompatibleRelease", f"{error}: {remedy}", people))

    def _pass(self, calls: Calls, intent: Intent) -> Step:
        context = self.context
        document = context.scratch.document(context.keys.manifest)
        if document is not None and document.get("round") == context.uid:
            out = read_output(context.output, context.keys.output)
            if out is not None and out.plan == _plan_of(document):
                return self._succeeded(document, calls)
        self._rerun = False
        listing = context.scratch.look()
        decided = context.scratch.outcome(listing, listing.top) if listing.top else None
        look = Look(listing, decided, calls, intent)
        if decided is not None and decided.verdict is Verdict.FAILED:
            return self._failed(decided, look)
        out = read_output(context.output, context.keys.output)
        if out is not None:
            mine = self._mine(out)
            return self._taken(out, look) if mine is None else self._commit(*mine, out, look)
        if decided is None or decided.verdict is Verdict.NEXT:
            hopeless = self._hopeless(look)
            if hopeless is not None:
                return fail(context, look, hopeless)
        if listing.planned:
            return self._go_on(look)
        if intent is Intent.SUSPEND:
            return Step(Phase.COLLECTING, delay=POLL_SECONDS, message="suspended")
        return self._collect(look)

    # Rules 0 and 1: endings

    def _succeeded(self, document: Mapping[str, Any], calls: Calls) -> Step:
        if calls.running and not self._stop_asked:
            return self._ask_stop()
        self._leave_nothing()
        if self._rerun:
            changed = self._changed_since(document)
            if changed:
                message = self._exists_message("this round", changed)
                return Step(Phase.ENDING, finished=Finished(False, "OutputExists", message, document))
            message = "this round was done before, and no update is new or changed since"
            return Step(Phase.ENDING, finished=Finished(True, "AlreadyCommitted", message, document))
        where = f"{self.context.spec.output.bucket}/{self.context.keys.output}"
        message = f"averaged {len(document['participants'])} updates into {where}"
        return Step(Phase.ENDING, finished=Finished(True, "Succeeded", message, document))

    def _failed(self, decided: Decision, look: Look) -> Step:
        context = self.context
        sweep_uploads(context.output, context.keys)
        if look.calls.running and not self._stop_asked:
            return self._ask_stop()  # what runs may upload parts until then: swept once more in the next pass
        outcome = context.keys.outcome(decided.revision)
        document = context.scratch.document(outcome) or nobody_yet(context.uid, context.spec.digest())
        remove_scratch(context.output, context.keys, keep=() if look.intent is Intent.DELETE else (outcome,))
        return Step(Phase.ENDING, finished=Finished(False, decided.reason, decided.message, document))

    def _ask_stop(self) -> Step:
        """Once: functions given up may go on as zombies, and harm nothing."""
        self._stop_asked = True
        return Step(Phase.ENDING, stop=True)

    def _leave_nothing(self) -> None:
        sweep_uploads(self.context.output, self.context.keys)
        remove_scratch(self.context.output, self.context.keys)

    def _hopeless(self, look: Look) -> RoundFailed | None:
        """What ends a round that is not decided to complete."""
        if look.intent is Intent.DELETE:
            return RoundFailed("Deleted", "the round was deleted before it was complete")
        limit = self.context.spec.active_deadline_seconds
        if limit is not None and self.context.clock() > self._created + limit:
            return RoundFailed(
                "DeadlineExceeded", f"the round did not end within spec.activeDeadlineSeconds, {limit} s"
            )
        return look.calls.failure

    # Rules 2 and 3: the output key is taken

    def _mine(self, out: Output) -> tuple[Plan, str] | None:
        """The stored plan of mine that an output names."""
        if out.plan is None or out.plan[0] != self.context.uid:
            return None
        stored = self.context.scratch.plan(out.plan[1])
        return stored if stored is not None and stored[1] == out.plan[2] else None

    def _commit(self, plan: Plan, digest: str, out: Output, look: Look) -> Step:
        scratch, listing = self.context.scratch, look.listing
        records = scratch.records(listing, plan.revision)
        state = progress(plan, digest, records)
        if not state.complete and self._incomplete < LOOK_AGAIN:
            # The listing may be older than the output, and another process through since: rule 0 comes first in the next pass.
            self._incomplete += 1
            return Step(Phase.ENDING)
        decisions = [scratch.outcome(listing, revision) for revision in listing.revisions]
        stored = [attempt for decision in decisions if decision for attempt in decision.attempts]
        attempts = all_attempts([*stored, *look.calls.attempts], records)
        body = manifest(plan, state, attempts, out.info.size, out.info.etag, self.context.clock())
        self.context.output.put(self.context.keys.manifest, body)
        return Step(Phase.ENDING, plan=plan, counts=Revision(plan, digest, state).counts)

    def _taken(self, out: Output, look: Look) -> Step:
        """The output key holds something that no stored plan of mine made."""
        context = self.context
        document = context.scratch.document(context.keys.manifest)  # read after the output: it is written after it
        whose, changed = "somebody else", list[str]()
        if document is not None and out.plan is not None and out.plan == _plan_of(document):
            whose = f"round {document['round']}"
            if document.get("spec_digest") == context.spec.digest():
                changed = self._changed_since(document)
                if not changed:
                    self._leave_nothing()
                    message = f"{whose} committed the same before, and no update is new or changed since"
                    return Step(Phase.ENDING, finished=Finished(True, "AlreadyCommitted", message, document))
        again = context.output.stat(context.keys.output)
        if again is None or again.etag != out.info.etag:
            return Step(Phase.ENDING)
        return fail(context, look, RoundFailed("OutputExists", self._exists_message(whose, changed)))

    def _exists_message(self, whose: str, changed: Sequence[str]) -> str:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        what = f"; new or changed since: {', '.join(changed[:3])}{more}" if changed else ""
        where = f"{self.context.spec.output.bucket}/{self.context.keys.output}"
        return f"{where} exists already, written by {whose}{what}: remove it, or give spec.output.key another name"

    def _changed_since(self, document: Mapping[str, Any]) -> list[str]:
        """Keys of candidates that the committed round did not see, or saw with another ETag."""
        rows = [row for name in ("participants", "rejected", "surplus", "excluded") for row in document.get(name, ())]
        seen = {row["key"]: row["etag"] for row in rows}
        now = self.context.updates.list(self.context.spec.updates.prefix)
        return [info.key for info in now if is_candidate(info.key) and seen.get(info.key) != info.etag]

    # Rules 4 and 5: work

    def _go_on(self, look: Look) -> Step:
        context = self.context
        number = look.listing.planned[-1]
        stored = context.scratch.plan(number)
        if stored is None:
            return Step(Phase.REDUCING)  # removed since it was listed
        plan, digest = stored
        if look.calls.digest != digest:  # calls of an earlier revision: their attempts are told, the rest is void
            look = replace(look, calls=Calls(attempts=look.calls.attempts))
        revision = Revision(plan, digest, progress(plan, digest, context.scratch.records(look.listing, number)))
        decided = context.scratch.outcome(look.listing, number)
        if decided is None:
            return reduce(context, look, revision)
        if decided.verdict is Verdict.NEXT:
            context.output.abort_upload(context.keys.output, plan.upload)
            return revise(context, look, plan, decided.drop)
        return self._stitching.complete(look, revision)

    def _collect(self, look: Look) -> Step:
        context = self.context
        collected = self._collector.collect()
        limits, accepted = context.spec.updates, len(collected.accepted)
        left = self.started + limits.deadline_seconds - context.clock() if self._wait else 0.0
        match quorum(accepted, limits.min_count, limits.max_count, left):
            case Quorum.WAIT:
                wanted = limits.max_count or f"at least {limits.min_count}"
                message = f"{accepted} of {wanted} updates are there, {left:.0f} s are left to collect"
                counts = Counts(collected.found, accepted, len(collected.rejected))
                return Step(Phase.COLLECTING, min(POLL_SECONDS, left), message, counts)
            case Quorum.FAILED:
                why = RoundFailed("QuorumNotMet", no_quorum(context.spec, collected))
                return fail(context, look, why, collected=collected)
            case Quorum.START:
                self._check_store(context.output, context.keys.scratch)
                try:
                    plan = propose(context.spec, context.uid, collected)
                except RoundFailed as error:
                    return fail(context, look, error, collected=collected)
                return put_plan(context, plan)


def _plan_of(document: Mapping[str, Any]) -> tuple[Any, Any, Any] | None:
    """The plan that a manifest commits, as an output's header names it."""
    plan = document.get("plan")
    return (document.get("round"), plan.get("revision"), plan.get("sha256")) if isinstance(plan, dict) else None
