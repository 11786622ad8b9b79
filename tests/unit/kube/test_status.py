from datetime import datetime

import pytest
from rounds_kit import manifest

from gradsharding.kube.status import Seen, collecting_since, is_terminal, must_write, parse_time, project
from gradsharding.rounds.outcome import nobody_yet
from gradsharding.rounds.step import Counts, Finished, Phase

SPEC = manifest()["spec"]
T0 = datetime.fromisoformat("2026-11-01T10:00:00Z").timestamp()


def at(seconds):
    return f"2026-11-01T10:00:{seconds:02d}Z"


def conditions(status):
    return {c["type"]: (c["status"], c["reason"], c["message"], c["lastTransitionTime"]) for c in status["conditions"]}


def run(*seen, generation=1):
    """One pass a second, each on top of the last one's status."""
    status = {}
    for second, one in enumerate(seen):
        status = project(status, one, SPEC, generation, T0 + second)
    return status


COLLECTING = Seen(Phase.COLLECTING, Counts(3, 2, 1), "2 of 8 are there")
REDUCING = Seen(Phase.REDUCING, Counts(excluded=0, participants=2, shards=4, shards_answered=1), "", 1, "abc", active=3)
ALL_DONE = Seen(Phase.COMPLETING, Counts(shards=4, shards_answered=4), "", 1, "abc")


def ended(succeeded, reason, **document):
    people = nobody_yet("uid", "digest")
    return Seen(Phase.ENDING, finished=Finished(succeeded, reason, f"because {reason}", {**people, **document}))


def test_collecting():
    status = run(COLLECTING)
    assert status["startTime"] == at(0)
    assert status["updates"] == {"found": 3, "accepted": 2, "rejected": 1}
    assert conditions(status) == {
        "Collected": ("False", "Collecting", "2 accepted, 1 rejected", at(0)),
        "Planned": ("False", "NoPlanYet", "", at(0)),
        "Reduced": ("False", "ShardsMissing", "", at(0)),
        "Succeeded": ("Unknown", "Collecting", "2 of 8 are there", at(0)),
    }
    assert "shards" not in status
    assert "plan" not in status
    assert not is_terminal(status)


def test_reducing():
    status = run(COLLECTING, REDUCING)
    assert status["startTime"] == at(0)
    assert status["plan"] == {"revision": 1, "sha256": "abc"}
    assert status["shards"] == {"total": 4, "succeeded": 1, "progress": "1/4", "active": 3, "retried": 0}
    assert status["updates"] == {"found": 3, "accepted": 2, "rejected": 1, "excluded": 0, "participants": 2}
    found = conditions(status)
    assert found["Collected"] == ("True", "QuorumMet", "2 accepted, 1 rejected", at(1))
    assert found["Planned"] == ("True", "PlanStored", "", at(1))
    assert found["Reduced"] == ("False", "ShardsMissing", "1/4", at(0))
    assert found["Succeeded"] == ("Unknown", "Reducing", "", at(0))


def test_reduced():
    assert conditions(run(REDUCING, ALL_DONE))["Reduced"] == ("True", "AllShardsDone", "4/4", at(1))


def test_a_new_revision_is_not_reduced_yet():
    again = Seen(Phase.REDUCING, Counts(shards=4, shards_answered=0), "", 2, "def")
    status = run(REDUCING, ALL_DONE, again)
    assert conditions(status)["Reduced"] == ("False", "ShardsMissing", "0/4", at(2))
    assert status["plan"]["revision"] == 2


def test_success():
    output = {"bytes": 12, "etag": "e-1"}
    status = run(COLLECTING, ended(True, "Succeeded", output=output, participants=[{}, {}]))
    assert is_terminal(status)
    assert status["completionTime"] == at(1)
    assert status["output"] == {**output, "manifest": "round/model.safetensors.manifest.json"}
    assert status["updates"] == {"found": 2, "accepted": 2, "participants": 2, "rejected": 0, "excluded": 0}
    assert [state for state, *_ in conditions(status).values()] == ["True"] * 4


