"""Leaving nothing behind: uploads that nobody will complete, and the scratch of a round."""

from __future__ import annotations

from collections.abc import Iterable

from gradsharding.rounds.keys import Keys
from gradsharding.rounds.plan import Plan
from gradsharding.store import Bucket
from gradsharding_reducer.task import ContractError


def sweep_uploads(bucket: Bucket, keys: Keys) -> None:
    """Abort this round's uploads, and those of exactly this output key that no plan of any round names.

    Uploads are listed before plans: one that is newer than the list of plans is never taken for an orphan.
    """
    open_uploads = bucket.list_uploads(keys.output)
    if not open_uploads:
        return
    others: set[str] = set()
    for info in bucket.list(keys.all_rounds):
        if info.key.endswith("/plan.json") and not info.key.startswith(keys.scratch):
            body = bucket.get(info.key)
            try:
                others.add(Plan.from_json(body).upload if body else "")
            except ContractError:
                return  # a plan of another release: nobody can tell which upload is its own
    for upload in open_uploads:
        if upload not in others:
            bucket.abort_upload(keys.output, upload)


def remove_scratch(bucket: Bucket, keys: Keys, keep: Iterable[str] = ()) -> None:
    """Remove the round's scratch but ``keep``. Outcomes go last: without them a half-removed round would look alive."""
    kept = set(keep)
    found = [info.key for info in bucket.list(keys.scratch) if info.key not in kept]
    for last in (False, True):
        batch = [key for key in found if key.endswith("/outcome.json") is last]
        if batch:
            bucket.delete(batch)
