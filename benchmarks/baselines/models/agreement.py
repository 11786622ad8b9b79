"""Held against the measured table: the fit, each row's residuals, and why a row does not agree.

A row agrees when its time lies within two standard deviations or 20 %, whichever is wider, and its cost within 15 %.
"""

from __future__ import annotations

from dataclasses import astuple
from math import log
from typing import NamedTuple

from gradsharding.rounds.cost import PRICES, function_usd

from .systems import FITTED, Parameters, Prediction, levels, memory_mb, predict
from .table import CLIENTS, MEASURED, MODEL_BYTES, TOO_LARGE, Row

TIME_TOLERANCE = 0.20
COST_TOLERANCE = 0.15


class Judged(NamedTuple):
    """A measured row, its prediction, and relative residuals: predicted over measured, less one."""

    row: Row
    predicted: Prediction
    time_residual: float
    time_tolerance: float
    cost_residual: float

    @property
    def agrees(self) -> bool:
        """Time and cost both do."""
        return abs(self.time_residual) <= self.time_tolerance and abs(self.cost_residual) <= COST_TOLERANCE


def judge(row: Row, parameters: Parameters = FITTED) -> Judged:
    """One row against the parameters."""
    predicted = predict(levels(row.system, MODEL_BYTES[row.model], row.shards), row.memory_mb, parameters)
    return Judged(
        row,
        predicted,
        predicted.wall / row.wall_seconds - 1,
        max(2 * row.sd / row.wall_seconds, TIME_TOLERANCE),
        predicted.usd * 1000 / row.usd_per_1000 - 1,
    )


def judge_all(parameters: Parameters = FITTED) -> list[Judged]:
    """Every measured row."""
    return [judge(row, parameters) for row in MEASURED]


def too_large() -> list[tuple[str, str, int]]:
    """The rows that the paper could not run, with the MB that the model says they need; it agrees when over ``LIMIT_MB``."""
    return [(model, system, memory_mb(MODEL_BYTES[model])) for model, system in TOO_LARGE]


def fit() -> Parameters:
    """Least squares of ``log(predicted / measured) / tolerance`` over time and cost of all rows, all rows alike."""
    from scipy.optimize import least_squares

    # Rates in MB/s, so that the five are of like magnitude.
    def parameters(x: list[float]) -> Parameters:
        return Parameters(x[0], x[1], x[2] * 1e6, x[3] * 1e6, x[4])

    def residuals(x: list[float]) -> list[float]:
        found = []
        for one in judge_all(parameters(x)):
            found.append(log(1 + one.time_residual) / one.time_tolerance)
            found.append(log(1 + one.cost_residual) / COST_TOLERANCE)
        return found

    bounds = ([0, 0, 10, 10, 0], [5, 1, 200, 200, 0.5])
    return parameters(least_squares(residuals, [0.5, 0.05, 55, 60, 0.05], bounds=bounds).x)


def drift(found: Parameters) -> float:
    """The largest relative difference of a fitted parameter from FITTED."""
    return max(abs(a / b - 1) for a, b in zip(astuple(found), astuple(FITTED), strict=True))


def billed_of_stages(row: Row) -> float:
    """Dollars per 1000 rounds when only reading and computing are billed, as the sweep's figures turn out to be."""
    assert row.stages is not None
    requests = row.shards * (CLIENTS * PRICES.get + PRICES.put)
    seconds = row.shards * (row.stages.read + row.stages.compute)
    return 1000 * (function_usd(seconds * row.memory_mb / 1024, row.shards) + requests)


def cause(one: Judged, parameters: Parameters = FITTED) -> str:
    """Why a row does not agree, in one sentence, computed from the row's own stages where it has them."""
    row = one.row
    if row.stages is None:
        return (
            f"its calls took {row.wall_seconds / one.predicted.wall:.2f} times what the same calls take in the other "
            "rows, and the paper reports no stages that could tell where"
        )
    each = row.stages.read / CLIENTS
    expected = parameters.request + MODEL_BYTES[row.model] / row.shards / parameters.read_rate
    call, reported = one.predicted.billed / one.predicted.calls, row.stages.read + row.stages.compute
    reading = CLIENTS * (expected - each)
    return (
        f"a GET took {each:.2f} s in this row and takes {expected:.2f} s by the common set, which the slower rows pull up: "
        f"{reading:.1f} s of the {call - reported:.1f} s by which a call is over the billed {reported:.1f} s (the rest is "
        f"its PUT and start, which the paper's bill leaves out), and in the time it counts once a wave, "
        f"of which the measured {row.wall_seconds:.1f} s, {row.wall_seconds / sum(row.stages):.1f} times the stages' sum, show two"
    )
