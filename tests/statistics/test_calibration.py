"""Calibration figures by hand and against scikit-learn."""

import numpy as np
import pytest
from sklearn import metrics as sk

from wsi_mil.statistics import calibration


def test_brier_and_log_loss_by_hand():
    targets, probabilities = np.array([1, 0]), np.array([[0.2, 0.8], [0.6, 0.4]])
    assert calibration.brier(targets, probabilities) == pytest.approx((0.04 + 0.16) / 2)
    assert calibration.log_loss(targets, probabilities) == pytest.approx(-(np.log(0.8) + np.log(0.6)) / 2)


def test_brier_and_log_loss_agree_with_scikit_learn():
    generator = np.random.default_rng(1)
    targets = generator.integers(0, 3, 40)
    probabilities = generator.dirichlet(np.ones(3), 40)
    assert calibration.log_loss(targets, probabilities) == pytest.approx(sk.log_loss(targets, probabilities))
    truth = np.eye(3)[targets]
    assert calibration.brier(targets, probabilities) == pytest.approx(((probabilities - truth) ** 2).sum(1).mean())
    two = np.stack([1 - probabilities[:, 0], probabilities[:, 0]], axis=1)
    expected = sk.brier_score_loss(targets == 0, probabilities[:, 0])
    assert calibration.brier((targets == 0).astype(int), two) == pytest.approx(expected)


def test_a_sure_mistake_costs_much_but_stays_finite():
    assert 30 < calibration.log_loss(np.array([1]), np.array([[1.0, 0.0]])) < 40


def test_bins_have_equal_mass_and_the_error_is_worked_by_hand():
    scores = np.array([0.1, 0.2, 0.6, 0.8])
    positive = np.array([False, True, True, True])
    curve = calibration.calibration_curve(positive, scores, n_bins=2)
    assert curve.counts.tolist() == [2, 2]
    np.testing.assert_allclose(curve.predicted, [0.15, 0.7])
    np.testing.assert_allclose(curve.observed, [0.5, 1.0])
    error = calibration.expected_calibration_error(positive, scores, n_bins=2)
    assert error == pytest.approx((0.35 + 0.3) / 2)


def test_equal_scores_are_never_cut_apart():
    scores = np.array([0.3] * 9 + [0.9])
    curve = calibration.calibration_curve(scores > 0.5, scores, n_bins=5)
    assert curve.counts.tolist() == [9, 1]


def test_truth_drawn_from_the_probabilities_is_calibrated_and_overconfidence_is_not():
    generator = np.random.default_rng(3)
    scores = generator.random(20_000)
    positive = generator.random(20_000) < scores
    assert calibration.expected_calibration_error(positive, scores) < 0.02
    sharp = scores**3 / (scores**3 + (1 - scores) ** 3)
    assert calibration.expected_calibration_error(positive, sharp) > 0.1
