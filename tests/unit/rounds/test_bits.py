"""The bit contract over the whole path, files to output: however a round is cut, its data section equals the plain reference's."""

import dataclasses
import io
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inline_platform import InlinePlatform
from memory_store import MemoryStore
from rounds_kit import OUTPUT, PREFIX, make_round, run, spec
from unit.reducer.reference import NUMPY, reference_mean

from gradsharding.platforms import FunctionFailed, TimedOut
from gradsharding.rounds import dispatch, memory
from gradsharding.rounds.memory import Sizing
from gradsharding_reducer.task import DTYPES

MIN_PART = 64


def values(random, dtype, shape):
    count = int(np.prod(shape, dtype=np.int64))
    if dtype == "BOOL":
        return np.resize(np.array([1, 0, 0, 1, 1], np.uint8), count).reshape(shape)
    kind = NUMPY[dtype]
    if dtype[0] in "IU":
        low = 0 if dtype[0] == "U" else -min(np.iinfo(kind).max, 2**53)
        return random.integers(low, min(np.iinfo(kind).max, 2**53), count, endpoint=True).astype(kind).reshape(shape)
    scale = 10.0 ** random.integers(-4, 4, count)
    return (random.standard_normal(count) * scale).astype(kind).reshape(shape)


def safetensors_bytes(tensors, order, metadata, padding):
    """Tensors in this order, with a header lengthened by ``padding`` spaces: real clients differ in both."""
    header, data = {"__metadata__": metadata}, b""
    for name in order:
        dtype, array = tensors[name]
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    text = json.dumps(header).encode() + b" " * padding
    return len(text).to_bytes(8, "little") + text + data


def data_section(body):
    return body[8 + int.from_bytes(body[:8], "little") :]


@st.composite
def federations(draw):
    """Layout, clients (weight, tensor order, header padding), cut and faults."""
    layout = draw(
        st.lists(
            st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 9), max_size=3).map(tuple)),
            min_size=1,
            max_size=6,
        )
    )
    names = [f"t{i}" for i in range(len(layout))]
    clients = draw(
        st.lists(
            st.tuples(st.integers(1, 2**20), st.permutations(names) | st.just(names), st.integers(0, 5)),
            min_size=1,
            max_size=4,
        )
    )
    return {
        "layout": dict(zip(names, layout, strict=True)),
        "clients": clients,
        "seed": draw(st.integers(0, 2**32)),
        "shards": draw(st.integers(1, 5)),
        "part_bytes": draw(st.integers(1, 700)),
        "range_bytes": draw(st.sampled_from([4096, 5001, 1 << 20])),
        "prefetch": draw(st.integers(1, 5)),
        "faults": draw(st.lists(st.sampled_from([None, TimedOut(), FunctionFailed("x")]), max_size=2)),
    }


@given(federations())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.slow
def test_any_cut_gives_the_bits_of_the_reference(monkeypatch, case):
    monkeypatch.setattr(memory, "MIN_PART", MIN_PART)
    # The reducer refuses ranges under 4 KiB; the parts here are smaller still, so that borders fall everywhere.
    sizing = Sizing(case["part_bytes"], case["range_bytes"], case["prefetch"])
    monkeypatch.setattr(memory, "choose", lambda *_, **__: sizing)
    monkeypatch.setattr(dispatch, "after", quickly(dispatch.after))
    random = np.random.default_rng(case["seed"])
    with MemoryStore(min_part=0) as store:
        bucket = store.bucket("federation")
        updates = []
        for i, (weight, order, padding) in enumerate(case["clients"]):
            tensors = {name: (dtype, values(random, dtype, shape)) for name, (dtype, shape) in case["layout"].items()}
            updates.append(tensors)
            body = safetensors_bytes(tensors, order, {"num_examples": str(weight), "client": str(i)}, padding)
            bucket.put(f"{PREFIX}{i}.safetensors", body)
        faults = list(case["faults"])

        def fail(task, number):
            fault = faults.pop() if faults else None
            if fault is not None:
                raise fault

        round_ = make_round(bucket, wait=False, spec=spec(updates_minCount=1, function_shards=case["shards"]))
        finished = run(round_, InlinePlatform(bucket.origin, fail))
        assert finished.succeeded, finished
        weights = [weight for weight, _, _ in case["clients"]]
        got = split(bucket.get(OUTPUT))
        for name, (dtype, _) in case["layout"].items():
            want = reference_mean([tensors[name][1] for tensors in updates], weights, dtype)
            assert got[name] == want.tobytes(), (name, dtype)


def quickly(real):
    def after(*arguments):
        return dataclasses.replace(real(*arguments), not_before=0.0)

    return after


def split(body):
    """Tensor name → bytes, in data order."""
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    data = data_section(body)
    rows = sorted((entry["data_offsets"], name) for name, entry in header.items() if name != "__metadata__")
    return {name: data[start:end] for (start, end), name in rows}


def test_npy_updates_become_one_tensor(bucket, platform):
    arrays = [np.random.default_rng(i).standard_normal((40, 50)).astype(np.float32) for i in range(3)]
    for i, array in enumerate(arrays):
        file = io.BytesIO()
        np.save(file, array)
        bucket.put(f"{PREFIX}{i}.npy", file.getvalue())
    assert run(make_round(bucket, wait=False, spec=spec(aggregation_weighting="Uniform")), platform).succeeded
    assert split(bucket.get(OUTPUT)) == {"array": reference_mean(arrays, [1, 1, 1], "F32").tobytes()}


def test_empty_model_is_one_part_that_holds_the_header(bucket, platform):
    for i in range(2):
        body = safetensors_bytes({"none": ("F32", np.zeros((0, 3), np.float32))}, ["none"], {"num_examples": "1"}, 0)
        bucket.put(f"{PREFIX}{i}.safetensors", body)
    finished = run(make_round(bucket, wait=False), platform)
    assert finished.succeeded, finished
    assert split(bucket.get(OUTPUT)) == {"none": b""}


def test_an_output_is_an_update_of_the_next_level(bucket, platform):
    """Two levels: its weight is the sum of its participants', without anybody copying anything."""
    leaves = [np.full((300,), float(i), np.float32) for i in range(4)]
    for i, leaf in enumerate(leaves):
        body = safetensors_bytes({"w": ("F32", leaf)}, ["w"], {"num_examples": str(i + 1)}, 0)
        bucket.put(f"{PREFIX}{i // 2}/{i}.safetensors", body)
    for region in range(2):
        lower = spec(updates_prefix=f"{PREFIX}{region}/", output_key=f"top/{region}.safetensors")
        assert run(make_round(bucket, f"r{region}", wait=False, spec=lower), platform).succeeded
    upper = spec(updates_prefix="top/", output_key="model.safetensors")
    for region in range(2):
        bucket.delete([f"top/{region}.safetensors.manifest.json"])
    assert run(make_round(bucket, "top", wait=False, spec=upper), platform).succeeded
    got = np.frombuffer(split(bucket.get("model.safetensors"))["w"], np.float32)
    assert got.tolist() == [(0 * 1 + 1 * 2 + 2 * 3 + 3 * 4) / 10] * 300
