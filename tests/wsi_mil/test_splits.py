"""Laws of folds: no leak, every patient tested once, even, reproducible, and refused where they cannot be had."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from wsi_mil.errors import CohortError, ConfigError
from wsi_mil.folding import dealing
from wsi_mil.folding.sites import assign_sites
from wsi_mil.splits import Fold, check_folds, folds_from_frame, folds_to_frame, make_folds, stratum_of

FEW = settings(derandomize=True, max_examples=40, deadline=None)


@st.composite
def cohorts(draw: st.DrawFn) -> tuple[dict[str, str], int]:
    n_folds = draw(st.integers(2, 5))
    sizes = draw(st.lists(st.integers(n_folds, 12), min_size=2, max_size=4))
    classes = [label for label, size in zip("abcd", sizes, strict=False) for _ in range(size)]
    order = draw(st.permutations(range(len(classes))))
    return {f"{i:03d}": classes[j] for i, j in enumerate(order)}, n_folds


@FEW
@given(cohorts(), st.integers(0, 5), st.sampled_from([0.0, 0.1, 0.2, 0.5]))
def test_parts_are_disjoint_and_cover_and_each_patient_is_tested_once_a_repeat(cohort, seed, validation):
    labels, n_folds = cohort
    folds = make_folds(labels, n_folds=n_folds, seed=seed, repeats=2, validation=validation)
    assert [(f.repeat, f.fold) for f in folds] == list(itertools.product(range(2), range(n_folds)))
    for fold in folds:
        assert sorted(fold.train + fold.validation + fold.test) == sorted(labels)
        assert {labels[p] for p in fold.train} == set(labels.values())
        rest = Counter(labels[p] for p in fold.train + fold.validation)
        spared = validation > 0 and max(rest.values()) > 1  # a class never leaves training
        assert bool(fold.validation) == spared
    for repeat in range(2):
        tested = Counter(p for f in folds if f.repeat == repeat for p in f.test)
        assert tested == dict.fromkeys(labels, 1)


@FEW
@given(cohorts(), st.integers(0, 5))
def test_folds_differ_by_one_patient_at_most_in_total_and_in_every_class(cohort, seed):
    labels, n_folds = cohort
    folds = make_folds(labels, n_folds=n_folds, seed=seed)
    for label in {None, *labels.values()}:
        sizes = [sum(label in (None, labels[p]) for p in fold.test) for fold in folds]
        assert max(sizes) - min(sizes) <= 1


@FEW
@given(cohorts(), st.sampled_from([0.1, 0.2, 0.3, 0.5]))
def test_validation_is_the_fraction_of_each_class_and_holds_each_class_that_can_spare_one(cohort, validation):
    labels, n_folds = cohort
    for fold in make_folds(labels, n_folds=n_folds, validation=validation):
        rest = Counter(labels[p] for p in fold.train + fold.validation)
        chosen = Counter(labels[p] for p in fold.validation)
        for label, n in rest.items():
            assert abs(chosen[label] - validation * n) <= 1
            assert (chosen[label] >= 1) == (n >= 2)


@FEW
@given(cohorts(), st.randoms(use_true_random=False))
def test_the_order_of_the_mapping_and_the_names_of_the_classes_change_nothing(cohort, random):
    labels, n_folds = cohort
    folds = make_folds(labels, n_folds=n_folds, seed=3)
    shuffled = list(labels.items())
    random.shuffle(shuffled)
    renamed = {p: {"a": "z", "b": "y", "c": "x", "d": "w"}[label] for p, label in shuffled}
    assert make_folds(dict(shuffled), n_folds=n_folds, seed=3) == folds
    assert make_folds(renamed, n_folds=n_folds, seed=3) == folds


def test_seeds_and_repeats_draw_other_folds_and_a_repeat_does_not_depend_on_how_many_follow():
    labels = {f"p{i}": "ab"[i % 2] for i in range(40)}
    two = make_folds(labels, seed=1, repeats=2)
    assert two[:5] == make_folds(labels, seed=1)
    assert [f.test for f in two[:5]] != [f.test for f in two[5:]]
    assert [f.test for f in two[:5]] != [f.test for f in make_folds(labels, seed=2)]


@st.composite
def site_cohorts(draw: st.DrawFn) -> tuple[dict[str, str], dict[str, str], int]:
    n_folds = draw(st.integers(2, 4))
    n_sites = draw(st.integers(n_folds, 9))
    counts = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=n_sites, max_size=n_sites))
    labels, sites = {}, {}
    for site, (a, b) in enumerate(counts):
        for i in range(a + b):
            labels[f"s{site}p{i}"] = "a" if i < a else "b"
            sites[f"s{site}p{i}"] = f"site {site}"
    return labels, sites, n_folds


@FEW
@given(site_cohorts(), st.integers(0, 3))
def test_a_site_is_whole_in_one_test_part_and_in_one_of_training_and_validation_where_sites_suffice(cohort, seed):
    labels, sites, n_folds = cohort
    folds = make_folds(labels, n_folds=n_folds, seed=seed, sites=sites, validation=0.25)
    where: dict[str, set[int]] = {}
    for fold in folds:
        assert fold.test
        assert sorted(fold.train + fold.validation + fold.test) == sorted(labels)
        for patient in fold.test:
            where.setdefault(sites[patient], set()).add(fold.fold)
        train, validation = ({sites[p] for p in part} for part in (fold.train, fold.validation))
        sizes = Counter(sites[p] for p in fold.train + fold.validation)
        if min(sizes.values()) <= sum(sizes.values()) / 2 and len(sizes) > 1:
            assert not train & validation
            assert validation
    assert all(len(found) == 1 for found in where.values())


@FEW
@given(site_cohorts())
def test_sites_are_assigned_as_evenly_as_trying_everything_could(cohort):
    labels, sites, n_folds = cohort
    assume(n_folds ** len(set(sites.values())) <= 700)
    groups = {c: [p for p in labels if labels[p] == c] for c in "ab"}
    assigned = assign_sites(groups, sites, n_folds=n_folds, generator=np.random.default_rng(0))
    names = sorted(set(sites.values()))

    def unevenness(fold_of: dict[str, int]) -> float:
        total = 0.0
        for fold in range(n_folds):
            members = [p for p in labels if fold_of[sites[p]] == fold]
            if not members:
                return float("inf")
            for label in (None, "a", "b"):
                share = sum(label in (None, x) for x in labels.values()) / n_folds
                total += (sum(label in (None, labels[p]) for p in members) / share - 1) ** 2
        return total

    choices = itertools.product(range(n_folds), repeat=len(names))
    best = min(unevenness(dict(zip(names, choice, strict=True))) for choice in choices)
    ours = unevenness({sites[p]: fold for p, fold in assigned.items()})
    assert ours <= best * 1.1 + 1e-9


def test_one_remaining_site_is_split_by_patients_because_something_must_validate():
    labels = {f"{site}{i}": "ab"[i % 2] for site in "AB" for i in range(10)}
    for fold in make_folds(labels, n_folds=2, sites={p: p[0] for p in labels}):
        assert len(fold.validation) == 2
        assert {labels[p] for p in fold.validation} == {"a", "b"}


def test_five_sites_of_eight_give_folds_of_one_site_and_validate_on_one_site():
    labels = {f"{site}{i}": "ab"[i % 2] for site in "ABCDE" for i in range(8)}
    folds = make_folds(labels, sites={p: p[0] for p in labels})
    assert sorted({p[0] for p in fold.test}.pop() for fold in folds) == list("ABCDE")
    assert [(len(f.test), len(f.validation), len(f.train)) for f in folds] == [(8, 8, 24)] * 5


@FEW
@given(site_cohorts(), st.integers(0, 3))
def test_leaving_one_site_out_tests_each_site_once_on_all_others(cohort, seed):
    labels, sites, _ = cohort
    folds = make_folds(labels, sites=sites, leave_one_site_out=True, seed=seed)
    assert [(f.repeat, f.fold) for f in folds] == [(0, i) for i in range(len(set(sites.values())))]
    for fold, name in zip(folds, sorted(set(sites.values())), strict=True):
        assert set(fold.test) == {p for p in labels if sites[p] == name}
        assert sorted(fold.train + fold.validation + fold.test) == sorted(labels)
        train, validation = ({sites[p] for p in part} for part in (fold.train, fold.validation))
        sizes = Counter(sites[p] for p in fold.train + fold.validation)
        if min(sizes.values()) <= sum(sizes.values()) / 2 and len(sizes) > 1:
            assert validation
            assert not train & validation
        assert {labels[p] for p in fold.train} == {"a", "b"}


def test_of_two_sites_the_one_that_trains_is_split_by_patients():
    labels = {f"{site}{i}": "ab"[i % 2] for site in "AB" for i in range(10)}
    for fold in make_folds(labels, sites={p: p[0] for p in labels}, leave_one_site_out=True):
        assert {labels[p] for p in fold.validation} == {"a", "b"}
        assert (len(fold.test), len(fold.validation)) == (10, 2)


def test_a_site_may_lack_a_class_when_it_is_left_out_but_one_site_must_not_have_all_of_it():
    labels = {f"{site}{i}": "ab"[i % 2] for site in "UVW" for i in range(6)} | {"X0": "a", "X1": "a"}
    folds = make_folds(labels, sites={p: p[0] for p in labels}, leave_one_site_out=True)
    assert folds[3].test == ("X0", "X1")
    assert {labels[p] for p in folds[3].test} == {"a"}
    labels |= {"X0": "c", "X1": "c"}
    with pytest.raises(CohortError, match=r"'c' are in site 'X'; .* U: 6, V: 6, W: 6, X: 2; .* a: 9, b: 9, c: 2"):
        make_folds(labels, sites={p: p[0] for p in labels}, leave_one_site_out=True)


def test_sites_cannot_be_left_out_where_there_is_one_or_none_or_again_in_the_same_way():
    labels = labels_of(a=10, b=10)
    with pytest.raises(CohortError, match=r"one site only.* U: 20"):
        make_folds(labels, sites=dict.fromkeys(labels, "U"), leave_one_site_out=True)
    sites = {p: "UV"[i % 2] for i, p in enumerate(labels)}
    with pytest.raises(CohortError, match="no site is given for 2 patients: a0, b3"):
        make_folds(labels, sites=sites | {"a0": "", "b3": ""}, leave_one_site_out=True)
    with pytest.raises(ConfigError, match=r"repeats is 2.*train.seeds"):
        make_folds(labels, sites=sites, leave_one_site_out=True, repeats=2)
    with pytest.raises(ValueError, match="needs the sites"):
        make_folds(labels, leave_one_site_out=True)


def labels_of(**sizes: int) -> dict[str, str]:
    return {f"{label}{i}": label for label, size in sizes.items() for i in range(size)}


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (labels_of(a=2, b=2), ["4 patients for 5 folds", "a: 2", "b: 2"]),
        (labels_of(neg=10, pos=1), ["'pos' is in one patient only ('pos0')", "neg: 10, pos: 1"]),
        (labels_of(common=28, rare=2), ["'rare' has 2 patients for 5 folds", "allow_absent_class"]),
        (labels_of(a=20), ["one class only", "a: 20"]),
        ({}, ["0 patients"]),
    ],
)
def test_folds_that_cannot_be_are_refused_with_the_counts(labels, words):
    with pytest.raises(CohortError) as error:
        make_folds(labels)
    for word in words:
        assert word in str(error.value)


def test_a_rare_class_may_miss_from_test_parts_when_asked_but_never_from_training():
    labels = labels_of(common=28, rare=2)
    folds = make_folds(labels, allow_absent_class=True)
    assert sum(any(labels[p] == "rare" for p in fold.test) for fold in folds) == 2
    assert all("rare" in {labels[p] for p in fold.train} for fold in folds)


def test_only_the_essential_labels_are_asked_of_each_training_part():
    strata = {f"p{i}": {"any"} for i in range(6)}
    assert [len(f.test) for f in make_folds(strata, n_folds=3, essential=())] == [2, 2, 2]
    strata = {f"p{i}": {"event" if i < 3 else "censored", "high" if i == 5 else "low"} for i in range(9)}
    folds = make_folds(strata, n_folds=3, essential={"event"})
    assert all(any("event" in strata[p] for p in f.train) for f in folds)
    assert all(sum("event" in strata[p] for p in f.test) == 1 for f in folds)
    with pytest.raises(CohortError, match="one class only"):
        make_folds(labels_of(a=20), essential={"a"})
    with pytest.raises(CohortError, match="'high' is in one patient only"):
        make_folds(strata, n_folds=3)
    with pytest.raises(CohortError, match=r"'relapse' is in no patient.* censored: 6, event: 3"):
        make_folds(strata, n_folds=3, essential={"relapse"})
    without = {p: labels - {"event"} for p, labels in strata.items()}
    with pytest.raises(CohortError, match="the train part has no patient of class event"):
        check_folds(folds, without, essential={"event"})
    check_folds(folds, without, essential={"low"})


def test_by_site_a_stratum_that_one_site_has_alone_is_no_fault_unless_it_is_essential():
    strata = {f"{site}{i}": {"low" if site == "U" else "high"} for site in "UVW" for i in range(4)}
    sites = {p: p[0] for p in strata}
    folds = make_folds(strata, n_folds=3, sites=sites, essential=())
    assert all({sites[p] for p in f.train}.isdisjoint({sites[p] for p in f.validation}) for f in folds)
    assert all(f.validation for f in folds)
    with pytest.raises(CohortError, match="all 4 patients of class 'low' are in site 'U'"):
        make_folds(strata, n_folds=3, sites=sites, essential={"low"})


@pytest.mark.parametrize("wrong", [{"n_folds": 1}, {"repeats": 0}, {"validation": 1.0}, {"validation": -0.1}])
def test_numbers_that_cannot_be_meant_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        make_folds(labels_of(a=9, b=9), **wrong)


def test_sites_that_are_too_few_unknown_or_hold_a_whole_class_are_refused():
    labels = labels_of(a=10, b=10)
    with pytest.raises(CohortError, match="2 sites for 5 folds"):
        make_folds(labels, sites={p: str(int(p[1:]) % 2) for p in labels})
    with pytest.raises(CohortError, match="no site is given for 1 patients: a0"):
        make_folds(labels, n_folds=2, sites={p: str(i % 3) for i, p in enumerate(labels) if p != "a0"})
    with pytest.raises(CohortError, match="all 10 patients of class 'a' are in site 'X'"):
        make_folds(labels, n_folds=2, sites={p: "X" if p[0] == "a" else str(i % 3) for i, p in enumerate(labels)})


def test_patients_who_all_have_both_classes_are_split_like_any_others():
    folds = make_folds({f"p{i:02d}": {"normal", "tumour"} for i in range(20)})
    assert [(len(f.test), len(f.validation), len(f.train)) for f in folds] == [(4, 3, 13)] * 5


@FEW
@given(st.lists(st.sets(st.sampled_from("abc"), min_size=1), min_size=12, max_size=40), st.integers(0, 3))
def test_a_patient_of_several_labels_counts_for_each_of_them(found, seed):
    classes_of = {f"p{i:02d}": labels for i, labels in enumerate(found)}
    counts = Counter(label for labels in found for label in labels)
    assume(len(counts) > 1 and min(counts.values()) >= 3)
    for fold in make_folds(classes_of, n_folds=3, seed=seed, allow_absent_class=True):
        assert sorted(fold.train + fold.validation + fold.test) == sorted(classes_of)
        rest = Counter(label for p in fold.train + fold.validation for label in classes_of[p])
        trained = Counter(label for p in fold.train for label in classes_of[p])
        assert set(trained) == set(counts)
        assert all(rest[label] >= counts[label] // 3 for label in counts)


def answers(n: int, targets: int, seed: int) -> dict[str, set[str]]:
    """Patients with an answer, rare or common, to each of several questions."""
    generator = np.random.default_rng(seed)
    rates = generator.uniform(0.05, 0.5, targets)
    drawn = generator.random((n, targets)) < rates
    return {f"p{i:03d}": {f"t{j}={int(drawn[i, j])}" for j in range(targets)} for i in range(n)}


@pytest.mark.parametrize("seed", range(6))
def test_with_many_targets_folds_differ_by_one_patient_or_two_in_every_label_and_in_size(seed):
    classes_of = answers(100, 8, seed)
    counts = Counter(label for labels in classes_of.values() for label in labels)
    folds = make_folds(classes_of, seed=seed, allow_absent_class=True, essential=())
    for label in {None, *counts}:
        sizes = [sum(label is None or label in classes_of[p] for p in fold.test) for fold in folds]
        assert max(sizes) - min(sizes) <= (1 if label is None else 2)
        for fold in folds:
            rest = [p for p in fold.train + fold.validation if label is None or label in classes_of[p]]
            chosen = sum(label is None or label in classes_of[p] for p in fold.validation)
            assert abs(chosen - 0.2 * len(rest)) <= 1.5


def test_dealing_a_label_at_a_time_leaves_the_common_ones_uneven_so_the_evening_is_needed(monkeypatch):
    classes_of = answers(100, 8, 0)

    def worst() -> int:
        folds = make_folds(classes_of, allow_absent_class=True)
        labels = {label for found in classes_of.values() for label in found}
        counts = [[sum(label in classes_of[p] for p in fold.test) for fold in folds] for label in labels]
        return max(max(c) - min(c) for c in counts)

    evened = worst()
    monkeypatch.setattr(dealing, "_SWAPPED_AT_MOST", 0)
    moved = worst()
    monkeypatch.setattr(dealing, "_even_out", lambda part_of, table, wished: part_of)
    assert evened <= 2 <= moved < worst()


@FEW
@given(st.lists(st.sets(st.sampled_from("abcd"), min_size=1), min_size=6, max_size=14), st.integers(0, 2))
def test_evening_never_takes_a_label_from_a_part_that_dealing_gave_it(found, seed):
    groups: dict[str, list[str]] = {}
    for i, labels in enumerate(found):
        for label in labels:
            groups.setdefault(label, []).append(f"p{i:02d}")
    assume(len(groups) > 1)
    held_out = dealing.hold_out(groups, 0.3, np.random.default_rng(seed))
    for patients in groups.values():
        assert set(patients) - held_out
    fold_of = dealing.deal(groups, 2, np.random.default_rng(seed))
    for patients in groups.values():
        assert len(patients) < 2 or len({fold_of[p] for p in patients}) == 2


@pytest.mark.parametrize("swapped_at_most", [0, 2000])
def test_evening_brings_counts_nearer_to_what_is_wished_and_takes_no_label_from_a_part(swapped_at_most, monkeypatch):
    monkeypatch.setattr(dealing, "_SWAPPED_AT_MOST", swapped_at_most)
    for seed in range(100):
        generator = np.random.default_rng(seed)
        table = (generator.random((12, 6)) < generator.uniform(0.1, 0.7, 6)).astype(float)
        before = generator.integers(3, size=12)
        wished = np.full((3, 6), 1 / 3) * table.sum(axis=0)

        def counts(part_of, table=table):
            return np.array([table[part_of == part].sum(axis=0) for part in range(3)])

        after = dealing._even_out(before, table, wished)
        assert ((counts(after) - wished) ** 2).sum() <= ((counts(before) - wished) ** 2).sum()
        assert not ((counts(before) > 0) & (counts(after) == 0)).any()


def test_folds_of_patients_with_few_or_many_labels_have_even_sizes():
    generator = np.random.default_rng(0)
    drawn = generator.random((90, 6)) < np.repeat([0.9, 0.2], 45)[:, None]
    found = {f"p{i:02d}": {"abcdef"[j] for j in np.flatnonzero(row)} or {"none"} for i, row in enumerate(drawn)}
    sizes = [len(fold.test) for fold in make_folds(found, essential=())]
    assert max(sizes) - min(sizes) <= 1


def test_the_stratum_is_the_set_of_labels_and_nobody_without_one_has_it():
    assert stratum_of({"p0": ["a", "b", "a"], "p1": {"a"}, "p2": ()}) == {"p0": {"a", "b"}, "p1": {"a"}}


def test_folds_survive_the_way_through_csv_with_ids_as_text(tmp_path):
    labels = {
        p: "ab"[i % 2] for i, p in enumerate(["007", "7", "12e3", "1_000", "NA", "0012", "präp, 1", "x", "1.0", "nan"])
    }
    folds = make_folds(labels, n_folds=2, repeats=2)
    folds_to_frame(folds).to_csv(tmp_path / "folds.csv", index=False)
    back = folds_from_frame(pd.read_csv(tmp_path / "folds.csv", dtype=str, keep_default_na=False))
    assert back == folds


def test_a_table_that_holds_no_folds_is_refused():
    frame = folds_to_frame(make_folds(labels_of(a=9, b=9)))
    with pytest.raises(CohortError, match="no column part"):
        folds_from_frame(frame.drop(columns="part"))
    with pytest.raises(CohortError, match="'dev' is none of train, validation, test"):
        folds_from_frame(frame.assign(part="dev"))
    with pytest.raises(CohortError, match="'one'"):
        folds_from_frame(frame.astype(str).assign(fold="one"))


def moved(fold: Fold, patient: str, *, source: str, target: str, keep: bool = False) -> Fold:
    source_part = tuple(p for p in getattr(fold, source) if keep or p != patient)
    return replace(fold, **{source: source_part, target: (*getattr(fold, target), patient)})


def test_the_audit_finds_every_kind_of_leak():
    labels = labels_of(a=10, b=10)
    classes_of = {p: {label} for p, label in labels.items()}
    folds = make_folds(labels)
    first, others = folds[0], folds[1:]
    check_folds(folds, classes_of)
    with pytest.raises(CohortError, match="not a single one"):
        check_folds([], classes_of)
    tested, trained = first.test[0], first.train[0]
    for wrong, word in [
        (moved(first, tested, source="test", target="train", keep=True), "more than one part"),
        (moved(first, tested, source="test", target="train"), "tested exactly once"),
        (moved(first, trained, source="train", target="test"), "tested exactly once"),
        (replace(first, train=first.train[1:]), "of the cohort in no part"),
        (replace(first, train=(*first.train, "stranger")), "not in this cohort"),
        (replace(first, test=(), train=first.train + first.test), "0 to test on"),
    ]:
        with pytest.raises(CohortError, match=word):
            check_folds([wrong, *others], classes_of)
    with pytest.raises(CohortError, match="of the cohort in no part: new"):
        check_folds(folds, classes_of | {"new": {"a"}})
    with pytest.raises(CohortError, match="train part has no patient of class c"):
        check_folds(folds, classes_of | {first.test[0]: {"a", "c"}})


def test_a_file_with_negative_folds_is_refused():
    """A model's folder is named after them, and r-1 is no name."""
    rows = [(-1, 0, "a", "train"), (-1, 0, "b", "test")]
    with pytest.raises(CohortError, match="whole numbers from 0 on"):
        folds_from_frame(pd.DataFrame(rows, columns=["repeat", "fold", "patient", "part"]))
