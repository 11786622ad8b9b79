"""One round on one platform, by this process alone."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from gradsharding.errors import ManifestError
from gradsharding.probe import probe_conditional_put
from gradsharding.rounds.advance import Round
from gradsharding.rounds.drive import Watch, drive
from gradsharding.rounds.spec import RoundSpec, cli_uid

if TYPE_CHECKING:
    from gradsharding.platforms import Platform
    from gradsharding.rounds.step import Finished
    from gradsharding.store import Bucket


async def run_round(
    spec: RoundSpec,
    updates: Bucket,
    output: Bucket,
    platform: Platform,
    wait: bool,
    watch: Watch,
    ca_pem: str | None = None,
) -> Finished:
    """Begin or continue the round, to its end. Raises StoreError, ManifestError, RoundFailed without a usable platform.

    Cancelling leaves it in the store as it is.
    """
    if spec.suspend:
        raise ManifestError("spec.suspend is true, so the round may not begin: set it to false")
    round_ = Round(
        spec, cli_uid(spec), updates, output,
        started=time.time(), wait=wait, rerun=True, check_store=probe_conditional_put,
    )  # fmt: skip
    await asyncio.to_thread(round_.begin_anew)
    return await drive(round_, platform, watch, ca_pem=ca_pem)
