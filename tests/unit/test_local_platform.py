"""Local reducers, for real: capped by the kernel, ended in every case, and alone with what they need to know."""

import asyncio
import contextlib
import gc
import hashlib
import itertools
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from memory_store import MemoryStore

from gradsharding.errors import RoundFailed
from gradsharding.platforms import FunctionFailed, FunctionSpec, OutOfMemory, TimedOut, cgroups, local
from gradsharding.platforms.local import LocalPlatform
from gradsharding.rounds.memory import MIB, Sizing, lower
from gradsharding_reducer.task import (
    Extent,
    Header,
    Method,
    Outcome,
    Part,
    ReduceResult,
    ReduceTask,
    Run,
    Runtime,
    Source,
    SourceObject,
    Tuning,
)

LIFETIME = timedelta(hours=1)
HEADER = b"{}".ljust(1024)
FUNCTION = FunctionSpec(
    memory_mib=96, timeout_seconds=50, max_concurrency=2, at_once=2, origins=("http://127.0.0.1:1",)
)
RESULT = ReduceResult("round", 1, 0, "0" * 64, Outcome.DONE)
TASK = ReduceTask(
    round="round",
    revision=1,
    shard=0,
    plan="0" * 64,
    method=Method("FedAvg"),
    sources=(Source("update", 1, (SourceObject("http://127.0.0.1:1/u?X-Amz-Signature=secret", "e"),), ()),),
    runs=(),
    parts=(Part(0, 1, 0, 0, "http://127.0.0.1:1/p"),),
    header=Header("http://127.0.0.1:1/h", 0, hashlib.sha256(b"").hexdigest()),
    record_url="http://127.0.0.1:1/r",
    budget_seconds=30.0,
    tuning=Tuning(MIB, 1),
)


def program(source):
    """The command of a reducer that is this program."""
    return (sys.executable, "-I", "-S", "-c", textwrap.dedent(source))


@contextlib.asynccontextmanager
async def prepared(command=local.REDUCER, function=FUNCTION, caps=None):
    platform = LocalPlatform(command, caps)
    try:
        await platform.prepare(function)
        yield platform
    finally:
        await platform.release()


PREPARED = {}


def invoke(command, function=FUNCTION, caps=None, task=TASK):
    """One invocation on a platform that is prepared once for all tests."""
    kinds = tuple(caps or ())

    async def once():
        platform, prepared_for = PREPARED.setdefault(kinds, (LocalPlatform(command, caps), None))
        if prepared_for != function:
            await platform.prepare(function)
            PREPARED[kinds] = platform, function
        platform.command = command
        return await platform.invoke(task, 1)

    return asyncio.run(once())


@pytest.fixture(autouse=True, scope="module")
def released():
    yield
    for platform, _ in PREPARED.values():
        asyncio.run(platform.release())
    PREPARED.clear()
    assert my_folders() == []


def kinds_here():
    async def is_enforced(kind):
        try:
            async with prepared(caps=[kind]):
                return True
        except RoundFailed:
            return False

    return [kind for kind in ("cgroup-v1", "cgroup-v2", "rlimit-data") if asyncio.run(is_enforced(kind))]


KINDS = kinds_here()


def my_folders():
    return [folder for place, _ in places_here() for folder in place.glob(f"gradsharding-{os.getpid()}-*")]


def places_here():
    return cgroups.places(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())