def test_failure_before_a_plan():
    status = run(COLLECTING, ended(False, "QuorumNotMet", rejected=[{"key": "a", "reason": "b"}]))
    assert is_terminal(status)
    assert "output" not in status
    found = conditions(status)
    assert found["Succeeded"] == ("False", "QuorumNotMet", "because QuorumNotMet", at(1))
    assert [found[kind][:2] for kind in ("Collected", "Planned", "Reduced")] == [("False", "RoundEnded")] * 3
    assert status["updates"]["rejected"] == 1


def test_failure_after_a_plan():
    found = conditions(run(REDUCING, ended(False, "OutOfMemory")))
    assert found["Collected"][:2] == ("True", "QuorumMet")
    assert found["Reduced"][:2] == ("False", "RoundEnded")


def test_trouble_and_its_end():
    trouble = Seen(Phase.REDUCING, trouble=("SecretUnusable", "create it"), active=1)
    status = run(REDUCING, trouble)
    assert conditions(status)["Succeeded"] == ("Unknown", "SecretUnusable", "create it", at(0))
    assert status["shards"]["succeeded"] == 1, "what a pass does not know stays"
    assert conditions(run(REDUCING, trouble, REDUCING))["Succeeded"][1] == "Reducing"


def test_suspended_and_resumed():
    suspended = Seen(Phase.COLLECTING, suspended=True)
    assert "Suspended" not in conditions(run(COLLECTING))
    status = run(COLLECTING, suspended)
    assert conditions(status)["Suspended"][:2] == ("True", "Suspended")
    assert conditions(status)["Succeeded"][:2] == ("Unknown", "Suspended")
    status = run(COLLECTING, suspended, COLLECTING, COLLECTING)
    assert conditions(status)["Suspended"] == ("False", "Resumed", "", at(2))


def test_when_collecting_began():
    suspended = Seen(Phase.COLLECTING, suspended=True)
    assert collecting_since({}, 5.0, T0) == 5.0
    assert collecting_since(run(COLLECTING), 5.0, T0) == 5.0
    assert collecting_since(run(suspended), 5.0, T0 + 9) == T0 + 9, "resumed just now"
    assert collecting_since(run(suspended, COLLECTING, COLLECTING), 5.0, T0 + 9) == T0 + 1


def test_retries_before_a_restart_still_count():
    one = Seen(Phase.REDUCING, REDUCING.counts, "", 1, "abc", retried=3)
    assert run(one, REDUCING)["shards"]["retried"] == 3


def test_generation():
    status = run(COLLECTING, generation=4)
    assert status["observedGeneration"] == 4
    assert {c["observedGeneration"] for c in status["conditions"]} == {4}


def test_foreign_fields_of_a_status_are_not_taken_over():
    assert "note" not in project({"note": 1}, COLLECTING, SPEC, 1, T0)


def test_a_message_has_a_limit():
    assert len(conditions(run(Seen(Phase.COLLECTING, message="x" * 40000)))["Succeeded"][2]) == 32768


@pytest.mark.parametrize(
    ("new", "since", "wanted"),
    [
        (COLLECTING, 1e9, False),
        (Seen(Phase.COLLECTING, Counts(4, 3, 1), "3 of 8"), 4.9, False),
        (Seen(Phase.COLLECTING, Counts(4, 3, 1), "3 of 8"), 5.0, True),
        (Seen(Phase.COLLECTING, Counts(3, 2, 1), "2 of 8 are there", suspended=True), 0.0, True),
        (Seen(Phase.COLLECTING, trouble=("StoreUnreachable", "no")), 0.0, True),
        (REDUCING, 0.0, True),
    ],
    ids=["nothing", "counters, too early", "counters", "suspended", "trouble", "a transition"],
)
def test_what_is_written_and_when(new, since, wanted):
    old = run(COLLECTING)
    assert must_write(old, project(old, new, SPEC, 1, T0 + 60), since) is wanted


def test_times():
    assert parse_time("1970-01-01T00:01:00Z") == 60.0
