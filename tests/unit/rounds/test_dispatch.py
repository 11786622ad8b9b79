"""What the end of a call means: repeated, lowered, waited for, or given up."""

import asyncio
import dataclasses

import pytest
from inline_platform import InlinePlatform
from rounds_kit import OUTPUT, assert_mean, document, keys_under, make_round, run, spec, tensors, upload

from gradsharding.errors import RoundFailed, StoreRefused
from gradsharding.platforms import FunctionFailed, OutOfMemory, Throttled, TimedOut, Unreachable
from gradsharding.rounds import dispatch
from gradsharding.rounds.dispatch import Calls, Limits, ShardState, after
from gradsharding.rounds.drive import drive, make_dispatcher
from gradsharding.rounds.memory import Sizing, lower
from gradsharding.rounds.step import Intent
from gradsharding_reducer.task import Outcome, ReduceResult, Refusal, UrlKind

LIMITS = Limits(memory_mib=256, timeout_seconds=300, backoff_limit=3, max_concurrency=4)
SIZING = Sizing(16 << 20, 8 << 20, 4)


def judge(state, end):
    return after(state, end, SIZING, LIMITS, now=100.0, luck=0.5)


def answer(outcome, url=None, code="", source=None):
    return ReduceResult("r", 1, 0, "p", outcome, refusal=Refusal(url, source, 403, code))


@pytest.fixture
def quick(monkeypatch):
    """Back-offs of no length: what matters here is their number."""
    real = dispatch.after
    monkeypatch.setattr(dispatch, "after", lambda *arguments: dataclasses.replace(real(*arguments), not_before=0.0))


def fill(bucket, count=3):
    updates = [(tensors(i), 10 + i) for i in range(count)]
    for i, (values, examples) in enumerate(updates):
        upload(bucket, f"{i}.safetensors", values, examples)
    return updates


# One call's end, judged purely


def test_out_of_memory_goes_down_step_by_step_until_the_floor():
    state = ShardState()
    steps = 0
    while state.failure is None:
        state = judge(state, OutOfMemory())
        steps += 1
    assert steps == next(n for n in range(99) if lower(SIZING, n) is None)
    assert state.failure.reason == "OutOfMemory"
    assert "spec.function.memoryMiB, to 512" in str(state.failure)
    assert state.tries == 0


@pytest.mark.parametrize("error", [TimedOut(), FunctionFailed("exit status 1")])
def test_failures_count_up_to_the_limit(error):
    state = judge(judge(ShardState(), error), error)
    assert (state.tries, state.failure) == (2, None)
    state = judge(state, error)
    assert state.failure is not None
    assert "3 tries without progress" in str(state.failure)


@pytest.mark.parametrize("error", [Throttled(), Unreachable("connection refused")])
def test_busy_platforms_are_waited_for_without_counting(error):
    state = ShardState()
    waits = []
    for _ in range(20):
        state = judge(state, error)
        waits.append(state.not_before - 100.0)
    assert (state.tries, state.failure) == (0, None)
    assert waits[:3] == [0.5, 1.0, 2.0]
    assert waits[-1] == 30.0


def test_throttled_waits_as_long_as_it_is_told():
    assert judge(ShardState(), Throttled(retry_after=77.0)).not_before == 177.0


def test_denied_is_signed_anew_once():
    denied = answer(Outcome.DENIED, UrlKind.PART, "AccessDenied")
    state = judge(ShardState(), denied)
    assert (state.failure, state.not_before) == (None, 0.0)
    state = judge(state, denied)
    assert state.failure.reason == "StoreDenied"
    assert "fresh part URLs (AccessDenied)" in str(state.failure)


def test_denials_between_successes_do_not_add_up():
    denied = answer(Outcome.DENIED, UrlKind.PART)
    state = judge(judge(judge(ShardState(), denied), answer(Outcome.PARTIAL)), denied)
    assert state.failure is None


def test_gone_source_and_gone_upload_hold_the_shard():
    assert judge(ShardState(), answer(Outcome.SOURCE_GONE, UrlKind.SOURCE, source=2)).gone == 2
    assert judge(ShardState(), answer(Outcome.CANCELLED, UrlKind.PART)).held is Outcome.CANCELLED


def test_a_function_that_was_stopped_is_only_called_again():
    state = judge(ShardState(), answer(Outcome.CANCELLED))
    assert (state.held, state.tries, state.waits) == (None, 0, 1)


