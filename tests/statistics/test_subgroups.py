"""Figures of subgroups are those of their rows, and small ones have none."""

import numpy as np

from wsi_mil.statistics.concordance import concordance
from wsi_mil.statistics.intervals import auc_interval
from wsi_mil.statistics.subgroups import concordance_subgroups
from wsi_mil.statistics.survival_concordance import survival_concordance

N = 90
PATIENTS = np.arange(N)
LEVELS = ["a"] * 40 + ["b"] * 40 + ["c"] * 10
GENERATOR = np.random.default_rng(0)
POSITIVE = np.arange(N) % 3 == 0
SCORES = GENERATOR.normal(size=N) + POSITIVE
FOLDS = np.arange(N) // 2 % 2


def _auc(rows):
    return concordance(POSITIVE[rows], SCORES[rows], groups=FOLDS[rows], patients=PATIENTS[rows], n_patients=N)


def test_each_level_is_the_figure_of_its_rows():
    found = concordance_subgroups(LEVELS, PATIENTS, _auc)
    assert [one.level for one in found] == ["a", "b", "c"]
    alone = _auc(np.arange(N) < 40)
    assert found[0].value == alone.auc
    assert found[0].interval == auc_interval(alone)
    assert (found[0].n_patients, found[0].counts, found[0].note) == (40, (14, 26), "")


def test_a_small_level_has_counts_and_a_reason_and_no_figure():
    small = concordance_subgroups(LEVELS, PATIENTS, _auc)[2]
    assert np.isnan(small.value)
    assert np.isnan(small.interval.low)
    assert small.counts == (3, 7)
    assert small.note == "too few: 3 patients on a side of its pairs, 10 are needed"


def test_slides_of_a_patient_are_one_patient():
    levels, patients = ["a"] * 60, np.arange(60) // 4
    found = concordance_subgroups(
        levels,
        patients,
        lambda rows: concordance(
            patients[rows] % 2 == 0, SCORES[:60][rows], groups=np.zeros(60, int)[rows], patients=patients[rows],
            n_patients=15,
        ),
    )  # fmt: skip
    assert found[0].n_patients == 15
    assert found[0].note.startswith("too few: 7 patients")


def test_enough_patients_in_folds_that_never_meet_are_undefined():
    found = concordance_subgroups(
        ["a"] * N,
        PATIENTS,
        lambda rows: concordance(
            POSITIVE[rows], SCORES[rows], groups=POSITIVE[rows].astype(int), patients=PATIENTS[rows], n_patients=N
        ),
    )
    assert np.isnan(found[0].value)
    assert found[0].note == "no pair within one fold"


def test_a_c_index_goes_the_same_way():
    times = GENERATOR.exponential(5, N)
    found = concordance_subgroups(
        LEVELS,
        PATIENTS,
        lambda rows: survival_concordance(
            times[rows], POSITIVE[rows], SCORES[rows], groups=FOLDS[rows], patients=PATIENTS[rows], n_patients=N
        ),
    )
    assert found[0].interval.method == "jackknife of pairs, logit scale"
    assert np.isnan(found[2].value)
