"""Every trigger of the operator, on one page."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import aiohttp
import kopf

from gradsharding.kube import handlers
from gradsharding.kube.api import GROUP, PLURAL, VERSION, connect
from gradsharding.kube.operator import Operator
from gradsharding.kube.settings import Settings
from gradsharding.kube.status import is_terminal

ROUNDS = (GROUP, VERSION, PLURAL)
FINALIZER = f"{GROUP}/cleanup"


def is_running(status: kopf.Status, **_: Any) -> bool:
    """Finished rounds carry no finalizer and cost no passes."""
    return not is_terminal(status)


def is_over(type: str | None, status: kopf.Status, **_: Any) -> bool:  # noqa: A002 - Kopf's name
    """Nothing is to be done for this round any more."""
    return type == "DELETED" or is_terminal(status)


def log_in(**kwargs: Any) -> kopf.ConnectionInfo | None:
    """The pod's service account, or KUBECONFIG."""
    return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)


def registry() -> kopf.OperatorRegistry:
    """The handlers, in a registry of their own: an import changes nothing."""
    made = kopf.OperatorRegistry()
    kopf.on.login(registry=made)(log_in)
    # Without cancellation_timeout a deletion would wait for a daemon that is in the middle of a pass.
    kopf.daemon(*ROUNDS, registry=made, id="round", when=is_running, cancellation_timeout=1.0)(handlers.run_round)
    # The filter takes part in the decision about the finalizer: a deletion while the operator is down waits for it.
    kopf.on.delete(*ROUNDS, registry=made, id="deletion", when=is_running, timeout=60)(handlers.clean_up)
    # Ended by another operator, or gone without a deletion that waited for us: none of the two above is told.
    kopf.on.event(*ROUNDS, registry=made, id="let-go", when=is_over)(handlers.let_go)
    kopf.on.cleanup(registry=made)(handlers.hang_up)
    return made


class NoDiffBase(kopf.DiffBaseStorage):
    """Kopf keeps no copy of a round in its annotations: nothing here asks what has changed since."""

    def fetch(self, **_: Any) -> None:
        """There is none."""

    def store(self, **_: Any) -> None:
        """None is kept."""


def operator_settings() -> kopf.OperatorSettings:
    """Kopf's settings: our own names from the first release on, and watches that cannot go silent."""
    settings = kopf.OperatorSettings()
    settings.persistence.finalizer = FINALIZER
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.posting.level = logging.WARNING
    settings.posting.loggers = False
    settings.posting.reporting_component = "gradsharding"
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.networking.request_timeout = 30
    settings.peering.standalone = True
    settings.scanning.disabled = True
    return settings


def run_until_signal(settings: Settings, namespaces: Sequence[str] | None) -> None:
    """The whole process: Kopf stops on SIGTERM and SIGINT by itself. Raises SettingsError when it cannot begin."""
    asyncio.run(run(settings, namespaces))


async def run(
    settings: Settings,
    namespaces: Sequence[str] | None,
    stop_flag: Any = None,
    ready_flag: Any = None,
    make: Callable[..., Operator] = Operator,
) -> None:
    """Run the operator until it is told to stop. ``namespaces`` None: the whole cluster.

    ``stop_flag`` and ``ready_flag`` are events of asyncio or threading; ``make`` is called as Operator is.
    """
    watched = None if namespaces is None else tuple(namespaces)
    operator = make(settings, watched, await connect(), aiohttp.ClientSession(auto_decompress=True))
    try:
        await operator.begin()
        await kopf.operator(
            registry=registry(),
            settings=operator_settings(),
            memo=kopf.Memo(operator=operator),
            # Kopf's own guess asks for the user's name, which a container's number has not.
            identity=cast(Any, f"gradsharding-{os.getpid()}"),
            standalone=True,
            clusterwide=watched is None,
            namespaces=watched or (),
            stop_flag=stop_flag,
            ready_flag=ready_flag,
        )
    finally:
        await operator.close()
