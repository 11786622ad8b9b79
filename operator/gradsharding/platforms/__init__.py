"""Where reducers run. A platform turns one task into one answer, under a memory cap and a timeout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gradsharding_reducer.task import ReduceResult, ReduceTask


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """What every function of a round is given.

    ``at_once``: how many of this round's shards run at once, at most. ``origins`` are the ``scheme://host:port`` that it may
    talk to; ``ca_pem`` are further certificates to trust.
    """

    memory_mib: int
    timeout_seconds: int
    max_concurrency: int
    at_once: int
    origins: tuple[str, ...]
    ca_pem: str | None = None


Trouble = tuple[str, str]
"""A documented reason in CamelCase, and a sentence for the user."""


def not_starting(sentence: str) -> Trouble | None:
    """The usual trouble; None without a sentence."""
    return ("FunctionsNotStarting", sentence) if sentence else None


class Platform(Protocol):
    """The life of a round's functions. ``invoke`` may run many times at once; cancelling it stops or abandons that call."""

    name: str

    startup_seconds: float
    """The longest that a call may wait for its environment; URLs live that much longer."""

    trouble: Trouble | None
    """What keeps calls from starting just now."""

    async def prepare(self, function: FunctionSpec) -> None:
        """Make the function ready; harmless when it is. Raises RoundFailed when it cannot be had, with the reason for the user."""
        ...

    async def invoke(self, task: ReduceTask, attempt: int) -> ReduceResult:
        """Run one task. Raises an InvocationError when no answer came."""
        ...

    async def release(self) -> None:
        """Let go of what ``prepare`` made, where that is this process's to remove."""
        ...


class InvocationError(Exception):
    """No answer came from an invocation. ``request_id`` is the platform's own, where there is one; ``billed_ms`` what it
    bills for the call all the same, in milliseconds."""

    billed_ms: int = 0

    def __init__(self, detail: str = "", request_id: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.request_id = request_id


class OutOfMemory(InvocationError):
    """The function was killed for its memory, or could not get any: go one memory step lower."""


class TimedOut(InvocationError):
    """The answer did not come within the timeout; the work may be done all the same."""


class Throttled(InvocationError):
    """The platform has no room now. Waiting helps; it is nobody's fault."""

    def __init__(self, detail: str = "", retry_after: float = 0.0) -> None:
        super().__init__(detail)
        self.retry_after = retry_after


class Unreachable(InvocationError):
    """The platform could not be asked. Waiting helps."""


class FunctionFailed(InvocationError):
    """The function ran and broke: a bug, or an environment that does not fit it."""
