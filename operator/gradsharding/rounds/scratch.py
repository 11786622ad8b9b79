"""A round's scratch as the store has it: plans, outcomes, records. What cannot change any more is read once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gradsharding.errors import StoreUnreachable
from gradsharding.rounds.keys import Keys
from gradsharding.rounds.outcome import Decision
from gradsharding.rounds.plan import Plan
from gradsharding.store import Bucket, ObjectInfo
from gradsharding_reducer.task import ContractError, ReduceResult


@dataclass(frozen=True, slots=True)
class Listing:
    """One listing of a round's scratch."""

    objects: Mapping[str, ObjectInfo]
    revisions: tuple[int, ...]
    """Every revision that has any object, ascending."""
    planned: tuple[int, ...]
    """Those that have a plan."""

    @property
    def top(self) -> int:
        """The highest revision; 0 when there is none."""
        return self.revisions[-1] if self.revisions else 0


class Scratch:
    """Reads and writes under one round's prefix. Plans and outcomes are written once, so they are kept; records are kept by ETag."""

    def __init__(self, bucket: Bucket, keys: Keys) -> None:
        self.bucket = bucket
        self.keys = keys
        self._plans: dict[int, tuple[Plan, str]] = {}
        self._outcomes: dict[int, Decision] = {}
        self._records: dict[str, tuple[str, ReduceResult | None]] = {}
        self._headers: set[str] = set()

    def look(self) -> Listing:
        """List the scratch, and forget what is kept of plans and outcomes that are gone."""
        objects = {info.key: info for info in self.bucket.list(self.keys.scratch)}
        revisions = sorted({r for key in objects if (r := self.keys.revision_of(key)) is not None})
        self._plans = {r: plan for r, plan in self._plans.items() if self.keys.plan(r) in objects}
        self._outcomes = {r: decision for r, decision in self._outcomes.items() if self.keys.outcome(r) in objects}
        return Listing(objects, tuple(revisions), tuple(r for r in revisions if self.keys.plan(r) in objects))

    def plan(self, revision: int) -> tuple[Plan, str] | None:
        """The stored plan and its digest. Raises ContractError for one of another release."""
        if revision not in self._plans:
            body = self.bucket.get(self.keys.plan(revision))
            if body is None:
                return None
            plan = Plan.from_json(body)
            self._plans[revision] = plan, plan.digest
        return self._plans[revision]

    def outcome(self, listing: Listing, revision: int) -> Decision | None:
        """What was decided on a revision, if anything."""
        key = self.keys.outcome(revision)
        if revision not in self._outcomes and key in listing.objects:
            body = self.bucket.get(key)
            if body is not None:
                self._outcomes[revision] = Decision.from_json(body)
        return self._outcomes.get(revision)

    def document(self, key: str) -> dict[str, Any] | None:
        """A JSON object of ours; None when it is missing or none of ours."""
        body = self.bucket.get(key)
        try:
            document = json.loads(body) if body is not None else None
        except (ValueError, RecursionError):
            return None
        return document if isinstance(document, dict) else None

    def records(self, listing: Listing, revision: int) -> list[ReduceResult]:
        """The readable records of a revision, of whichever plan. One that cannot be read counts as missing: its shard runs again."""
        prefix = self.keys.records(revision)
        records = []
        for key, info in listing.objects.items():
            if not key.startswith(prefix):
                continue
            if self._records.get(key, ("", None))[0] != info.etag:
                body = self.bucket.get(key)
                self._records[key] = (info.etag, _record(body))
            record = self._records[key][1]
            if record is not None:
                records.append(record)
        return records

    def put_plan(self, plan: Plan) -> None:
        """Propose a plan. The stored bytes are the plan, whoever wrote them; an upload of ours that they do not name is aborted."""
        body = plan.to_json()
        with suppress(StoreUnreachable):  # the answer is lost, not the plan: reading it back tells
            self.bucket.put_new(self.keys.plan(plan.revision), body)
        stored = self.bucket.get(self.keys.plan(plan.revision))
        if stored == body:
            return
        try:
            winner = Plan.from_json(stored).upload if stored is not None else ""
        except ContractError:
            winner = ""
        if winner != plan.upload:
            self.bucket.abort_upload(self.keys.output, plan.upload)

    def put_header(self, listing: Listing, plan: Plan, digest: str) -> None:
        """Write the header that part 1 begins with, if it is not there."""
        key = self.keys.header(plan.revision)
        if digest not in self._headers and key not in listing.objects:
            self.bucket.put(key, plan.header())
        self._headers.add(digest)

    def decide(self, decision: Decision, people: Mapping[str, Any]) -> None:
        """Propose an outcome; whoever is first decides, and the next pass reads what was decided."""
        self.bucket.put_new(self.keys.outcome(decision.revision), decision.to_json(people))


def _record(body: bytes | None) -> ReduceResult | None:
    try:
        return ReduceResult.from_json(body) if body is not None else None
    except ContractError:
        return None
