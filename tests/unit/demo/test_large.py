"""Updates that are made up piece by piece."""

import dataclasses

import numpy as np
import pytest
import safetensors.numpy
from memory_store import MemoryStore

from gradsharding.demo import averaging, large
from gradsharding.errors import RoundFailed

CROWD = large.Crowd(clients=2, mib=64, seed=1)


class Sink:
    """Takes what minio-py would send."""

    def __init__(self):
        self.objects = {}

    def put_object(self, bucket, key, stream, length, **options):
        body = stream.read(length)
        assert (len(body), stream.read(1)) == (length, b"")
        self.objects[key] = body


@pytest.fixture(scope="module")
def uploaded():
    sink, seen = Sink(), []
    large.upload(CROWD, sink, "large", "large/updates/", lambda done, total: seen.append((done, total)))
    assert seen[-1] == (CROWD.total_bytes, CROWD.total_bytes)
    assert seen == sorted(seen)
    return sink.objects


def test_stream_is_a_safetensors_file_with_weight(uploaded):
    assert list(uploaded) == ["large/updates/client-00.safetensors", "large/updates/client-01.safetensors"]
    for client, body in enumerate(uploaded.values()):
        values = safetensors.numpy.load(body)
        assert {name: array.shape for name, array in values.items()} == {"layer0.weight": (4096, 4096)}
        assert f'"num_examples": "{CROWD.examples[client]}"'.encode() in body[:200]


def test_pieces_differ_between_clients_and_places():
    block = CROWD.block()
    pieces = [CROWD.piece(block, client, index).tobytes() for client in range(2) for index in range(CROWD.pieces)]
    assert len(set(pieces)) == len(pieces)


def test_check_finds_one_flipped_bit(uploaded):
    values = [safetensors.numpy.load(body)["layer0.weight"] for body in uploaded.values()]
    mean = averaging.weighted_mean(values, CROWD.examples)
    with MemoryStore() as store:
        bucket = store.bucket("large")
        bucket.put("mean", safetensors.numpy.save({"layer0.weight": mean}))
        large.check(CROWD, bucket, "mean", [0, 7, CROWD.pieces - 1])
        mean.view(np.uint32)[-1, -1] ^= 1
        bucket.put("mean", safetensors.numpy.save({"layer0.weight": mean}))
        large.check(CROWD, bucket, "mean", [0, 7])
        with pytest.raises(RoundFailed, match="differs from plain numpy"):
            large.check(CROWD, bucket, "mean", [CROWD.pieces - 1])


def test_sample_has_both_ends_and_stays_inside():
    crowd = dataclasses.replace(CROWD, mib=512)
    pieces = large.sample(crowd, 24)
    assert (pieces[0], pieces[-1], len(set(pieces))) == (0, crowd.pieces - 1, len(pieces))
    assert 24 <= len(pieces) <= 26
    assert large.sample(CROWD, 1000) == list(range(CROWD.pieces))


def test_in_memory_need_is_two_models_more_than_clients():
    assert large.Crowd(8, 512, 0).in_memory_bytes == 10 * 512 << 20
