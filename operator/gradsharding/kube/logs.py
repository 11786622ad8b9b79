"""Logs: JSON lines with the round in each, or plain ones for people."""

from __future__ import annotations

import logging

import kopf


class NextPass(kopf.TemporaryError):
    """How a pass asks Kopf to write its status and to call again after ``delay`` seconds: no error, and many a second."""

    MARK = "(the next pass is due)"

    def __init__(self, delay: float) -> None:
        super().__init__(self.MARK, delay=delay)


class _WithoutPasses(logging.Filter):
    """Kopf logs each pass that ends in NextPass as an error, and each daemon that it stops as a warning."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not text.endswith((NextPass.MARK, "is cancelled. Will escalate."))


def configure(*, as_json: bool) -> None:
    """Set the root logger up, once for the process."""
    kopf.configure(log_format=kopf.LogFormat.JSON if as_json else kopf.LogFormat.FULL)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_WithoutPasses())
    logging.getLogger("gradsharding").setLevel(logging.INFO)
    for chatty in ("kopf.activities", "kopf._core", "kopf.objects", "asyncio", "aiohttp"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
