"""The models of the paper's systems against its table: what agrees shall go on agreeing, with one parameter set."""

import sys
from pathlib import Path

import pytest

from gradsharding.rounds import cost

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """Benchmarks are scripts, and import each other from their own folder."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("baselines", "paper_model")]:
        del sys.modules[name]


def test_no_fewer_rows_agree_than_before():
    from baselines.models import agreement
    from baselines.models.systems import LIMIT_MB

    judged = agreement.judge_all()
    assert len(judged) == 13
    assert [(one.row.model, one.row.shards) for one in judged if not one.agrees] == [("VGG-16", 16)]
    assert all(megabytes > LIMIT_MB for *_, megabytes in agreement.too_large())


def test_the_parameters_are_those_of_the_fit():
    pytest.importorskip("scipy")
    from baselines.models import agreement

    assert agreement.drift(agreement.fit()) < 0.02


def test_our_own_model_uses_the_fitted_ones():
    from baselines.models.systems import FITTED

    assert pytest.approx(FITTED.request, rel=0.02) == cost.REQUEST_SECONDS
    assert pytest.approx(FITTED.spread, rel=0.02) == cost.SPREAD
    assert 0.9 < cost.CONNECTION_RATE / FITTED.read_rate < 1.1


@pytest.mark.parametrize(
    ("system", "shards", "calls", "gets"),
    [("GradsSharding (paper)", 4, 4, 80), ("λ-FL tree", 1, 5, 24), ("LIFL", 1, 11, 30)],
)
def test_calls_and_requests_are_those_that_the_paper_counts(system, shards, calls, gets):
    from baselines.models.systems import levels, predict

    predicted = predict(levels(system, 400, shards), 512)
    assert (predicted.calls, predicted.gets, predicted.puts) == (calls, gets, calls)


def test_one_call_by_hand():
    from baselines.models.systems import Call, Parameters, predict

    parameters = Parameters(start=1, request=0.1, read_rate=50e6, write_rate=25e6, spread=0.5, cpu=1e-9)
    found = predict([[Call(4, 100e6)]], 1769 // 2, parameters)
    share = (1769 // 2) / 1769
    assert found.wall == pytest.approx(1 + 4 * 2.1 + 0.4 / share + 4.1)
    assert found.usd == pytest.approx(
        found.wall * (1769 // 2) / 1024 * 0.0000166667 + 0.0000002 + 4 * 0.0000004 + 0.000005
    )


def test_memory_is_what_the_paper_gives():
    from baselines.models.systems import memory_mb
    from baselines.models.table import COMPARED, MODEL_BYTES

    for row in COMPARED:
        if row.model != "ResNet-18":  # whose functions have 10 MB or 85 MB less, two objects instead of three
            assert memory_mb(MODEL_BYTES[row.model] / row.shards) == row.memory_mb


def test_a_row_that_does_not_agree_has_its_cause():
    from baselines.models import agreement

    for one in agreement.judge_all():
        sentence = agreement.cause(one)
        assert len(sentence) > 80
        assert "nan" not in sentence


def test_the_document_has_what_the_script_prints():
    import paper_model

    text = paper_model.DOCUMENT.read_text(encoding="utf-8")
    assert text.count(paper_model.BEGIN) == text.count(paper_model.END) == 1
    assert paper_model.filled(text) == text
