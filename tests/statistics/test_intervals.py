"""Intervals hold what they promise: coverage, never zero width, seeded, patients moved as a whole."""

import numpy as np
import pytest
from scipy import stats

from wsi_mil.statistics import intervals
from wsi_mil.statistics.concordance import concordance
from wsi_mil.statistics.ranking import auc, average_precision


def _part(positive, scores, groups=None):
    n = len(scores)
    groups = np.zeros(n, int) if groups is None else groups
    return concordance(positive, scores, groups=groups, patients=np.arange(n), n_patients=n)


@pytest.mark.parametrize(("n", "n_groups", "shift"), [(80, 1, 1.4), (80, 5, 1.4), (14, 1, 1.4), (40, 5, 2.2)])
def test_the_95_percent_interval_covers_the_true_auc(n, n_groups, shift):
    generator = np.random.default_rng(n + n_groups)
    positive, groups = np.arange(n) % 2 == 0, np.arange(n) // 2 % n_groups
    truth = 0.5 * (1 + np.vectorize(__import__("math").erf)(shift / 2))  # two unit normals, `shift` apart
    covered = 0
    for _ in range(500):
        scores = generator.normal(size=n) + shift * positive
        interval = intervals.auc_interval(_part(positive, scores, groups))
        covered += interval.low <= truth <= interval.high
    assert covered / 500 >= 0.925


@pytest.mark.parametrize("scores", [[0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0.5] * 6])
def test_no_width_is_zero_at_the_ends_or_when_all_scores_are_equal(scores):
    interval = intervals.auc_interval(_part(np.repeat([False, True], 3), np.array(scores, float)))
    assert interval.high - interval.low > 0.3
    assert 0 <= interval.low < interval.high <= 1
    assert interval.method.startswith("Wilson score interval")


def test_a_perfect_auc_keeps_a_width_even_with_many_patients():
    interval = intervals.auc_interval(_part(np.repeat([False, True], 50), np.arange(100.0)))
    assert interval.high == 1.0
    assert interval.low == pytest.approx(50 / (50 + 1.959964**2), rel=1e-6)  # Wilson at 50 of 50


def test_below_ten_a_class_the_score_interval_is_used_and_named_and_from_ten_on_delong():
    scores = np.array([0.1, 0.5, 0.3, 0.9, 0.2, 0.8, 0.4, 0.7, 0.15, 0.6, 0.55, 0.62, 0.05, 0.95, 0.35, 0.45, 0.5, 0.4])
    few = intervals.auc_interval(_part(np.arange(18) % 2 == 1, scores))
    assert few.method == "Wilson score interval, 9 disjoint pairs"
    many = intervals.auc_interval(_part(np.arange(20) % 2 == 1, np.append(scores, [0.3, 0.5])))
    assert many.method == "DeLong, logit scale"


def test_the_logit_interval_is_worked_by_hand():
    generator = np.random.default_rng(0)
    part = _part(np.arange(40) % 2 == 0, generator.normal(size=40) + (np.arange(40) % 2 == 0))
    logit = np.log(part.auc / (1 - part.auc))
    reach = 1.959963984540054 * np.sqrt(part.variance) / part.auc / (1 - part.auc)
    interval = intervals.auc_interval(part)
    assert np.log(interval.low / (1 - interval.low)) == pytest.approx(logit - reach)
    assert np.log(interval.high / (1 - interval.high)) == pytest.approx(logit + reach)


def test_an_undefined_auc_has_no_interval():
    assert np.isnan(intervals.auc_interval(_part(np.ones(4, bool), np.arange(4.0))).low)


def test_wilson_by_hand_and_at_no_trial():
    assert intervals.wilson_interval(0.5, 10).low == pytest.approx(0.2366, abs=1e-4)
    assert (intervals.wilson_interval(0.5, 0).low, intervals.wilson_interval(0.5, 0).high) == (0.0, 1.0)
    assert intervals.wilson_interval(0.5, 4, of="patients").method == "Wilson score interval, 4 patients"


def test_weights_keep_each_stratum_whole_and_repeat_with_the_seed():
    strata = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2])
    weights = intervals.patient_weights(strata, draws=300, seed=4)
    for stratum, size in ((0, 3), (1, 2), (2, 4)):
        np.testing.assert_allclose(weights[:, strata == stratum].sum(axis=1), size)
    np.testing.assert_array_equal(weights, intervals.patient_weights(strata, draws=300, seed=4))
    assert (weights != intervals.patient_weights(strata, draws=300, seed=5)).any()


def test_a_stratum_of_one_joins_its_neighbour_so_that_it_can_vary():
    weights = intervals.patient_weights(np.array([0, 1, 1, 2]), draws=200)
    assert (weights.std(axis=0) > 0).all()
    np.testing.assert_allclose(weights.sum(axis=1), 4)


