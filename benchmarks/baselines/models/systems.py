"""Three systems as levels of Lambda calls, and one set of parameters that times them all.

A call of each of them does the same: it gets its sources one after another over one connection, averages them, and puts
one object. Levels run one after another, the calls of a level at once, as far as the account's quota goes::

    call  = start + sources * (request + bytes / read_rate) + sources * bytes * cpu / share + request + bytes / write_rate
    level = waves * call of the largest * straggling(calls at once)

The structures follow from the paper's counts of calls, GETs and PUTs for 20 clients:

* GradsSharding: one level of M calls, each over the same shard of all clients; a client uploads M objects.
* λ-FL: 5 calls, 24 GETs, 5 PUTs: a tree of fan-in 5 = ceil(sqrt(20)), 4 leaves and a root.
* LIFL: 11 calls, 30 GETs, 11 PUTs: a tree of fan-in 3, with levels of 7, 3 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isqrt
from typing import TYPE_CHECKING, NamedTuple

from gradsharding.rounds.cost import PRICES, function_usd, processor_share, straggling

from .table import CLIENTS, GRADSSHARDING, LAMBDA_FL, LIFL

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Parameters:
    """Of all rows. The first five are fitted, rates in bytes per second; the last two are read off the table."""

    start: float
    request: float
    read_rate: float
    write_rate: float
    spread: float
    cpu: float = 0.19e-9
    """Processor seconds a byte of ``np.load`` and ``np.add``: mean of the sweep's compute stages over their bytes."""
    concurrency: int = 10
    """Calls at once. New AWS accounts have reduced quotas; the paper's had the 3,008 MB of one, and 16 shards took twice
    as long as one function's stages: 22.3 s to 11.9 s."""


FITTED = Parameters(start=0.122, request=0.0737, read_rate=56.2e6, write_rate=47.6e6, spread=0.0582)
"""Least squares over all 13 measured rows, time and cost, see ``paper_model.py --fit``."""

LIMIT_MB = 3008
"""Memory of the paper's functions, at most."""


class Call(NamedTuple):
    """One invocation: so many objects of so many bytes each."""

    sources: int
    object_bytes: float


Levels = list[list[Call]]


class Prediction(NamedTuple):
    """Wall seconds, summed seconds of calls, dollars without the clients and readers, requests."""

    wall: float
    billed: float
    usd: float
    calls: int
    gets: int
    puts: int


def levels(system: str, model_bytes: int, shards: int = 1, clients: int = CLIENTS) -> Levels:
    """The calls of a round, level by level."""
    if system == GRADSSHARDING:
        return [[Call(clients, model_bytes / shards)] * shards]
    return tree(model_bytes, clients, {LAMBDA_FL: 1 + isqrt(clients - 1), LIFL: 3}[system])


def tree(model_bytes: int, clients: int, fan_in: int) -> Levels:
    """Up to ``fan_in`` whole models into one, until one is left."""
    out: Levels = []
    while clients > 1:
        full, rest = divmod(clients, fan_in)
        out.append([Call(fan_in, model_bytes)] * full + [Call(rest, model_bytes)] * (rest > 0))
        clients = full + (rest > 0)
    return out


def memory_mb(object_bytes: float) -> int:
    """What the paper gives a function: body, decoded array and accumulator, and 450 MB for the runtime."""
    return ceil(3 * object_bytes / 2**20 + 450)


def predict(plan: Levels, memory: int, parameters: Parameters = FITTED) -> Prediction:
    """Time and cost of a round whose functions have ``memory`` MB. All time is billed, the cold start's too."""
    share = processor_share(memory)

    def seconds(call: Call) -> float:
        read = call.sources * (parameters.request + call.object_bytes / parameters.read_rate)
        compute = call.sources * call.object_bytes * parameters.cpu / share
        return parameters.start + read + compute + parameters.request + call.object_bytes / parameters.write_rate

    def wall(level: Sequence[Call]) -> float:
        waves = ceil(len(level) / parameters.concurrency)
        at_once = min(len(level), parameters.concurrency)
        return waves * max(map(seconds, level)) * straggling(at_once, parameters.spread)

    every = [call for level in plan for call in level]
    billed = sum(map(seconds, every))
    gets = sum(call.sources for call in every)
    usd = function_usd(billed * memory / 1024, len(every)) + gets * PRICES.get + len(every) * PRICES.put
    return Prediction(sum(map(wall, plan)), billed, usd, len(every), gets, len(every))


def clients_usd(system: str, shards: int, clients: int = CLIENTS) -> float:
    """Of the full trip: what the clients upload and, as readers, download again; one request an object."""
    objects = clients * (shards if system == GRADSSHARDING else 1)
    return objects * (PRICES.put + PRICES.get)
