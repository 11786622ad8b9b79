"""/healthz and /metrics. Healthy means: the event loop turns, and every running round was passed over lately."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from gradsharding.errors import SettingsError

MAX_LAG = 10.0
"""Seconds that the event loop may be late."""
MAX_PASS_AGE = 180.0
"""Seconds that a running round may be without a pass."""


@dataclass(slots=True)
class Health:
    """``unattended`` gives the most seconds that any running round is without a pass."""

    unattended: Callable[[], float]
    lag: float = 0.0

    async def watch(self) -> None:
        """Measure how late the event loop is, for ever."""
        while True:
            begun = time.monotonic()
            await asyncio.sleep(1.0)
            self.lag = time.monotonic() - begun - 1.0

    def problem(self) -> str:
        """Why the operator should be restarted; empty when it is well."""
        if self.lag > MAX_LAG:
            return f"the event loop is {self.lag:.0f} s late"
        seconds = self.unattended()
        if seconds > MAX_PASS_AGE:
            return f"a running round was not looked at for {seconds:.0f} s"
        return ""


async def serve(port: int, health: Health, registry: CollectorRegistry) -> web.AppRunner:
    """Start the server; ``cleanup()`` of the runner stops it. Raises SettingsError when the port is not to be had."""

    async def healthz(_: web.Request) -> web.Response:
        problem = health.problem()
        return web.Response(text=problem or "ok", status=503 if problem else 200)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "0.0.0.0", port).start()  # noqa: S104 - the kubelet and Prometheus come from outside of the pod
    except OSError as error:
        await runner.cleanup()
        why = error.strerror or "it cannot be opened"
        raise SettingsError(f"environment variable GRADSHARDING_PORT: port {port} is not to be had: {why}") from None
    return runner
