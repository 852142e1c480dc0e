"""Ranking figures by hand and against scikit-learn."""

import numpy as np
import pytest
from sklearn import metrics as sk

from wsi_mil.statistics import ranking


def _ties(seed: int, n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    positive = generator.random(n) < 0.4
    return positive, np.round(generator.normal(size=n) + positive, 1)


def test_auc_by_hand_counts_a_tie_as_half():
    # pairs: 3 > 1, 3 > 2, 2 > 1, 2 = 2 -> (1 + 1 + 1 + 0.5) / 4
    assert ranking.auc(np.array([True, True, False, False]), np.array([3.0, 2, 1, 2])) == 0.875


@pytest.mark.parametrize("seed", range(5))
def test_auc_and_average_precision_agree_with_scikit_learn(seed):
    positive, scores = _ties(seed)
    assert ranking.auc(positive, scores) == pytest.approx(sk.roc_auc_score(positive, scores), abs=1e-12)
    assert ranking.average_precision(positive, scores) == pytest.approx(
        sk.average_precision_score(positive, scores), abs=1e-12
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_roc_curve_is_scikit_learns_and_its_area_is_the_auc(seed):
    positive, scores = _ties(seed)
    curve = ranking.roc_curve(positive, scores)
    x, y, _ = sk.roc_curve(positive, scores, drop_intermediate=False)
    np.testing.assert_allclose(curve.x, x)
    np.testing.assert_allclose(curve.y, y)
    assert np.trapezoid(curve.y, curve.x) == pytest.approx(ranking.auc(positive, scores))


def test_precision_recall_points_are_scikit_learns():
    positive, scores = _ties(9)
    curve = ranking.precision_recall_curve(positive, scores)
    precision, recall, _ = sk.precision_recall_curve(positive, scores)
    np.testing.assert_allclose(curve.y[1:], precision[:-1][::-1])
    np.testing.assert_allclose(curve.x[1:], recall[:-1][::-1])


@pytest.mark.parametrize("positive", [[True, True], [False, False]])
def test_an_absent_class_gives_no_auc_and_no_curve(positive):
    assert np.isnan(ranking.auc(np.array(positive), np.array([0.1, 0.9])))
    assert len(ranking.roc_curve(np.array(positive), np.array([0.1, 0.9])).x) == 0


def test_auc_does_not_change_under_a_growing_map_and_turns_over_with_the_sign():
    positive, scores = _ties(4)
    assert ranking.auc(positive, np.exp(3 * scores)) == pytest.approx(ranking.auc(positive, scores))
    assert ranking.auc(positive, -scores) == pytest.approx(1 - ranking.auc(positive, scores))


def test_macro_is_the_mean_of_the_defined_classes():
    probabilities = np.array([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.6, 0.4, 0.0], [0.3, 0.7, 0.0]])
    aucs = ranking.one_vs_rest_auc(np.array([0, 1, 1, 0]), probabilities)
    assert np.isnan(aucs[2])
    assert aucs[:2].tolist() == [0.75, 0.75]
    assert ranking.macro(aucs) == 0.75
    assert np.isnan(ranking.macro(np.array([np.nan])))