def test_a_stratum_of_one_joins_its_own_class_and_never_the_other():
    classes = np.array([0, 0, 0, 0, 1, 1, 1])
    folds = np.array([0, 0, 0, 4, 0, 0, 0])  # the last stratum of class 0 is one patient
    weights = intervals.patient_weights(folds, classes=classes, draws=200)
    for name in (0, 1):
        np.testing.assert_allclose(weights[:, classes == name].sum(axis=1), (classes == name).sum())
    assert (weights.std(axis=0) > 0).all()


def test_a_patient_who_is_alone_in_a_class_is_drawn_once_each_time():
    weights = intervals.patient_weights(np.array([0, 1, 1, 1]), classes=np.array([0, 1, 1, 1]), draws=50)
    np.testing.assert_array_equal(weights[:, 0], 1.0)


def test_the_bootstrap_of_a_mean_has_the_textbook_variance_in_small_strata():
    generator = np.random.default_rng(1)
    strata = np.repeat(np.arange(10), 4)
    values = generator.normal(size=40) + strata
    samples = intervals.bootstrap_mean(values, weights=intervals.patient_weights(strata, draws=20_000))
    textbook = sum(values[strata == s].var(ddof=1) / 4 for s in range(10)) / 100
    assert samples.var() == pytest.approx(textbook, rel=0.06)


def test_bootstrap_figures_at_weight_one_are_the_figures_and_at_weight_two_those_of_doubled_rows():
    generator = np.random.default_rng(2)
    positive, groups = np.arange(30) % 2 == 0, np.arange(30) // 10
    scores = np.round(generator.normal(size=30) + positive, 1)
    one = np.ones((1, 30))
    assert intervals.bootstrap_auc(positive, scores, groups=groups, weights=one)[0] == pytest.approx(
        _part(positive, scores, groups).auc
    )
    assert intervals.bootstrap_average_precision(positive, scores, weights=one)[0] == pytest.approx(
        average_precision(positive, scores)
    )
    counts = generator.integers(0, 3, 30)
    repeated = np.repeat(np.arange(30), counts)
    got = intervals.bootstrap_auc(positive, scores, groups=np.zeros(30, int), weights=counts[None].astype(float))
    assert got[0] == pytest.approx(auc(positive[repeated], scores[repeated]))
    got = intervals.bootstrap_average_precision(positive, scores, weights=counts[None].astype(float))
    assert got[0] == pytest.approx(average_precision(positive[repeated], scores[repeated]))


def test_the_bootstrap_and_delong_agree_on_a_large_sample():
    generator = np.random.default_rng(3)
    positive, groups = np.arange(400) % 2 == 0, np.arange(400) // 2 % 5
    scores = generator.normal(size=400) + positive
    weights = intervals.patient_weights(groups, classes=positive.astype(int), draws=2000)
    samples = intervals.bootstrap_auc(positive, scores, groups=groups, weights=weights)
    assert samples.std() == pytest.approx(np.sqrt(_part(positive, scores, groups).variance), rel=0.1)


def test_bca_is_the_percentile_interval_where_nothing_is_biased_or_skewed_and_moves_with_both():
    samples = np.linspace(0.0, 1.0, 1001)
    plain = intervals.percentile_interval(samples)
    level = np.array([1.0, -1.0, 2.0, -2.0])
    same = intervals.bca_interval(samples, value=0.5, influence=level)
    assert (same.low, same.high) == pytest.approx((plain.low, plain.high))
    biased = intervals.bca_interval(samples, value=0.6, influence=level)  # samples lie too low, so it moves up
    assert biased.low > plain.low
    assert biased.high > plain.high
    skewed = intervals.bca_interval(samples, value=0.5, influence=np.array([3.0, -1.0, -1.0, -1.0]))
    assert skewed.low > plain.low


def test_bca_worked_by_hand():
    samples, influence = np.linspace(0.0, 1.0, 1001), np.array([3.0, -1.0, -1.0, -1.0])
    got = intervals.bca_interval(samples, value=0.6, influence=influence)
    skew = 24 / 6 / 12**1.5
    bias = stats.norm.ppf((600 + 0.5) / 1001)
    for end, tail in ((got.low, 0.025), (got.high, 0.975)):
        shifted = bias + stats.norm.ppf(tail)
        assert end == pytest.approx(stats.norm.cdf(bias + shifted / (1 - skew * shifted)), abs=1e-6)


def test_bca_agrees_with_scipy_on_a_skewed_mean():
    values = np.random.default_rng(5).exponential(size=30)
    other = stats.bootstrap((values,), np.mean, method="BCa", n_resamples=20_000, random_state=0, vectorized=True)
    samples = np.random.default_rng(1).choice(values, (20_000, 30)).mean(axis=1)
    got = intervals.bca_interval(samples, value=values.mean(), influence=(values - values.mean()) / 30)
    expected = other.confidence_interval
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high), rel=0.02)


def test_without_samples_on_both_sides_bca_is_the_plain_interval():
    for samples in (np.ones(50), np.array([np.nan])):
        plain, moved = (
            intervals.percentile_interval(samples),
            intervals.bca_interval(samples, value=2.0, influence=np.array([1.0, -1.0])),
        )
        np.testing.assert_equal((moved.low, moved.high), (plain.low, plain.high))
