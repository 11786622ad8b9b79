import io
import json
import logging

import pytest

from gradsharding.kube.logs import NextPass, configure


@pytest.fixture
def logged():
    """All lines so far, read. The loggers are as before after the test."""
    root, quiet = logging.getLogger(), logging.getLogger("asyncio")
    handlers, quiet_handlers, propagate = list(root.handlers), list(quiet.handlers), quiet.propagate
    levels = {logger: logger.level for logger in [root, *map(logging.getLogger, list(root.manager.loggerDict))]}
    configure(as_json=True)
    (ours,) = (handler for handler in root.handlers if handler not in handlers)
    ours.setStream(io.StringIO())
    yield lambda: [json.loads(line) for line in ours.stream.getvalue().splitlines()]
    root.removeHandler(ours)
    quiet.handlers[:], quiet.propagate = quiet_handlers, propagate
    for logger, level in levels.items():
        logger.setLevel(level)


def test_passes_make_no_noise(logged):
    log = logging.getLogger("kopf.objects")
    log.error(f"Daemon 'round' failed temporarily: {NextPass(0.0)}")
    log.warning("Daemon 'round' is cancelled. Will escalate.")
    log.info("Handler 'let-go' succeeded.")
    log.error("Daemon 'round' failed temporarily: no such thing")
    assert [line["message"] for line in logged()] == ["Daemon 'round' failed temporarily: no such thing"]


def test_lines_carry_round_and_shard(logged):
    extra = {"namespace": "federation", "round": "digits-7", "shard": 3}
    logging.getLogger("gradsharding.kube.operator").info("shard %d: Done", 3, extra=extra)
    (line,) = logged()
    assert line["message"] == "shard 3: Done"
    assert {key: line[key] for key in extra} == extra
