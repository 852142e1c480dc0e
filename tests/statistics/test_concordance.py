"""Within-fold AUC, DeLong's variance and paired tests."""

import numpy as np
import pytest

from wsi_mil.statistics.comparison import compare_aucs, holm
from wsi_mil.statistics.concordance import concordance, mean_concordance
from wsi_mil.statistics.ranking import auc


def _one_group(positive, scores):
    everyone = np.arange(len(scores))
    return concordance(
        np.asarray(positive, bool), np.asarray(scores, float), groups=np.zeros(len(scores), int), patients=everyone,
        n_patients=len(scores),
    )  # fmt: skip


def _delong(positive, scores):
    """DeLong, DeLong and Clarke-Pearson 1988 by the definition, pair by pair."""
    x, y = scores[positive], scores[~positive]
    psi = (x[:, None] > y) + 0.5 * (x[:, None] == y)
    return psi.mean(), psi.mean(1).var(ddof=1) / len(x) + psi.mean(0).var(ddof=1) / len(y)


@pytest.mark.parametrize("seed", range(4))
def test_one_group_is_delong_by_its_definition(seed):
    generator = np.random.default_rng(seed)
    positive = np.arange(37) % 3 == 0
    scores = np.round(generator.normal(size=37) + positive, 1)
    part = _one_group(positive, scores)
    expected_auc, expected_variance = _delong(positive, scores)
    assert part.auc == pytest.approx(expected_auc)
    assert part.variance == pytest.approx(expected_variance)
    assert part.auc == pytest.approx(auc(positive, scores))


def test_delong_worked_by_hand():
    # positives 3, 1; negatives 2, 0: psi = [[1, 1], [0, 1]] -> AUC 0.75; V10 = 1, .5 ; V01 = .5, 1
    part = _one_group([1, 1, 0, 0], [3, 1, 2, 0])
    assert part.auc == 0.75
    assert part.variance == pytest.approx(0.125 / 2 + 0.125 / 2)


def test_pairs_across_folds_do_not_count():
    positive = np.array([1, 0, 1, 0], bool)
    scores = np.array([0.2, 0.1, 0.9, 0.8])  # perfect within each fold, 0.75 pooled
    both = concordance(positive, scores, groups=np.array([0, 0, 1, 1]), patients=np.arange(4), n_patients=4)
    assert both.auc == 1.0
    assert auc(positive, scores) == 0.75


def test_a_shift_of_one_folds_scale_changes_nothing():
    generator = np.random.default_rng(5)
    positive, groups = np.arange(40) % 2 == 0, np.arange(40) // 8
    scores = generator.normal(size=40) + positive
    plain = concordance(positive, scores, groups=groups, patients=np.arange(40), n_patients=40)
    moved = concordance(positive, scores + 7.0 * groups, groups=groups, patients=np.arange(40), n_patients=40)
    assert moved.auc == plain.auc
    np.testing.assert_allclose(moved.influence, plain.influence)


def test_a_group_without_both_classes_counts_for_nothing_and_all_such_is_undefined():
    positive = np.array([1, 0, 1, 1], bool)
    part = concordance(positive, np.array([2.0, 1, 0, 0]), groups=np.array([0, 0, 1, 1]), patients=np.arange(4),
                       n_patients=4)  # fmt: skip
    assert part.auc == 1.0
    assert part.influence[2:].tolist() == [0, 0]
    lonely = concordance(positive, np.ones(4), groups=np.arange(4), patients=np.arange(4), n_patients=4)
    assert np.isnan(lonely.auc)
    assert lonely.disjoint_pairs == 0


def test_the_same_patients_scored_twice_do_not_shrink_the_variance():
    generator = np.random.default_rng(6)
    positive = np.arange(30) % 2 == 0
    scores, once = generator.normal(size=30) + positive, np.arange(30)
    single = _one_group(positive, scores)
    double = concordance(
        np.tile(positive, 2), np.tile(scores, 2), groups=np.repeat([0, 1], 30), patients=np.tile(once, 2),
        n_patients=30,
    )  # fmt: skip
    assert double.auc == pytest.approx(single.auc)
    assert double.variance == pytest.approx(single.variance)
    assert double.disjoint_pairs == single.disjoint_pairs == 15


def test_macro_leaves_the_undefined_class_out():
    defined = _one_group([1, 1, 0, 0], [3, 1, 2, 0])
    undefined = _one_group([0, 0, 0, 0], [3, 1, 2, 0])
    together = mean_concordance([defined, undefined])
    assert together.auc == 0.75
    np.testing.assert_allclose(together.influence, defined.influence)


def test_the_paired_test_equals_the_covariance_form_of_delong():
    generator = np.random.default_rng(8)
    positive = np.arange(50) % 2 == 0
    a, b = generator.normal(size=50) + 1.2 * positive, generator.normal(size=50) + 0.4 * positive
    first, second = _one_group(positive, a), _one_group(positive, b)
    x = [s[positive][:, None] > s[~positive] for s in (a, b)]
    s10 = np.cov([p.mean(1) for p in x]) / positive.sum() + np.cov([p.mean(0) for p in x]) / (~positive).sum()
    variance = s10[0, 0] + s10[1, 1] - 2 * s10[0, 1]
    test = compare_aucs(first, second)
    assert test.difference == pytest.approx(first.auc - second.auc)
    assert (test.interval.high - test.interval.low) / 2 == pytest.approx(1.959964 * np.sqrt(variance), rel=1e-5)


def test_a_method_does_not_differ_from_itself_and_a_much_better_one_does():
    generator = np.random.default_rng(2)
    positive = np.arange(60) % 2 == 0
    good, poor = positive + 0.3 * generator.normal(size=60), generator.normal(size=60)
    assert compare_aucs(_one_group(positive, good), _one_group(positive, good)).p == 1.0
    assert compare_aucs(_one_group(positive, good), _one_group(positive, poor)).p < 1e-4


def test_a_handful_of_patients_is_not_tested():
    positive = np.arange(18) % 2 == 0
    good, poor = positive + np.arange(18) / 50, np.arange(18.0) % 5
    test = compare_aucs(_one_group(positive, good), _one_group(positive, poor))
    assert test.difference > 0.3
    assert np.isnan(test.p)
    assert np.isnan(test.interval.low)


def test_under_no_difference_p_values_are_near_uniform():
    generator = np.random.default_rng(11)
    positive = np.arange(60) % 2 == 0
    small = 0
    for _ in range(400):
        common = generator.normal(size=60) + positive
        a, b = (common + 0.5 * generator.normal(size=60) for _ in range(2))
        small += compare_aucs(_one_group(positive, a), _one_group(positive, b)).p < 0.05
    assert 0.02 < small / 400 < 0.09


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    corrected = holm([0.02, float("nan"), 0.9])
    assert corrected[0] == pytest.approx(0.04)
    assert np.isnan(corrected[1])
    assert corrected[2] == pytest.approx(0.9)
