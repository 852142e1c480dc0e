"""Charts are the same bytes for the same numbers, and names are not read as formulas."""

import base64

import pytest

from wsi_mil.report import figures
from wsi_mil.report.benefit import benefits
from wsi_mil.report.evaluate import evaluate
from wsi_mil.report.probability_charts import benefit_chart, reliability_chart
from wsi_mil.report.study import read_study
from wsi_mil.report.subgroup_chart import subgroup_chart
from wsi_mil.report.subgroups import SubgroupFigures

CLASSES = ("normal", "tumour")
LEVEL = {"level": "one", "patients": 9, "by_class": (4, 5), "note": ""}


@pytest.fixture
def methods(make_run):
    run = make_run(patients=20, scores=False, signal=(("a$b_c$", 1.0), ("other", 2.0)))
    return [evaluate(method) for method in read_study(run.path).methods]


def _svg(chart) -> str:
    head, _, body = chart.uri.partition(",")
    assert head == "data:image/svg+xml;base64"
    return base64.b64decode(body).decode()


def _common_charts(methods) -> list[str]:
    level = [
        SubgroupFigures(**LEVEL, method=method.label, auc=method.primary, right=method.pooled) for method in methods
    ]
    charts = (
        figures.forest_chart(methods),
        figures.curves_chart(methods, CLASSES),
        figures.folds_chart(methods),
        benefit_chart(benefits(methods), (0, 1)),
        subgroup_chart("site", [("$one$", level)], auc=(0.8, 0.9), right=(0.8, 0.9)),
    )
    return [_svg(chart) for chart in charts]


def _all_charts(methods) -> list[str]:
    alone = (figures.method_chart(methods[0], 0, CLASSES), reliability_chart(methods[0], 0, CLASSES))
    return [*_common_charts(methods), *map(_svg, alone)]


def test_the_same_numbers_give_the_same_bytes_and_no_date(methods):
    for first, second in zip(_all_charts(methods), _all_charts(methods), strict=True):
        assert first == second
        assert "dc:date" not in first


def test_a_method_keeps_its_colour_in_every_chart(methods):
    for place in (0, 1):
        colour = figures.colour_of(place).lower()
        for chart in _common_charts(methods):
            assert colour in chart.lower()
    for alone in (figures.method_chart(methods[1], 1, CLASSES), reliability_chart(methods[1], 1, CLASSES)):
        assert figures.colour_of(1).lower() in _svg(alone).lower()
        assert figures.colour_of(0).lower() not in _svg(alone).lower()


def test_neighbouring_methods_never_share_colour_and_dash():
    pairs = {(figures.colour_of(place), figures.DASHES[place % len(figures.DASHES)]) for place in range(8)}
    assert len(pairs) == 8
