"""Charts are the same bytes for the same numbers, and names are not read as formulas."""

import base64

import pytest

from wsi_mil.report import figures
from wsi_mil.report.evaluate import evaluate
from wsi_mil.report.study import read_study


@pytest.fixture
def methods(make_run):
    run = make_run(patients=20, scores=False, signal=(("a$b_c$", 1.0), ("other", 2.0)))
    return [evaluate(method) for method in read_study(run.path).methods]


def _svg(chart) -> str:
    head, _, body = chart.uri.partition(",")
    assert head == "data:image/svg+xml;base64"
    return base64.b64decode(body).decode()


def test_the_same_numbers_give_the_same_bytes_and_no_date(methods):
    for draw in (figures.forest_chart, figures.curves_chart, figures.folds_chart):
        first, second = _svg(draw(methods)), _svg(draw(methods))
        assert first == second
        assert "dc:date" not in first
    assert figures.method_chart(methods[0], 0).uri == figures.method_chart(methods[0], 0).uri


def test_a_method_keeps_its_colour_in_every_chart(methods):
    for place in (0, 1):
        colour = figures.colour_of(place).lower()
        for chart in (figures.forest_chart(methods), figures.curves_chart(methods), figures.folds_chart(methods)):
            assert colour in _svg(chart).lower()
    alone = _svg(figures.method_chart(methods[1], 1)).lower()
    assert figures.colour_of(1).lower() in alone
    assert figures.colour_of(0).lower() not in alone


def test_neighbouring_methods_never_share_colour_and_dash():
    pairs = {(figures.colour_of(place), figures.DASHES[place % len(figures.DASHES)]) for place in range(8)}
    assert len(pairs) == 8
