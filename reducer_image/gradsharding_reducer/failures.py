"""How an invocation ends otherwise than with its work done."""

from __future__ import annotations

from gradsharding_reducer.task import Outcome, Refusal


class ReducerFailure(Exception):
    """There is no answer: one sentence that says what, where and how to mend it, without URLs."""


class Refused(Exception):
    """There is an answer: SourceGone, Denied or Cancelled."""

    def __init__(self, outcome: Outcome, refusal: Refusal) -> None:
        super().__init__(outcome, refusal)
        self.outcome = outcome
        self.refusal = refusal


def cancelled() -> Refused:
    """The caller hung up, or the process was told to stop."""
    return Refused(Outcome.CANCELLED, Refusal(None, None, None, "Stopped"))
