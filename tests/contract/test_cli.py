"""The command line for real: processes of their own, SeaweedFS, and local reducers under the kernel's memory cap."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from rounds_kit import mean

from gradsharding.credentials import static
from gradsharding.s3 import S3Bucket

pytestmark = [pytest.mark.xdist_group("seaweedfs")]

MAIN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests' own starter ignores it
from gradsharding.cli import main
"""
RUN = "sys.exit(main())"
STUCK = """
from gradsharding.platforms import local

class Stuck(local.LocalPlatform):
    def __init__(self, **options):
        hang = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        super().__init__((sys.executable, "-I", "-S", "-c", hang), **options)

local.LocalPlatform = Stuck
"""


class Desk:
    """A folder in a bucket of its own, a manifest for it, and the commands with the store's keys."""

    def __init__(self, store, folder):
        self.store, self.folder = store, folder
        self.name = f"cli-{uuid.uuid4().hex[:12]}"
        self.bucket = store.create_bucket(self.name)
        self.file = folder / "round.yaml"
        self.write()
        self.updates = []

    def write(self, **updates):
        spec = {
            "store": {"endpoint": self.store.endpoint},
            "updates": {"bucket": self.name, "prefix": "updates/", "minCount": 2, "deadlineSeconds": 600, **updates},
            "output": {"bucket": self.name, "key": "model.safetensors"},
            "function": {"memoryMiB": 128, "maxConcurrency": 2},
        }
        head = {"apiVersion": "gradsharding.dev/v1alpha1", "kind": "AggregationRound", "metadata": {"name": "cli"}}
        self.file.write_text(json.dumps(head | {"spec": spec}))

    def upload(self, name, values, examples):
        body = safetensors.numpy.save(values, metadata={"num_examples": str(examples)})
        self.bucket.put(f"updates/{name}.safetensors", body)

    def environment(self, **more):
        keys = {"AWS_ACCESS_KEY_ID": self.store.access_key, "AWS_SECRET_ACCESS_KEY": self.store.secret_key}
        return os.environ | keys | more

    def start(self, *arguments, before=""):
        return subprocess.Popen(
            [sys.executable, "-c", MAIN + before + RUN, *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.environment(), text=True,
        )  # fmt: skip

    def run(self, *arguments, **more):
        command = [sys.executable, "-c", MAIN + RUN, *arguments]
        done = subprocess.run(command, capture_output=True, env=self.environment(**more), text=True, timeout=50)
        return done.returncode, done.stdout, done.stderr


def values(seed):
    """11 MiB, so that there are two parts."""
    random = np.random.default_rng(seed)
    return {
        "weight": random.standard_normal((1000, 2800), dtype=np.float32),
        "half": random.standard_normal(1001).astype(np.float16),
        "steps": np.array([7 + seed], np.int64),
    }


@pytest.fixture
def desk(seaweedfs, tmp_path):
    desk = Desk(seaweedfs, tmp_path)
    for i in range(3):
        desk.updates.append((values(i), 10 + i))
        desk.upload(i, *desk.updates[i])
    yield desk
    seaweedfs.remove_bucket(desk.name)


@pytest.mark.slow
def test_a_round_from_its_updates_to_its_end(desk):
    bad = values(3)
    bad["half"][500] = np.nan
    desk.upload(3, bad, 13)
    status, out, err = desk.run("run", str(desk.file), "--no-wait", "--json")
    assert status == 0, err
    first = json.loads(out)
    assert first["reason"] == "Succeeded"
    (excluded,) = first["updates"]["excluded"]
    assert excluded["key"] == "updates/3.safetensors"
    assert "'half'" in excluded["reason"]
    assert first["shards"] == {"total": 2, "succeeded": 2, "retried": 0}
    assert 30e6 < first["max_reducer_rss_bytes"] <= 128 << 20
    output = safetensors.numpy.load(desk.bucket.get("model.safetensors"))
    for name, expected in mean(desk.updates).items():
        assert output[name].tobytes() == expected.tobytes(), name

    status, out, err = desk.run("run", str(desk.file))
    assert status == 0, err
    assert "AlreadyCommitted" in out
    assert f"{desk.name}/model.safetensors" in out

    status, out, err = desk.run("verify", str(desk.file))
    assert status == 0, err
    body = bytearray(desk.bucket.get("model.safetensors"))
    body[-1_000_000] ^= 0x40
    desk.bucket.put("model.safetensors", bytes(body))
    status, _, err = desk.run("verify", str(desk.file))
    assert status == 3
    assert "differs first in tensor 'weight' at [" in err

    desk.upload(1, values(9), 11)
    status, _, err = desk.run("run", str(desk.file))
    assert status == 3
    assert "OutputExists" in err


def test_wrong_keys(desk):
    status, _, err = desk.run("run", str(desk.file), AWS_SECRET_ACCESS_KEY="wrong")
    assert status == 4
    assert err.startswith("error: ")
    assert "SignatureDoesNotMatch" in err
    status, _, err = desk.run("plan", str(desk.file), AWS_ACCESS_KEY_ID="NOBODY")
    assert status == 4


def wait_for_line(stream, words):
    """Lines up to the one that holds the words; the test's timeout bounds it."""
    seen = ""
    for line in stream:
        seen += line
        if words in line:
            return seen
    raise AssertionError(seen)


def children(pid):
    """Processes that this one has started and that still run."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_reducing_and_continued(desk, number):
    with desk.start("run", str(desk.file), "--no-wait", "--json", before=STUCK) as process:
        wait_for_line(process.stderr, "averaging 3 updates")
        deadline = time.monotonic() + 40
        while len(reducers := children(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(reducers) == 2
        process.send_signal(number)
        out, err = process.communicate(timeout=40)
    assert process.returncode == 130
    assert json.loads(out)["reason"] == "Interrupted"
    assert err.splitlines()[-1] == "interrupted: run the same command again to continue"
    assert "Traceback" not in err
    assert not [pid for pid in reducers if Path(f"/proc/{pid}").exists()]
    (plan,) = [info for info in desk.bucket.list("model.safetensors.round/") if info.key.endswith("plan.json")]
    assert len(desk.bucket.list_uploads("model.safetensors")) == 1

    status, out, err = desk.run("run", str(desk.file), "--no-wait", "--json")
    assert status == 0, err
    assert json.loads(out)["plan"]["revision"] == 1
    manifest = json.loads(desk.bucket.get("model.safetensors.manifest.json"))
    assert plan.key.split("/")[1] == manifest["round"]
    assert [info.key for info in desk.bucket.list("model.safetensors")] == [
        "model.safetensors", "model.safetensors.manifest.json"
    ]  # fmt: skip


def test_interrupted_while_collecting(desk):
    with desk.start("run", str(desk.file)) as process:
        wait_for_line(process.stderr, "3 of at least 2 updates are there")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=40)
    assert process.returncode == 130
    assert "run the same command again" in err
    assert list(desk.bucket.list("model.safetensors")) == []


def test_the_second_interrupt_quits_at_once(desk):
    with desk.start("run", str(desk.file), "--no-wait", before=STUCK) as process:
        wait_for_line(process.stderr, "averaging 3 updates")
        process.send_signal(signal.SIGINT)
        wait_for_line(process.stderr, "Ctrl-C again quits at once")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=40)
    assert process.returncode == 130
    assert err == ""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "as_json"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_store(tmp_path, number, as_json):
    command = [
        sys.executable,
        "-c",
        MAIN + RUN,
        "store",
        "--dir",
        str(tmp_path / "s3"),
        "--bucket",
        "one",
        "--bucket",
        "two",
    ]
    with subprocess.Popen(
        [*command, *["--json"] * as_json], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        if as_json:
            told = json.loads(process.stdout.readline())
            assert set(told) == {"endpoint", "access_key", "secret_key", "region"}
            keys = static(told["access_key"], told["secret_key"])
        else:
            lines = [process.stdout.readline() for _ in range(5)]
            told = dict(line.removeprefix("export ").strip().split("=") for line in lines if line.startswith("export "))
            told |= {"endpoint": told["AWS_ENDPOINT_URL"], "region": told["AWS_REGION"]}
            keys = static(told["AWS_ACCESS_KEY_ID"], told["AWS_SECRET_ACCESS_KEY"])
        for name in ("one", "two"):
            bucket = S3Bucket.connect(told["endpoint"], name, told["region"], keys)
            bucket.put("key", b"body")
            assert bucket.get("key") == b"body"
        started = children(process.pid)
        assert started
        process.send_signal(number)
        out, err = process.communicate(timeout=40)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


def test_a_port_that_is_taken(seaweedfs, tmp_path):
    port = seaweedfs.endpoint.rpartition(":")[2]
    command = [sys.executable, "-c", MAIN + RUN, "store", "--dir", str(tmp_path), "--port", port, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (done.returncode, json.loads(done.stdout)["reason"]) == (4, "StoreRefused")
    assert "--port" in done.stderr
