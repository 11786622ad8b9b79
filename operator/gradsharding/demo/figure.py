"""The picture of the demo: test accuracy by round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gradsharding.demo.federation import Accuracies

INK, MUTED, GRID = "#1f2430", "#5b6472", "#e6e8ec"
BLUE, ORANGE, GREY = "#0b62a8", "#c8500a", "#7a828e"
"""Told apart by the colour-blind, and in print by their markers and line styles."""


def draw(path: Path, rounds: Sequence[Accuracies], clients: int, largest_examples: int, all_examples: int) -> None:
    """Write the PNG. ``rounds`` in order, from the first."""
    margins = ConstrainedLayoutEngine(rect=(0.012, 0.015, 0.976, 0.97))
    figure = Figure(figsize=(8.6, 5.0), dpi=160, layout=margins)
    axes = figure.add_subplot()
    x = range(1, len(rounds) + 1)
    for values, label, colour, style, marker in (
        ([r.central for r in rounds], f"Central: all {all_examples:,} examples in one place", GREY, (0, (5, 2)), "s"),
        ([r.federated for r in rounds], f"Federated: {clients} clients, averaged by GradsSharding", BLUE, "-", "o"),
        ([r.alone for r in rounds], f"Alone: the largest client, {largest_examples} examples", ORANGE, "-.", "^"),
    ):
        prominent = colour == BLUE
        axes.plot(
            x, values, label=label, color=colour, linestyle=style, marker=marker, clip_on=False,
            linewidth=2.6 if prominent else 1.7, markersize=6 if prominent else 4.5, zorder=4 if prominent else 3,
        )  # fmt: skip
    last = rounds[-1]
    for value, colour, y in zip(
        (last.central, last.federated, last.alone),
        (GREY, BLUE, ORANGE),
        apart([last.central, last.federated, last.alone], 0.045),
        strict=True,
    ):
        axes.annotate(
            f"{value:.1%}", (len(rounds), y), xytext=(10, 0), textcoords="offset points", va="center",
            color=colour, fontsize=10.5, fontweight="bold", annotation_clip=False,
        )  # fmt: skip
    axes.set_title(
        f"{clients} clients who each know a few digits learn all of them",
        loc="left", fontsize=14, fontweight="bold", color=INK, pad=26,
    )  # fmt: skip
    axes.text(
        0, 1.025, "Test accuracy on scikit-learn's digits. All three train for equally many epochs per round.",
        transform=axes.transAxes, fontsize=10, color=MUTED, va="bottom",
    )  # fmt: skip
    axes.set_xlabel("Round", color=MUTED, fontsize=10.5)
    axes.set_ylabel("Test accuracy", color=MUTED, fontsize=10.5)
    axes.set_ylim(0, 1)
    axes.set_xlim(0.8, max(len(rounds), 2) + 0.05)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="y", color=GRID, linewidth=1)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(length=0, colors=MUTED, labelsize=10)
    axes.legend(loc="lower right", frameon=False, fontsize=10.5, labelcolor=INK, handlelength=3.2, borderaxespad=0.8)
    figure.savefig(path)


def apart(values: Sequence[float], distance: float) -> list[float]:
    """Heights for labels: in the order of the values, as near to them as can be with this distance between neighbours.

    Neighbours that are too close are pushed apart evenly around their middle.
    """
    order = sorted(range(len(values)), key=lambda index: values[index])
    groups: list[list[int]] = []
    for index in order:
        groups.append([index])
        while (
            len(groups) > 1
            and _place(values, groups[-1], distance)[0] - _place(values, groups[-2], distance)[-1] < distance
        ):
            last = groups.pop()
            groups[-1] += last
    heights = [0.0] * len(values)
    for group in groups:
        for index, height in zip(group, _place(values, group, distance), strict=True):
            heights[index] = height
    return heights


def _place(values: Sequence[float], group: Sequence[int], distance: float) -> list[float]:
    middle = sum(values[index] for index in group) / len(group)
    return [middle + (rank - (len(group) - 1) / 2) * distance for rank in range(len(group))]
