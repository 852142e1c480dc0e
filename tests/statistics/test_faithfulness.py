"""Deletion and insertion by hand."""

import numpy as np
import pytest

from wsi_mil.statistics.faithfulness import Perturbed, summarise

NAN = float("nan")


def _perturbed(without_top, without_random, only_top, only_random) -> Perturbed:
    return Perturbed(
        without_top=np.array(without_top),
        without_random=np.array(without_random),
        only_top=np.array(only_top),
        only_random=np.array(only_random),
    )


def test_the_figures_by_hand():
    found = _perturbed(
        [0.9, 0.6, 0.3, 0.0, 0.0, 0.0], [0.9, 0.9, 0.9, 0.9, 0.6, 0.6], [0.6] * 6, [0.0, 0.0, 0.0, 0.3, 0.3, 0.6]
    )
    assert found.deletion == pytest.approx((0 + 0.3 + 0.6 + 0.9 + 0.6 + 0.6) / 6)
    assert found.insertion == pytest.approx((0.6 * 3 + 0.3 * 2 + 0) / 6)
    assert found.faithfulness == pytest.approx((0.5 + 0.4) / 2)


def test_the_same_curve_as_random_is_zero_and_below_it_is_negative():
    assert _perturbed([0.5] * 6, [0.5] * 6, [0.2] * 6, [0.2] * 6).faithfulness == 0
    assert _perturbed([0.9] * 6, [0.5] * 6, [0.1] * 6, [0.2] * 6).faithfulness == pytest.approx(-0.25)


def test_steps_that_could_not_be_taken_are_left_out():
    found = _perturbed([0.1] + [NAN] * 5, [0.5] + [NAN] * 5, [NAN] * 6, [NAN] * 6)
    assert found.deletion == pytest.approx(0.4)
    assert np.isnan(found.insertion)
    assert found.faithfulness == pytest.approx(0.4)
    assert np.isnan(_perturbed(*[[NAN] * 6] * 4).faithfulness)


def test_together_each_measurement_counts_alike_and_the_interval_is_of_patients():
    generator = np.random.default_rng(0)
    values = generator.normal(0.3, 0.1, size=60)
    patients = [f"p{place // 3}" for place in range(60)]
    found = summarise(values + 0.1, values - 0.1, values, patients)
    assert (found.n_bags, found.n_patients) == (60, 20)
    assert found.mean == pytest.approx(values.mean())
    assert (found.deletion - found.mean, found.mean - found.insertion) == (pytest.approx(0.1), pytest.approx(0.1))
    assert found.interval.low < found.mean < found.interval.high
    thrice = summarise(*[np.tile(values, 3)] * 3, patients * 3)
    assert (thrice.interval.low, thrice.interval.high) == pytest.approx((found.interval.low, found.interval.high))


def test_bags_that_were_too_small_count_nowhere_and_few_patients_give_no_interval():
    values = np.array([0.5, NAN, 0.3])
    found = summarise(values, values, values, ["a", "b", "c"])
    assert (found.n_bags, found.n_patients, found.mean) == (2, 2, pytest.approx(0.4))
    assert np.isnan(found.interval.low)
