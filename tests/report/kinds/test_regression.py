"""Numbers: figures by patient, paired tests, and what is said where nothing can be."""

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

from wsi_mil.report.kinds.pairs import compare_methods
from wsi_mil.report.kinds.regression import compare_numbers, evaluate_numbers
from wsi_mil.runs import write_frame


def _noisy(answered, *, noise, n=40, seed=5, label="one"):
    generator = np.random.default_rng(seed)
    truth = generator.normal(50, 10, size=n)
    told = truth + noise * generator.normal(size=n)
    return answered([(f"p{i:02d}", 0, i % 4, 0, truth[i], told[i]) for i in range(n)])


def test_figures_are_those_of_a_second_library(answered):
    method = _noisy(answered, noise=6.0)
    truth, told, figures = method.test.truth, method.test.predicted, evaluate_numbers(method).figures
    assert figures["r2"].value == pytest.approx(r2_score(truth, told))
    assert figures["mae"].value == pytest.approx(mean_absolute_error(truth, told))
    assert figures["rmse"].value == pytest.approx(root_mean_squared_error(truth, told))
    assert figures["pearson"].value == pytest.approx(stats.pearsonr(truth, told).statistic)
    assert figures["spearman"].value == pytest.approx(stats.spearmanr(truth, told).statistic)
    for figure in figures.values():
        assert figure.interval.low < figure.value < figure.interval.high


def test_a_patient_counts_once_with_the_mean_over_seeds_and_repeats(answered):
    told = {"a": (8.0, 12.0, 16.0, 20.0), "b": (30.0, 30.0, 30.0, 30.0)}
    rows = [
        (patient, repeat, 0, seed, truth, told[patient][2 * repeat + seed])
        for patient, truth in (("a", 10.0), ("b", 24.0))
        for repeat in (0, 1)
        for seed in (0, 1)
    ]
    figures = evaluate_numbers(answered(rows))
    assert figures.patients.predicted.tolist() == [14.0, 30.0]
    assert figures.patients.off.tolist() == [4.0, 6.0]
    assert figures.figures["mae"].value == pytest.approx(5.0)
    assert figures.by_seed == {(0, 0): 4.0, (0, 1): 4.0, (1, 0): 6.0, (1, 1): 8.0}


def test_a_patient_whose_slides_have_different_values_has_none(answered):
    method = answered([("a", 0, 0, 0, 1.0, 1.0), ("a", 0, 0, 0, 2.0, 1.0), ("b", 0, 0, 0, 3.0, 4.0)])
    figures = evaluate_numbers(method)
    assert figures.mixed == ("a",)
    assert figures.patients.ids == ("b",)


def test_the_nearer_method_is_told_from_the_other_and_a_method_equals_itself(answered):
    near, far = _noisy(answered, noise=2.0), _noisy(answered, noise=9.0)
    sets = [(name, evaluate_numbers(method).rows) for name, method in (("near", near), ("far", far), ("again", near))]
    tests = {(one.first, one.second): one for one in compare_methods(sets, compare_numbers)}
    assert tests["near", "far"].test.difference < 0
    assert tests["near", "far"].test.interval.high < 0
    assert tests["near", "far"].p_corrected < 0.01
    assert tests["near", "again"].test.p == 1.0
    assert tests["near", "far"].patients == 40


def test_only_patients_that_both_methods_judged_are_compared(answered):
    whole = _noisy(answered, noise=2.0)
    part = whole.test.take(range(25))
    (one,) = compare_methods([("whole", whole.test), ("part", part)], compare_numbers)
    assert one.patients == 25
    assert one.test.difference == 0.0


def test_one_value_for_everybody_has_an_error_but_no_correlation(make_kinds, page_of):
    run = make_kinds(patients=20, n_folds=4, signal=(("one", 1.0),))
    frame = run.predictions()
    write_frame(run.predictions_path, frame.assign(prediction="7.5"))
    page, (chapter,) = page_of(run)
    own = chapter.metrics["methods"]["one"]
    assert np.isnan(own["pearson"]["value"])
    assert own["r2"]["value"] < 0
    assert own["mae"]["value"] > 0
    assert "one: every patient got the same value, so correlations are not defined." in page
    assert "giving every patient the mean value would do no worse" in page


def test_a_single_patient_has_an_error_and_no_share_explained(make_kinds, page_of):
    run = make_kinds(patients=10, n_folds=2, signal=(("one", 1.0),))
    frame = run.predictions()
    frame["target"] = ["31.5" if patient == "P003" else "" for patient in frame["patient"]]
    write_frame(run.predictions_path, frame)
    page, (chapter,) = page_of(run)
    assert chapter.labelled == 1
    assert "R² is not defined: there is a single patient." in page
    assert "9 tested patients have no label of “ki67”; no figure of it counts them." in page


def test_predictions_that_are_no_number_are_left_out_and_counted(make_kinds, page_of, found_of):
    run = make_kinds(patients=20, n_folds=4, signal=(("one", 1.0),))
    frame = run.predictions()
    frame.loc[[1, 4], "prediction"] = [np.nan, np.inf]
    write_frame(run.predictions_path, frame.assign(prediction=[str(value) for value in frame["prediction"].tolist()]))
    page, (chapter,) = page_of(run)
    assert chapter.labelled == 18
    assert "one: 2 predictions are not finite numbers; left out." in page


def test_the_largest_errors_come_first(make_kinds, found_of):
    ((_, part),) = found_of(make_kinds(patients=30, signal=(("one", 1.0),))).targets
    off = [abs(float(part.methods[0].patients.off[case.place])) for case in part.cases["one"]]
    assert off == sorted(off, reverse=True)
    assert off[0] == pytest.approx(np.abs(part.methods[0].patients.off).max())
    assert len(off) == 10
