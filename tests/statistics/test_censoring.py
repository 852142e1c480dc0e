"""Inverse-probability weights, Brier scores and AUC at a time: by hand, without censoring, and by simulation."""

import numpy as np
import pytest
from sklearn import metrics as sk

from wsi_mil.statistics import censoring as cens
from wsi_mil.statistics.ranking import auc
from wsi_mil.statistics.survival import censoring_curve

# G is 3/4 from time 1 on and 3/8 from time 3 on; training patients were seen until 4.
TRAINING = censoring_curve(np.array([1.0, 2, 3, 4]), np.array([0, 1, 0, 1], bool))
TIMES, EVENTS = np.array([0.5, 1.5, 2.0, 3.5]), np.array([1, 0, 1, 0], bool)


def _uncensored(n=50, seed=0):
    generator = np.random.default_rng(seed)
    times = generator.exponential(5, n)
    training = censoring_curve(np.append(times, 1e3), np.ones(n + 1, bool))
    return generator, times, training


def test_weights_by_hand():
    weights = cens.censoring_weights(TRAINING, TIMES, EVENTS, at=2.5)
    np.testing.assert_allclose(weights, [1, 0, 4 / 3, 4 / 3])
    np.testing.assert_allclose(cens.censoring_weights(TRAINING, TIMES, EVENTS, at=3.0), [1, 0, 4 / 3, 8 / 3])


def test_an_event_at_the_time_of_a_censoring_is_the_earlier():
    weights = cens.censoring_weights(TRAINING, np.array([1.0, 1.0]), np.array([True, False]), at=1.0)
    assert weights.tolist() == [1.0, 0.0]


def test_brier_and_auc_by_hand():
    weights = cens.censoring_weights(TRAINING, TIMES, EVENTS, at=2.5)
    terms = cens.survival_brier_terms(TIMES, np.array([0.2, 0.5, 0.4, 0.9]), at=2.5, weights=weights)
    np.testing.assert_allclose(terms, [0.04, 0, 0.16 * 4 / 3, 0.01 * 4 / 3])
    # cases 0 (weight 1) and 2 (4/3), one control between their risks
    value = cens.dynamic_auc(
        TIMES, np.array([0.9, 0.1, 0.3, 0.5]), at=2.5, weights=weights, groups=np.zeros(4, int)
    )  # fmt: skip
    assert value[0] == pytest.approx(1 / (1 + 4 / 3))


def test_without_censoring_they_are_the_ordinary_figures():
    generator, times, training = _uncensored()
    survival, at = generator.random(50), 4.0
    weights = cens.censoring_weights(training, times, np.ones(50, bool), at=at)
    assert weights.tolist() == [1.0] * 50
    terms = cens.survival_brier_terms(times, survival, at=at, weights=weights)
    assert terms.mean() == pytest.approx(sk.brier_score_loss(times > at, survival))
    value = cens.dynamic_auc(times, -survival, at=at, weights=weights, groups=np.zeros(50, int))[0]
    assert value == pytest.approx(auc(times <= at, -survival))


def test_weights_repair_what_censoring_takes():
    generator = np.random.default_rng(3)
    n, at = 20_000, 4.0
    risk = generator.normal(size=n)
    true, left = generator.exponential(5, n) * np.exp(-0.8 * risk), generator.exponential(6, n)
    times, events = np.minimum(true, left), true <= left
    weights = cens.censoring_weights(censoring_curve(times, events), times, events, at=at)
    assert weights.mean() == pytest.approx(1, abs=0.02)
    assert np.average(times > at, weights=weights) == pytest.approx((true > at).mean(), abs=0.01)
    value = cens.dynamic_auc(times, risk, at=at, weights=weights, groups=np.zeros(n, int))[0]
    assert value == pytest.approx(auc(true <= at, risk), abs=0.01)
    survival = np.exp(-at / 5 * np.exp(0.8 * risk))
    terms = cens.survival_brier_terms(times, survival, at=at, weights=weights)
    assert terms.mean() == pytest.approx(
        ((true > at) - survival).var() + ((true > at) - survival).mean() ** 2, abs=0.01
    )


def test_beyond_the_training_part_nothing_is_said_and_why():
    assert cens.why_undefined(TRAINING, at=4.0) == ""
    assert "until 4 only" in cens.why_undefined(TRAINING, at=4.1)
    assert np.isnan(cens.censoring_weights(TRAINING, TIMES, EVENTS, at=4.1)).all()
    ends_censored = censoring_curve(np.array([1.0, 2.0]), np.array([True, False]))
    assert "beyond 2" in cens.why_undefined(ends_censored, at=2.0)
    weights = cens.censoring_weights(ends_censored, TIMES, EVENTS, at=2.0)
    assert np.isnan(cens.survival_brier_terms(TIMES, np.ones(4), at=2.0, weights=weights)).all()
    assert np.isnan(cens.dynamic_auc(TIMES, TIMES, at=2.0, weights=weights, groups=np.zeros(4, int))).all()
    assert cens.why_undefined(censoring_curve(np.empty(0), np.empty(0, bool)), at=1.0) == "there is no training patient"


