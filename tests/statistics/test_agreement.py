"""Kappa by hand and against scikit-learn."""

import numpy as np
import pytest
from sklearn import metrics as sk

from wsi_mil.statistics.agreement import bootstrap_kappa, kappa
from wsi_mil.statistics.decisions import confusion_matrix

SKLEARN = {"unweighted": None, "linear": "linear", "quadratic": "quadratic"}


def _labels(seed=0, k=4, n=80):
    generator = np.random.default_rng(seed)
    targets = generator.integers(0, k, n)
    return targets, np.clip(targets + generator.integers(-1, 2, n), 0, k - 1)


def test_kappa_by_hand():
    # 20 yes-yes, 5 yes-no, 10 no-yes, 15 no-no: agreement 0.7, by chance 0.5
    assert kappa(np.array([[20, 5], [10, 15]]), distance="unweighted") == pytest.approx(0.4)
    # of three in an order: observed squares (4 + 1) / 5; totals 2 1 2 and 2 2 1: chance (1*4 + ...) worked out below
    matrix = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0]])
    chance = sum((i - j) ** 2 * r * c for i, r in enumerate([2, 1, 2]) for j, c in enumerate([2, 2, 1])) / 25
    assert kappa(matrix, distance="quadratic") == pytest.approx(1 - (4 + 4 + 1) / 5 / chance)


@pytest.mark.parametrize("distance", SKLEARN)
def test_all_weights_agree_with_scikit_learn(distance):
    targets, called = _labels()
    expected = sk.cohen_kappa_score(targets, called, weights=SKLEARN[distance])
    assert kappa(confusion_matrix(targets, called, n_classes=4), distance=distance) == pytest.approx(expected)


def test_agreement_is_one_the_contrary_is_minus_one_and_chance_zero():
    assert kappa(np.diag([3, 4, 5]), distance="quadratic") == 1
    assert kappa(np.array([[0, 5], [5, 0]]), distance="linear") == -1
    assert kappa(np.outer([2, 3], [4, 1]), distance="unweighted") == pytest.approx(0)


def test_a_mistake_by_two_grades_costs_more_only_where_grades_have_an_order():
    near, far = np.array([[4, 1, 0], [0, 4, 1], [1, 0, 4]]), np.array([[4, 0, 1], [1, 4, 0], [0, 1, 4]])
    assert kappa(near, distance="unweighted") == pytest.approx(kappa(far, distance="unweighted"))
    two_wide = np.array([[3, 0, 2], [0, 5, 0], [2, 0, 3]])
    one_wide = np.array([[3, 2, 0], [2, 3, 0], [0, 0, 5]])
    assert kappa(two_wide, distance="quadratic") < kappa(one_wide, distance="quadratic")


@pytest.mark.parametrize("matrix", [np.zeros((3, 3), int), np.diag([7, 0, 0])])
def test_nothing_to_disagree_on_is_undefined(matrix):
    assert np.isnan(kappa(matrix, distance="linear"))


def test_bootstrap_samples_are_kappas_of_repeated_rows():
    targets, called = _labels(1)
    counts = np.random.default_rng(2).integers(0, 3, 80)
    rows = np.repeat(np.arange(80), counts)
    got = bootstrap_kappa(targets, called, n_classes=4, distance="quadratic", weights=np.stack([np.ones(80), counts]))
    assert got[0] == pytest.approx(sk.cohen_kappa_score(targets, called, weights="quadratic"))
    assert got[1] == pytest.approx(sk.cohen_kappa_score(targets[rows], called[rows], weights="quadratic"))
