"""Net benefit by hand and its laws."""

import numpy as np
import pytest

from wsi_mil.statistics.decision_curve import decision_curve

POSITIVE = np.array([1, 1, 0, 0, 0], bool)
PROBABILITIES = np.array([0.9, 0.3, 0.5, 0.2, 0.1])


def test_by_hand():
    curve = decision_curve(POSITIVE, PROBABILITIES, thresholds=np.array([0.0, 0.25, 0.5, 0.6]))
    # at 0.25: two hits, one alarm; at 0.5 one hit, one alarm (p = t is treated); at 0.6 one hit
    np.testing.assert_allclose(curve.model, [0.4, (2 - 1 / 3) / 5, (1 - 1) / 5, 1 / 5])
    np.testing.assert_allclose(curve.treat_all, [0.4, 0.4 - 0.6 / 3, 0.4 - 0.6, 0.4 - 0.6 * 1.5])


def test_treating_all_is_worth_nothing_at_the_prevalence_and_a_model_of_one_value_is_all_or_none():
    thresholds = np.array([0.1, 0.4, 0.5, 0.9])
    curve = decision_curve(POSITIVE, np.full(5, 0.5), thresholds=thresholds)
    assert curve.treat_all[1] == pytest.approx(0)
    np.testing.assert_allclose(curve.model, np.where(thresholds <= 0.5, curve.treat_all, 0.0))


def test_a_perfect_model_is_worth_the_prevalence():
    curve = decision_curve(POSITIVE, POSITIVE.astype(float), thresholds=np.array([0.01, 0.5, 0.99]))
    np.testing.assert_allclose(curve.model, 0.4)


def test_calibrated_probabilities_beat_both_at_every_threshold():
    generator = np.random.default_rng(0)
    probabilities = generator.random(50_000)
    curve = decision_curve(
        generator.random(50_000) < probabilities, probabilities, thresholds=np.array([0.1, 0.3, 0.5, 0.8])
    )
    assert (curve.model > np.maximum(curve.treat_all, 0)).all()


def test_nobody_is_undefined_and_a_threshold_of_one_is_refused():
    nobody = decision_curve(np.empty(0, bool), np.empty(0), thresholds=np.array([0.5]))
    assert np.isnan(nobody.model).all()
    assert np.isnan(nobody.treat_all).all()
    for bad in (1.0, -0.1, np.nan):
        with pytest.raises(ValueError, match="threshold"):
            decision_curve(POSITIVE, PROBABILITIES, thresholds=np.array([bad]))
