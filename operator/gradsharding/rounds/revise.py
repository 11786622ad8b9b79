"""One revision of a plan: what its records call for, and how the next revision comes about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from gradsharding.errors import RoundFailed
from gradsharding.rounds import memory
from gradsharding.rounds.context import Context, Look, Revision, decide, fail
from gradsharding.rounds.outcome import Verdict
from gradsharding.rounds.plan import LeftOut, Participant, Plan, next_plan
from gradsharding.rounds.progress import bad_updates, fault_message
from gradsharding.rounds.step import Intent, Phase, Step

POLL_SECONDS = 5.0
"""Between passes while calls run: their ends wake the loop, so this only notices what others did."""

UPLOADS_LOST = 2
"""So many revisions may drop nobody, since their upload was gone."""


def reduce(context: Context, look: Look, revision: Revision) -> Step:
    """Nothing is decided yet: judge the answers, or call what is missing."""
    plan, state, calls = revision.plan, revision.state, look.calls
    bad = bad_updates(plan, state.bad)
    gone = vanished(context, plan, calls.source_gone.values()) if calls.source_gone else ()
    # Under Exclude all bad clients are dropped at once: when every shard has answered, or when there is a new plan anyway.
    if gone or (bad and (state.complete or not context.exclude)):
        named = {row.key for row in gone}
        drop = gone + tuple(row for row in bad if row.key not in named)
        if context.exclude:
            return decide(context, look, Verdict.NEXT, revision, drop)
        return fail(context, look, RoundFailed("InvalidUpdate", f"{drop[0].key} {drop[0].reason}"), drop)
    if state.complete and state.faults:
        return fail(context, look, RoundFailed(*fault_message(plan, state.faults)))
    if state.complete:
        return decide(context, look, Verdict.COMPLETE, revision)
    if calls.upload_gone and context.output.list_parts(context.keys.output, plan.upload) is None:
        # Rule 2 was asked in this pass, and nothing completes a revision that is not decided to.
        lost = upload_lost(context, plan)
        return fail(context, look, lost) if lost else decide(context, look, Verdict.NEXT, revision)
    if fitting(context, plan) is None:  # made under a larger memory cap
        return decide(context, look, Verdict.NEXT, revision)
    return call(context, look, revision, release=calls.upload_gone | frozenset(calls.source_gone or ()))


def call(context: Context, look: Look, revision: Revision, release: frozenset[int] = frozenset()) -> Step:
    """Ask for the missing parts; nothing while the round is suspended."""
    context.scratch.put_header(look.listing, revision.plan, revision.digest)
    suspended = look.intent is Intent.SUSPEND
    return Step(
        Phase.REDUCING,
        delay=POLL_SECONDS,
        message="suspended" if suspended else "",
        counts=revision.counts,
        plan=revision.plan,
        digest=revision.digest,
        missing={} if suspended else revision.state.missing,
        sizing=fitting(context, revision.plan) or revision.plan.sizing,
        release=release,
    )


def revise(context: Context, look: Look, plan: Plan, drop: Sequence[LeftOut]) -> Step:
    """Revision r+1: of plan r and whom to drop, nothing else; only while plan r is there and the output key is free."""
    if (
        context.output.stat(context.keys.output) is not None
        or context.output.stat(context.keys.plan(plan.revision)) is None
    ):
        return Step(Phase.REDUCING)
    left, least = len(plan.participants) - len(drop), context.spec.updates.min_count
    if left < least:
        message = f"{left} participants are left, fewer than spec.updates.minCount, {least}"
        why = f": {drop[0].key} {drop[0].reason}" if drop else ""
        return fail(context, look, RoundFailed("QuorumNotMet", message + why), drop)
    try:
        following = next_plan(plan, context.spec, drop, upload="")
    except RoundFailed as error:
        return fail(context, look, error, drop)
    return put_plan(context, following)


def put_plan(context: Context, plan: Plan) -> Step:
    """Create the upload, propose the plan. A crash in between leaves an upload that no plan names: every ending sweeps those."""
    plan = replace(plan, upload=context.output.create_upload(context.keys.output))
    context.scratch.put_plan(plan)
    return Step(Phase.REDUCING)


def upload_lost(context: Context, plan: Plan) -> RoundFailed | None:
    """The store dropped an upload once too often."""
    if plan.uploads_lost < UPLOADS_LOST:
        return None
    return RoundFailed(
        "UploadLost",
        f"the store dropped the unfinished upload of {context.keys.output} {UPLOADS_LOST + 1} times: "
        "look for a lifecycle rule of the bucket that aborts incomplete multipart uploads too early",
    )


def fitting(context: Context, plan: Plan) -> memory.Sizing | None:
    """The plan's sizing under the present memory cap, which may be another one than it was made for; None: too small for its parts."""
    return memory.fit(
        plan.sizing,
        context.spec.function.memory_mib,
        header_bytes=plan.header_length,
        sources=len(plan.participants),
    )


def vanished(context: Context, plan: Plan, named: Iterable[int | None]) -> tuple[LeftOut, ...]:
    """Which participants are gone or another object now: one HEAD each; of a pinned version, the reducers' word."""
    told = {index for index in named if index is not None}

    def look_at(item: tuple[int, Participant]) -> LeftOut | None:
        index, participant = item
        if participant.version_id is not None:
            reason = "had its pinned version removed during the round"
            return LeftOut(participant.key, None, reason) if index in told else None
        info = context.updates.stat(participant.key)
        if info is None:
            return LeftOut(participant.key, None, "was removed during the round")
        if info.etag != participant.etag:
            return LeftOut(participant.key, info.etag, "was overwritten during the round")
        return None

    with ThreadPoolExecutor(max_workers=16, thread_name_prefix="head") as pool:
        return tuple(row for row in pool.map(look_at, enumerate(plan.participants)) if row is not None)
