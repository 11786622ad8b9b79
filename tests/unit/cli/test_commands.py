"""The commands on the memory store: exit statuses, JSON, and what is said in which case."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from inline_platform import InlinePlatform
from rounds_kit import OUTPUT, PREFIX, assert_mean, keys_under, tensors, upload

from gradsharding import __version__
from gradsharding.cli import opening
from gradsharding.errors import StoreRefused, StoreUnreachable
from gradsharding.s3_transport import Patience


def put_updates(bucket, count=3):
    updates = [(tensors(i), 10 + i) for i in range(count)]
    for i, (values, examples) in enumerate(updates):
        upload(bucket, f"{i}.safetensors", values, examples)
    return updates


RESULT = {
    "": {"succeeded", "reason", "message", "output", "updates", "shards", "bytes_read", "seconds",
         "max_reducer_rss_bytes", "plan"},
    "output": {"bucket", "key", "bytes", "etag"},
    "updates": {"found", "accepted", "participants", "rejected", "excluded"},
    "shards": {"total", "succeeded", "retried"},
    "plan": {"revision", "parts", "part_bytes", "range_bytes", "prefetch"},
}  # fmt: skip


def result_of(out):
    """The one object on stdout, whose shape is that of a round's end."""
    (line,) = out.splitlines()
    result = json.loads(line)
    assert {"": set(result)} | {name: set(result[name]) for name in RESULT if name} == RESULT
    return result


def test_run_prints_one_object(bucket, command, round_file):
    updates = put_updates(bucket)
    bucket.put(f"{PREFIX}bad.npy", b"no array")
    status, out, err = command("run", round_file(), "--no-wait", "--json")
    assert status == 0
    result = result_of(out)
    assert_mean(bucket, updates)
    assert (result["succeeded"], result["reason"]) == (True, "Succeeded")
    assert result["output"] == {
        "bucket": "federation", "key": OUTPUT, "bytes": len(bucket.get(OUTPUT)), "etag": bucket.stat(OUTPUT).etag
    }  # fmt: skip
    assert result["updates"] == {
        "found": 4, "accepted": 3, "participants": 3, "excluded": [],
        "rejected": [{"key": f"{PREFIX}bad.npy", "reason": "it does not begin as an .npy file does"}],
    }  # fmt: skip
    assert result["shards"] == {"total": 2, "succeeded": 2, "retried": 0}
    assert result["bytes_read"] == 3 * (3000 * 4 + 10 * 4 + 8)
    assert "averaging 3 updates, 36.1 kB, in 2 shards" in err


def test_run_prints_a_table(bucket, command, round_file):
    put_updates(bucket)
    bucket.put(f"{PREFIX}[red]\x1b[2J.npy", b"")
    status, out, _ = command("run", round_file(), "--no-wait")
    assert status == 0
    rows = dict(line.split("  ", 1) for line in out.splitlines() if not line.startswith(" "))
    rows = {name: value.strip() for name, value in rows.items()}
    assert rows["participants"] == "3 of 4 updates found"
    assert rows["output"].startswith(f"federation/{OUTPUT}, ")
    assert rows["manifest"] == f"federation/{OUTPUT}.manifest.json"
    assert "of 128 MiB (none)" in rows["peak reducer memory"]
    assert f"{PREFIX}[red]\\x1b[2J.npy: it does not begin as an .npy file does" in out
    assert "\x1b" not in out


def test_run_again_prints_the_stored_result(bucket, command, round_file):
    put_updates(bucket)
    first = result_of(command("run", round_file(), "--no-wait", "--json")[1])
    status, out, _ = command("run", round_file(), "--no-wait", "--json")
    second = result_of(out)
    assert (status, second["reason"]) == (0, "AlreadyCommitted")
    same = set(RESULT[""]) - {"reason", "message", "seconds"}
    assert {name: second[name] for name in same} == {name: first[name] for name in same}


def test_run_again_after_a_change_fails_and_names_it(bucket, command, round_file):
    put_updates(bucket)
    command("run", round_file(), "--no-wait")
    upload(bucket, "1.safetensors", tensors(99))
    status, out, err = command("run", round_file(), "--no-wait", "--json")
    assert (status, result_of(out)["reason"]) == (3, "OutputExists")
    assert f"error: OutputExists: federation/{OUTPUT} exists already" in err
    assert f"{PREFIX}1.safetensors" in err


def test_another_output_key_is_another_round(bucket, command, round_file):
    updates = put_updates(bucket)
    command("run", round_file(), "--no-wait")
    status, out, _ = command("run", round_file(), "--no-wait", "--json", "--output-key", "second.safetensors")
    assert (status, result_of(out)["output"]["key"]) == (0, "second.safetensors")
    assert_mean(bucket, updates, "second.safetensors")


