import json
import re

import pytest
from inline_platform import InlinePlatform
from memory_store import MemoryStore
from rounds_kit import manifest

from gradsharding.cli import main, opening
from gradsharding.platforms import local
from gradsharding.rounds import memory, stitch


@pytest.fixture
def bucket(monkeypatch):
    """The store that the commands of this process get, with parts of 4 KiB; reducers run in this process, too."""
    monkeypatch.setattr(memory, "MIN_PART", 4096)
    monkeypatch.setattr(stitch, "ASK_AGAIN_SECONDS", 0.001)
    with MemoryStore(min_part=4096) as store:
        bucket = store.bucket("federation")
        monkeypatch.setattr(opening, "open_buckets", lambda *_: (bucket, bucket))
        monkeypatch.setattr(local, "LocalPlatform", lambda **_: InlinePlatform(store.origin))
        yield bucket


@pytest.fixture
def round_file(tmp_path):
    """Writes a manifest; JSON is YAML."""

    def write(**changes):
        file = tmp_path / "round.yaml"
        file.write_text(json.dumps(manifest(**changes)))
        return str(file)

    return write


@pytest.fixture
def command(capsys):
    """Runs a command in this process: (exit status, stdout, stderr), without colours."""

    def run(*arguments):
        status = main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, re.sub(r"\x1b\[[0-9;]*m", "", captured.err)

    return run
