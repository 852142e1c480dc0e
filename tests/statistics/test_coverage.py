"""Do intervals hold the truth as often as they say? Simulations with fixed seeds; the bands are what was measured."""

from math import asin, erf, pi, sqrt
from statistics import NormalDist

import numpy as np
import pytest
from scipy import stats

from wsi_mil.statistics import intervals
from wsi_mil.statistics.comparison import compare_aucs, compare_samples
from wsi_mil.statistics.concordance import concordance
from wsi_mil.statistics.operating import sensitivity_at
from wsi_mil.statistics.regression import regression, regression_intervals
from wsi_mil.statistics.survival_concordance import bootstrap_c_index, survival_concordance

NORMAL = NormalDist()


def _part(positive, scores, groups):
    n = len(scores)
    return concordance(positive, scores, groups=groups, patients=np.arange(n), n_patients=n)


def _holds(interval, truth):
    return interval.low <= truth <= interval.high


@pytest.mark.parametrize("n_folds", [1, 5])
@pytest.mark.parametrize("n_per_class", [20, 50, 200])
@pytest.mark.parametrize("truth", [0.8, 0.95])
def test_the_primary_interval_covers_93_to_985_percent(truth, n_per_class, n_folds):
    generator = np.random.default_rng(1)
    n, shift = 2 * n_per_class, sqrt(2) * NORMAL.inv_cdf(truth)
    positive, groups = np.arange(n) % 2 == 0, np.arange(n) // 2 % n_folds
    draws = 400 if n_per_class == 200 else 1000
    held = [
        _holds(intervals.auc_interval(_part(positive, generator.normal(size=n) + shift * positive, groups)), truth)
        for _ in range(draws)
    ]
    assert 0.93 <= np.mean(held) <= 0.985


def test_plain_percentiles_are_too_narrow_near_the_end_and_bca_is_not():
    generator = np.random.default_rng(2)
    truth, positive, groups = 0.95, np.arange(40) % 2 == 0, np.zeros(40, int)
    shift = sqrt(2) * NORMAL.inv_cdf(truth)
    weights = intervals.patient_weights(groups, classes=positive.astype(int), draws=500)
    held = []
    for _ in range(1000):
        scores = generator.normal(size=40) + shift * positive
        part = _part(positive, scores, groups)
        samples = intervals.bootstrap_auc(positive, scores, groups=groups, weights=weights)
        plain = intervals.percentile_interval(samples)
        moved = intervals.bca_interval(samples, value=part.auc, influence=part.influence)
        stand_in = intervals.auc_interval(part)  # a perfect order shows no spread; the report then gives this one
        held.append([_holds(plain, truth), _holds(stand_in if part.auc == 1 else moved, truth)])
    plain_share, bca_share = np.mean(held, axis=0)
    assert 0.85 <= plain_share <= 0.91
    assert 0.93 <= bca_share <= 0.975


@pytest.mark.parametrize(("n_per_class", "n_folds"), [(20, 1), (20, 5), (50, 5), (200, 5)])
def test_the_paired_test_rejects_equal_methods_in_at_most_about_5_percent(n_per_class, n_folds):
    generator = np.random.default_rng(3)
    n = 2 * n_per_class
    positive, groups = np.arange(n) % 2 == 0, np.arange(n) // 2 % n_folds
    p = []
    for _ in range(600):
        common = generator.normal(size=n) + 1.5 * positive
        first, second = (_part(positive, common + 0.7 * generator.normal(size=n), groups) for _ in range(2))
        p.append(compare_aucs(first, second).p)
    assert 0.005 <= np.mean(np.array(p) < 0.05) <= 0.075