def children():
    """Processes that threads of this one have started and nobody has waited for."""
    return {pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


def exists(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def until(condition):
    async with asyncio.timeout(40):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before = children()
    yield
    assert children() == before  # neither a process nor a zombie; the tests' own S3 server may run
    assert [cgroup for folder in my_folders() for cgroup in folder.glob("*/")] == []
    gc.collect()  # an unclosed transport would warn, which is an error


def test_this_machine_enforces_a_cap():
    assert "rlimit-data" in KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_says_where_it_ran_and_under_which_cap(kind):
    command = program(f"import sys; sys.stdin.read(); print({RESULT.to_json().decode()!r})")
    result = invoke(command, caps=[kind])
    assert result.runtime.request_id.startswith("pid ")
    assert result == replace(RESULT, runtime=Runtime("local", result.runtime.request_id, kind))


def test_the_task_arrives_unchanged():
    digest = hashlib.sha256(TASK.to_json()).hexdigest()
    command = program(
        f"""
        import hashlib, sys
        assert hashlib.sha256(sys.stdin.buffer.read()).hexdigest() == {digest!r}
        print({RESULT.to_json().decode()!r})
        """
    )
    assert invoke(command).outcome is Outcome.DONE


@pytest.mark.parametrize("kind", KINDS)
def test_more_memory_than_the_cap_is_out_of_memory(kind):
    command = program(f"import sys; sys.stdin.read(); b'x' * {200 * MIB}")
    with pytest.raises(OutOfMemory, match=rf"a cap of 96 MiB \({kind}\)") as error:
        invoke(command, caps=[kind])
    assert error.value.request_id.startswith("pid ")


@pytest.mark.parametrize("kind", KINDS)
def test_less_memory_than_the_cap_is_fine(kind):
    command = program(f"import sys; sys.stdin.read(); b'x' * {60 * MIB}; print({RESULT.to_json().decode()!r})")
    assert invoke(command, caps=[kind]).outcome is Outcome.DONE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_reducer_out_of_memory_gets_through_some_steps_lower(kind):
    """And its parts have the ETags that they have without a cap."""
    sizing = Sizing(8 * MIB, 8 * MIB, 16)
    with MemoryStore() as store:
        bucket = store.bucket("federation")
        function = replace(FUNCTION, origins=(bucket.origin,))

        async def with_steps():
            async with prepared(function=replace(function, memory_mib=1024)) as roomy:
                free = await roomy.invoke(real_task(bucket, sizing), 1)
            assert free.peak_rss_bytes > 150 * 10**6
            async with prepared(function=function, caps=[kind]) as platform:
                steps = 0
                while True:
                    lowered = lower(sizing, steps)
                    try:
                        return free, await platform.invoke(real_task(bucket, lowered), steps + 1), steps
                    except OutOfMemory:
                        steps += 1

        free, capped, steps = asyncio.run(with_steps())
    assert 1 <= steps <= 5
    assert capped.outcome is free.outcome is Outcome.DONE
    shared = 20 * MIB  # pages of libraries count in RSS, but in the cap of whoever touched them first
    assert capped.peak_rss_bytes <= 96 * MIB + shared
    assert [part.etag for part in capped.parts] == [part.etag for part in free.parts]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_part_larger_than_the_cap_is_out_of_memory(kind):
    with MemoryStore() as store:
        bucket = store.bucket("federation")
        function = replace(FUNCTION, origins=(bucket.origin,))
        task = real_task(bucket, Sizing(100 * MIB, MIB, 1), size=100 * MIB, sources=1)
        with pytest.raises(OutOfMemory):
            invoke(local.REDUCER, function, [kind], task)


def real_task(bucket, sizing, size=64 * MIB, sources=4):
    """Parts of float32 zeros for the real reducer, which reads them from ``bucket``."""
    if bucket.stat("update") is None:
        bucket.put("update", bytes(size))
        bucket.put("header", HEADER)
    etag = bucket.stat("update").etag
    upload = bucket.create_upload("output")
    borders = [*range(0, size, sizing.part_bytes), size]
    return replace(
        TASK,
        sources=tuple(
            Source(
                "update",
                1 + i,
                (SourceObject(bucket.presign_get("update", None, LIFETIME), etag),),
                (Extent(0, size, 0, 0),),
            )
            for i in range(sources)
        ),
        runs=(Run("F32", 0, size),),
        parts=tuple(
            Part(0, number, start, end, bucket.presign_part("output", upload, number, LIFETIME))
            for number, (start, end) in enumerate(itertools.pairwise(borders), start=1)
        ),
        header=Header(bucket.presign_get("header", None, LIFETIME), len(HEADER), hashlib.sha256(HEADER).hexdigest()),
        record_url=bucket.presign_put("record", LIFETIME),
        tuning=Tuning(sizing.range_bytes, sizing.prefetch),
    )


@pytest.mark.parametrize(
    "source",
    [
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "raise SystemExit(12)",
        "raise MemoryError",
        'raise RuntimeError("can\'t start new thread")',
        "raise ImportError('libblas.so: failed to map segment from shared object')",
    ],
)
def test_every_way_to_say_out_of_memory_is_understood(source):
    with pytest.raises(OutOfMemory):
        invoke(program(source))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("""import sys; sys.exit('{"error": "the store is not S3"}')""", "the store is not S3 (exit status 1)"),
        (
            "raise ValueError('http://s/k?X-Amz-Signature=abc broke')",
            "ValueError: http://s/k?... broke (exit status 1)",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the reducer broke without a word (signal 11)"),
        ("print('nonsense')", "what the reducer answered is no result: result is not JSON"),
        ("print('[]')", "what the reducer answered is no result: result must be a JSON object"),
    ],
)
def test_a_broken_reducer_is_told_by_its_last_words(source, message):
    with pytest.raises(FunctionFailed) as error:
        invoke(program(source))
    assert error.value.detail.startswith(message)


def test_a_missing_reducer_is_told():
    with pytest.raises(FunctionFailed, match=r"cannot start under cap .*No such file"):
        invoke(("/nonexistent/reducer",))


def test_a_python_without_the_reducer_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(local, "PROBE_REDUCER", program("import gradsharding_reducer"))

    async def prepare():
        async with prepared():
            pass

    with pytest.raises(RoundFailed, match=r"does not start under a cap of 96 MiB .*No module named") as error:
        asyncio.run(prepare())
    assert error.value.reason == "ReducerUnusable"


def test_the_timeout_ends_the_process(tmp_path):
    pid = tmp_path / "pid"
    command = program(f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    with pytest.raises(TimedOut, match="no answer in 1 seconds") as error:
        invoke(command, replace(FUNCTION, timeout_seconds=1))
    assert not pid.exists() or error.value.request_id == f"pid {pid.read_text()}"


@pytest.mark.parametrize("obeys", [True, False])
def test_cancelling_ends_the_process(tmp_path, monkeypatch, obeys):
    monkeypatch.setattr(local, "STOP_SECONDS", 40.0 if obeys else 0.05)
    ready, stopped = tmp_path / "ready", tmp_path / "stopped"
    act = f"(open({str(stopped)!r}, 'w'), sys.exit())" if obeys else "print('x' * 10**6)"
    command = program(
        f"""
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: {act})
        open({str(ready)!r}, "w").close()
        while True:
            time.sleep(600)
        """
    )

    async def cancel():
        async with prepared(command) as platform:
            call = asyncio.ensure_future(platform.invoke(TASK, 1))
            await until(ready.exists)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(cancel())
    assert stopped.exists() == obeys


def test_cancelling_twice_does_not_wait_and_still_ends_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "STOP_SECONDS", 600.0)
    ready = tmp_path / "ready"
    command = program(
        f"""
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open({str(ready)!r}, "w").close()
        time.sleep(600)
        """
    )

    async def cancel():
        async with prepared(command) as platform:
            call = asyncio.ensure_future(platform.invoke(TASK, 1))
            await until(ready.exists)
            call.cancel()
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(cancel())


def test_cancelling_at_any_moment_leaves_nothing():
    """The fixture looks for what is left."""
    command = program("import time; time.sleep(600)")

    async def cancel():
        async with prepared(command) as platform:
            for turns in range(12):
                call = asyncio.ensure_future(platform.invoke(TASK, 1))
                for _ in range(turns):
                    await asyncio.sleep(0)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call

    asyncio.run(cancel())


OWNER = """
import asyncio, sys
sys.path[:0] = {path!r}
import test_local_platform as t

async def main():
    async with t.prepared(t.program({source!r})) as platform:
        await platform.invoke(t.TASK, 1)

asyncio.run(main())
"""


def test_the_kernel_ends_reducers_whose_owner_is_killed(tmp_path):
    ready = tmp_path / "ready"
    source = f"""
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open({str(ready) + ".new"!r}, "w") as file:
            file.write(str(os.getpid()))
        os.rename({str(ready) + ".new"!r}, {str(ready)!r})
        time.sleep(600)
    """
    path = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    with subprocess.Popen([sys.executable, "-c", OWNER.format(path=path, source=source)]) as owner:
        asyncio.run(until(ready.exists))
        reducer = int(ready.read_text())
        assert exists(reducer)
        owner.send_signal(signal.SIGKILL)
    asyncio.run(until(lambda: not runs(reducer)))
    # What is left are empty cgroups, which the next one sweeps.
    asyncio.run(sweep_until_gone(owner.pid))


def runs(pid):
    """Whether it lives; once its parent is gone, whoever reaps a zombie is none of ours."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def sweep_until_gone(pid):
    def left():
        return [folder for place, _ in places_here() for folder in place.glob(f"gradsharding-{pid}-*")]

    async with asyncio.timeout(40):
        while True:
            async with prepared():
                pass
            if not left():
                return


def test_the_environment_holds_no_secrets(tmp_path, monkeypatch):
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "MINIO_ROOT_PASSWORD", "PYTHONPATH", "HOME"):
        monkeypatch.setenv(name, "secret")
    seen = tmp_path / "seen"
    command = program(
        f"""
        import os, sys
        sys.stdin.read()
        files = sorted(set(os.listdir("/proc/self/fd")))
        ca = open(os.environ["GRADSHARDING_CA_FILE"]).read()
        open({str(seen)!r}, "w").write(repr((dict(os.environ), files, ca)))
        print({RESULT.to_json().decode()!r})
        """
    )
    function = replace(FUNCTION, origins=("http://a:1", "https://b"), ca_pem="-----BEGIN CERTIFICATE-----\n")

    async def once():
        async with prepared(command, function) as platform:
            await platform.invoke(TASK, 1)

    asyncio.run(once())
    environment, files, ca = eval(seen.read_text())
    assert ca == function.ca_pem
    assert environment["GRADSHARDING_ALLOWED_ORIGINS"] == "http://a:1 https://b"
    assert environment["OPENBLAS_NUM_THREADS"] == "1"
    own = {"GRADSHARDING_ALLOWED_ORIGINS", "GRADSHARDING_CA_FILE", "OPENBLAS_NUM_THREADS", "LANG", "LC_CTYPE"}
    assert set(environment) <= own | set(local.PASSED_ON)
    assert "secret" not in environment.values()
    assert len(files) <= 5  # the three streams, the certificates, and the listing itself


def test_progress_is_told_as_it_comes_and_is_no_last_word():
    """Also in pieces, and between lines that are something else."""
    talk = """
        import sys
        assert sys.argv[1:] == ["--progress"]
        sys.stderr.write("a warning\\nprogress 12\\nprogress 345\\nprogress x\\nlast words")
        sys.exit(3)
    """
    told = []

    async def once():
        platform = LocalPlatform(on_progress=lambda shard, count: told.append((shard, count)))
        try:
            await platform.prepare(FUNCTION)
            platform.command = program(talk)
            await platform.invoke(replace(TASK, shard=5), 1)
        finally:
            await platform.release()

    with pytest.raises(FunctionFailed) as failed:
        asyncio.run(once())
    assert told == [(5, 12), (5, 345)]
    assert failed.value.detail == "last words (exit status 3)"


def test_two_run_at_once_and_apart():
    command = program(f"import sys; sys.stdin.read(); b'x' * {60 * MIB}; print({RESULT.to_json().decode()!r})")

    async def both():
        async with prepared(command) as platform:
            return await asyncio.gather(*(platform.invoke(TASK, 1) for _ in range(4)))

    assert len({result.runtime.request_id for result in asyncio.run(both())}) == 4


def test_a_cap_that_is_not_enforced_is_not_believed(tmp_path, monkeypatch):
    """A folder takes every file that a cgroup has, and caps nothing."""
    fake = cgroups.CgroupOwner(tmp_path, cgroups.V2)
    monkeypatch.setattr(cgroups.CgroupOwner, "oom_kills", lambda self, cgroup: 0)
    monkeypatch.setattr(local, "owners", lambda: [fake])
    command = program(f"import sys; sys.stdin.read(); print({RESULT.to_json().decode()!r})")

    async def cap(kinds=None):
        async with prepared(command, caps=kinds) as platform:
            return (await platform.invoke(TASK, 1)).runtime.memory_cap

    assert asyncio.run(cap()) == "rlimit-data"
    assert list(tmp_path.glob("gradsharding-*/0/cgroup.procs"))  # it was tried
    with pytest.raises(RoundFailed) as error:
        asyncio.run(cap(["cgroup-v2"]))
    assert error.value.reason == "NoMemoryCap"


def test_places_for_cgroups_are_inside_or_beside_our_own():
    v1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    v2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
    assert cgroups.places("8:pids:/\n4:memory:/a/b\n", v1) == [(Path("/sys/fs/cgroup/memory/a/b"), cgroups.V1)]
    assert cgroups.places("0::/user.slice/app.scope\n", v2) == [
        (Path("/sys/fs/cgroup/user.slice/app.scope"), cgroups.V2),
        (Path("/sys/fs/cgroup/user.slice"), cgroups.V2),
    ]
    assert cgroups.places("0::/\n", v2) == [(Path("/sys/fs/cgroup"), cgroups.V2)]
    container = v1.replace("0:32 /", "0:32 /docker/f00")
    assert cgroups.places("4:memory:/docker/f00/x\n", container) == [(Path("/sys/fs/cgroup/memory/x"), cgroups.V1)]
    assert cgroups.places("4:memory:/elsewhere\n", container) == []
    assert cgroups.places("4:memory:/docker/f00d\n", container) == []
    assert cgroups.places("4:cpu,cpuacct:/\n", v1) == []


def test_version_2_is_spoken_as_the_kernel_documents_it(tmp_path):
    owner = cgroups.CgroupOwner(tmp_path, cgroups.V2)
    cgroup = owner.create(96 * MIB)
    assert (cgroup.parent / "cgroup.subtree_control").read_text() == "+memory"
    assert (cgroup / "memory.max").read_text() == str(96 * MIB)
    (cgroup / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert owner.oom_kills(cgroup) == 2


def test_only_folders_of_dead_owners_are_swept(tmp_path):
    dead = subprocess.Popen([sys.executable, "-S", "-c", ""])
    dead.wait()
    gone = tmp_path / f"gradsharding-{dead.pid}-0a" / "0"
    stays = [tmp_path / f"gradsharding-{os.getpid()}-0a", tmp_path / "gradsharding-x", tmp_path / f"a-{dead.pid}-0a"]
    for folder in (gone, *stays):
        folder.mkdir(parents=True)
    cgroups.CgroupOwner(tmp_path, cgroups.V1).sweep()
    assert sorted(tmp_path.iterdir()) == sorted(stays)
