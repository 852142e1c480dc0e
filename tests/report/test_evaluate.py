"""Figures of a fabricated run against the definitions, worked on its files by brute force."""

import numpy as np
import pandas as pd
import pytest

from wsi_mil.errors import RunError
from wsi_mil.report.evaluate import evaluate
from wsi_mil.report.findings import compare_all
from wsi_mil.report.study import patient_rows, read_study
from wsi_mil.stages.report import report


def _brute_force_within_folds(frame: pd.DataFrame) -> float:
    won, pairs = 0.0, 0
    for _, rows in frame.groupby(["repeat", "fold"]):
        patients = rows.groupby("patient").agg({"target": "first", "prob_tumour": "mean"})
        for up in patients["prob_tumour"][patients["target"] == "tumour"]:
            for down in patients["prob_tumour"][patients["target"] == "normal"]:
                won, pairs = won + (up > down) + 0.5 * (up == down), pairs + 1
    return won / pairs


@pytest.mark.parametrize(
    "wishes",
    [
        {},
        {"level": "slide", "slides_per_patient": 3},
        {"seeds": (0, 1, 2), "repeats": 2},
        {"level": "slide", "slides_per_patient": 2, "seeds": (0, 1)},
    ],
)
def test_the_primary_auc_counts_patient_pairs_within_folds_on_the_mean_over_slides_and_seeds(make_run, wishes):
    run = make_run(scores=False, **wishes)
    predictions = run.predictions()
    for method in read_study(run.path).methods:
        figures = evaluate(method)
        expected = _brute_force_within_folds(predictions[predictions["method"] == method.label])
        assert figures.primary.value == pytest.approx(expected)
        assert len(figures.patients.ids) == 40
        assert figures.confusion.sum() == 40  # one decision a patient, however often it was scored
        assert (figures.slides is not None) == (wishes.get("level") == "slide")
        assert len(figures.by_training) == len(wishes.get("seeds", (0,))) * wishes.get("repeats", 1)
        for interval in (figures.primary.interval, figures.primary_bootstrap, figures.pooled.interval):
            assert interval.low < interval.high


def test_patient_figures_take_the_mean_probability_of_the_slides(make_run):
    run = make_run(level="slide", slides_per_patient=3, scores=False)
    frame = run.predictions().query("method == 'acmil'")
    study = read_study(run.path)
    rows, mixed = patient_rows(next(m for m in study.methods if m.label == "acmil").test)
    expected = frame.groupby("patient")["prob_tumour"].mean()
    assert mixed == ()
    assert dict(zip(rows.patients, rows.probabilities[:, 1], strict=True)) == pytest.approx(expected.to_dict())


def _mix(run, n: int) -> list[str]:
    """Give the first n patients a slide of each class, whatever was predicted of it."""
    mixed = [f"P{place:03}" for place in range(n)]
    for path in (run.predictions_path, run.cohort_path):
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        for number, name in enumerate(("normal", "tumour")):
            frame.loc[frame["patient"].isin(mixed) & frame["slide"].str.endswith(f"_S{number}"), "target"] = name
        frame.to_csv(path, index=False)
    return mixed


@pytest.mark.parametrize("n", [1, 30])
def test_a_patient_with_slides_of_two_classes_counts_in_slide_figures_only(make_run, n):
    run = make_run(level="slide", slides_per_patient=2, scores=False)
    before = evaluate(read_study(run.path).methods[0]).slides.auc.value
    mixed = _mix(run, n)
    study = read_study(run.path)
    figures = evaluate(study.methods[0])
    assert figures.mixed == tuple(mixed)
    assert not set(mixed) & set(figures.patients.ids)
    assert len(figures.patients.ids) == 40 - n
    slides = run.predictions().query("method == 'mean_pool'")
    slides["patient"] = slides["slide"]  # each slide for itself
    assert figures.slides.auc.value == pytest.approx(_brute_force_within_folds(slides))
    assert figures.slides.auc.value < before, "the labels that were moved had not been predicted"
    assert figures.slides.auc.interval.low < figures.slides.auc.value < figures.slides.auc.interval.high


@pytest.mark.parametrize("n", [39, 40])
def test_where_hardly_any_patient_has_one_class_the_slide_figure_stands_and_the_others_are_not_defined(make_run, n):
    run = make_run(level="slide", slides_per_patient=2, signal=(("acmil", 1.0),))
    _mix(run, n)
    figures = evaluate(read_study(run.path).methods[0])
    assert np.isfinite([figures.slides.auc.value, figures.slides.auc.interval.low]).all()
    assert np.isnan([figures.primary.value, figures.pooled.value, figures.folds[0].brier]).all()
    assert np.isnan(figures.raw.brier.value) == np.isnan(figures.decided.balanced_accuracy.value) == (n == 40)
    assert [fold.epoch for fold in figures.folds] == [7, 8, 9, 10, 11], "every model is still listed"
    report(run.path)
    assert f"{n} of them with slides of different classes" in run.report_path.read_text()
    assert ("No patient has a class of its own" in run.report_path.read_text()) == (n == 40)


