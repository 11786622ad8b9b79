"""The package as it is deployed, under AWS's own emulator and runtime client, through real boto3.

Needs aws-lambda-rie (LAMBDA_RIE or PATH) and the right to make memory cgroups.
"""

import asyncio
import itertools
import json
import signal
import threading
from contextlib import asynccontextmanager

import pytest
from lambda_front import LambdaFront
from memory_store import MemoryStore
from rounds_kit import OUTPUT, assert_mean, document, make_round, manifest, spec, tensors, upload
from unit.reducer.object_server import ObjectServer
from unit.reducer.shards import make_shard

from gradsharding.cli import main, opening
from gradsharding.platforms import FunctionFailed, FunctionSpec, OutOfMemory, TimedOut
from gradsharding.platforms.aws_lambda import PLAIN_BYTES, LambdaPlatform
from gradsharding.platforms.local import LocalPlatform
from gradsharding.rounds import memory, stitch
from gradsharding.rounds.drive import drive
from gradsharding_reducer.task import Outcome

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240), pytest.mark.xdist_group("lambda-package")]

SHARDS = 4


@pytest.fixture(autouse=True)
def aws(monkeypatch):
    for name, value in (("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # the store's, never Lambda's


@asynccontextmanager
async def prepared(front, origin, memory_mib=128, seconds=60):
    platform = LambdaPlatform(front.name, endpoint=front.url)
    try:
        await platform.prepare(FunctionSpec(memory_mib, seconds, SHARDS, SHARDS, (origin,)))
        yield platform
    finally:
        await platform.release()


def invoke(front, task, origin, **options):
    async def once():
        async with prepared(front, origin, **options) as platform:
            return await platform.invoke(task, 1)

    return asyncio.run(once())


def test_a_task_is_answered_with_its_result_and_what_it_bills(task_root, tmp_path):
    with ObjectServer() as server, LambdaFront(task_root, tmp_path, memory_mb=128, origins=[server.origin]) as front:
        shard = make_shard(server, [("BF16", 50_000)], [1, 2], part_bytes=30_000)
        result = invoke(front, shard.task, server.origin)
        assert result.outcome is Outcome.DONE
        assert b"".join(server.objects[f"part-{p.number}"] for p in shard.task.parts) == shard.header + shard.expected
    assert result.runtime.platform == "lambda"
    assert result.runtime.memory_cap == "Lambda, 128 MB"
    assert result.runtime.billed_ms > 0
    assert result.peak_rss_bytes < 128 << 20


def test_a_task_of_more_than_256_kib_arrives(task_root, tmp_path):
    with ObjectServer() as server, LambdaFront(task_root, tmp_path, origins=[server.origin]) as front:
        shard = make_shard(server, [("F32", 40_000)], [1, 2], part_bytes=64)
        assert len(shard.task.to_json()) > PLAIN_BYTES
        assert invoke(front, shard.task, server.origin).outcome is Outcome.DONE


def test_too_small_a_cap_is_out_of_memory(task_root, tmp_path):
    with (
        ObjectServer() as server,
        LambdaFront(task_root, tmp_path, memory_mb=128, cap_mib=40, origins=[server.origin]) as front,
    ):
        shard = make_shard(server, [("F32", 8_000_000)], [1], part_bytes=40_000_000, range_bytes=8 << 20)
        with pytest.raises(OutOfMemory, match=r"Runtime\.ExitError.*signal: killed") as caught:
            invoke(front, shard.task, server.origin)
    assert "secret" not in caught.value.detail
    assert caught.value.request_id


def test_a_cap_that_does_not_even_hold_the_interpreter_is_out_of_memory(task_root, tmp_path):
    with ObjectServer() as server, LambdaFront(task_root, tmp_path, cap_mib=8, origins=[server.origin]) as front:
        shard = make_shard(server, [("F32", 1000)], [1], part_bytes=4000)
        with pytest.raises(OutOfMemory, match="signal: killed"):
            invoke(front, shard.task, server.origin)


def test_a_function_that_never_ends_times_out(task_root, tmp_path):
    stalled = threading.Event()

    def stall(method, path, nth):
        return (lambda handler: stalled.wait(60)) if "update" in path else None

    with ObjectServer(stall) as server, LambdaFront(task_root, tmp_path, timeout=8, origins=[server.origin]) as front:
        shard = make_shard(server, [("F32", 1000)], [1], part_bytes=4000)
        with pytest.raises(TimedOut, match="Task timed out after 8"):
            invoke(front, shard.task, server.origin, seconds=8)
        stalled.set()


def test_a_function_that_crashes_has_failed(task_root, tmp_path):
    fronts = []

    def crash(method, path, nth):
        if "update" in path and fronts:
            fronts.pop().kill(signal.SIGSEGV)

    with ObjectServer(crash) as server, LambdaFront(task_root, tmp_path, origins=[server.origin]) as front:
        fronts.append(front)
        shard = make_shard(server, [("F32", 1000)], [1], part_bytes=4000)
        with pytest.raises(FunctionFailed, match=r"Runtime\.ExitError.*segmentation fault"):
            invoke(front, shard.task, server.origin)
        assert invoke(front, shard.task, server.origin).outcome is Outcome.DONE  # in a fresh environment
    assert front.environments_started == 2


def test_a_whole_round_with_four_shards_throttling_and_a_killed_environment(task_root, tmp_path, monkeypatch):
    """Refused with 429 at first, one environment killed at work: the same bits as on local processes."""
    monkeypatch.setattr(memory, "MIN_PART", 65536)
    monkeypatch.setattr(stitch, "ASK_AGAIN_SECONDS", 0.001)
    reads, fronts = itertools.count(), []

    def kill_once(op, key):
        if fronts and op.startswith("http GET") and "updates" in key and next(reads) == 5:
            fronts[0].kill()

    updates = [(tensors(seed, 90_000), 10 + seed) for seed in range(3)]
    function = {"memoryMiB": 128, "shards": SHARDS, "maxConcurrency": SHARDS, "timeoutSeconds": 60}
    with MemoryStore(min_part=65536, before=kill_once) as store:
        bucket = store.bucket("federation")
        for i, (values, examples) in enumerate(updates):
            upload(bucket, f"client-{i}.safetensors", values, examples)

        async def run(platform, key):
            round_ = make_round(
                bucket, uid=platform.name, wait=False,
                spec=spec(function=function, output={"bucket": "federation", "key": key}),
            )  # fmt: skip
            return await drive(round_, platform)

        def refuse(number):
            return 429 if number in (1, 2, 5) else None

        with LambdaFront(task_root, tmp_path, memory_mb=128, origins=[bucket.origin], script=refuse) as front:
            fronts.append(front)
            finished = asyncio.run(run(LambdaPlatform(front.name, endpoint=front.url), OUTPUT))
            fronts.clear()
        assert finished.succeeded, finished
        assert front.most_at_once > 1
        assert_mean(bucket, updates)
        assert asyncio.run(run(LocalPlatform(), "round/local.safetensors")).succeeded
        here, there = document(bucket, "round/local.safetensors.manifest.json"), document(bucket)
        digests = [[part["sha256"] for part in manifest["parts"]][1:] for manifest in (here, there)]
        assert digests[0] == digests[1]  # all but the first part, where the header names the plan
    outcomes = [attempt["outcome"] for attempt in there["attempts"]]
    assert outcomes.count("Throttled") == 3
    assert outcomes.count("OutOfMemory") == 1  # SIGKILL is what the kernel sends, too
    assert outcomes.count("Done") == SHARDS
    assert all(a["billed_ms"] > 0 for a in there["attempts"] if a["outcome"] == "Done")


def test_the_command_runs_a_round_on_the_function(task_root, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory, "MIN_PART", 65536)
    updates = [(tensors(seed, 90_000), 10 + seed) for seed in range(2)]
    with (
        MemoryStore(min_part=65536) as store,
        LambdaFront(task_root, tmp_path, memory_mb=128, origins=[store.origin]) as front,
    ):
        bucket = store.bucket("federation")
        monkeypatch.setattr(opening, "open_buckets", lambda *_: (bucket, bucket))
        monkeypatch.setenv("AWS_ENDPOINT_URL_LAMBDA", front.url)
        for i, (values, examples) in enumerate(updates):
            upload(bucket, f"client-{i}.safetensors", values, examples)
        function = {"platform": "Lambda", "memoryMiB": 128, "shards": 2, "lambda": {"functionName": front.name}}
        round_file = tmp_path / "round.yaml"
        round_file.write_text(json.dumps(manifest(function=function | {"timeoutSeconds": 60})))
        assert main(["run", str(round_file), "--platform", "lambda", "--no-wait", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["shards"] == {"total": 2, "succeeded": 2, "retried": 0}
        assert_mean(bucket, updates)

        round_file.write_text(json.dumps(manifest(function=function | {"timeoutSeconds": 600})))
        arguments = [
            "run",
            str(round_file),
            "--platform",
            "lambda",
            "--no-wait",
            "--json",
            "--output-key",
            "b.safetensors",
        ]
        assert main(arguments) == 3
        assert json.loads(capsys.readouterr().out)["reason"] == "FunctionTooSmall"