def test_a_client_with_nan_is_left_out_and_named(bucket, command, round_file):
    updates = put_updates(bucket)
    bad = tensors(5)
    bad["layer.weight"][7, 3] = np.nan
    upload(bucket, "nan.safetensors", bad)
    status, out, err = command("run", round_file(), "--no-wait", "--json")
    result = result_of(out)
    assert (status, result["plan"]["revision"], result["updates"]["participants"]) == (0, 2, 3)
    (excluded,) = result["updates"]["excluded"]
    assert excluded["key"] == f"{PREFIX}nan.safetensors"
    assert "'layer.weight'" in excluded["reason"]
    assert f"going on without {PREFIX}nan.safetensors: it holds a value that is not finite" in err
    assert_mean(bucket, updates)


def test_a_failed_round_has_the_same_shape(bucket, command, round_file):
    put_updates(bucket, 1)
    status, out, err = command("run", round_file(), "--no-wait", "--json")
    result = result_of(out)
    assert (status, result["succeeded"], result["reason"]) == (3, False, "QuorumNotMet")
    assert "1 usable updates of at least 2" in result["message"]
    assert "error: QuorumNotMet: " in err


@pytest.mark.parametrize("name", ["run", "plan", "verify"])
@pytest.mark.parametrize("with_json", [False, True])
def test_a_bad_manifest(command, round_file, name, with_json):
    status, out, err = command(name, round_file(updates_minCount=0), *["--json"] * with_json)
    assert status == 2
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert "spec.updates.minCount must be an integer from 1" in line
    if with_json:
        assert json.loads(out) == {
            "succeeded": False, "reason": "InvalidManifest", "message": line.removeprefix("error: ")
        }  # fmt: skip
    else:
        assert out == ""