def test_the_interval_of_balanced_accuracy_says_over_how_many_patients_it_is(make_run):
    methods = read_study(make_run(scores=False, patients=16, n_folds=2).path).methods
    assert {evaluate(m).decided.balanced_accuracy.interval.method for m in methods} == {
        "Wilson score interval, 8 patients of the smallest class"
    }


def test_a_fold_models_own_scale_is_flagged_and_does_not_touch_the_primary_auc(make_run, tmp_path):
    figures = [evaluate(m) for m in read_study(make_run(scores=False, fold_shift=2.0).path).methods]
    assert all(one.flagged for one in figures)
    assert all(one.primary.value > one.pooled.value for one in figures[1:])


def test_thresholds_come_from_validation_and_only_where_it_is_large_enough(make_run):
    run = make_run(scores=False, patients=80, validation=30)
    figures = evaluate(read_study(run.path).methods[1])
    for fold in figures.folds:
        validation = run.validation("abmil+aem", fold.key)
        positive = (validation["target"] == "tumour").to_numpy()
        gains = [
            (validation["prob_tumour"][positive] >= cut).mean() - (validation["prob_tumour"][~positive] >= cut).mean()
            for cut in [*validation["prob_tumour"], fold.threshold.value]
        ]
        assert fold.threshold.from_validation
        assert gains[-1] == pytest.approx(max(gains))


def test_changing_test_labels_moves_no_threshold(make_run):
    run = make_run(scores=False, patients=80, validation=30)
    before = [fold.threshold for fold in evaluate(read_study(run.path).methods[0]).folds]
    frame = pd.read_csv(run.predictions_path, dtype=str)
    frame["target"] = frame["target"].map({"normal": "tumour", "tumour": "normal"})
    frame.to_csv(run.predictions_path, index=False)
    assert [fold.threshold for fold in evaluate(read_study(run.path).methods[0]).folds] == before


def test_three_classes_are_macro_averaged_and_decided_by_the_largest_probability(make_run):
    run = make_run(scores=False, classes=("a", "b", "c"), patients=45)
    figures = evaluate(read_study(run.path).methods[1])
    assert figures.confusion.shape == (3, 3)
    assert len(figures.classes) == 3
    np.testing.assert_array_equal(figures.patients.decisions, figures.patients.probabilities.argmax(axis=1))
    assert figures.primary.interval.low < figures.primary.value < figures.primary.interval.high


def test_the_stronger_planted_signal_wins_and_is_told_apart(make_run):
    study = read_study(make_run(scores=False, patients=80).path)
    methods = tuple(evaluate(method) for method in study.methods)
    by_label = {one.label: one.primary.value for one in methods}
    assert by_label["abmil+aem"] > by_label["mean_pool"]
    comparison = next(c for c in compare_all(methods) if {c.first, c.second} == {"mean_pool", "abmil+aem"})
    assert comparison.test.difference < 0
    assert comparison.p_corrected < 0.05
    assert all(one.p_corrected >= one.test.p for one in compare_all(methods))


def test_a_perfect_method_claims_no_zero_width(make_run):
    study = read_study(make_run(scores=False, signal=(("perfect", 30.0),)).path)
    figures = evaluate(study.methods[0])
    assert figures.primary.value == figures.decided.balanced_accuracy.value == 1.0
    assert figures.primary.interval.low < 0.9
    assert figures.primary_bootstrap.low < 0.9
    assert figures.decided.balanced_accuracy.interval.low < 0.9
    assert np.isnan(figures.average_precision.interval.low)


def test_a_run_of_another_kind_an_unfinished_one_and_a_foreign_class_are_refused(make_run, tmp_path):
    with pytest.raises(RunError, match="holds no run"):
        read_study(tmp_path / "nothing")
    run = make_run(scores=False)
    text = run.predictions_path.read_text()
    run.predictions_path.write_text(text.replace(",tumour,", ",Tumour,"))
    with pytest.raises(RunError, match=r"unknown to the run: Tumour"):
        read_study(run.path)
    run.predictions_path.unlink()
    with pytest.raises(RunError, match="not finished"):
        read_study(run.path)
    run.config_path.write_text(run.config_path.read_text().replace("kind: crossval", "kind: predict"))
    with pytest.raises(RunError, match=r"without labels.*--table TABLE"):
        read_study(run.path)


def test_averaging_seeds_is_no_gap_between_pooled_and_within_fold(make_run):
    study = read_study(make_run(scores=False, patients=80, seeds=(0, 1, 2), repeats=2, signal=(("acmil", 0.8),)).path)
    figures = evaluate(study.methods[0])
    assert figures.pooled.value > max(
        one.auc for one in figures.by_training.values()
    )  # an ensemble is better than each of its members
    assert figures.pooled_gap < 0.03
    assert not figures.flagged


def test_a_handful_of_patients_gets_bounds_or_no_interval_and_no_test(make_run):
    methods = tuple(evaluate(m) for m in read_study(make_run(scores=False, patients=16, n_folds=2).path).methods)
    for figures in methods:
        assert "Wilson" in figures.primary.interval.method
        assert "Wilson" in figures.primary_bootstrap.method
        assert "Wilson" in figures.decided.balanced_accuracy.interval.method
        assert np.isnan([figures.raw.brier.interval.low, figures.average_precision.interval.low]).all()
    assert all(np.isnan(one.p_corrected) for one in compare_all(methods))
