"""The operator as a process: how it starts, what it says, how it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from loop.kubernetes_mock import LIMIT

HANGING = Path(__file__).with_name("hanging_operator.py")


class Process:
    """One operator; its lines on stderr, as they come."""

    def __init__(self, *command, **environment):
        self.process = subprocess.Popen(
            [sys.executable, "-X", "dev", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONWARNINGS": "error", **environment},
        )
        self.lines = []
        self._come = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            with self._come:
                self.lines.append(line.rstrip())
                self._come.notify_all()

    def wait_for(self, text):
        with self._come:
            assert self._come.wait_for(lambda: any(text in line for line in self.lines), LIMIT), self.lines

    def end(self):
        try:
            return self.process.wait(LIMIT)
        finally:
            self.process.kill()
            self._reader.join()
            self.process.stdout.close()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_the_middle_of_a_pass(world, number):
    world.apply()
    process = Process(str(HANGING), GRADSHARDING_REDUCER_IMAGE="image", GRADSHARDING_PORT=free_port())
    try:
        process.wait_for("hanging in")
        begun = time.monotonic()
        process.process.send_signal(number)
        status = process.process.wait(LIMIT)
        seconds = time.monotonic() - begun
    finally:
        process.end()
    assert status == 0, process.lines
    assert seconds < 8
    logged = [json.loads(line) for line in process.lines if line.startswith("{")]
    assert [line for line in logged if line["severity"] not in ("info", "debug")] == []
    rest = [line for line in process.lines if not line.startswith(("{", "hanging in"))]
    assert rest == []
    assert "finalizers" in world.get()["metadata"], "the round waits for the next operator"


def start(*arguments, **environment):
    process = Process("-m", "gradsharding", "operator", *arguments, **environment)
    return process.end(), process.lines


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({}, "environment variable GRADSHARDING_REDUCER_IMAGE is not set"),
        ({"GRADSHARDING_REDUCER_IMAGE": "i", "GRADSHARDING_PORT": "http"}, "environment variable GRADSHARDING_PORT must be a port"),
        ({"GRADSHARDING_REDUCER_IMAGE": "i", "KUBECONFIG": "/nowhere"}, "no cluster to work in"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(monkeypatch, environment, sentence):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    status, lines = start(**environment)
    assert status == 2
    assert f"error: {sentence}" in " ".join(lines)
    assert not any("Traceback" in line for line in lines)


def test_a_port_that_is_taken(world):
    with socket.socket() as s:
        s.bind(("0.0.0.0", 0))
        s.listen()
        port = str(s.getsockname()[1])
        status, lines = start(GRADSHARDING_REDUCER_IMAGE="image", GRADSHARDING_PORT=port)
    assert status == 2
    assert f"port {port} is not to be had" in " ".join(lines)
