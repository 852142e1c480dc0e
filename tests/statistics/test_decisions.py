"""Decisions by hand and against scikit-learn; thresholds come from validation alone."""

import numpy as np
import pytest
from sklearn import metrics as sk

from wsi_mil.statistics import decisions


def _labels(seed: int = 0, k: int = 3, n: int = 50) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    targets = generator.integers(0, k, n)
    called = np.where(generator.random(n) < 0.6, targets, generator.integers(0, k, n))
    return targets, called


def test_the_matrix_by_hand():
    matrix = decisions.confusion_matrix(np.array([0, 0, 1, 1, 1]), np.array([0, 1, 1, 1, 0]), n_classes=2)
    assert matrix.tolist() == [[1, 1], [1, 2]]
    assert decisions.accuracy(matrix) == 0.6
    assert decisions.sensitivity(matrix) == pytest.approx(2 / 3)
    assert decisions.specificity(matrix) == 0.5
    assert decisions.balanced_accuracy(matrix) == pytest.approx((2 / 3 + 0.5) / 2)
    assert decisions.f1(matrix, average="positive") == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))


def test_all_figures_agree_with_scikit_learn():
    targets, called = _labels()
    matrix = decisions.confusion_matrix(targets, called, n_classes=3)
    np.testing.assert_array_equal(matrix, sk.confusion_matrix(targets, called))
    assert decisions.accuracy(matrix) == pytest.approx(sk.accuracy_score(targets, called))
    assert decisions.balanced_accuracy(matrix) == pytest.approx(sk.balanced_accuracy_score(targets, called))
    for average in ("macro", "micro"):
        expected = sk.f1_score(targets, called, average=average)
        assert decisions.f1(matrix, average=average) == pytest.approx(expected)


def test_an_absent_class_keeps_its_row_and_column():
    matrix = decisions.confusion_matrix(np.array([0, 0]), np.array([0, 1]), n_classes=3)
    assert matrix.shape == (3, 3)
    assert np.isnan(decisions.recalls(matrix)[1:]).all()
    assert decisions.balanced_accuracy(matrix) == 0.5


def test_the_threshold_is_the_youden_point_between_two_scores():
    positive = np.repeat([False, True], 10)
    scores = np.concatenate([np.linspace(0.0, 0.2, 10), np.linspace(0.3, 0.9, 10)])
    threshold = decisions.choose_threshold(positive, scores)
    assert threshold.from_validation
    assert threshold.value == pytest.approx(0.25)


def test_of_equally_good_cuts_the_one_nearest_to_a_half_is_taken():
    # Youden's index is 0.9 at every cut between 0.1|0.4 (one positive below) and 0.6|0.9 (one negative above)
    negatives = [0.1] * 9 + [0.6]
    positives = [0.4] + [0.9] * 9
    threshold = decisions.choose_threshold(np.repeat([False, True], 10), np.array(negatives + positives))
    assert threshold.value in (pytest.approx(0.25), pytest.approx(0.75))
    better = decisions.choose_threshold(np.repeat([False, True], 10), np.array([0.1] * 9 + [0.56] + [0.4] + [0.9] * 9))
    assert better.value == pytest.approx(0.73)


@pytest.mark.parametrize(("n_negative", "n_positive"), [(9, 30), (30, 9), (0, 30), (0, 0)])
def test_a_small_validation_part_chooses_nothing_and_says_so(n_negative, n_positive):
    positive = np.repeat([False, True], [n_negative, n_positive])
    threshold = decisions.choose_threshold(positive, np.linspace(0, 0.2, len(positive)))
    assert threshold.value == 0.5
    assert not threshold.from_validation
    assert "0.5" in threshold.source


def test_ten_in_each_class_are_enough():
    positive = np.repeat([False, True], 10)
    assert decisions.choose_threshold(positive, np.where(positive, 0.2, 0.1)).value == pytest.approx(0.15)
