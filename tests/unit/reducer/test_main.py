"""``python -m gradsharding_reducer`` as a process: answers, errors, memory cap, signals, and what its start costs."""

import gzip
import json
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from unit.reducer.object_server import ObjectServer, error
from unit.reducer.processes import environment, run_main
from unit.reducer.shards import make_shard

from gradsharding_reducer.task import Outcome, ReduceResult, Tuning


@pytest.fixture
def server():
    with ObjectServer() as server:
        yield server


@pytest.fixture
def shard(server):
    return make_shard(server, [("F32", 50_000)], [1, 2], part_bytes=150_000)


def error_of(done):
    """The one line on stderr."""
    (line,) = done.stderr.decode().splitlines()
    (message,) = json.loads(line).values()
    assert done.stdout == b""
    assert "Signature" not in message
    return message


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_task_on_stdin_is_answered_on_stdout(server, shard, pack):
    done = run_main(pack(shard.task.to_json()), environment(server))
    assert (done.returncode, done.stderr) == (0, b"")
    result = ReduceResult.from_json(done.stdout)
    assert result.outcome is Outcome.DONE
    assert server.objects["record"] == done.stdout
    assert server.objects["part-1"] + server.objects["part-2"] == shard.header + shard.expected
    assert result.peak_rss_bytes < 60e6


def test_progress_is_told_on_stderr(server, shard):
    done = run_main(shard.task.to_json(), environment(server), arguments=["--progress"])
    assert ReduceResult.from_json(done.stdout).outcome is Outcome.DONE
    lines = done.stderr.decode().splitlines()
    counts = [int(line.removeprefix("progress ")) for line in lines]
    assert 0 < counts[0] <= counts[-1] <= 2 * 200_000
    assert counts == sorted(set(counts))


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (b"", "task is not JSON"),
        (b"{}", "task.version is missing"),
        (b"\x1f\x8b nonsense", "not valid gzip"),
        (gzip.compress(b"{}" * 1000)[:-20], "it ends too early"),
        (gzip.compress(b" " * (17 << 20)), "larger than 16 MiB unpacked"),
    ],
    ids=["nothing", "empty", "no gzip", "cut off", "bomb"],  # gzip writes the time: not in an id
)
def test_what_is_no_task_is_one_sentence(document, sentence):
    done = run_main(document, environment())
    assert done.returncode == 1
    assert sentence in error_of(done)


def test_a_failure_is_one_sentence(server, shard):
    server.faults = lambda method, path, nth: (
        (lambda handler: error(handler, 416, "InvalidRange")) if path == "update-1" else None
    )
    done = run_main(shard.task.to_json(), environment(server))
    assert done.returncode == 1
    assert error_of(done) == "reading source 1: the store refused with 416 InvalidRange"


def test_without_allowed_origins_everything_is_denied(shard):
    done = run_main(shard.task.to_json(), environment())
    assert done.returncode == 0
    assert ReduceResult.from_json(done.stdout).refusal.code == "OriginNotAllowed"


def test_a_cap_that_is_too_small_is_told_by_the_exit_code(server):
    shard = make_shard(server, [("F32", 30_000_000)], [1], part_bytes=2**40)
    task = replace(shard.task, tuning=Tuning(64 << 20, 4))
    cap = lambda: resource.setrlimit(resource.RLIMIT_DATA, (128 << 20, 128 << 20))  # noqa: E731
    done = run_main(task.to_json(), environment(server), preexec_fn=cap)
    assert done.returncode == 12
    assert error_of(done).startswith("OutOfMemory")


def test_sigterm_is_answered_with_cancelled(server, shard):
    reading, over = threading.Event(), threading.Event()

    def wait(handler):
        reading.set()
        over.wait()
        handler.close_connection = True

    server.faults = lambda method, path, nth: wait if path == "update-1" else None
    command = [sys.executable, "-m", "gradsharding_reducer"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(server), **pipes) as process:
        process.stdin.write(shard.task.to_json())
        process.stdin.close()
        assert reading.wait(30)
        process.send_signal(signal.SIGTERM)
        answer = process.stdout.read()
        assert process.wait(30) == 0
    over.set()
    assert ReduceResult.from_json(answer).outcome is Outcome.CANCELLED
    assert "record" not in server.objects


START = """
import time; begun = time.process_time()
import gradsharding_reducer.reduce
spent = time.process_time() - begun
import sys
rss = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(spent, int(rss) * 1024, " ".join(sys.modules))
"""


def test_the_start_is_cheap():
    """CPU seconds, since a busy machine stretches wall time; the best of three."""
    runs = []
    for _ in range(3):
        command = [sys.executable, "-c", START]
        done = subprocess.run(command, env=environment(OPENBLAS_NUM_THREADS="1"), capture_output=True, check=True)
        spent, rss, *modules = done.stdout.decode().split()
        runs.append((float(spent), int(rss)))
    assert min(runs)[0] < 0.150
    assert min(rss for _, rss in runs) < 40e6
    foreign = {
        "gradsharding",
        "urllib3",
        "minio",
        "boto3",
        "asyncio",
        "multiprocessing",
        "numpy.random",
        "numpy.typing",
    }
    assert foreign.isdisjoint(modules)