def test_files_that_cannot_be_read(command, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, sentence in (("none", "No such file"), ("", "Is a directory"), ("binary", "is not UTF-8")):
        status, _, err = command("run", str(tmp_path / name))
        assert (status, err.count("\n")) == (2, 1)
        assert sentence in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--output-key", "model.bin"], "--output-key: spec.output.key must end with '.safetensors'"),
        (["--endpoint", "minio:9000"], "--endpoint must be http:// or https://"),
        (["--platform", "moon"], "--platform"),
        (["--no-such-option"], "No such option"),
        (["one-more"], "unexpected extra argument"),
    ],
)
def test_bad_usage(command, round_file, arguments, sentence):
    status, out, err = command("run", round_file(), *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert sentence in err


def test_a_suspended_round_does_not_begin(bucket, command, round_file):
    put_updates(bucket)
    status, _, err = command("run", round_file(suspend=True), "--no-wait")
    assert (status, err) == (2, "error: spec.suspend is true, so the round may not begin: set it to false\n")


@pytest.mark.parametrize("name", ["run", "plan", "verify"])
@pytest.mark.parametrize(
    "error", [StoreRefused("The store said no.", "AccessDenied"), StoreUnreachable("Nobody there.")]
)
def test_a_store_that_refuses_or_is_gone(bucket, command, round_file, name, error):
    def refuse(_op, _key):
        raise error

    bucket.store.before = refuse
    status, out, err = command(name, round_file(), "--json")
    assert (status, err.splitlines()[-1]) == (4, f"error: {error}")
    assert json.loads(out) == {"succeeded": False, "reason": type(error).__name__, "message": str(error)}


def test_an_endpoint_of_a_cluster_comes_with_advice(bucket, command, round_file):
    def refuse(_op, _key):
        raise StoreUnreachable("Nobody there.")

    bucket.store.before = refuse
    file = round_file(store={"endpoint": "http://minio.storage.svc.cluster.local:9000"})
    _, _, err = command("plan", file)
    assert "--endpoint http://127.0.0.1:PORT" in err
    _, _, err = command("plan", file, "--endpoint", "http://127.0.0.1:9000")
    assert "--endpoint" not in err


def test_another_endpoint_is_the_same_round(monkeypatch, command, round_file):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    spec = opening.read_round(Path(round_file()))
    updates, output = opening.open_buckets(spec, None, "http://127.0.0.1:1234")
    assert updates is output
    assert updates.origin == "http://127.0.0.1:1234"
    assert spec.store.endpoint == "http://store.test:9000"


def test_without_keys(monkeypatch, command, round_file, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_ACCESS_KEY", "MINIO_ACCESS_KEY", "MINIO_ROOT_USER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    status, _, err = command("run", round_file(), "--profile", "work")
    assert status == 4
    assert "profile 'work'" in err


def test_an_endpoint_where_nobody_listens(monkeypatch, command, round_file):
    monkeypatch.setattr(Patience, "sleep", lambda *_: None)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        status, out, err = command("run", round_file(), "--json", "--endpoint", endpoint)
    assert (status, json.loads(out)["reason"]) == (4, "StoreUnreachable")
    assert "no connection" in err


def test_plan_writes_nothing_and_tells_what_would_be(bucket, command, round_file):
    put_updates(bucket)
    bucket.put(f"{PREFIX}bad.npy", b"no array")
    before = keys_under(bucket, "")
    status, out, _ = command("plan", round_file(), "--json")
    plan = json.loads(out)
    assert (status, plan["succeeded"], plan["reason"]) == (0, True, "Planned")
    assert [row["weight"] for row in plan["updates"]["participants"]] == [10, 11, 12]
    assert [row["key"] for row in plan["updates"]["rejected"]] == [f"{PREFIX}bad.npy"]
    assert plan["bytes_to_read"] == 3 * (3000 * 4 + 10 * 4 + 8)
    assert plan["shards"] == {"total": 2}
    assert 34e6 < plan["function"]["predicted_peak_bytes"] < 128 << 20
    assert not plan["output"]["exists"]
    assert keys_under(bucket, "") == before
    assert bucket.list_uploads(OUTPUT) == []
    command("run", round_file(), "--no-wait")
    assert bucket.stat(OUTPUT).size == plan["output"]["bytes"]
    assert "it exists already" in command("plan", round_file())[1]


def test_plan_without_a_quorum(bucket, command, round_file):
    put_updates(bucket, 2)
    status, out, _ = command("plan", round_file(updates_minCount=3), "--json")
    plan = json.loads(out)
    assert (status, plan["reason"], len(plan["updates"]["participants"])) == (0, "NoQuorumYet", 2)
    assert "2 usable updates of at least 3" in plan["message"]


def test_plan_names_the_surplus(bucket, command, round_file):
    put_updates(bucket, 3)
    plan = json.loads(command("plan", round_file(updates_maxCount=2), "--json")[1])
    assert [row["key"] for row in plan["updates"]["surplus"]] == [f"{PREFIX}2.safetensors"]
    assert plan["message"] == "the round would start at once"


def test_plan_of_nothing_fails(bucket, command, round_file):
    status, out, _ = command("plan", round_file(), "--json")
    assert (status, json.loads(out)["reason"]) == (3, "QuorumNotMet")


def test_collecting_says_what_is_awaited(bucket, command, round_file, monkeypatch):
    put_updates(bucket)
    status, _, err = command("run", round_file(updates_deadlineSeconds=1))
    assert status == 0
    assert "3 of at least 2 updates are there, 1 s are left to collect (Ctrl-C to stop, --no-wait to start now)" in err


def test_a_bug_is_one_sentence_and_with_debug_a_traceback(bucket, command, round_file):
    def break_(_op, _key):
        raise KeyError("\x1b[2J")

    bucket.store.before = break_
    status, out, err = command("plan", round_file(), "--json")
    assert (status, err) == (1, "bug: KeyError, run again with --debug\n")
    assert json.loads(out) == {"succeeded": False, "reason": "InternalError", "message": "KeyError"}
    _, _, err = command("plan", round_file(), "--debug")
    assert "Traceback (most recent call last)" in err
    assert err.splitlines()[-1].startswith("bug: KeyError: ")
    assert "\x1b" not in err


def test_a_failing_platform_shows_no_traceback(bucket, command, round_file, monkeypatch):
    async def invoke(_self, _task, _attempt):
        raise ZeroDivisionError

    monkeypatch.setattr(InlinePlatform, "invoke", invoke)
    put_updates(bucket)
    status, _, err = command("run", round_file(function_backoffLimit=1), "--no-wait")
    assert status == 3
    assert "Traceback" not in err
    assert "error: FunctionFailed: " in err


def test_version(command):
    assert command("--version") == (0, f"gradsharding {__version__}\n", "")


@pytest.mark.parametrize("name", ["run", "plan", "verify", "store", "demo"])
def test_help_teaches(command, name):
    status, out, err = command(name, "--help")
    assert (status, err) == (0, "")
    assert out.count(f"gradsharding {name} ") >= 2 + (name != "demo")
    assert "--json" in out


def test_help_of_the_whole(command):
    status, out, _ = command("--help")
    assert status == 0
    assert not [name for name in ("run", "plan", "verify", "store", "demo", "130", "--debug") if name not in out]
    without_a_command = command()
    assert (without_a_command[0], without_a_command[1].rstrip()) == (2, out.rstrip())


HELP = """
import sys, time
from gradsharding.cli import main
main(["--help"])
heavy = {"numpy", "minio", "urllib3", "yaml", "rich.progress", "kubernetes", "sklearn"} & set(sys.modules)
sys.stderr.write(f"{time.process_time()} {sorted(heavy)}")
"""


def test_help_is_quick():
    """CPU seconds, since a busy machine stretches wall time; the best of three."""
    runs = [subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True) for _ in range(3)]
    seconds, heavy = zip(*(run.stderr.split(" ", 1) for run in runs), strict=True)
    assert set(heavy) == {"[]"}
    assert min(map(float, seconds)) < 0.5


@pytest.mark.parametrize(("package", "extra"), [("typer", "operator"), ("minio", "operator"), ("rich", "operator")])
def test_a_missing_extra_is_named(round_file, package, extra):
    """Of a base install: what a package of that extra would bring cannot be imported."""
    code = f"import sys; sys.modules[{package!r}] = None; from gradsharding.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, "plan", round_file()], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: the package {package} is not installed: pip install 'gradsharding[{extra}]'\n"


def test_a_reader_that_leaves_is_no_error(round_file):
    code = "from gradsharding.cli import main; import sys; sys.exit(main())"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code, "--help"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == ""
