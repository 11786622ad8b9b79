"""What tests of whole rounds share: real safetensors updates in a memory store, a spec, and the expected bytes."""

import asyncio
import json

import numpy as np
import safetensors.numpy

from gradsharding.rounds.advance import Round
from gradsharding.rounds.drive import drive
from gradsharding.rounds.spec import parse_round

OUTPUT = "round/model.safetensors"
PREFIX = "round/updates/"


def manifest(**changes):
    """A round's manifest; ``updates_minCount=3`` sets spec.updates.minCount."""
    document = {
        "apiVersion": "gradsharding.dev/v1alpha1",
        "kind": "AggregationRound",
        "metadata": {"name": "test"},
        "spec": {
            "store": {"endpoint": "http://store.test:9000"},
            "updates": {"bucket": "federation", "prefix": PREFIX, "minCount": 2, "deadlineSeconds": 60},
            "aggregation": {},
            "output": {"bucket": "federation", "key": OUTPUT},
            "function": {"memoryMiB": 128, "shards": 2, "maxConcurrency": 1},
        },
    }
    for path, value in changes.items():
        section, _, name = path.partition("_")
        if name:
            document["spec"][section][name] = value
        else:
            document["spec"][section] = value
    return document


def spec(**changes):
    return parse_round(manifest(**changes))


def tensors(seed, elements=3000):
    random = np.random.default_rng(seed)
    return {
        "layer.weight": random.standard_normal((elements // 10, 10), dtype=np.float32),
        "layer.bias": random.standard_normal(10, dtype=np.float32),
        "steps": np.array([7], dtype=np.int64),
    }


def upload(bucket, name, values, examples=10):
    body = safetensors.numpy.save(values, metadata={"num_examples": str(examples)})
    bucket.put(PREFIX + name, body)


def mean(updates):
    """The plain reference: ``[(tensors, weight), …]`` in key order → tensors."""
    total = float(sum(weight for _, weight in updates))
    out = {}
    for name, first in updates[0][0].items():
        acc = np.float64(updates[0][1]) * first.astype(np.float64)
        for values, weight in updates[1:]:
            acc = acc + np.float64(weight) * values[name].astype(np.float64)
        exact = acc / total
        out[name] = (np.rint(exact) if first.dtype.kind in "iu" else exact).astype(first.dtype)
    return out


def output_tensors(bucket, key=OUTPUT):
    return safetensors.numpy.load(bucket.get(key))


def assert_mean(bucket, updates, key=OUTPUT):
    got, want = output_tensors(bucket, key), mean(updates)
    assert sorted(got) == sorted(want)
    for name, values in want.items():
        assert got[name].tobytes() == values.tobytes(), name


def keys_under(bucket, prefix):
    return sorted(info.key for info in bucket.list(prefix))


def document(bucket, key=OUTPUT + ".manifest.json"):
    return json.loads(bucket.get(key))


class Clock:
    """A clock that jumps by ``step`` seconds whenever it is read, so that waits of the protocol take no time."""

    def __init__(self, now=1_000_000.0, step=0.0):
        self.now, self.step = now, step

    def __call__(self):
        self.now += self.step
        return self.now


def make_round(bucket, uid="uid-1", clock=None, **options):
    clock = clock or Clock()
    changes = options.pop("spec", None) or spec()
    return Round(changes, uid, bucket, bucket, started=options.pop("started", clock.now), clock=clock, **options)


def run(round_, platform, **options):
    return asyncio.run(drive(round_, platform, **options))
