"""Kaplan-Meier and log-rank: the remission times of Freireich et al. 1963, SciPy, and the definitions."""

import warnings

import numpy as np
import pytest
from scipy import stats

from wsi_mil.statistics import survival

# Weeks of remission (Freireich et al. 1963; figures of Kalbfleisch and Prentice, and of every textbook since).
TREATED = np.array([6, 6, 6, 6, 7, 9, 10, 10, 11, 13, 16, 17, 19, 20, 22, 23, 25, 32, 32, 34, 35], float)
TREATED_EVENTS = np.array([1, 1, 1, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0], bool)
PLACEBO = np.array([1, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23], float)


def _random(seed, n=60):
    generator = np.random.default_rng(seed)
    return np.ceil(generator.exponential(8, n)), generator.random(n) < 0.6


def test_the_published_curve_and_its_greenwood_errors():
    curve = survival.kaplan_meier(TREATED, TREATED_EVENTS)
    assert curve.times.tolist() == [6, 7, 10, 13, 16, 22, 23]
    assert curve.at_risk.tolist() == [21, 17, 15, 12, 11, 7, 6]
    np.testing.assert_allclose(curve.survival, [0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448], atol=5e-4)
    np.testing.assert_allclose(np.sqrt(curve.variance())[:3], [0.0764, 0.0869, 0.0963], atol=5e-5)
    assert curve.median() == 23
    assert survival.kaplan_meier(PLACEBO, np.ones(21, bool)).median() == 8


def test_a_curve_and_its_band_worked_by_hand():
    # 1, 2+, 3, 3, 5+, 6: falls by 1/6 at 1, by 2/4 at 3, to 0 at 6
    curve = survival.kaplan_meier(np.array([1.0, 2, 3, 3, 5, 6]), np.array([1, 0, 1, 1, 0, 1], bool))
    np.testing.assert_allclose(curve.survival, [5 / 6, 5 / 12, 0])
    np.testing.assert_allclose(curve.variance()[:2], [25 / 36 / 30, 25 / 144 * (1 / 30 + 1 / 4)])
    low, high = curve.band()
    reach = 1.959963984540054 * np.sqrt(1 / 30 + 1 / 4)
    middle = np.log(-np.log(5 / 12))
    for end, sign in ((low, 1), (high, -1)):
        assert np.log(-np.log(end[1])) == pytest.approx(middle + sign * reach / np.log(12 / 5))
        assert np.isnan(end[2])
    np.testing.assert_allclose(curve.at([0.5, 1, 2.9, 3, 6, 100]), [1, 5 / 6, 5 / 6, 5 / 12, 0, 0])
    np.testing.assert_allclose(curve.before([1, 3, 6]), [1, 5 / 6, 5 / 12])


