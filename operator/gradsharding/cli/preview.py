"""The updates that are there now → what a round would do with them, as one flat object and as rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gradsharding.cli.compared import comparison, estimated
from gradsharding.cli.summary import people
from gradsharding.cli.terminal import in_bytes, in_mib
from gradsharding.errors import RoundFailed
from gradsharding.rounds import memory
from gradsharding.rounds.collect import Collected, Collector
from gradsharding.rounds.propose import no_quorum, propose
from gradsharding.rounds.spec import RoundSpec, cli_uid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gradsharding.rounds.plan import Plan
    from gradsharding.store import Bucket


def preview(spec: RoundSpec, updates: Bucket, output: Bucket, advise: bool = False) -> dict[str, Any]:
    """What ``plan --json`` prints; ``advise`` adds other sizes, for Lambda, under ``comparison``. Writes nothing.

    Raises RoundFailed when there is nothing to plan with or the functions cannot hold it, and StoreError.
    """
    limits = spec.updates
    collected = Collector(updates, limits.prefix, spec.aggregation.weighting, limits.max_num_examples).collect()
    if not collected.accepted:
        raise RoundFailed("QuorumNotMet", no_quorum(spec, collected))
    plan = propose(spec, cli_uid(spec), collected)
    sources = len(plan.participants)
    peak = memory.predict_peak(_in_use(plan), header_bytes=plan.header_length, sources=sources)
    found = {
        "succeeded": True,
        "reason": "Planned" if len(collected.accepted) >= limits.min_count else "NoQuorumYet",
        "message": _message(spec, collected),
        "output": {
            "bucket": spec.output.bucket,
            "key": spec.output.key,
            "bytes": plan.header_length + plan.layout.size,
            "exists": output.stat(spec.output.key) is not None,
        },
        "updates": {
            "found": collected.found,
            "accepted": len(collected.accepted),
            "participants": [{"key": p.key, "weight": p.weight} for p in plan.participants],
            "rejected": [{"key": row.key, "reason": row.reason} for row in plan.rejected],
            "surplus": [{"key": row.key, "reason": row.reason} for row in plan.surplus],
        },
        "tensors": len(plan.layout.tensors),
        "bytes_to_read": plan.layout.size * sources,
        "shards": {"total": len(plan.shards)},
        "function": {
            "memory_mib": spec.function.memory_mib,
            "predicted_peak_bytes": peak,
            "timeout_seconds": spec.function.timeout_seconds,
        },
        "plan": {
            "parts": len(plan.parts),
            "part_bytes": plan.sizing.part_bytes,
            "range_bytes": plan.sizing.range_bytes,
            "prefetch": plan.sizing.prefetch,
        },
    }
    if spec.function.platform == "Lambda":
        found["estimate"] = estimated(spec, plan)
    return found | {"comparison": comparison(spec, plan)} if advise else found


def _in_use(plan: Plan) -> memory.Sizing:
    """The sizing with no more reads in flight than the largest shard has at all: small rounds take less."""
    parts = max(last - first + 1 for first, last in plan.shards)
    reads = parts * -(-plan.sizing.part_bytes // plan.sizing.range_bytes) * len(plan.participants)
    return replace(plan.sizing, prefetch=min(plan.sizing.prefetch, max(1, reads - 1)))


def _message(spec: RoundSpec, collected: Collected) -> str:
    limits, accepted = spec.updates, len(collected.accepted)
    if accepted < limits.min_count:
        return f"no quorum yet: {no_quorum(spec, collected)}; planned with those that are there"
    if limits.max_count is not None and accepted >= limits.max_count:
        return "the round would start at once"
    more = f"for {limits.max_count} updates" if limits.max_count else "for more updates"
    return f"the round would wait {more}, at most {limits.deadline_seconds} s; with --no-wait it would start at once"


def rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The same for people."""
    updates, plan, function, output = found["updates"], found["plan"], found["function"], found["output"]
    yield "plan", f"{found['message']}"
    yield "participants", f"{len(updates['participants'])} of {updates['found']} updates found"
    yield from people("rejected", updates["rejected"])
    yield from people("surplus", updates["surplus"])
    yield "data", f"{found['tensors']} tensors, {in_bytes(found['bytes_to_read'])} to read"
    yield "shards", f"{found['shards']['total']}, {plan['parts']} parts of {in_mib(plan['part_bytes'])}"
    yield "reads", f"{plan['range_bytes'] / 2**20:.2f} MiB each, {plan['prefetch']} in flight"
    peak, cap = function["predicted_peak_bytes"], function["memory_mib"]
    yield "memory per function", f"{in_mib(peak)} predicted, {cap} MiB allowed"
    if "estimate" in found:
        yield (
            "estimate",
            f"{found['estimate']['seconds']:.1f} s, ${found['estimate']['usd']:.6f}; --compare shows other sizes",
        )
    taken = ": it exists already, and a round never overwrites" if output["exists"] else ""
    yield "output", f"{output['bucket']}/{output['key']}, {in_bytes(output['bytes'])}{taken}"
