"""Where a round keeps what: the keys of everything beside its output. Scratch lives under ``<output key>.round/<uid>/``."""

from __future__ import annotations

import re
from dataclasses import dataclass

SCRATCH_SUFFIX = ".round/"
MANIFEST_SUFFIX = ".manifest.json"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of the round ``uid`` that writes ``output``."""

    output: str
    uid: str

    @property
    def manifest(self) -> str:
        """The commit record, beside the output."""
        return self.output + MANIFEST_SUFFIX

    @property
    def all_rounds(self) -> str:
        """Prefix of the scratch of every round that writes this output."""
        return self.output + SCRATCH_SUFFIX

    @property
    def scratch(self) -> str:
        """Prefix of this round's scratch."""
        return f"{self.all_rounds}{self.uid}/"

    def plan(self, revision: int) -> str:
        """The plan of one revision."""
        return f"{self.scratch}{revision}/plan.json"

    def header(self, revision: int) -> str:
        """What the output begins with."""
        return f"{self.scratch}{revision}/header"

    def outcome(self, revision: int) -> str:
        """What becomes of one revision."""
        return f"{self.scratch}{revision}/outcome.json"

    def records(self, revision: int) -> str:
        """Prefix of the records of one revision."""
        return f"{self.scratch}{revision}/shards/"

    def record(self, revision: int, shard: int, first_part: int) -> str:
        """The record of an invocation for ``shard`` whose first part is ``first_part``."""
        return f"{self.records(revision)}{shard}/{first_part}.json"

    def revision_of(self, key: str) -> int | None:
        """The revision that a scratch key of this round belongs to; None for a key that is none of ours."""
        match = re.match(r"([1-9][0-9]{0,8})/", key[len(self.scratch) :]) if key.startswith(self.scratch) else None
        return int(match.group(1)) if match else None
