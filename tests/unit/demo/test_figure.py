"""The picture."""

import pytest

from gradsharding.demo.federation import Accuracies
from gradsharding.demo.figure import apart, draw


def test_picture_is_a_png(tmp_path):
    draw(tmp_path / "accuracy.png", [Accuracies(0.5, 0.3, 0.9), Accuracies(0.89, 0.35, 0.9)], 10, 300, 1437)
    body = (tmp_path / "accuracy.png").read_bytes()
    assert body.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(body) > 10_000


@pytest.mark.parametrize(
    ("values", "places"),
    [
        ([0.2, 0.9], [0.2, 0.9]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.52, 0.5, 0.54], [0.52, 0.42, 0.62]),
        ([0.9, 0.1, 0.9], [0.85, 0.1, 0.95]),
    ],
)
def test_labels_do_not_overlap(values, places):
    assert apart(values, 0.1) == pytest.approx(places)
