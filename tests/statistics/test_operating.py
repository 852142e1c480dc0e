"""Points of a ROC at a wished specificity or sensitivity."""

import numpy as np
import pytest

from wsi_mil.statistics.intervals import patient_weights
from wsi_mil.statistics.operating import sensitivity_at, specificity_at


def _weights(positive, draws=300):
    return patient_weights(np.zeros(len(positive), int), classes=positive.astype(int), draws=draws)


def _brute(positive, scores, wished):
    best = 0.0
    for cut in [*np.unique(scores), np.inf]:
        called = scores >= cut
        if (~called[~positive]).mean() >= wished - 1e-12:
            best = max(best, called[positive].mean())
    return best


def test_by_hand():
    positive = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0], bool)
    scores = np.array([9, 7, 5, 2, 8, 6, 4, 3, 1.0])
    point = sensitivity_at(positive, scores, specificity=0.8, weights=_weights(positive))
    assert (point.value, point.reached, point.cut) == (0.5, 0.8, 7.0)
    # at 4 nothing is gained over 5, so the higher cut is named
    lower = sensitivity_at(positive, scores, specificity=0.4, weights=_weights(positive))
    assert (lower.value, lower.reached, lower.cut) == (0.75, pytest.approx(0.6), 5.0)
    mirror = specificity_at(positive, scores, sensitivity=0.75, weights=_weights(positive))
    assert (mirror.value, mirror.reached, mirror.cut) == (pytest.approx(0.6), 0.75, 5.0)


def test_ties_are_called_alike_and_nothing_is_interpolated():
    positive = np.repeat([True, False], 10)
    scores = np.full(20, 0.5)
    point = sensitivity_at(positive, scores, specificity=0.5, weights=_weights(positive))
    assert (point.value, point.reached, point.cut) == (0.0, 1.0, np.inf)
    mirror = specificity_at(positive, scores, sensitivity=0.5, weights=_weights(positive))
    assert (mirror.value, mirror.reached, mirror.cut) == (0.0, 1.0, 0.5)


@pytest.mark.parametrize("wished", [0.0, 0.5, 0.9, 0.95, 1.0])
def test_all_cuts_tried_one_by_one(wished):
    generator = np.random.default_rng(3)
    positive = np.arange(60) % 3 == 0
    scores = np.round(generator.normal(size=60) + positive, 1)
    weights = _weights(positive)
    point = sensitivity_at(positive, scores, specificity=wished, weights=weights)
    assert point.value == pytest.approx(_brute(positive, scores, wished))
    assert point.reached >= wished
    mirror = specificity_at(positive, scores, sensitivity=wished, weights=weights)
    assert mirror.value == pytest.approx(_brute(~positive, -scores, wished))
    for found, called in ((point, scores >= point.cut), (mirror, scores >= mirror.cut)):
        both = called[positive].mean(), (~called[~positive]).mean()
        expected = (found.value, found.reached) if found is point else (found.reached, found.value)
        assert both == pytest.approx(expected)


def test_the_interval_chooses_the_cut_anew_and_is_wider_than_that_of_a_known_cut():
    generator = np.random.default_rng(4)
    positive = np.repeat([True, False], [200, 30])
    scores = generator.normal(size=230) + 1.5 * positive
    point = sensitivity_at(positive, scores, specificity=0.9, weights=_weights(positive, 1000))
    assert point.interval.method == "patient bootstrap"
    assert point.interval.low < point.value < point.interval.high
    wilson = 2 * 1.96 * np.sqrt(point.value * (1 - point.value) / 200)
    assert point.interval.high - point.interval.low > 1.3 * wilson


def test_without_spread_or_with_few_patients_the_score_interval_stands_in():
    positive = np.repeat([True, False], 25)
    perfect = sensitivity_at(positive, positive.astype(float), specificity=0.9, weights=_weights(positive))
    assert perfect.value == 1.0
    assert perfect.interval.method == "Wilson score interval, 25 positive patients"
    assert perfect.interval.low < 0.9
    few = np.repeat([True, False], [9, 30])
    scores = np.random.default_rng(0).normal(size=39) + 1.0 * few
    mirror = specificity_at(few, scores, sensitivity=0.7, weights=_weights(few))
    assert 0 < mirror.value < 1
    assert mirror.interval.method == "Wilson score interval, 30 negative patients"


def test_one_class_alone_is_undefined():
    positive = np.ones(5, bool)
    point = sensitivity_at(positive, np.arange(5.0), specificity=0.9, weights=_weights(positive))
    assert np.isnan(point.value)
    assert np.isnan(point.interval.low)
