"""Folds: who trains, who validates, who is tested. Patients are split, never slides. No files, no global randomness.

Without sites: patients are dealt so that folds differ by one patient at most, in each class and in total. A patient of
several labels (slides of different classes, several targets) counts for each of them; counts are then as even as moves
and swaps can make them (wsi_mil.folding.dealing). With sites: whole sites are assigned so that classes and sizes are
even (wsi_mil.folding.sites), or each site is a test part of its own. The validation part is a stratified fraction of
what is left after the test part. The same seed gives the same folds, whatever the order of the mapping and the spelling
of the classes. Targets that are no class come as strata (wsi_mil.folding.strata).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from wsi_mil.errors import CohortError, ConfigError
from wsi_mil.folding.dealing import deal, hold_out
from wsi_mil.folding.folds import (
    ADVICE,
    ALLOW_ABSENT,
    Fold,
    FoldSpec,
    HoldOutSpec,
    check_folds,
    fold_notes,
    folds_from_frame,
    folds_to_frame,
    names_of,
)
from wsi_mil.folding.sites import assign_sites, choose_validation_sites
from wsi_mil.folding.strata import strata_of_numbers, strata_of_survival

__all__ = [
    "Fold",
    "FoldSpec",
    "HoldOutSpec",
    "check_folds",
    "choose_validation",
    "fold_notes",
    "folds_from_frame",
    "folds_to_frame",
    "make_folds",
    "strata_of_numbers",
    "strata_of_survival",
    "stratum_of",
]

Labels = Mapping[str, str | Collection[str]]


def make_folds(
    labels: Labels,
    *,
    n_folds: int = 5,
    seed: int = 0,
    repeats: int = 1,
    validation: float = 0.2,
    sites: Mapping[str, str] | None = None,
    leave_one_site_out: bool = False,
    allow_absent_class: bool = False,
    essential: Collection[str] | None = None,
) -> list[Fold]:
    """Split patients into folds. labels: patient -> its class or classes.  sites: patient -> site that stays whole.

    leave_one_site_out: fold i tests the i-th site by name, whatever n_folds says; test parts may then lack a class.
    essential: the labels that every training part must hold, and every test part unless `allow_absent_class`; all when
    None, none of the quantiles of a number. Raises CohortError with the counts of each class where that cannot be.
    """
    _check_numbers(n_folds, repeats, validation, seed, leave_one_site_out=leave_one_site_out)
    classes_of = stratum_of({p: (found,) if isinstance(found, str) else found for p, found in labels.items()})
    groups = _by_class(classes_of)
    if leave_one_site_out:
        if sites is None:
            raise ValueError("leaving sites out needs the sites")
        n_folds = len({sites.get(patient) for patient in classes_of})
        allow_absent_class = True
    _check_classes(groups, n_folds, essential, allow_absent_class=allow_absent_class)
    if sites is not None:
        _check_sites(groups, sites, n_folds, essential)
    folds = []
    for repeat in range(repeats):
        generator = np.random.default_rng([seed, repeat])
        if sites is None:
            test_fold = deal(groups, n_folds, generator)
        elif leave_one_site_out:
            names = sorted({sites[p] for p in classes_of})
            test_fold = {p: names.index(sites[p]) for p in classes_of}
        else:
            test_fold = assign_sites(groups, sites, n_folds=n_folds, generator=generator)
        for fold in range(n_folds):
            test = {patient for patient, its_fold in test_fold.items() if its_fold == fold}
            left = {label: [p for p in patients if p not in test] for label, patients in groups.items()}
            held_out = _held_out(left, validation, sites=sites, essential=essential, generator=generator)
            train = classes_of.keys() - test - held_out
            folds.append(
                Fold(
                    repeat=repeat,
                    fold=fold,
                    train=tuple(sorted(train)),
                    validation=tuple(sorted(held_out)),
                    test=tuple(sorted(test)),
                )
            )
    check_folds(folds, classes_of, allow_absent_class=allow_absent_class, essential=essential)
    return folds


def choose_validation(
    classes_of: Mapping[str, Collection[str]],
    fraction: float,
    *,
    seed: int | Sequence[int] = 0,
    sites: Mapping[str, str] | None = None,
    essential: Collection[str] | None = None,
) -> set[str]:
    """The patients that validate where nobody is tested: about `fraction` of them, in each class; training keeps one.

    classes_of: patient -> its labels.  sites: patient -> site that stays whole where enough of them remain.
    essential: as in make_folds.
    """
    _check_validation(fraction, seed)
    generator = np.random.default_rng(seed)
    return _held_out(_by_class(classes_of), fraction, sites=sites, essential=essential, generator=generator)


def stratum_of(classes_of: Mapping[str, Collection[str]]) -> dict[str, frozenset[str]]:
    """What each patient is stratified by: the set of its labels. Patients without a label are left out."""
    return {patient: frozenset(labels) for patient, labels in classes_of.items() if labels}


def _check_numbers(n_folds: int, repeats: int, validation: float, seed: int, *, leave_one_site_out: bool) -> None:
    if n_folds < 2:
        raise ConfigError(f"folds: n_folds is {n_folds}; at least 2 are needed")
    if repeats < 1:
        raise ConfigError(f"folds: repeats is {repeats}; at least 1 is needed")
    if leave_one_site_out and repeats > 1:
        raise ConfigError(
            f"folds: repeats is {repeats}, but leaving each site out can be done in one way only, so the same "
            "models would be trained again. Leave repeats at 1; for the spread of training give several train.seeds."
        )
    _check_validation(validation, seed)


def _check_validation(validation: float, seed: int | Sequence[int]) -> None:
    if not 0 <= validation < 1:
        raise ConfigError(f"folds: validation is {validation}; it is a fraction from 0 to below 1")
    if np.min(seed) < 0:
        raise ConfigError(f"folds: seed is {seed}; it must be 0 or more")


def _by_class(classes_of: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    """Sorted patients of each class; classes from large to small, then by their patients, never by their name."""
    groups: dict[str, list[str]] = {}
    for patient in sorted(classes_of):
        for label in classes_of[patient]:
            groups.setdefault(label, []).append(patient)
    return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[1])))


def _check_classes(
    groups: Mapping[str, Sequence[str]], n_folds: int, essential: Collection[str] | None, *, allow_absent_class: bool
) -> None:
    counts = ", ".join(f"{label}: {len(patients)}" for label, patients in groups.items()) or "none"
    n_patients = len(set().union(*groups.values()))
    if n_patients < n_folds:
        raise CohortError(f"folds: {n_patients} patients for {n_folds} folds. Patients a class: {counts}. {ADVICE}")
    if len(groups) < 2 and (essential is None or set(groups) <= set(essential)):
        raise CohortError(f"folds: one class only, there is nothing to tell apart. Patients a class: {counts}.")
    for label in sorted(essential) if essential is not None else groups:
        patients = groups.get(label, ())
        if len(patients) < 2:
            where = f"in one patient only ({patients[0]!r})" if patients else "in no patient"
            raise CohortError(
                f"folds: class {label!r} is {where}; when that patient is tested, "
                f"nothing is left to learn the class from. Patients a class: {counts}. "
                "Merge the class with another one, leave it out, or bring in more patients."
            )
        if len(patients) < n_folds and not allow_absent_class:
            raise CohortError(
                f"folds: class {label!r} has {len(patients)} patients for {n_folds} folds, so some test parts would "
                f"lack it. Patients a class: {counts}. {ADVICE} {ALLOW_ABSENT}"
            )


def _check_sites(
    groups: Mapping[str, Sequence[str]], sites: Mapping[str, str], n_folds: int, essential: Collection[str] | None
) -> None:
    unknown = {p for patients in groups.values() for p in patients if not sites.get(p)}
    if unknown:
        raise CohortError(f"folds by site: no site is given for {len(unknown)} patients: {names_of(unknown)}")
    sizes = Counter(sites[p] for p in set().union(*groups.values()))
    listed = ", ".join(f"{site}: {n}" for site, n in sorted(sizes.items()))
    if len(sizes) < 2:
        raise CohortError(
            f"folds by site: one site only, none is left to learn from when it is tested. Patients a site: {listed}. "
            "Bring in patients of another site, or use folds that are not by site."
        )
    if len(sizes) < n_folds:
        raise CohortError(
            f"folds by site: {len(sizes)} sites for {n_folds} folds. Patients a site: {listed}. "
            "Use at most as many folds as sites, or folds that are not by site."
        )
    for label, patients in groups.items():
        where = {sites[p] for p in patients}
        if len(where) == 1 and (essential is None or label in essential):
            counts = ", ".join(f"{name}: {len(members)}" for name, members in groups.items())
            raise CohortError(
                f"folds by site: all {len(patients)} patients of class {label!r} are in site {min(where)!r}; "
                f"when it is tested, nothing is left to learn the class from. Patients a site: {listed}; "
                f"patients a class: {counts}. Merge or leave out the class, or use folds that are not by site."
            )


def _held_out(
    left: Mapping[str, Sequence[str]],
    fraction: float,
    *,
    sites: Mapping[str, str] | None,
    essential: Collection[str] | None,
    generator: np.random.Generator,
) -> set[str]:
    """Patients that validate. left: class -> patients outside the test part; training keeps one of each class."""
    if fraction == 0:
        return set()
    if sites is not None:
        whole = choose_validation_sites(left, sites, fraction=fraction, essential=essential, generator=generator)
        if whole is not None:
            return {p for patients in left.values() for p in patients if sites[p] in whole}
    return hold_out(left, fraction, generator)
