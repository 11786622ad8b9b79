import gc

import pytest
from loop.operators import MIN_PART, World

from gradsharding.kube import driver, handlers, main, status
from gradsharding.rounds import advance, memory, revise, stitch


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Small parts, and the operator's pauses in milliseconds."""
    monkeypatch.setattr(memory, "MIN_PART", MIN_PART)
    monkeypatch.setattr(stitch, "ASK_AGAIN_SECONDS", 0.001)
    monkeypatch.setattr(advance, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(revise, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(driver, "TROUBLE_SECONDS", 0.05)
    monkeypatch.setattr(driver, "probe_conditional_put", lambda bucket, prefix: None)
    monkeypatch.setattr(driver, "resolve_host", lambda host: [])
    monkeypatch.setattr(handlers, "WRITE_AGAIN", 0.05)
    monkeypatch.setattr(handlers, "MAX_WAIT", 0.1)
    kopf_settings = main.operator_settings

    def impatient():
        settings = kopf_settings()
        settings.queueing.exit_timeout = 0.5
        return settings

    monkeypatch.setattr(main, "operator_settings", impatient)


@pytest.fixture
def eager(monkeypatch):
    """Counters and messages are written at once."""
    monkeypatch.setattr(status, "COUNTERS_EVERY", 0.0)


@pytest.fixture
def world(monkeypatch, tmp_path):
    world = World(monkeypatch, tmp_path)
    yield world
    world.close()
    if world.untidy:  # asyncio complains of dead tasks when they are collected: here, not in the middle of another test
        gc.collect()