# Whole rounds


def scripted(bucket, *errors):
    """Fails the first calls with these errors."""
    pending = list(errors)

    def script(task, number):
        if pending:
            raise pending.pop(0)

    return InlinePlatform(bucket.origin, script)


def test_out_of_memory_is_retried_with_less_and_the_same_bits(bucket, quick):
    updates = fill(bucket)
    platform = scripted(bucket, OutOfMemory("killed"), OutOfMemory("killed"))
    assert run(make_round(bucket, wait=False, spec=spec(function_shards=1)), platform).succeeded
    assert_mean(bucket, updates)
    first, second, third = (task.tuning for task in platform.tasks)
    assert first.prefetch > second.prefetch > third.prefetch
    attempts = document(bucket)["attempts"]
    assert [a["outcome"] for a in attempts] == ["OutOfMemory", "OutOfMemory", "Done"]


def test_backoff_limit_ends_the_round(bucket, quick):
    fill(bucket)
    platform = scripted(bucket, *[FunctionFailed("exit status 1")] * 9)
    finished = run(make_round(bucket, wait=False), platform)
    assert finished.reason == "FunctionFailed"
    assert "exit status 1" in finished.message
    assert len(finished.document["attempts"]) >= 3
    assert bucket.list_uploads(OUTPUT) == []


def test_lost_answers_are_looked_up_before_anything_is_repeated(bucket, quick):
    """The work was done and recorded; only its answer was lost."""
    updates = fill(bucket)

    class Forgetful(InlinePlatform):
        async def invoke(self, task, attempt):
            await super().invoke(task, attempt)
            raise TimedOut("504")

    platform = Forgetful(bucket.origin)
    assert run(make_round(bucket, wait=False), platform).succeeded
    assert [task.shard for task in platform.tasks] == [0, 1]
    assert_mean(bucket, updates)


def test_answers_without_a_record_do_not_loop_for_ever(bucket, quick):
    fill(bucket)

    class Silent(InlinePlatform):
        async def invoke(self, task, attempt):
            self.tasks.append(task)
            return ReduceResult(
                task.round, task.revision, task.shard, task.plan, Outcome.DONE, started=float(len(self.tasks))
            )

    platform = Silent(bucket.origin)
    finished = run(make_round(bucket, wait=False), platform)
    assert finished.reason == "FunctionFailed"
    assert "left no record" in finished.message
    assert len(platform.tasks) <= 2 * LIMITS.backoff_limit


def test_partial_answers_are_progress_not_retries(bucket, quick):
    """Every call answers one part of its shard; with more parts than backoffLimit the round still succeeds."""
    updates = fill(bucket)

    class OnePart(InlinePlatform):
        async def invoke(self, task, attempt):
            rest = dataclasses.replace(task, parts=task.parts[:1])
            return await super().invoke(rest, attempt)

    platform = OnePart(bucket.origin)
    finished = run(make_round(bucket, wait=False, spec=spec(function_shards=1, function_backoffLimit=1)), platform)
    assert finished.succeeded, finished
    assert_mean(bucket, updates)


def test_platform_bug_is_a_failed_function(bucket, quick):
    fill(bucket)
    finished = run(make_round(bucket, wait=False), scripted(bucket, *[KeyError("oops")] * 9))
    assert finished.reason == "FunctionFailed"
    assert "KeyError in the platform" in finished.message


def test_concurrency_is_bounded(bucket):
    fill(bucket)
    running, most = set(), []

    class Counting(InlinePlatform):
        async def invoke(self, task, attempt):
            running.add(task.shard)
            most.append(len(running))
            try:
                await asyncio.sleep(0.01)
                return await super().invoke(task, attempt)
            finally:
                running.discard(task.shard)

    round_ = make_round(bucket, wait=False, spec=spec(function_shards=4, function_maxConcurrency=2))
    assert run(round_, Counting(bucket.origin)).succeeded
    assert max(most) == 2


def test_no_progress_while_the_platform_is_busy_ends_the_round(bucket, quick, monkeypatch):
    fill(bucket)
    monkeypatch.setattr(dispatch, "PATIENCE_SECONDS", -300.0 + 0.2)
    finished = run(make_round(bucket, wait=False), scripted(bucket, *[Throttled()] * 100_000))
    assert finished.reason == "NoProgress"


