"""Collected updates → the first plan, or the sentence why there can be none yet. Pure."""

from __future__ import annotations

from gradsharding.rounds.collect import Collected, select
from gradsharding.rounds.layout import merge_metadata
from gradsharding.rounds.plan import LeftOut, Participant, Plan, first_plan
from gradsharding.rounds.spec import RoundSpec


def propose(spec: RoundSpec, uid: str, collected: Collected) -> Plan:
    """The plan of revision 1, still without an upload. Raises RoundFailed when the functions cannot hold or finish it."""
    assert collected.layout is not None  # there is an accepted update
    chosen, surplus = select(collected, spec.updates.max_count)
    return first_plan(
        spec,
        uid,
        collected.layout,
        merge_metadata(a.update.header for a in collected.accepted),
        [Participant(a.update.key, a.update.etag, a.update.version_id, a.weight, a.extents) for a in chosen],
        [LeftOut(r.key, r.etag, r.reason) for r in collected.rejected],
        [LeftOut(a.update.key, a.update.etag, "maxCount was reached before it") for a in surplus],
        upload="",
    )


def no_quorum(spec: RoundSpec, collected: Collected) -> str:
    """Why the quorum was not met, with the first rejection as an example."""
    where = f"{spec.updates.bucket}/{spec.updates.prefix}"
    message = f"{len(collected.accepted)} usable updates of at least {spec.updates.min_count} in {where}"
    if collected.rejected:
        first = collected.rejected[0]
        return f"{message}; {len(collected.rejected)} were rejected, the first being {first.key}: {first.reason}"
    return message if collected.found else f"{message}: nothing there ends in .safetensors or .npy"