@pytest.mark.parametrize(("n", "n_folds", "effect"), [(60, 1, 1.0), (60, 1, 2.0), (60, 5, 1.0), (200, 5, 1.0)])
def test_the_c_index_interval_and_its_paired_test(n, n_folds, effect):
    """The truth is the mean of the estimates: the C-index of censored data has no simple form. Folds of a dozen
    patients make the jackknife wide, never narrow."""
    generator = np.random.default_rng(4)
    groups, patients = np.arange(n) % n_folds, np.arange(n)
    weights = intervals.patient_weights(groups, draws=300)
    found, p, resampled = [], [], []
    for _ in range(400):
        hazard = generator.normal(size=n)
        event, left = generator.exponential(size=n) * np.exp(-effect * hazard), 2 * generator.exponential(size=n)
        times, events = np.minimum(event, left), event <= left
        scores = [hazard + 0.5 * generator.normal(size=n) for _ in range(2)]
        parts = [
            survival_concordance(times, events, score, groups=groups, patients=patients, n_patients=n)
            for score in scores
        ]
        found.append(parts[0])
        p.append(compare_aucs(*parts).p)
        samples = bootstrap_c_index(times, events, scores[0], groups=groups, weights=weights)
        resampled.append(intervals.percentile_interval(samples))
    truth = np.mean([part.auc for part in found])
    assert 0.92 <= np.mean([_holds(intervals.auc_interval(part), truth) for part in found]) <= 0.99
    assert 0.91 <= np.mean([_holds(interval, truth) for interval in resampled]) <= 0.99
    assert np.mean(np.array(p) < 0.05) <= 0.075


@pytest.mark.parametrize(("n", "least"), [(20, 0.87), (50, 0.90), (200, 0.91)])
def test_the_regression_bootstrap_covers_about_93_percent_and_more_with_more_patients(n, least):
    generator = np.random.default_rng(5)
    weights = intervals.patient_weights(np.zeros(n, int), draws=400)
    # truth N(0, 9), predicted = truth + N(0, 4)
    correlation = 3 / sqrt(13)
    truths = {
        "r2": 1 - 4 / 9,
        "mae": 2 * sqrt(2 / pi),
        "rmse": 2.0,
        "pearson": correlation,
        "spearman": 6 / pi * asin(correlation / 2),
        "slope": 9 / 13,
        "intercept": 0.0,
    }
    held, p = dict.fromkeys(truths, 0), []
    for _ in range(400):
        truth = 3 * generator.normal(size=n)
        first, second = (truth + 2 * generator.normal(size=n) for _ in range(2))
        samples = regression(truth, first, weights=weights)
        for name, interval in regression_intervals(samples, n_patients=n).items():
            held[name] += _holds(interval, truths[name])
        other = regression(truth, second, weights=weights)
        values = float(regression(truth, first).mae[0]), float(regression(truth, second).mae[0])
        p.append(compare_samples(values, (samples.mae, other.mae), n_patients=n).p)
    assert {name for name, count in held.items() if not least <= count / 400 <= 0.985} == set()
    assert 0.02 <= np.mean(np.array(p) < 0.05) <= (0.1 if n == 20 else 0.08)


def test_the_interval_of_a_chosen_operating_point_covers_about_95_percent():
    generator = np.random.default_rng(6)
    positive, shift = np.arange(120) % 2 == 0, 1.8
    truth = 0.5 * (1 + erf((shift - NORMAL.inv_cdf(0.9)) / sqrt(2)))
    weights = intervals.patient_weights(np.zeros(120, int), classes=positive.astype(int), draws=300)
    held = [
        _holds(
            sensitivity_at(
                positive, generator.normal(size=120) + shift * positive, specificity=0.9, weights=weights
            ).interval,
            truth,
        )
        for _ in range(400)
    ]
    assert 0.91 <= np.mean(held) <= 0.99


def test_the_score_interval_of_one_pair_a_fold_covers_95_percent_on_average_and_90_at_worst():
    """Exact, by the binomial distribution of concordant pairs in ten folds."""
    ends = [intervals.wilson_interval(hits / 10, 10) for hits in range(11)]
    shares = np.linspace(0.5, 0.95, 226)
    covered = np.array(
        [
            sum(stats.binom.pmf(hits, 10, share) for hits, interval in enumerate(ends) if _holds(interval, share))
            for share in shares
        ]
    )
    assert 0.95 <= covered.mean() <= 0.97
    assert 0.89 <= covered.min() < 0.91
