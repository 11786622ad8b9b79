"""Logs: JSON lines with the round in each, or plain ones for people."""

from __future__ import annotations

import logging

import kopf


class _WithoutPasses(logging.Filter):
    """A pass ends in a TemporaryError, which is how Kopf is told to call again: no news, and many a second."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "failed temporarily: n" not in text


def configure(*, as_json: bool) -> None:
    """Set the root logger up, once for the process."""
    kopf.configure(log_format=kopf.LogFormat.JSON if as_json else kopf.LogFormat.FULL)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_WithoutPasses())
    logging.getLogger("gradsharding").setLevel(logging.INFO)
    for chatty in ("kopf.activities", "kopf._core", "asyncio", "aiohttp"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
