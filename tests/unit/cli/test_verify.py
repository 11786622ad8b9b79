"""``gradsharding verify`` on the memory store: what is compared, and why it cannot be."""

import json

import numpy as np
import pytest
import safetensors.numpy
from rounds_kit import OUTPUT, PREFIX, tensors, upload

from gradsharding.rounds import verify

MANIFEST = OUTPUT + ".manifest.json"


@pytest.fixture
def done(bucket, command, round_file, monkeypatch):
    """A finished round of three clients; blocks of 100 elements."""
    monkeypatch.setattr(verify, "BLOCK_ELEMENTS", 100)
    for i in range(3):
        upload(bucket, f"{i}.safetensors", tensors(i), 10 + i)
    assert command("run", round_file(), "--no-wait")[0] == 0
    return round_file()


def changed(bucket, key, offset, flip=1):
    body = bytearray(bucket.get(key))
    body[offset] ^= flip
    bucket.put(key, bytes(body))


def data_start(body):
    return 8 + int.from_bytes(body[:8], "little")


def test_equal(bucket, command, done):
    status, out, _ = command("verify", done, "--json")
    found = json.loads(out)
    assert (status, found["succeeded"], found["reason"], found["difference"]) == (0, True, "Equal", None)
    assert found["participants"] == 3
    assert found["bytes_read"] == 4 * (3000 * 4 + 10 * 4 + 8)
    assert command("verify", done)[1].startswith(f"equal  federation/{OUTPUT} has the bits of the reference")


def test_the_first_different_element_is_named(bucket, command, done):
    header = data_start(bucket.get(OUTPUT))
    layout = json.loads(bucket.get(OUTPUT)[8:header])
    start = layout["layer.weight"]["data_offsets"][0]
    changed(bucket, OUTPUT, header + start + (123 * 10 + 4) * 4 + 2)
    changed(bucket, OUTPUT, header + start + (200 * 10) * 4)
    status, out, err = command("verify", done, "--json")
    found = json.loads(out)
    assert (status, found["reason"]) == (3, "Different")
    assert found["difference"]["tensor"] == "layer.weight"
    assert found["difference"]["position"] == [123, 4]
    assert found["difference"]["output"] != found["difference"]["reference"]
    assert "differs first in tensor 'layer.weight' at [123, 4]" in err


def test_a_scalar_and_another_order_of_tensors(bucket, command, round_file, monkeypatch):
    monkeypatch.setattr(verify, "BLOCK_ELEMENTS", 7)
    values = [{"a": np.array(1.5 + i, np.float32), "b": np.arange(50, dtype=np.int16) + i} for i in range(3)]
    for i in range(2):
        upload(bucket, f"{i}.safetensors", values[i])
    body = safetensors.numpy.save(values[2], metadata={"num_examples": "10"})
    start = data_start(body)
    header = json.loads(body[8:start])
    (low, middle), (_, high) = sorted(header[name]["data_offsets"] for name in "ab")
    for name in "ab":
        first = header[name]["data_offsets"][0] == low
        header[name]["data_offsets"] = [high - middle, high] if first else [0, high - middle]
    text = json.dumps(header).encode()
    other = len(text).to_bytes(8, "little") + text + body[start + middle :] + body[start : start + middle]
    bucket.put(f"{PREFIX}2.safetensors", other)
    assert command("run", round_file(), "--no-wait")[0] == 0
    assert command("verify", round_file())[0] == 0
    assert json.loads(command("verify", round_file(), "--json")[1])["participants"] == 3


def fails(command, done, reason, sentence):
    status, out, err = command("verify", done, "--json")
    found = json.loads(out)
    assert (status, found["succeeded"], found["reason"]) == (3, False, reason)
    assert sentence in err
    assert err.splitlines()[-1] == f"error: {found['message']}"


def test_an_update_that_was_overwritten(bucket, command, done):
    changed(bucket, f"{PREFIX}1.safetensors", -1)
    fails(command, done, "UpdateGone", f"{PREFIX}1.safetensors was overwritten since the round")


def test_an_update_that_is_gone(bucket, command, done):
    bucket.delete([f"{PREFIX}1.safetensors"])
    fails(command, done, "UpdateGone", f"{PREFIX}1.safetensors is gone since the round")


def test_an_update_that_is_overwritten_meanwhile(bucket, command, done):
    reads = []

    def overwrite(op, key):
        reads.append(key)
        if op == "read" and reads.count(f"{PREFIX}1.safetensors") == 5:
            upload(bucket, "1.safetensors", tensors(9))

    bucket.store.before = overwrite
    fails(command, done, "UpdateGone", f"{PREFIX}1.safetensors was overwritten")


def test_no_manifest(bucket, command, done):
    bucket.delete([MANIFEST])
    fails(command, done, "NoManifest", "only a round that is done can be verified")


def test_no_output(bucket, command, done):
    bucket.delete([OUTPUT])
    fails(command, done, "NoOutput", "is gone")


@pytest.mark.parametrize(
    "participants", [None, [], {}, [{"key": "a.npy"}], [{"key": "a.npy", "etag": "e", "weight": 0}],
                     [{"key": "a.txt", "etag": "e", "weight": 1}], [{"key": 1, "etag": "e", "weight": 1}]]
)  # fmt: skip
def test_a_manifest_that_somebody_changed(bucket, command, done, participants):
    document = json.loads(bucket.get(MANIFEST))
    bucket.put(MANIFEST, json.dumps({**document, "participants": participants}).encode())
    fails(command, done, "ManifestUnreadable", "is no manifest of a round")


@pytest.mark.parametrize("body", [b"", b"[]", b"[" * 100_000, b"\xff"])
def test_a_manifest_that_is_none(bucket, command, done, body):
    bucket.put(MANIFEST, body)
    fails(command, done, "ManifestUnreadable", "is no manifest of a round")


def test_an_output_of_somebody_else(bucket, command, done):
    bucket.put(OUTPUT, safetensors.numpy.save(tensors(1)))
    fails(command, done, "ForeignOutput", "does not name the plan")
    bucket.put(OUTPUT, b"\x00")
    fails(command, done, "ForeignOutput", "is no output of a round")


def test_weights_that_somebody_changed(bucket, command, done):
    document = json.loads(bucket.get(MANIFEST))
    first, second, *_ = document["participants"]
    first["weight"], second["weight"] = second["weight"], first["weight"]  # the sum stays
    bucket.put(MANIFEST, json.dumps(document).encode())
    status, out, _ = command("verify", done, "--json")
    assert (status, json.loads(out)["reason"]) == (3, "Different")
