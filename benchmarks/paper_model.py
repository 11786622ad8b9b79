"""The paper's table against models with one parameter set, and this project beside it: Markdown for ``docs/cost.md``.

``python benchmarks/paper_model.py`` prints it, ``--write`` puts it into ``docs/cost.md`` between its two markers, and
``--fit`` fits the parameters anew and prints them. Nothing is measured here: it takes a second.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from baselines.models import agreement
from baselines.models.systems import FITTED, LIMIT_MB, Parameters, clients_usd, levels, memory_mb, predict
from baselines.models.table import (
    CLIENTS,
    COMPARED,
    GRADSSHARDING,
    LAMBDA_FL,
    LIFL,
    MODEL_BYTES,
    SWEEP,
    Row,
)

from gradsharding.rounds.compare import compare
from gradsharding.rounds.cost import Estimate, Work, estimate

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENT = Path(__file__).parents[1] / "docs" / "cost.md"
BEGIN, END = "<!-- begin: python benchmarks/paper_model.py --write -->\n", "<!-- end -->\n"

CONCURRENCY = 16
"""Of our rounds, the default of ``maxConcurrency``."""

MEMORY_MIB = 256
"""Of our rounds, the default of ``memoryMiB``."""

HEADER_BYTES = 16 << 10
"""Of an output of some hundred tensors."""

MOST_MB = 10_240
SHARDS = {"ResNet-18": 4, "VGG-16": 4, "GPT-2 Large": 4, "synthetic 5 GB": 8}
"""The paper's, for each model."""


def main() -> None:
    """Print, write or fit."""
    if "--fit" in sys.argv[1:]:
        print(parameters(found := agreement.fit()))
        print(f"largest difference from what is used: {agreement.drift(found):.1%}")
    elif "--write" in sys.argv[1:]:
        DOCUMENT.write_text(filled(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(markdown(), end="")


def filled(document: str) -> str:
    """The document with what stands between its markers made anew."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{markdown()}\n{END}{after}"


def markdown() -> str:
    """Both tables."""
    return "\n".join([*_agreement(), "", *_beside()]) + "\n"


def parameters(of: Parameters) -> str:
    """One line."""
    return (
        f"start {of.start * 1e3:.0f} ms, request {of.request * 1e3:.1f} ms, read {of.read_rate / 1e6:.1f} MB/s, "
        f"write {of.write_rate / 1e6:.1f} MB/s, spread {of.spread:.1%}, cpu {of.cpu * 1e9:.2f} s/GB, "
        f"{of.concurrency} calls at once"
    )


def _agreement() -> Iterator[str]:
    judged = agreement.judge_all()
    large = agreement.too_large()
    agreeing = sum(one.agrees for one in judged)
    yield f"Parameters of all rows: {parameters(FITTED)}."
    yield ""
    yield (
        f"**{agreeing} of {len(judged)} measured rows agree**, and {sum(mb > LIMIT_MB for *_, mb in large)} of {len(large)} "
        f"that the paper could not run. Cost is $ per 1000 rounds, without clients and readers, as the paper has it."
    )
    yield ""
    yield "| model | system | MB | time, measured | model | residual | allowed | cost, measured | model | residual | |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for one in judged:
        row, predicted = one.row, one.predicted
        deviation = f" ± {row.sd:g}" if row.sd else ""
        yield (
            f"| {row.model} | {_system(row)} | {row.memory_mb} | {row.wall_seconds:g}{deviation} s | {predicted.wall:.1f} s "
            f"| {one.time_residual:+.1%} | ± {one.time_tolerance:.0%} | {row.usd_per_1000:g} | {predicted.usd * 1e3:.4g} "
            f"| {one.cost_residual:+.1%} | {'agrees' if one.agrees else '**no**'} |"
        )
    for model, system, megabytes in large:
        verdict = "agrees" if megabytes > LIMIT_MB else "**no**"
        yield f"| {model} | {system} | | does not fit {LIMIT_MB} MB | needs {megabytes} MB | | | | | | {verdict} |"
    yield ""
    for one in judged:
        if not one.agrees:
            yield f"* {one.row.model}, {_system(one.row)}: {agreement.cause(one)}."
    worst = max(abs(agreement.billed_of_stages(row) / row.usd_per_1000 - 1) for row in SWEEP)
    yield (
        f"* The sweep's costs are those of reading and computing alone, to {worst:.1%} in all {len(SWEEP)} rows: its PUTs "
        "are not billed. The models bill them, as Lambda does."
    )


def _beside() -> Iterator[str]:
    yield (
        f"Full trip of a round of {CLIENTS} clients, with their uploads and, as readers, their downloads. The paper's figures "
        f"are measured where it has them, the others, marked ~, come from the models, with up to {MOST_MB:,} MB. "
        f"Ours are estimates, too: {MEMORY_MIB} MiB, x86, every call a cold start."
    )
    yield ""
    yield "| model | paper's GradsSharding | λ-FL tree | LIFL | ours, same shards | ours, at the knee |"
    yield "|---|---|---|---|---|---|"
    for model, size in MODEL_BYTES.items():
        work = Work(size, HEADER_BYTES, CLIENTS)
        same = estimate(work, MEMORY_MIB, SHARDS[model], CONCURRENCY)
        theirs = [_theirs(model, system) for system in (GRADSSHARDING, LAMBDA_FL, LIFL)]
        yield f"| {model} | {' | '.join(theirs)} | {_ours(same)} | {_ours(compare(work, CONCURRENCY).knee)} |"


def _theirs(model: str, system: str) -> str:
    shards = SHARDS[model] if system == GRADSSHARDING else 1
    around = clients_usd(system, shards)
    for row in COMPARED:
        if (row.model, row.system) == (model, system):
            return _cell(row.wall_seconds, row.usd_per_1000 / 1e3 + around, f"{row.memory_mb} MB")
    megabytes = memory_mb(MODEL_BYTES[model] / shards)
    if megabytes > MOST_MB:
        return f"needs {megabytes:,} MB"
    predicted = predict(levels(system, MODEL_BYTES[model], shards), megabytes)
    return "~ " + _cell(predicted.wall, predicted.usd + around, f"{megabytes} MB")


def _ours(row: Estimate) -> str:
    return _cell(row.seconds, row.usd, f"{row.memory_mib} MiB, M={row.shards}")


def _cell(seconds: float, usd: float, size: str) -> str:
    return f"{seconds:.3g} s, ${usd:.2g} ({size})"


def _system(row: Row) -> str:
    return f"{row.system} M={row.shards}" if row.system == GRADSSHARDING else row.system


if __name__ == "__main__":
    main()
