"""A plan → what it takes on AWS Lambda, and what other sizes would: as objects, and as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradsharding.cli.terminal import console, printable
from gradsharding.rounds.compare import MEMORIES, compare
from gradsharding.rounds.cost import PRICES, Work, estimate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradsharding.rounds.cost import Estimate
    from gradsharding.rounds.plan import Plan
    from gradsharding.rounds.spec import RoundSpec


def estimated(spec: RoundSpec, plan: Plan) -> dict[str, Any]:
    """The round as its manifest has it. Raises RoundFailed when the functions cannot hold it, as planning does."""
    function = spec.function
    shards = function.shards or function.max_concurrency
    return _row(estimate(_work(spec, plan), function.memory_mib, shards, function.max_concurrency))


def comparison(spec: RoundSpec, plan: Plan) -> dict[str, Any]:
    """What ``plan --compare --json`` adds to the plan. Raises RoundFailed when nothing fits."""
    function = spec.function
    own = (max(MEMORIES[0], function.memory_mib), function.shards or function.max_concurrency)
    found = compare(_work(spec, plan), function.max_concurrency, also=own)
    return {
        "prices": {"date": PRICES.date, "source": PRICES.source, "arch": "x86_64"},
        "rows": [{**_row(row), "marks": list(found.marks(row))} for row in found.rows],
        "misfits": [{"memory_mib": memory_mib, "message": message} for memory_mib, message in found.misfits],
        "why": found.why,
    }


def print_comparison(found: Mapping[str, Any]) -> None:
    """The table on stdout, and the advice below it."""
    from rich.text import Text

    to = console(stderr=False)
    to.print(Text(f"\n{'MiB':>6}  {'shards':>6}  {'time':>9}  {'cost':>10}", "bold"), soft_wrap=True)
    for row in found["rows"]:
        line = f"{row['memory_mib']:>6}  {row['shards']:>6}  {row['seconds']:>7.1f} s  {'$' + format(row['usd'], '.6f'):>10}"
        marks = ", ".join(row["marks"])
        to.print(Text(f"{line}  {marks}".rstrip(), "bold" if marks else ""), soft_wrap=True)
    for row in found["misfits"]:
        to.print(Text(f"{row['memory_mib']:>6}  does not fit: {printable(row['message'])}"), soft_wrap=True)
    to.print(Text(f"\n{found['why']}\n{SMALL_PRINT}"), soft_wrap=True)


SMALL_PRINT = (
    f"Estimates for AWS Lambda in us-east-1 at prices of {PRICES.date}, x86 (on arm the functions cost 20 % less), with the "
    "clients' uploads and one download by each client. docs/cost.md has the assumptions."
)


def _work(spec: RoundSpec, plan: Plan) -> Work:
    return Work(plan.layout.size, plan.header_length, len(plan.participants), spec.function.timeout_seconds)


def _row(row: Estimate) -> dict[str, Any]:
    return {
        "memory_mib": row.memory_mib,
        "shards": row.shards,
        "seconds": round(row.seconds, 2),
        "usd": round(row.usd, 8),
        "usd_functions": round(row.usd_functions, 8),
        "usd_store": round(row.usd_store, 8),
        "gets": row.gets,
        "puts": row.puts,
    }
