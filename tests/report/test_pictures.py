"""Pictures of the worst cases: none without a slide, and one that fails costs only itself."""

import dataclasses

import pandas as pd
import pytest

from wsi_mil.heatmap import ScoreColumn
from wsi_mil.report import pictures
from wsi_mil.report.case_notes import pictures_note
from wsi_mil.report.evaluate import evaluate
from wsi_mil.report.pictures import worst_cases
from wsi_mil.report.study import read_study
from wsi_mil.stages.report import report

ONE = {"patients": 12, "n_folds": 3, "signal": (("acmil", 1.0),)}


def _rewrite(run, change):
    for key in run.keys("acmil"):
        for path in run.scores_path("acmil", key, "x").parent.glob("*.h5"):
            run.write_scores("acmil", key, change(run.scores("acmil", key, path.stem)))


def _in_a_row(scores):
    """Three instances that never were tiles."""
    geometry = dataclasses.replace(
        scores.geometry,
        level0_size=(3, 1),
        tile_size_l0=(1, 1),
        stride_l0=(1, 1),
        bounds_l0=(0, 0, 3, 1),
    )
    grid = scores.grid_xy[:3]
    return dataclasses.replace(scores, geometry=geometry, coords_l0=grid, grid_xy=grid, values=scores.values[:3])


def test_bags_that_are_no_slides_have_a_report_without_pictures(make_run):
    run = make_run(**ONE)
    _rewrite(run, _in_a_row)
    cohort = pd.read_csv(run.cohort_path, dtype=str, keep_default_na=False)
    cohort.assign(path="", annotation="").to_csv(run.cohort_path, index=False)
    summary = report(run.path)
    assert summary.failures == ()
    page = run.report_path.read_text()
    assert "No picture is shown: the bags of these patients were not made from slides" in page
    assert "data:image/jpeg" not in page


def test_a_picture_that_fails_costs_only_itself(make_run, monkeypatch):
    study = read_study(make_run(**ONE).path)
    monkeypatch.setattr(pictures, "rasterise", lambda *_: [][-1])
    cases, failures = worst_cases(study, evaluate(study.methods[0]), slides_root=None)
    shown = [case.picture for case in cases if case.picture]
    assert [one.outcome for one in failures] == ["no heat map"] * len(shown)
    assert shown
    assert all(one.heatmap == "" and "they cannot be drawn" in one.remark for one in shown)


@pytest.mark.parametrize("classes", [("normal", "tumour"), ("ki67",)])
def test_a_caption_speaks_of_classes_only_where_there_are_some(make_run, classes):
    run = make_run(**ONE)
    column = ScoreColumn(name="contribution:x", kind="contribution", label=classes[-1])
    _rewrite(run, lambda scores: dataclasses.replace(scores, columns=(column, scores.columns[1])))
    study = read_study(run.path)
    slide = study.used["slide"].iloc[0]
    scores = run.scores("acmil", run.score_keys("acmil", slide)[0], slide)
    _, caption = pictures._heat(scores, None, column, classed=len(classes) > 1, drawn_by="")
    assert ("Class shown: tumour." in caption) == (len(classes) > 1)
    assert ("adds to the predicted ki67" in caption) == (len(classes) == 1)
    assert ("logit" in caption) == (len(classes) > 1)


def test_files_out_of_reach_are_said_once_with_the_cure(make_run):
    study = read_study(make_run(**ONE).path)
    cases, _ = worst_cases(study, evaluate(study.methods[0]), slides_root=None)
    note = pictures_note(cases, external=False)
    assert note.count("not reachable") == 1
    assert "wsi-mil report RUN --slides DIR" in note
    assert all(case.picture.remark == "" for case in cases if case.picture)
