import asyncio
import socket
import time

import aiohttp
import pytest

from gradsharding.errors import SettingsError
from gradsharding.kube.metrics import Metrics
from gradsharding.kube.server import MAX_LAG, MAX_PASS_AGE, Health, serve


async def ask(health, path):
    metrics = Metrics()
    runner = await serve(0, health, metrics.registry)
    try:
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
            return answer.status, await answer.text(), answer.headers["Content-Type"]
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("seconds", [0.0, MAX_PASS_AGE - 1])
def test_well(seconds):
    assert asyncio.run(ask(Health(lambda: seconds), "/healthz"))[:2] == (200, "ok")


def test_a_round_that_nobody_looks_at():
    status, text, _ = asyncio.run(ask(Health(lambda: MAX_PASS_AGE + 20), "/healthz"))
    assert (status, text) == (503, "a running round was not looked at for 200 s")


def test_a_loop_that_lags():
    status, text, _ = asyncio.run(ask(Health(lambda: 0.0, lag=MAX_LAG + 2), "/healthz"))
    assert (status, text) == (503, "the event loop is 12 s late")


def test_the_lag_is_measured(monkeypatch):
    async def lag():
        health = Health(lambda: 0.0)
        watching = asyncio.create_task(health.watch())
        await asyncio.sleep(0)
        time.sleep(1.3)  # noqa: ASYNC251 - it blocks the loop
        while health.lag == 0.0:
            await asyncio.sleep(0.01)
        watching.cancel()
        return health.lag

    assert 0.2 < asyncio.run(lag()) < 5


def test_metrics():
    status, text, kind = asyncio.run(ask(Health(lambda: 0.0), "/metrics"))
    assert status == 200
    assert kind.startswith("text/plain")
    assert "gradsharding_rounds_running 0.0" in text


def test_a_port_that_is_taken():
    with socket.socket() as s:
        s.bind(("0.0.0.0", 0))
        s.listen()
        port = s.getsockname()[1]
        with pytest.raises(SettingsError, match=f"GRADSHARDING_PORT: port {port} is not to be had"):
            asyncio.run(serve(port, Health(lambda: 0.0), Metrics().registry))
