"""The demo from end to end, with a small network and a small crowd, on a real store with real reducers."""

import json
import subprocess

import pytest

from gradsharding.cli import demo_show
from gradsharding.cli.answering import Interrupts
from gradsharding.cli.demo_show import Show, accuracy_table, folder
from gradsharding.demo.averaging import Ran
from gradsharding.demo.federation import Accuracies, FederatedRound, Setting
from gradsharding.demo.large import Crowd
from gradsharding.errors import StoreRefused

TINY = Setting(rounds=2, clients=3, shape=(64, 32, 16, 10))


def servers_in(directory):
    """Command lines of processes that name this directory."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if str(directory) in line]


@pytest.mark.slow
def test_demo_from_end_to_end(tmp_path, capsys):
    Show(Interrupts(), as_json=True).everything(TINY, Crowd(2, 64, seed=1), tmp_path)
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert [each["number"] for each in result["rounds"]] == [1, 2]
    assert result["rounds"][0]["ran"]["shards"] == 1
    assert (result["large"]["shards"], result["large"]["bytes_read"]) == (4, 2 * 64 << 20)
    assert 0 < result["large"]["peak_bytes"] < 128 << 20
    assert "bits verified" in err
    assert max(map(len, err.splitlines())) <= 80 + len(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["accuracy.png"]
    assert servers_in(tmp_path) == []


@pytest.mark.slow
def test_failure_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("in the middle")

    monkeypatch.setattr(demo_show, "run_round", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        Show(Interrupts(), as_json=False).everything(TINY, Crowd(2, 64, seed=1), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert servers_in(tmp_path) == []


def test_short_disk_is_said_before_anything_starts(tmp_path):
    with pytest.raises(StoreRefused, match="--output"):
        folder(tmp_path / "new", 1 << 60)


def test_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreRefused, match="another folder with --output"):
        folder(tmp_path / "file", 0)


def test_table_of_many_rounds_shows_first_and_last():
    ran = Ran(1, 1, "none", 1, 1, 1.0)
    rounds = [FederatedRound(n, ran, 1.0, Accuracies(n / 100, 0.1, 0.9)) for n in range(1, 38)]
    for count in (1, 2, 10, 11, 37):
        header, _, federated, _ = accuracy_table(rounds[:count], "alone")
        numbers = header.removeprefix("accuracy in %, round").split()
        assert (numbers[0], numbers[-1], len(set(numbers))) == ("1", str(count), min(count, 10))
        assert federated.split()[-1] == f"{count:.1f}"
