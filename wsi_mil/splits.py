"""Folds: who trains, who validates, who is tested. Patients are split, never slides. No files, no global randomness.

Without sites: class by class, from the rarest on, each patient goes to the fold that has fewest of its class, so folds
differ by one patient at most, in each class and in total. A patient whose slides have several labels (level slide)
counts for each of them. With sites: whole sites are assigned so that classes and sizes are even (wsi_mil.site_folds).
The validation part is a stratified fraction of what is left after the test part. The same seed gives the same folds,
whatever the order of the mapping and the spelling of the classes.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from wsi_mil.errors import CohortError, ConfigError
from wsi_mil.folds import (
    ADVICE,
    ALLOW_ABSENT,
    Fold,
    FoldSpec,
    HoldOutSpec,
    check_folds,
    folds_from_frame,
    folds_to_frame,
    names_of,
)
from wsi_mil.site_folds import assign_sites, choose_validation_sites

__all__ = [
    "Fold",
    "FoldSpec",
    "HoldOutSpec",
    "check_folds",
    "choose_validation",
    "folds_from_frame",
    "folds_to_frame",
    "make_folds",
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
    allow_absent_class: bool = False,
) -> list[Fold]:
    """Split patients into folds. labels: patient -> its class or classes.  sites: patient -> site that stays whole.

    A training part always holds every class. Raises CohortError with the counts of each class where it could not, or
    where a test part would lack a class and `allow_absent_class` is not set.
    """
    _check_numbers(n_folds, repeats, validation, seed)
    classes_of = stratum_of({p: (found,) if isinstance(found, str) else found for p, found in labels.items()})
    groups = _by_class(classes_of)
    _check_classes(groups, n_folds, allow_absent_class=allow_absent_class)
    if sites is not None:
        _check_sites(groups, sites, n_folds)
    folds = []
    for repeat in range(repeats):
        generator = np.random.default_rng([seed, repeat])
        if sites is None:
            test_fold = _deal(groups, n_folds, generator)
        else:
            test_fold = assign_sites(groups, sites, n_folds=n_folds, generator=generator)
        for fold in range(n_folds):
            test = {patient for patient, its_fold in test_fold.items() if its_fold == fold}
            left = {label: [p for p in patients if p not in test] for label, patients in groups.items()}
            held_out = _held_out(left, validation, sites=sites, generator=generator)
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
    check_folds(folds, classes_of, allow_absent_class=allow_absent_class)
    return folds


def choose_validation(
    classes_of: Mapping[str, Collection[str]],
    fraction: float,
    *,
    seed: int = 0,
    sites: Mapping[str, str] | None = None,
) -> set[str]:
    """The patients that validate where nobody is tested: about `fraction` of them, in each class; training keeps one.

    classes_of: patient -> its labels.  sites: patient -> site that stays whole where enough of them remain.
    """
    _check_validation(fraction, seed)
    return _held_out(_by_class(classes_of), fraction, sites=sites, generator=np.random.default_rng(seed))


def stratum_of(classes_of: Mapping[str, Collection[str]]) -> dict[str, frozenset[str]]:
    """What each patient is stratified by: the set of its labels. Patients without a label are left out."""
    return {patient: frozenset(labels) for patient, labels in classes_of.items() if labels}


def _check_numbers(n_folds: int, repeats: int, validation: float, seed: int) -> None:
    if n_folds < 2:
        raise ConfigError(f"folds: n_folds is {n_folds}; at least 2 are needed")
    if repeats < 1:
        raise ConfigError(f"folds: repeats is {repeats}; at least 1 is needed")
    _check_validation(validation, seed)


def _check_validation(validation: float, seed: int) -> None:
    if not 0 <= validation < 1:
        raise ConfigError(f"folds: validation is {validation}; it is a fraction from 0 to below 1")
    if seed < 0:
        raise ConfigError(f"folds: seed is {seed}; it must be 0 or more")


def _by_class(classes_of: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    """Sorted patients of each class; classes from large to small, then by their patients, never by their name."""
    groups: dict[str, list[str]] = {}
    for patient in sorted(classes_of):
        for label in classes_of[patient]:
            groups.setdefault(label, []).append(patient)
    return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[1])))


def _check_classes(groups: Mapping[str, Sequence[str]], n_folds: int, *, allow_absent_class: bool) -> None:
    counts = ", ".join(f"{label}: {len(patients)}" for label, patients in groups.items())
    n_patients = len(set().union(*groups.values()))
    if n_patients < n_folds:
        raise CohortError(
            f"folds: {n_patients} patients for {n_folds} folds. Patients a class: {counts or 'none'}. {ADVICE}"
        )
    if len(groups) < 2:
        raise CohortError(f"folds: one class only, there is nothing to tell apart. Patients a class: {counts}.")
    for label, patients in groups.items():
        if len(patients) == 1:
            raise CohortError(
                f"folds: class {label!r} is in one patient only ({patients[0]!r}); when that patient is tested, "
                f"nothing is left to learn the class from. Patients a class: {counts}. "
                "Merge the class with another one, leave it out, or bring in more patients."
            )
        if len(patients) < n_folds and not allow_absent_class:
            raise CohortError(
                f"folds: class {label!r} has {len(patients)} patients for {n_folds} folds, so some test parts would "
                f"lack it. Patients a class: {counts}. {ADVICE} {ALLOW_ABSENT}"
            )


def _check_sites(groups: Mapping[str, Sequence[str]], sites: Mapping[str, str], n_folds: int) -> None:
    unknown = {p for patients in groups.values() for p in patients if not sites.get(p)}
    if unknown:
        raise CohortError(f"folds by site: no site is given for {len(unknown)} patients: {names_of(unknown)}")
    sizes = Counter(sites[p] for p in set().union(*groups.values()))
    listed = ", ".join(f"{site}: {n}" for site, n in sorted(sizes.items()))
    if len(sizes) < n_folds:
        raise CohortError(
            f"folds by site: {len(sizes)} sites for {n_folds} folds. Patients a site: {listed}. "
            "Use at most as many folds as sites, or folds that are not by site."
        )
    for label, patients in groups.items():
        where = {sites[p] for p in patients}
        if len(where) == 1:
            raise CohortError(
                f"folds by site: all {len(patients)} patients of class {label!r} are in site {min(where)!r}; "
                f"when it is tested, nothing is left to learn the class from. Patients a site: {listed}."
            )


def _deal(groups: Mapping[str, Sequence[str]], n_folds: int, generator: np.random.Generator) -> dict[str, int]:
    """Test fold of each patient: from the rarest class on, to the fold with fewest of the class, then fewest at all."""
    fold_of: dict[str, int] = {}
    totals = [0] * n_folds
    for patients in reversed(list(groups.values())):
        of_class = [sum(fold_of.get(p) == fold for p in patients) for fold in range(n_folds)]
        for patient in _shuffled([p for p in patients if p not in fold_of], generator):
            fold = min(range(n_folds), key=lambda f: (of_class[f], totals[f]))
            fold_of[patient] = fold
            of_class[fold] += 1
            totals[fold] += 1
    return fold_of


def _held_out(
    left: Mapping[str, Sequence[str]],
    fraction: float,
    *,
    sites: Mapping[str, str] | None,
    generator: np.random.Generator,
) -> set[str]:
    """Patients that validate. left: class -> patients outside the test part; training keeps one of each class."""
    if fraction == 0:
        return set()
    if sites is not None:
        whole = choose_validation_sites(left, sites, fraction=fraction, generator=generator)
        if whole is not None:
            return {p for patients in left.values() for p in patients if sites[p] in whole}
    shares = dict(zip(left, _shares([len(p) for p in left.values()], fraction), strict=True))
    classes_of: dict[str, list[str]] = {}
    for label, patients in left.items():
        for patient in patients:
            classes_of.setdefault(patient, []).append(label)
    chosen: set[str] = set()
    taken: Counter[str] = Counter()
    for label in reversed(list(left)):
        for patient in _shuffled([p for p in left[label] if p not in chosen], generator):
            spared = all(len(left[other]) - taken[other] > 1 for other in classes_of[patient])
            if taken[label] < shares[label] and spared:
                chosen.add(patient)
                taken.update(classes_of[patient])
    return chosen


def _shuffled(patients: Sequence[str], generator: np.random.Generator) -> list[str]:
    return [patients[i] for i in generator.permutation(len(patients))]


def _shares(sizes: Sequence[int], fraction: float) -> list[int]:
    """Patients of each class that validate: the fraction by largest remainders, one at least where two are there."""
    total = round(fraction * sum(sizes))
    exact = [fraction * size for size in sizes]
    shares = [int(x) for x in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: max(0, total - sum(shares))]:
        shares[i] += 1
    return [min(max(share, 1), size - 1) if size > 1 else 0 for share, size in zip(shares, sizes, strict=True)]
