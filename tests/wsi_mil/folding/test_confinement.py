"""Labels and sites on one side of a fold are found, and the association is the one of the textbook."""

import math

import numpy as np
import pytest
from scipy.stats.contingency import association

from wsi_mil.folding.confinement import Confined, balance_frame, confinement, site_label_association
from wsi_mil.folding.folds import Fold
from wsi_mil.splits import make_folds

CLASSES = {"a": {"x"}, "b": {"y"}, "c": {"x", "y"}, "d": {"z"}, "e": {"x"}, "f": {"y"}}
SITES = {"a": "U", "b": "U", "c": "V", "d": "V", "e": "W", "f": None}


def test_what_a_fold_does_not_both_train_on_and_test_is_told_with_the_parts_where_it_stands():
    fold = Fold(repeat=1, fold=2, train=("a", "b"), validation=("d", "e"), test=("c", "f"))
    assert confinement([fold], CLASSES, SITES) == (
        Confined(repeat=1, fold=2, kind="label", name="z", parts=("validation",), patients=1),
        Confined(repeat=1, fold=2, kind="site", name="U", parts=("train",), patients=2),
        Confined(repeat=1, fold=2, kind="site", name="V", parts=("validation", "test"), patients=2),
        Confined(repeat=1, fold=2, kind="site", name="W", parts=("validation",), patients=1),
    )
    z, u, v, _ = confinement([fold], CLASSES, SITES)
    assert [(c.learnt, c.tested) for c in (z, u, v)] == [(False, False), (True, False), (False, True)]


def test_folds_by_site_confine_every_site_and_no_label_and_folds_by_patient_none():
    labels = {f"{site}{i}": "xy"[i % 2] for site in "UVW" for i in range(8)}
    classes_of = {p: {label} for p, label in labels.items()}
    sites = {p: p[0] for p in labels}
    by_site = confinement(make_folds(labels, n_folds=3, sites=sites), classes_of, sites)
    assert {(c.kind, c.name, c.fold) for c in by_site} == {("site", s, f) for s in "UVW" for f in range(3)}
    assert sum(c.tested for c in by_site) == 3
    assert not confinement(make_folds(labels, n_folds=2), classes_of)


def test_a_run_that_tests_nobody_confines_nothing():
    assert not confinement([Fold(repeat=0, fold=0, train=("a",), validation=(), test=())], CLASSES, SITES)


def test_the_balance_counts_each_label_of_a_patient_and_keeps_who_has_no_site():
    fold = Fold(repeat=0, fold=0, train=("a", "b", "e"), validation=("d",), test=("c", "f"))
    assert balance_frame([fold], CLASSES, SITES).to_numpy().tolist() == [
        [0, 0, "train", "U", "x", 1],
        [0, 0, "train", "U", "y", 1],
        [0, 0, "train", "W", "x", 1],
        [0, 0, "validation", "V", "z", 1],
        [0, 0, "test", "", "y", 1],
        [0, 0, "test", "V", "x", 1],
        [0, 0, "test", "V", "y", 1],
    ]


def cohort(table: list[list[int]]) -> tuple[dict[str, set[str]], dict[str, str]]:
    cells = [(site, label) for site, row in enumerate(table) for label, n in enumerate(row) for _ in range(n)]
    return {f"p{i}": {f"l{c[1]}"} for i, c in enumerate(cells)}, {f"p{i}": f"s{c[0]}" for i, c in enumerate(cells)}


def test_the_association_is_one_where_the_site_tells_the_label_and_zero_where_they_are_independent():
    told = site_label_association(*cohort([[20, 0], [0, 10], [0, 30]]))
    assert told.cramers_v == pytest.approx(1)
    assert (told.n, told.one_label_sites, told.one_site_labels) == (60, ("s0", "s1", "s2"), ("l0",))
    free = site_label_association(*cohort([[4, 8], [3, 6]]))
    assert (free.cramers_v, free.corrected_v) == (pytest.approx(0, abs=1e-9), 0)
    assert (free.one_label_sites, free.one_site_labels) == ((), ())


def test_the_association_of_a_hand_worked_table_and_of_a_second_library():
    table = [[10, 20], [30, 40]]  # chi2 = 100 (400 - 600)^2 / (30 * 70 * 40 * 60) = 0.79365
    found = site_label_association(*cohort(table))
    assert found.cramers_v == pytest.approx(math.sqrt(0.7936507936 / 100))
    # less its expectation 1 / 99 nothing is left
    assert found.corrected_v == 0
    for seed in range(5):
        drawn = np.random.default_rng(seed).integers(1, 9, size=(4, 3))
        ours = site_label_association(*cohort(drawn.tolist()))
        assert ours.cramers_v == pytest.approx(association(drawn, method="cramer"))


def test_the_corrected_association_is_not_fooled_by_few_patients_in_many_sites():
    generator = np.random.default_rng(0)
    plain, corrected = [], []
    for _ in range(200):
        classes_of = {f"p{i}": {str(generator.integers(2))} for i in range(40)}
        found = site_label_association(classes_of, {p: str(generator.integers(10)) for p in classes_of})
        plain.append(found.cramers_v)
        corrected.append(found.corrected_v)
    assert np.mean(plain) > 0.4
    assert np.mean(corrected) < 0.15


def test_the_association_leaves_out_who_has_no_site_and_is_not_defined_for_one_site_or_label():
    found = site_label_association(CLASSES, SITES)
    assert (found.n, found.sites, found.labels) == (5, ("U", "V", "W"), ("x", "x+y", "y", "z"))
    assert math.isnan(site_label_association(CLASSES, dict.fromkeys(CLASSES, "U")).cramers_v)
    assert math.isnan(site_label_association({p: {"x"} for p in CLASSES}, SITES).cramers_v)
    assert math.isnan(site_label_association({}, {}).corrected_v)
