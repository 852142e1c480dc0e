"""Inverse-probability weights, Brier scores and AUC at a time: by hand, without censoring, and by simulation."""

import numpy as np
import pytest
from sklearn import metrics as sk

from wsi_mil.statistics import censoring as cens
from wsi_mil.statistics.ranking import auc
from wsi_mil.statistics.survival import censoring_curve, kaplan_meier

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


def test_beyond_the_follow_up_nothing_is_said_and_why():
    assert cens.why_undefined(TRAINING, at=4.0, whose="these patients") == ""
    why = cens.why_undefined(TRAINING, at=4.1, whose="these patients")
    assert why == "these patients were followed until 4 only"
    assert np.isnan(cens.censoring_weights(TRAINING, TIMES, EVENTS, at=4.1)).all()
    ends_censored = censoring_curve(np.array([1.0, 2.0]), np.array([True, False]))
    why = cens.why_undefined(ends_censored, at=2.0, whose="the training patients")
    assert why == "none of the training patients was followed beyond 2"
    weights = cens.censoring_weights(ends_censored, TIMES, EVENTS, at=2.0)
    assert np.isnan(cens.survival_brier_terms(TIMES, np.ones(4), at=2.0, weights=weights)).all()
    assert np.isnan(cens.dynamic_auc(TIMES, TIMES, at=2.0, weights=weights, groups=np.zeros(4, int))).all()
    nobody = censoring_curve(np.empty(0), np.empty(0, bool))
    why = cens.why_undefined(nobody, at=1.0, whose="the training patients")
    assert why == "the time of none of the training patients is known"
    assert np.isnan(cens.censoring_weights(nobody, TIMES, EVENTS, at=1.0)).all()


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


def test_a_predicted_curve_is_straight_between_its_cuts_and_level_after_the_last():
    survival = np.array([[0.8, 0.5], [0.9, 0.1]])
    cuts = np.array([1.0, 3.0])
    for at, expected in (
        (0.0, [1, 1]),
        (0.5, [0.9, 0.95]),
        (1.0, [0.8, 0.9]),
        (2.5, [0.575, 0.3]),
        (3.0, [0.5, 0.1]),
        (99.0, [0.5, 0.1]),
    ):
        np.testing.assert_allclose(cens.survival_at(cuts, survival, at=at), expected, atol=1e-15)
    with pytest.raises(ValueError, match="rising cuts"):
        cens.survival_at(np.array([3.0, 1.0]), survival, at=1.0)
    with pytest.raises(ValueError, match="one column"):
        cens.survival_at(np.array([1.0]), survival, at=1.0)


def _line(cuts, survival):
    """The two arguments by which a predicted curve is integrated."""
    return {"predicted": lambda at: cens.survival_at(cuts, survival, at=at), "knots": cuts}


def _step(curve):
    return {"predicted": lambda at: curve.at(np.array([at])), "knots": curve.times}


def test_the_integrated_score_is_the_area_below_the_score():
    generator = np.random.default_rng(5)
    times, events = generator.exponential(4, 30), generator.random(30) < 0.6
    training = censoring_curve(generator.exponential(4, 60), generator.random(60) < 0.6)
    cuts, end = np.array([1.0, 2.5, 4.0]), 5.0
    survival = np.sort(generator.random((30, 3)), axis=1)[:, ::-1]
    exact = cens.integrated_brier_terms(times, events, **_line(cuts, survival), censoring=training, end=end)
    grid = (np.arange(4000) + 0.5) * end / 4000
    total = np.zeros(30)
    for at in grid.tolist():
        weights = cens.censoring_weights(training, times, events, at=at)
        total += cens.survival_brier_terms(times, cens.survival_at(cuts, survival, at=at), at=at, weights=weights)
    np.testing.assert_allclose(exact, total / len(grid), atol=2e-3)


def test_the_integrated_score_by_hand_and_its_bounds():
    """One patient, event at 2, predicted 1 - t / 4 until 2, then a half: until 2 the integral of t^2 / 16 is 1 / 6,
    from 2 to 4 that of a quarter is a half."""
    training = censoring_curve(np.array([4.0]), np.array([True]))
    words = {**_line(np.array([2.0]), np.array([[0.5]])), "censoring": training}
    one = (np.array([2.0]), np.array([True]))
    assert cens.integrated_brier_terms(*one, **words, end=4.0)[0] == pytest.approx((1 / 6 + 1 / 2) / 4, abs=1e-14)
    assert np.isnan(cens.integrated_brier_terms(*one, **words, end=4.1)).all()
    with pytest.raises(ValueError, match="above it"):
        cens.integrated_brier_terms(*one, **words, end=0.0)


def test_a_step_is_integrated_as_a_step():
    """One patient, event at 3, told 1 until 1 and a half from then on: 0, then a quarter from 1 to 4."""
    training, told = (f(np.array([1.0, 4.0]), np.array([True, True])) for f in (censoring_curve, kaplan_meier))
    terms = cens.integrated_brier_terms(np.array([3.0]), np.array([True]), **_step(told), censoring=training, end=4.0)
    assert terms[0] == pytest.approx(0.25 * 3 / 4, abs=1e-14)


def test_knowing_the_truth_scores_zero_and_the_contrary_one():
    times = np.array([1.0, 2.0, 3.0])
    training = censoring_curve(np.array([9.0]), np.array([True]))
    for known in (True, False):
        terms = cens.integrated_brier_terms(
            times,
            np.ones(3, bool),
            predicted=lambda at, known=known: ((times > at) == known).astype(float),
            knots=times,
            censoring=training,
            end=3.0,
        )
        assert terms.mean() == pytest.approx(0.0 if known else 1.0, abs=1e-14)


def test_four_cuts_cost_nothing_against_the_null_and_the_truth_beats_it():
    """Who tells everyone the Kaplan-Meier curve at four cuts scores as that curve does; who knows each one's own curve
    at the same cuts scores below it, as the true curve does without cuts."""
    generator = np.random.default_rng(1)
    n, end = 400, 5.0
    scale = 5 * np.exp(generator.normal(size=n) * 0.7)
    true, left = generator.exponential(scale), generator.exponential(12, n)
    times, events = np.minimum(true, left), true <= left
    free, censoring = kaplan_meier(times, events), censoring_curve(times, events)
    cuts = np.append(np.quantile(times[events], (0.25, 0.5, 0.75)), times.max())
    everyone = np.tile(free.at(cuts), (n, 1))

    def score(**curve):
        return cens.integrated_brier_terms(times, events, **curve, censoring=censoring, end=end).mean()

    null, own = score(**_step(free)), score(**_line(cuts, np.exp(-cuts / scale[:, None])))
    exact = score(predicted=lambda at: np.exp(-at / scale), knots=np.empty(0))
    assert score(**_line(cuts, everyone)) == pytest.approx(null, abs=0.002)
    assert own < null - 0.01
    assert own == pytest.approx(exact, abs=0.002)
