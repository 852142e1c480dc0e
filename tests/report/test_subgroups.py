"""Groups are the levels of a column, counted by patients, each with the figures of its own patients."""

import numpy as np
import pandas as pd
import pytest

from wsi_mil.report.evaluate import evaluate
from wsi_mil.report.study import read_study
from wsi_mil.report.subgroups import SEVERAL, UNKNOWN, levels_of, subgroups

VALUES = (
    ("sex", ("f", "m")),
    ("batch", tuple("ABCDEFGHIJK")),
    ("hospital", ("one",)),
    ("blank", ("x", "")),
    ("diagnosis", ("normal", "tumour")),
)


@pytest.fixture
def study(make_run):
    return read_study(make_run(patients=120, values=VALUES, scores=False, signal=(("acmil", 1.0),)).path)


def test_columns_of_two_to_ten_levels_are_groups_and_the_target_is_none(study):
    found = subgroups(study, [evaluate(method) for method in study.methods])
    assert [column.name for column in found] == ["site", "sex"]


def test_a_group_has_the_figures_of_its_own_patients(study):
    figures = evaluate(study.methods[0])
    sex = subgroups(study, [figures])[1]
    levels = levels_of(study.used, "value:sex")
    frame = study.run.predictions()
    for one in sex.figures:
        own = frame[[levels[patient] == one.level for patient in frame["patient"]]]
        won = pairs = 0
        for _, rows in own.groupby("fold"):
            up, down = (rows["prob_tumour"][rows["target"] == name].to_numpy() for name in ("tumour", "normal"))
            won, pairs = won + (up[:, None] > down).sum(), pairs + len(up) * len(down)
        assert one.auc.value == pytest.approx(won / pairs)
        assert one.auc.interval.low < one.auc.value < one.auc.interval.high
        members = [levels[patient] == one.level for patient in figures.patients.ids]
        right = (figures.patients.decisions == figures.patients.targets)[members]
        assert (one.right.value, one.patients) == (pytest.approx(right.mean()), sum(members))
        assert sum(one.by_class) == one.patients
    assert sum(one.patients for one in sex.figures) == 120


def test_a_small_group_has_counts_and_no_auc(make_run):
    study = read_study(make_run(patients=40, scores=False).path)
    site, *_ = subgroups(study, [evaluate(method) for method in study.methods])
    assert all(np.isnan(one.auc.value) and "too few" in one.note for one in site.figures)
    assert all(one.right.interval.low < one.right.value <= 1 for one in site.figures)
    assert {one.patients for one in site.figures} == {8}


def test_a_patient_whose_slides_differ_is_a_group_of_its_own_and_an_empty_cell_says_so():
    used = pd.DataFrame({"patient": ["p", "p", "q", "r"], "value:x": ["a", "b", "a", ""]})
    assert levels_of(used, "value:x") == {"p": SEVERAL, "q": "a", "r": UNKNOWN}