@pytest.mark.parametrize("seed", range(3))
def test_curve_and_band_agree_with_scipy(seed):
    times, events = _random(seed)
    curve = survival.kaplan_meier(times, events)
    other = stats.ecdf(stats.CensoredData(uncensored=times[events], right=times[~events])).sf
    np.testing.assert_allclose(curve.survival, other.evaluate(curve.times), atol=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # SciPy warns where the curve is 0 or 1
        band = other.confidence_interval(0.9, method="log-log")
    low, high = curve.band(level=0.9)
    kept = curve.survival > 0
    np.testing.assert_allclose(low[kept], band.low.evaluate(curve.times[kept]), atol=1e-9)
    np.testing.assert_allclose(high[kept], band.high.evaluate(curve.times[kept]), atol=1e-9)


def test_the_median_is_the_first_time_that_leaves_just_a_half():
    assert survival.kaplan_meier(np.array([1.0, 2, 3, 4]), np.ones(4, bool)).median() == 2


def test_nothing_is_said_later_than_anybody_was_seen():
    curve = survival.kaplan_meier(np.array([1.0, 2.0]), np.array([True, False]))
    assert curve.at([2.0])[0] == 0.5
    assert np.isnan(curve.at([2.1])[0])
    assert np.isnan(curve.before([2.1])[0])


def test_all_censored_is_a_level_curve_and_nobody_is_an_empty_one():
    level = survival.kaplan_meier(np.array([1.0, 2.0]), np.zeros(2, bool))
    assert level.at([0.0, 2.0]).tolist() == [1.0, 1.0]
    assert np.isnan(level.median())
    nobody = survival.kaplan_meier(np.empty(0), np.empty(0, bool))
    assert np.isnan(nobody.at([0.0])[0])


def test_who_has_the_event_at_a_time_can_no_longer_be_censored_at_it():
    # of four at time 1 one has the event first, one of the other three is censored; then one of two
    curve = survival.censoring_curve(np.array([1.0, 1, 2, 3]), np.array([1, 0, 0, 1], bool))
    assert curve.at_risk.tolist() == [3, 2]
    np.testing.assert_allclose(curve.survival, [2 / 3, 1 / 3])


def test_without_ties_censoring_is_the_mirror_of_the_event():
    times, events = np.arange(1.0, 31), np.arange(30) % 3 == 0
    mirror = survival.kaplan_meier(times, ~events)
    np.testing.assert_allclose(survival.censoring_curve(times, events).survival, mirror.survival)


def test_the_published_log_rank_test():
    times, events = np.append(TREATED, PLACEBO), np.append(TREATED_EVENTS, np.ones(21, bool))
    test = survival.log_rank(times, events, np.repeat([0, 1], 21))
    assert test.observed.tolist() == [9, 21]
    np.testing.assert_allclose(test.expected, [19.25, 10.75], atol=5e-3)
    assert test.statistic == pytest.approx(16.79, abs=5e-3)
    assert test.degrees == 1
    assert test.p == pytest.approx(4.17e-5, rel=5e-3)


@pytest.mark.parametrize("seed", range(3))
def test_two_groups_agree_with_scipy(seed):
    times, events = _random(seed)
    groups = np.arange(60) % 2
    sides = [
        stats.CensoredData(uncensored=times[own & events], right=times[own & ~events])
        for own in (groups == 0, groups == 1)
    ]
    other = stats.logrank(*sides)
    test = survival.log_rank(times, events, groups)
    assert test.statistic == pytest.approx(other.statistic**2)
    assert test.p == pytest.approx(other.pvalue)


def test_three_groups_by_the_definition_moment_by_moment():
    times, events = _random(7)
    groups = np.arange(60) % 3
    gap, covariance = np.zeros(3), np.zeros((3, 3))
    for moment in np.unique(times[events]):
        risk = np.array([((times >= moment) & (groups == g)).sum() for g in range(3)])
        died = np.array([((times == moment) & events & (groups == g)).sum() for g in range(3)])
        n, d = risk.sum(), died.sum()
        gap += died - d * risk / n
        if n > 1:
            for g in range(3):
                for h in range(3):
                    covariance[g, h] += d * (n - d) / (n - 1) * (risk[g] / n * (g == h) - risk[g] * risk[h] / n**2)
    expected = gap[:2] @ np.linalg.inv(covariance[:2, :2]) @ gap[:2]
    test = survival.log_rank(times, events, groups)
    assert test.statistic == pytest.approx(expected)
    assert test.degrees == 2
    assert test.p == pytest.approx(stats.chi2.sf(expected, 2))


@pytest.mark.parametrize("degrees", range(1, 8))
@pytest.mark.parametrize("statistic", [0.0, 0.3, 4.0, 40.0])
def test_the_chi_square_tail_is_that_of_scipy(degrees, statistic):
    assert survival._chi_square_tail(statistic, degrees) == pytest.approx(stats.chi2.sf(statistic, degrees), rel=1e-9)


def test_a_log_rank_test_that_cannot_be_made_says_why():
    times = np.array([1.0, 2, 3, 4])
    assert survival.log_rank(times, np.zeros(4, bool), np.array([0, 0, 1, 1])).reason == "no event was seen"
    lonely = survival.log_rank(times, np.ones(4, bool), np.zeros(4, int))
    assert "two groups" in lonely.reason
    assert np.isnan(lonely.p)
    late = survival.log_rank(times, np.array([0, 0, 1, 1], bool), np.array([0, 0, 1, 1]))  # group 0 is gone by then
    assert np.isnan(late.p)
    assert "at risk" in late.reason


def test_a_group_that_left_before_the_first_event_takes_no_degree():
    times, events = _random(3)
    test = survival.log_rank(np.append(times, [0.1, 0.2]), np.append(events, [False] * 2), np.append(np.arange(60) % 2,
                             [2, 2]))  # fmt: skip
    assert test.degrees == 1
    assert test.statistic == pytest.approx(survival.log_rank(times, events, np.arange(60) % 2).statistic)


def test_two_equal_groups_do_not_differ():
    times, events = _random(4)
    test = survival.log_rank(np.tile(times, 2), np.tile(events, 2), np.repeat([0, 1], 60))
    assert test.statistic == pytest.approx(0, abs=1e-9)
    assert test.p == pytest.approx(1)


@pytest.mark.parametrize("times", [[1.0, np.nan], [1.0, -1.0], [1.0, np.inf], [1.0]])
def test_what_is_no_time_is_refused(times):
    with pytest.raises(ValueError, match="time"):
        survival.kaplan_meier(np.array(times), np.array([True, False]))