def test_a_test_part_that_was_all_censored_before_has_no_score_rather_than_a_perfect_one():
    times, events = np.array([0.5, 1.0]), np.zeros(2, bool)
    weights = cens.censoring_weights(TRAINING, times, events, at=2.0)
    assert np.isnan(cens.survival_brier_terms(times, np.ones(2), at=2.0, weights=weights)).all()
    assert np.isnan(cens.dynamic_auc(times, times, at=2.0, weights=weights, groups=np.zeros(2, int))).all()


def test_pairs_lie_within_groups_and_ties_count_a_half():
    times, risks, groups = np.array([1.0, 9, 1, 9]), np.array([1.0, 0, 5, 5]), np.array([0, 0, 1, 1])
    value = cens.dynamic_auc(times, risks, at=3.0, weights=np.ones(4), groups=groups)
    assert value[0] == 0.75
    draws = np.array([[1.0, 1, 0, 0], [0, 0, 2, 1], [1, 0, 0, 1]])
    samples = cens.dynamic_auc(times, risks, at=3.0, weights=np.ones(4), groups=groups, draws=draws)
    assert samples[:2].tolist() == [1.0, 0.5]
    assert np.isnan(samples[2])


def test_a_predicted_curve_is_read_as_steps():
    survival = np.array([[0.8, 0.5], [0.9, 0.1]])
    cuts = np.array([1.0, 3.0])
    for at, expected in ((0.0, [1, 1]), (0.99, [1, 1]), (1.0, [0.8, 0.9]), (2.9, [0.8, 0.9]), (3.0, [0.5, 0.1]),
                         (99.0, [0.5, 0.1])):  # fmt: skip
        assert cens.survival_at(cuts, survival, at=at).tolist() == expected
    with pytest.raises(ValueError, match="rising cuts"):
        cens.survival_at(np.array([3.0, 1.0]), survival, at=1.0)
    with pytest.raises(ValueError, match="one column"):
        cens.survival_at(np.array([1.0]), survival, at=1.0)


def test_the_integrated_score_is_the_area_below_the_score():
    generator = np.random.default_rng(5)
    times, events = generator.exponential(4, 30), generator.random(30) < 0.6
    training = censoring_curve(generator.exponential(4, 60), generator.random(60) < 0.6)
    cuts, end = np.array([1.0, 2.5, 4.0]), 5.0
    survival = np.sort(generator.random((30, 3)), axis=1)[:, ::-1]
    exact = cens.integrated_brier_terms(times, events, cuts=cuts, survival=survival, censoring=training, end=end)
    grid = (np.arange(4000) + 0.5) * end / 4000
    total = np.zeros(30)
    for at in grid.tolist():
        weights = cens.censoring_weights(training, times, events, at=at)
        total += cens.survival_brier_terms(times, cens.survival_at(cuts, survival, at=at), at=at, weights=weights)
    np.testing.assert_allclose(exact, total / len(grid), atol=2e-3)


def test_the_integrated_score_by_hand_and_its_bounds():
    # one patient, event at 2, predicted 1 until 1 and 0.5 from then on: 0, then 0.25 from 1 to 2 and from 2 to 4
    training = censoring_curve(np.array([4.0]), np.array([True]))
    words = {"cuts": np.array([1.0]), "survival": np.array([[0.5]]), "censoring": training}
    one = (np.array([2.0]), np.array([True]))
    assert cens.integrated_brier_terms(*one, **words, end=4.0)[0] == pytest.approx(0.25 * 3 / 4)
    assert np.isnan(cens.integrated_brier_terms(*one, **words, end=4.1)).all()
    with pytest.raises(ValueError, match="above it"):
        cens.integrated_brier_terms(*one, **words, end=0.0)


def test_knowing_the_truth_scores_zero_and_the_contrary_one():
    times = np.array([1.0, 2.0, 3.0])
    training = censoring_curve(np.array([9.0]), np.array([True]))
    truth = (times[:, None] > times).astype(float)
    for survival, expected in ((truth, 0.0), (1 - truth, 2 / 3)):  # both say 1 until the first cut, a third of the way
        terms = cens.integrated_brier_terms(
            times, np.ones(3, bool), cuts=times, survival=survival, censoring=training, end=3.0
        )
        assert terms.mean() == pytest.approx(expected)
