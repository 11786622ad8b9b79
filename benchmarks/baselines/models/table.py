"""What the paper measured: Barrak 2026, arXiv 2604.22072, on AWS Lambda in us-east-1, 20 clients. Figures only.

A row without ``sd`` was measured once. ``usd_per_1000`` is the round's Lambda and S3 bill without the clients' uploads and
the readers' downloads. ``Stages`` are the paper's means of one function.
"""

from __future__ import annotations

from typing import NamedTuple

CLIENTS = 20

MODEL_BYTES = {
    "ResNet-18": 4 * 11_181_642,
    "VGG-16": 4 * 134_301_514,
    "GPT-2 Large": 4 * 774_030_080,
    "synthetic 5 GB": 4 * 1_342_177_280,
}

GRADSSHARDING, LAMBDA_FL, LIFL = "GradsSharding (paper)", "λ-FL tree", "LIFL"


class Stages(NamedTuple):
    """Seconds of one function."""

    read: float
    compute: float
    write: float


class Row(NamedTuple):
    """One measured round. ``shards`` is 1 for trees, whose objects are whole models."""

    model: str
    system: str
    shards: int
    memory_mb: int
    wall_seconds: float
    sd: float
    usd_per_1000: float
    stages: Stages | None = None


COMPARED = (
    Row("ResNet-18", GRADSSHARDING, 4, 472, 7.9, 0.85, 0.2625),
    Row("ResNet-18", LAMBDA_FL, 1, 536, 10.4, 0.78, 0.2692),
    Row("ResNet-18", LIFL, 1, 536, 12.28, 1.13, 0.4149),
    Row("VGG-16", GRADSSHARDING, 4, 835, 67.25, 5.12, 3.3831),
    Row("VGG-16", LAMBDA_FL, 1, 1987, 117.35, 10.7, 10.1674),
    Row("VGG-16", LIFL, 1, 1987, 126.59, 26.51, 12.9191),
    Row("GPT-2 Large", GRADSSHARDING, 4, 2665, 362.49, 26.79, 58.8533),
    Row("synthetic 5 GB", GRADSSHARDING, 8, 2370, 299.44, 9.5, 84.8001),
)

SWEEP = (
    Row("VGG-16", GRADSSHARDING, 1, 3008, 188.77, 0, 8.919, Stages(179.94, 1.963, 6.8)),
    Row("VGG-16", GRADSSHARDING, 2, 3008, 97.78, 0, 9.313, Stages(93.85, 0.999, 2.97)),
    Row("VGG-16", GRADSSHARDING, 4, 3008, 59.77, 0, 11.27, Stages(56.78, 0.511, 3.68)),
    Row("VGG-16", GRADSSHARDING, 8, 3008, 26.86, 0, 10.131, Stages(25.35, 0.259, 1.95)),
    Row("VGG-16", GRADSSHARDING, 16, 3008, 22.32, 0, 9.016, Stages(11.14, 0.132, 0.65)),
)

MEASURED = COMPARED + SWEEP

TOO_LARGE = (
    ("GPT-2 Large", LAMBDA_FL),
    ("GPT-2 Large", LIFL),
    ("synthetic 5 GB", LAMBDA_FL),
    ("synthetic 5 GB", LIFL),
)
"""Those that the paper could not run within its 3,008 MB."""
