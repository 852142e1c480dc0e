"""Paired test of mean differences."""

from itertools import product

import numpy as np
import pytest

from wsi_mil.statistics.paired_means import compare_means


def test_p_is_the_share_of_all_sign_flips_that_go_as_far():
    values = np.random.default_rng(4).normal(0.5, 1.0, size=10)
    means = [abs(np.mean(np.array(signs) * values)) for signs in product((-1, 1), repeat=10)]
    exact = np.mean(np.array(means) >= abs(values.mean()) - 1e-12)
    assert compare_means(values).p == pytest.approx(exact, abs=0.02)


def test_swapping_the_methods_swaps_the_sign_alone():
    values = np.random.default_rng(4).normal(0.5, 1.0, size=30)
    one, other = compare_means(values), compare_means(-values)
    assert (one.difference, one.p) == (-other.difference, other.p)
    assert one.interval.low == pytest.approx(-other.interval.high)
    assert one.interval.low < values.mean() < one.interval.high


def test_no_difference_is_p_1_and_a_handful_of_patients_is_not_tested():
    assert compare_means(np.zeros(12)).p == 1.0
    few = compare_means(np.ones(9))
    assert few.difference == 1.0
    assert np.isnan(few.p)
    assert np.isnan(few.interval.low)


def test_equal_methods_are_called_different_in_about_5_of_100_studies():
    generator = np.random.default_rng(11)
    found = sum(compare_means(generator.standard_t(3, size=20)).p < 0.05 for _ in range(200))
    assert 2 <= found <= 20