def test_store_that_refuses_to_sign_is_retried_and_remembered(bucket, quick):
    fill(bucket)
    round_ = make_round(bucket, wait=False)

    async def scenario():
        dispatcher = make_dispatcher(round_, InlinePlatform(bucket.origin))

        def refuse(*_):
            raise StoreRefused("the credentials have expired", "ExpiredToken")

        dispatcher._sign = refuse
        for _ in range(3):
            step = round_.advance(dispatcher.snapshot())
            if step.sizing is not None:
                dispatcher.want(step.plan, step.digest, step.missing, step.sizing)
                await dispatcher.changed.wait()
        await dispatcher.stop()
        return dispatcher

    assert str(asyncio.run(scenario()).store_error) == "the credentials have expired"


# What the user wants


def advance_until(round_, calls, intent, limit=20):
    for _ in range(limit):
        step = round_.advance(calls, intent)
        if step.finished is not None or step.delay:
            return step
    raise AssertionError("no end")


def test_suspended_round_makes_no_call(bucket):
    fill(bucket)
    round_ = make_round(bucket, wait=False)
    assert advance_until(round_, Calls(), Intent.SUSPEND).message == "suspended"
    assert keys_under(bucket, OUTPUT) == []
    step = advance_until(round_, Calls(), Intent.RUN)
    assert step.missing
    step = advance_until(round_, Calls(), Intent.SUSPEND)
    assert (step.message, dict(step.missing)) == ("suspended", {})
    assert run(round_, InlinePlatform(bucket.origin)).succeeded


def test_deletion_leaves_nothing(bucket):
    fill(bucket)
    round_ = make_round(bucket, wait=False)
    assert advance_until(round_, Calls(), Intent.RUN).missing
    step = advance_until(round_, Calls(), Intent.DELETE)
    assert (step.finished.succeeded, step.finished.reason) == (False, "Deleted")
    assert keys_under(bucket, OUTPUT) == []
    assert bucket.list_uploads(OUTPUT) == []


def test_deletion_after_the_decision_to_complete_completes(bucket):
    updates = fill(bucket)
    round_ = make_round(bucket, wait=False)
    wish = [Intent.RUN]

    def watch(step, calls):
        if step.counts.shards and step.counts.shards_answered == step.counts.shards:
            wish[0] = Intent.DELETE

    finished = asyncio.run(drive(round_, InlinePlatform(bucket.origin), watch, lambda: wish[0]))
    assert finished.reason == "Succeeded"
    assert_mean(bucket, updates)


def test_active_deadline(bucket):
    fill(bucket)
    round_ = make_round(bucket, wait=False, spec=spec(activeDeadlineSeconds=100))
    assert advance_until(round_, Calls(), Intent.RUN).missing
    round_.context.clock.now += 101
    step = advance_until(round_, Calls(), Intent.RUN)
    assert step.finished.reason == "DeadlineExceeded"
    assert bucket.list_uploads(OUTPUT) == []


def test_cancelling_leaves_a_round_that_goes_on(bucket):
    """Ctrl-C: what is recorded stays, and only the rest runs again."""
    updates = fill(bucket)

    class Hanging(InlinePlatform):
        async def invoke(self, task, attempt):
            if task.shard == 1:
                await asyncio.Event().wait()
            return await super().invoke(task, attempt)

    async def interrupted():
        running = asyncio.create_task(drive(make_round(bucket, wait=False), platform))
        while not keys_under(bucket, OUTPUT + ".round/uid-1/1/shards/0/"):
            await asyncio.sleep(0.005)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    platform = Hanging(bucket.origin)
    asyncio.run(interrupted())
    second = InlinePlatform(bucket.origin)
    assert run(make_round(bucket, wait=False), second).succeeded
    assert [task.shard for task in second.tasks] == [1]
    assert_mean(bucket, updates)


def test_round_failed_is_what_a_platform_may_raise(bucket):
    fill(bucket)
    finished = run(
        make_round(bucket, wait=False), scripted(bucket, RoundFailed("RuntimeUnavailable", "no Knative here"))
    )
    assert (finished.reason, finished.message) == ("RuntimeUnavailable", "no Knative here")


def test_a_backoff_limit_of_zero_still_waits_for_a_busy_platform(bucket, quick):
    fill(bucket)
    platform = scripted(bucket, Throttled(), OutOfMemory("killed"))
    assert run(make_round(bucket, wait=False, spec=spec(function_backoffLimit=0)), platform).succeeded
