"""Figures of numbers: by hand, against scikit-learn and SciPy, and where they are not defined."""

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sk

from wsi_mil.statistics.comparison import compare_samples
from wsi_mil.statistics.intervals import patient_weights
from wsi_mil.statistics.regression import regression, regression_intervals

UNDEFINED = ("r2", "pearson", "spearman", "slope", "intercept")


def _sample(n=40, seed=0):
    generator = np.random.default_rng(seed)
    truth = np.round(generator.normal(10, 3, n))
    return truth, np.round(2 + 0.7 * truth + generator.normal(size=n), 1)


def test_by_hand():
    # truth 1 2 3, predicted 2 2 4: errors 1 0 1; around the mean of 2 the truth has 2
    figures = regression(np.array([1.0, 2, 3]), np.array([2.0, 2, 4]))
    assert figures.r2[0] == pytest.approx(1 - 2 / 2)
    assert figures.mae[0] == pytest.approx(2 / 3)
    assert figures.rmse[0] == pytest.approx(np.sqrt(2 / 3))
    assert figures.pearson[0] == pytest.approx(2 / np.sqrt(2 * 8 / 3))
    assert figures.spearman[0] == pytest.approx(1.5 / np.sqrt(2 * 1.5))  # ranks 1 2 3 and 1.5 1.5 3
    assert figures.slope[0] == pytest.approx(2 / (8 / 3))
    assert figures.intercept[0] == pytest.approx(2 - 0.75 * 8 / 3)


def test_all_figures_agree_with_scikit_learn_and_scipy():
    truth, predicted = _sample()
    figures, line = regression(truth, predicted), stats.linregress(predicted, truth)
    expected = {
        "r2": sk.r2_score(truth, predicted),
        "mae": sk.mean_absolute_error(truth, predicted),
        "rmse": sk.root_mean_squared_error(truth, predicted),
        "pearson": stats.pearsonr(truth, predicted).statistic,
        "spearman": stats.spearmanr(truth, predicted).statistic,
        "slope": line.slope,
        "intercept": line.intercept,
    }
    for name, value in expected.items():
        assert getattr(figures, name)[0] == pytest.approx(value), name


def test_a_set_of_weights_is_the_repeated_rows():
    truth, predicted = _sample()
    counts = np.random.default_rng(1).integers(0, 3, 40)
    rows = np.repeat(np.arange(40), counts)
    weighted, repeated = regression(truth, predicted, weights=counts[None]), regression(truth[rows], predicted[rows])
    for name in ("mae", "rmse", *UNDEFINED):
        assert getattr(weighted, name)[0] == pytest.approx(getattr(repeated, name)[0]), name


def test_a_perfect_prediction_and_one_in_other_units():
    truth, _ = _sample()
    perfect, scaled = regression(truth, truth), regression(truth, 100 + 2 * truth)
    assert (perfect.r2[0], perfect.mae[0], perfect.slope[0]) == pytest.approx((1, 0, 1))
    assert (scaled.pearson[0], scaled.spearman[0], scaled.slope[0]) == pytest.approx((1, 1, 0.5))
    assert scaled.intercept[0] == pytest.approx(-50)
    assert scaled.r2[0] < 0


def test_the_mean_of_the_test_rows_has_r2_zero_and_no_order():
    truth, _ = _sample()
    figures = regression(truth, np.full(40, truth.mean()))
    assert figures.r2[0] == pytest.approx(0)
    for name in ("pearson", "spearman", "slope", "intercept"):
        assert np.isnan(getattr(figures, name)[0]), name


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.1])
def test_equal_predictions_have_no_slope_in_any_resample(value):
    truth, _ = _sample()
    weights = patient_weights(np.zeros(40, int), draws=50)
    assert np.isnan(regression(truth, np.full(40, value), weights=weights).slope).all()


def test_one_patient_has_errors_alone_and_equal_truths_no_r2():
    one = regression(np.array([3.0]), np.array([5.0]))
    assert (one.mae[0], one.rmse[0]) == (2, 2)
    for name in UNDEFINED:
        assert np.isnan(getattr(one, name)[0]), name
    assert np.isnan(regression(np.full(5, 2.1), np.arange(5.0)).r2[0])
    nobody = regression(np.empty(0), np.empty(0))
    assert np.isnan(nobody.mae[0])
    assert np.isnan(nobody.rmse[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_missing_number_is_refused(bad):
    for truth, predicted in (([1, bad], [1, 2]), ([1, 2], [bad, 2])):
        with pytest.raises(ValueError, match="missing or infinite"):
            regression(np.array(truth), np.array(predicted))
    with pytest.raises(ValueError, match="one length"):
        regression(np.arange(3.0), np.arange(2.0))


def test_a_patients_slides_move_together_in_the_bootstrap():
    truth, predicted = _sample(30, seed=2)
    weights = patient_weights(np.zeros(30, int), draws=200)
    once = regression(truth, predicted, weights=weights)
    twice = regression(np.repeat(truth, 2), np.repeat(predicted, 2), weights=np.repeat(weights, 2, axis=1))
    for name in ("r2", "mae", "spearman"):
        np.testing.assert_allclose(getattr(once, name), getattr(twice, name))


def test_intervals_hold_the_value_and_a_handful_has_none():
    truth, predicted = _sample(60)
    figures = regression(truth, predicted)
    samples = regression(truth, predicted, weights=patient_weights(np.zeros(60, int), draws=500))
    for name, interval in regression_intervals(samples, n_patients=60).items():
        assert interval.low < getattr(figures, name)[0] < interval.high, name
    for interval in regression_intervals(samples, n_patients=9).values():
        assert np.isnan(interval.low)


def test_the_better_of_two_methods_is_found_and_a_method_equals_itself():
    truth, good = _sample(60)
    poor = np.random.default_rng(3).permutation(good)
    weights = patient_weights(np.zeros(60, int), draws=999)
    values = regression(truth, good).mae[0], regression(truth, poor).mae[0]
    samples = regression(truth, good, weights=weights).mae, regression(truth, poor, weights=weights).mae
    test = compare_samples(values, samples, n_patients=60)
    assert test.difference == values[0] - values[1]
    assert test.p == pytest.approx(2 / 1000)
    assert test.interval.high < 0
    assert compare_samples((values[0], values[0]), (samples[0], samples[0]), n_patients=60).p == 1.0
    for undefined in (
        compare_samples(values, samples, n_patients=9),
        compare_samples((1.0, 0.0), (samples[0] + 1, samples[0]), n_patients=60),  # no spread
        compare_samples((float("nan"), 0.0), samples, n_patients=60),
    ):
        assert np.isnan(undefined.p)
        assert np.isnan(undefined.interval.low)
