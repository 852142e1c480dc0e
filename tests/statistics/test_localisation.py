"""Localisation by hand."""

import numpy as np
import pytest

from wsi_mil.statistics.localisation import dice, dice_all, localise, localise_all, mean_interval

LESION = [np.array([1, 0, 0, 0], bool), np.array([1, 1, 0, 0], bool)]
SCORES = [np.array([0.9, 0.1, 0.2, 0.3]), np.array([0.8, 0.3, 0.5, 0.1])]


def test_one_slide_by_hand():
    figures = localise(LESION[1], SCORES[1])
    assert (figures.n_tiles, figures.n_lesion, figures.prevalence) == (4, 2, 0.5)
    assert figures.auc == 0.75
    assert figures.average_precision == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)


def test_without_lesion_or_with_nothing_else_there_is_no_figure():
    for lesion in (np.zeros(4, bool), np.ones(4, bool)):
        figures = localise(lesion, SCORES[0])
        assert np.isnan(figures.auc)
        assert np.isnan(figures.average_precision)


def test_together_by_hand():
    figures = localise_all(LESION, SCORES)
    assert figures.n_slides == 2
    assert figures.mean_auc == pytest.approx((1 + 0.75) / 2)
    assert figures.within_slide_auc == pytest.approx((3 + 3) / 7)
    # pooled positives 0.9 0.8 0.3, negatives 0.1 0.2 0.3 0.5 0.1: 5 + 5 + (3 + 0.5)
    assert figures.pooled_auc == pytest.approx(13.5 / 15)
    assert figures.prevalence == pytest.approx(3 / 8)
    assert figures.mean_prevalence == pytest.approx((1 / 4 + 2 / 4) / 2)


def test_a_slide_without_lesion_leaves_the_mean_alone_but_counts_among_the_pooled_tiles():
    clean = np.zeros(3, bool), np.array([0.95, 0.95, 0.95])
    figures = localise_all([*LESION, clean[0]], [*SCORES, clean[1]])
    assert figures.n_slides == 2
    assert figures.mean_auc == pytest.approx(0.875)
    assert figures.mean_prevalence == pytest.approx(3 / 8)
    assert figures.prevalence == pytest.approx(3 / 11)
    assert figures.pooled_auc < 13.5 / 15


def test_noise_scores_at_chance():
    generator = np.random.default_rng(0)
    lesion = generator.random(20_000) < 0.1
    figures = localise(lesion, generator.random(20_000))
    assert figures.auc == pytest.approx(0.5, abs=0.02)
    assert figures.average_precision == pytest.approx(lesion.mean(), abs=0.02)


def test_dice_by_hand():
    assert dice(np.array([1, 1, 0, 0], bool), np.array([1, 0, 1, 1], bool)) == pytest.approx(2 / 5)
    assert dice(np.array([1, 0], bool), np.array([0, 0], bool)) == 0
    assert dice(np.array([1, 0], bool), np.array([1, 0], bool)) == 1
    assert np.isnan(dice(np.zeros(3, bool), np.ones(3, bool)))


def test_alarms_on_a_slide_without_lesion_weigh_on_the_pooled_dice_alone():
    lesions = [np.array([1, 1, 0], bool), np.array([1, 0, 0], bool), np.zeros(3, bool)]
    called = [np.array([1, 1, 0], bool), np.array([0, 1, 0], bool), np.array([1, 1, 0], bool)]
    figures = dice_all(lesions, called)
    assert (figures.n_slides, figures.mean) == (2, 0.5)
    assert figures.pooled == pytest.approx(2 * 2 / (3 + 5))


def test_the_interval_of_a_mean_draws_patients_and_leaves_out_what_is_not_defined():
    generator = np.random.default_rng(1)
    values = generator.random(40)
    patients = [f"p{place // 2}" for place in range(40)]
    found = mean_interval(values, patients)
    assert found.low < values.mean() < found.high
    thrice = mean_interval(np.repeat(values, 3), list(np.repeat(patients, 3)))
    assert (thrice.low, thrice.high) == pytest.approx((found.low, found.high))
    padded = mean_interval(np.append(values, np.nan), [*patients, "nobody"])
    assert (padded.low, padded.high) == (found.low, found.high)
    assert np.isnan(mean_interval(values[:18], patients[:18]).low)
