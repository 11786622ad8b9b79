"""The HTTP entrance as a process: one shard at a time, health, limits, hang-ups, SIGTERM."""

import contextlib
import gzip
import http.client
import json
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from unit.reducer.object_server import ObjectServer, error
from unit.reducer.processes import post, serving
from unit.reducer.shards import make_shard

from gradsharding_reducer import serve
from gradsharding_reducer.task import Outcome, ReduceResult


@pytest.fixture
def server():
    with ObjectServer() as server:
        yield server


@pytest.fixture
def shard(server):
    return make_shard(server, [("F32", 50_000)], [1, 2], part_bytes=150_000)


class Gate:
    """Holds the first read of source 1 until opened."""

    def __init__(self, server):
        self.reached, self._open = threading.Event(), threading.Event()
        server.faults = lambda method, path, nth: self._hold if (path, nth) == ("update-1", 1) else None

    def _hold(self, handler):
        self.reached.set()
        self._open.wait()
        error(handler, 503, "SlowDown")  # the reducer asks again

    def open(self):
        self._open.set()


def healthz(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", "/healthz")
        return connection.getresponse().status


def in_background(call):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()

    def wait():
        thread.join(30)
        return answers[0]

    return wait


def send(port, document):
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(document) + document)
    return connection


def test_tasks_are_answered_one_after_another_on_one_connection(server, shard):
    document = shard.task.to_json()
    with serving(server) as (_, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        with contextlib.closing(connection):
            for body, headers in (
                (document, {}),
                (gzip.compress(document), {}),
                (gzip.compress(document), {"Content-Encoding": "gzip"}),
            ):
                connection.request("POST", "/", body, headers)
                response = connection.getresponse()
                assert response.status == 200
                assert response.headers["Content-Type"] == "application/json"
                assert ReduceResult.from_json(response.read()).outcome is Outcome.DONE
    assert server.objects["part-1"] + server.objects["part-2"] == shard.header + shard.expected


def test_it_stays_healthy_and_refuses_a_second_shard_while_one_runs(server, shard):
    gate = Gate(server)
    with serving(server) as (_, port):
        first = in_background(lambda: post(port, shard.task.to_json()))
        assert gate.reached.wait(30)
        assert healthz(port) == 200
        status, answer, headers = post(port, shard.task.to_json())
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "busy" in answer["error"]
        gate.open()
        assert first()[0] == 200
        assert post(port, shard.task.to_json())[0] == 200


@pytest.mark.parametrize(
    ("body", "headers", "status", "sentence"),
    [
        (b"{}", {}, 400, "task.version is missing"),
        (b"nonsense", {}, 400, "task is not JSON"),
        (b"nonsense", {"Content-Encoding": "gzip"}, 400, "not valid gzip"),
        (gzip.compress(b" " * (17 << 20)), {}, 413, "16 MiB unpacked"),
        (b"", {"Content-Length": str(6 << 20)}, 413, "5 MiB as sent"),
        (b"", {"Content-Length": "9" * 30}, 413, "5 MiB as sent"),
        (b"", {"Content-Length": "-1"}, 411, "Content-Length"),
        (b"", {"Transfer-Encoding": "chunked"}, 411, "Content-Length"),
    ],
    ids=["empty", "no JSON", "no gzip", "bomb", "long", "absurdly long", "negative", "chunked"],  # gzip writes the time
)
def test_what_it_does_not_take_is_answered_with_a_sentence(server, body, headers, status, sentence):
    with serving(server) as (_, port):
        answer = post(port, body, headers=headers)
        assert answer[0] == status
        assert sentence in answer[1]["error"]
        assert healthz(port) == 200
        assert post(port, b"{}", path="/elsewhere")[0] == 404


def test_a_failure_is_500_and_a_sentence_and_no_url_is_logged(server, shard):
    server.faults = lambda method, path, nth: (
        (lambda handler: error(handler, 416, "InvalidRange")) if path == "update-1" else None
    )
    with serving(server) as (process, port):
        status, answer, _ = post(port, shard.task.to_json())
        assert status == 500
        assert answer == {"error": "reading source 1: the store refused with 416 InvalidRange"}
        process.terminate()
        log = process.stderr.read().decode()
        assert process.wait(30) == 0
    assert [json.loads(line)["error"] for line in log.splitlines()] == [answer["error"]]


def test_a_caller_that_hangs_up_frees_it(server, shard):
    gate = Gate(server)
    with serving(server) as (_, port):
        caller = send(port, shard.task.to_json())
        assert gate.reached.wait(30)
        caller.close()
        while (answer := post(port, shard.task.to_json()))[0] == 503:
            time.sleep(0.01)
        assert answer[0] == 200
        assert server.count("PUT", "record") == 1  # the second's
        gate.open()


def test_sigterm_finishes_the_running_shard(server, shard):
    gate = Gate(server)
    with serving(server) as (process, port):
        first = in_background(lambda: post(port, shard.task.to_json()))
        assert gate.reached.wait(30)
        process.send_signal(signal.SIGTERM)
        second = post(port, shard.task.to_json())
        assert (second[0], healthz(port)) == (503, 200)
        assert process.poll() is None
        gate.open()
        status, answer, _ = first()
        assert (status, answer["outcome"]) == (200, "Done")
        assert process.wait(30) == 0


def test_an_idle_server_ends_on_sigterm(server):
    with serving(server) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_port_that_is_taken_is_one_sentence(server):
    with serving(server) as (_, port):
        again = serving(server, PORT=str(port))
        with pytest.raises(KeyError), again:  # it says "error" where it would say "listening"
            pass


def test_idle_connections_outlive_those_of_the_queue_proxy():
    assert serve._Handler.timeout > 90


def test_memory_is_given_back_between_shards(server):
    """Peaks are of each invocation alone, and the process shrinks afterwards."""
    small = make_shard(server, [("F32", 50_000)], [1], part_bytes=150_000)
    big = [("F32", 8_000_000)]
    with serving(server) as (process, port):

        def rss():
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) * 1024

        post(port, small.task.to_json())
        idle = rss()
        shard = make_shard(server, big, [1, 1], part_bytes=16 << 20, range_bytes=8 << 20)
        peaks = [post(port, shard.task.to_json())[1]["peak_rss_bytes"] for _ in range(3)]
        assert rss() < idle + 12e6
        assert max(peaks) - min(peaks) < 8e6
        small = make_shard(server, [("F32", 50_000)], [1], part_bytes=150_000)
        assert post(port, small.task.to_json())[1]["peak_rss_bytes"] < min(peaks) - 20e6
