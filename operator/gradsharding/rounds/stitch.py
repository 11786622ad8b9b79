"""Records → the output: CompleteMultipartUpload, and what its answers mean. The store joins the parts; nobody copies a byte."""

from __future__ import annotations

from gradsharding.errors import RoundFailed
from gradsharding.rounds.context import Context, Look, Revision, fail
from gradsharding.rounds.revise import call, revise, upload_lost
from gradsharding.rounds.step import Phase, Step
from gradsharding.store import Completion

DOUBT_SECONDS = 10.0
"""How long an output that may still appear is waited for."""

ASK_AGAIN_SECONDS = 0.5

INVALID_PARTS = 2
"""So many times the parts may be rejected and made anew."""


class Stitching:
    """Completes a revision that is decided to complete. Remembers between passes since when there is a doubt."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._doubt: float | None = None
        self._rejected = 0

    def complete(self, look: Look, revision: Revision) -> Step:
        """Join the parts: only if the key is free, only with recorded ETags, never with a listing.

        Rule 2 has been asked in this pass and found no output of mine.
        """
        context, plan = self._context, revision.plan
        if self._doubt is not None:
            if context.clock() < self._doubt + DOUBT_SECONDS:
                return Step(Phase.COMPLETING, ASK_AGAIN_SECONDS, "waiting for the store's word on the finished upload")
            self._doubt = None
            if context.output.list_parts(context.keys.output, plan.upload) is None:
                lost = upload_lost(context, plan)
                return fail(context, look, lost) if lost else revise(context, look, plan, ())
        if not revision.state.complete:  # a rejected Complete took records back
            if look.calls.failure is not None:
                return fail(context, look, look.calls.failure)
            if look.calls.upload_gone:
                return self._doubted()
            return call(context, look, revision)
        if context.output.stat(context.keys.output) is not None:
            return Step(Phase.COMPLETING)
        match context.output.complete_upload(context.keys.output, plan.upload, revision.state.etags):
            case Completion.COMPLETED | Completion.KEY_EXISTS:
                return Step(
                    Phase.COMPLETING, plan=plan, counts=revision.counts
                )  # whose it is, the next pass reads in it
            case Completion.INVALID_PART:
                return self._take_back(look, revision)
            case Completion.NO_SUCH_UPLOAD | Completion.UNCLEAR:
                return self._doubted()

    def _doubted(self) -> Step:
        self._doubt = self._context.clock()
        return Step(Phase.COMPLETING, ASK_AGAIN_SECONDS)

    def _take_back(self, look: Look, revision: Revision) -> Step:
        """Shards whose recorded ETags the store does not have, or all, lose their records and run again."""
        context, plan = self._context, revision.plan
        if look.calls.running:  # with SSE-KMS equal bytes get new ETags: what still runs would undo the repetition
            return Step(Phase.COMPLETING, ASK_AGAIN_SECONDS)
        self._rejected += 1
        if self._rejected > INVALID_PARTS:
            message = f"the store rejected parts of {context.keys.output} that it had acknowledged, {self._rejected} times: see its log"
            return fail(context, look, RoundFailed("PartsRejected", message))
        stored = context.output.list_parts(context.keys.output, plan.upload)
        if stored is None:
            return self._doubted()
        wrong = {number for number, etag in revision.state.etags.items() if etag not in stored.get(number, ())}
        shards = [i for i, (first, last) in enumerate(plan.shards) if any(first <= n <= last for n in wrong)]
        prefixes = tuple(f"{context.keys.records(plan.revision)}{i}/" for i in shards or range(len(plan.shards)))
        context.output.delete([key for key in look.listing.objects if key.startswith(prefixes)])
        return Step(Phase.COMPLETING)
