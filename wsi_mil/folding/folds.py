"""The record of a split, its table, and the audit that finds any leak in it. Pure: no files."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from wsi_mil.errors import CohortError

PARTS = ("train", "validation", "test")
_COLUMNS = ("repeat", "fold", "patient", "part")
_NAMES_SHOWN = 8
ADVICE = "Use fewer folds, merge rare classes, or bring in more patients."
ALLOW_ABSENT = "Or accept figures that are not defined in those folds: folds.allow_absent_class true."


@dataclass(frozen=True, kw_only=True)
class FoldSpec:
    """How the patients are split."""

    n_folds: int = 5
    """Number of folds; each patient is tested once a repeat."""
    repeats: int = 1
    """How often the whole split is drawn again."""
    seed: int = 0
    """Seed of the split; it has nothing to do with the seeds of training."""
    validation: float = 0.2
    """Fraction of the patients outside the test part that choose epoch and threshold; 0 for none."""
    by_site: bool = False
    """Keep each site whole: in one test part, and in one of training and validation where enough sites remain."""
    leave_one_site_out: bool = False
    """Test each site once, on a model of all the others: as many folds as sites, drawn once (repeats 1). Test parts may
    lack a class."""
    allow_absent_class: bool = False
    """Allow test parts that lack a class; the figures that need it are then "not defined" in that fold."""
    file: Path | None = None
    """Folds used instead of drawing new ones: folds.csv of a run, CLAM's splits (a file, or the folder of them),
    STAMP's splits.json, or a table with columns fold_0, fold_1 ... (Patho-Bench). Where these know no validation part,
    `validation` and `seed` draw it from the training part."""

    @property
    def needs_sites(self) -> bool:
        """Whether the site of every patient must be known."""
        return self.by_site or self.leave_one_site_out


@dataclass(frozen=True, kw_only=True)
class HoldOutSpec:
    """Which patients are held out from training when nobody is tested."""

    validation: float = 0.2
    """Fraction of the patients that choose epoch and threshold; 0 for none."""
    seed: int = 0
    """Seed of the split; it has nothing to do with the seeds of training."""
    by_site: bool = False
    """Keep each site whole, in training or in validation, where enough sites remain."""


@dataclass(frozen=True, kw_only=True)
class Fold:
    """One split of the patients into three disjoint parts, each in the order of the text."""

    repeat: int
    fold: int
    train: tuple[str, ...]
    validation: tuple[str, ...]
    test: tuple[str, ...]


def check_folds(
    folds: Sequence[Fold],
    classes_of: Mapping[str, Collection[str]],
    *,
    allow_absent_class: bool = True,
    sites: Mapping[str, str] | None = None,
    essential: Collection[str] | None = None,
    complete: bool = True,
) -> None:
    """Raise CohortError unless the folds are free of leaks and fit the cohort. classes_of: patient -> its labels.

    Checked: the three parts of a fold are disjoint and hold every patient and no stranger; every patient is tested
    once a repeat; each training part holds every class; no test part is empty; with sites (patient -> site), no site is
    both tested and learnt from.
    essential: the labels that training parts must hold, and test parts unless allowed; all of them when None.
    complete=False: a fold may leave out patients of other folds, and a repeat may test some of them only.
    """
    if not folds:
        raise CohortError("folds: there is not a single one")
    patients = set(classes_of)
    needed = {label for labels in classes_of.values() for label in labels} if essential is None else set(essential)
    tested: dict[int, Counter[str]] = {}
    for fold in folds:
        name = f"repeat {fold.repeat}, fold {fold.fold}"
        _check_membership(name, fold, patients, complete=complete)
        tested.setdefault(fold.repeat, Counter()).update(fold.test)
        for part, allowed in (("train", False), ("test", allow_absent_class)):
            absent = needed - {label for p in getattr(fold, part) for label in classes_of[p]}
            if absent and not allowed:
                raise CohortError(
                    f"{name}: the {part} part has no patient of class {names_of(absent)}. "
                    f"Patients a class in the cohort: {_counts(classes_of)}. {ADVICE}"
                    + (f" {ALLOW_ABSENT}" if part == "test" else "")
                )
        if sites is not None:
            _check_whole_sites(name, fold, sites)
    for repeat, counts in tested.items():
        wrong = {p for p in patients if counts[p] > 1 or (complete and counts[p] != 1)}
        if wrong:
            once = "exactly once" if complete else "once at most"
            raise CohortError(
                f"repeat {repeat}: each patient must be tested {once}, but these are not: {names_of(wrong)}"
            )


def fold_notes(folds: Sequence[Fold], patients: Collection[str]) -> tuple[str, ...]:
    """What the user should know of folds that do not test every patient once a repeat, as those of a file may not."""
    tested = Counter(p for fold in folds for p in fold.test)
    never = set(patients) - set(tested)
    unused = [len(set(patients).difference(fold.train, fold.validation, fold.test)) for fold in folds]
    notes = []
    if len(set(tested.values())) > 1:
        notes.append(
            f"The {len(folds)} folds test patients {min(tested.values())} to {max(tested.values())} times each; those "
            f"whose test parts overlap are repeats of their own, and a patient's score is the mean over its repeats."
        )
    if never:
        notes.append(f"{len(never)} of {len(patients)} patients are never tested: {names_of(never)}.")
    if any(unused):
        notes.append(
            f"{sum(map(bool, unused))} of {len(folds)} folds leave patients out of all their parts, "
            f"{max(unused)} at most."
        )
    return tuple(notes)


def folds_to_frame(folds: Sequence[Fold]) -> pd.DataFrame:
    """One row a repeat, fold and patient, with the part it is in."""
    rows = [
        (fold.repeat, fold.fold, patient, part) for fold in folds for part in PARTS for patient in getattr(fold, part)
    ]
    return pd.DataFrame(rows, columns=list(_COLUMNS))


def folds_from_frame(frame: pd.DataFrame) -> list[Fold]:
    """The folds of such a table, in the order of repeat and fold. Raises CohortError when it is no table of folds."""
    missing = [c for c in _COLUMNS if c not in frame.columns]
    if missing:
        raise CohortError(f"folds: no column {names_of(missing)}; needed are {', '.join(_COLUMNS)}")
    parts: dict[tuple[int, int], dict[str, list[str]]] = {}
    for row, (repeat, fold, patient, part) in enumerate(zip(*(frame[c] for c in _COLUMNS), strict=True), start=2):
        if part not in PARTS:
            raise CohortError(f"folds, line {row}: part {part!r} is none of {', '.join(PARTS)}")
        try:
            key = (int(repeat), int(fold))
            if min(key) < 0:
                raise ValueError
        except ValueError:
            raise CohortError(
                f"folds, line {row}: repeat {repeat!r} and fold {fold!r} must be whole numbers from 0 on"
            ) from None
        parts.setdefault(key, {name: [] for name in PARTS})[part].append(str(patient))
    return [
        Fold(
            repeat=repeat,
            fold=fold,
            train=tuple(sorted(found["train"])),
            validation=tuple(sorted(found["validation"])),
            test=tuple(sorted(found["test"])),
        )
        for (repeat, fold), found in sorted(parts.items())
    ]


def _check_membership(name: str, fold: Fold, patients: set[str], *, complete: bool) -> None:
    parts = {part: getattr(fold, part) for part in PARTS}
    counts = Counter(patient for members in parts.values() for patient in members)
    for wrong, what in (
        ({p for p, n in counts.items() if n > 1}, "in more than one part, or twice in one"),
        (set(counts) - patients, "not in this cohort, or without a label"),
        (patients - set(counts) if complete else set(), "of the cohort in no part"),
    ):
        if wrong:
            raise CohortError(
                f"{name}: {len(wrong)} patients are {what}: {names_of(wrong)}. Draw new folds, or mend the file."
            )
    if not fold.test or not fold.train:
        raise CohortError(f"{name}: {len(fold.train)} patients to train on and {len(fold.test)} to test on")


def _check_whole_sites(name: str, fold: Fold, sites: Mapping[str, str]) -> None:
    both = {sites[p] for p in fold.test} & {sites[p] for p in (*fold.train, *fold.validation)}
    if both:
        raise CohortError(
            f"{name}: patients of site {names_of(both)} are in the test part and outside it, so these folds are not by "
            f"site. Draw new folds, or leave folds.by_site out."
        )


def _counts(classes_of: Mapping[str, Collection[str]]) -> str:
    counts = Counter(label for labels in classes_of.values() for label in set(labels))
    return ", ".join(f"{label}: {n}" for label, n in sorted(counts.items()))


def names_of(names: Collection[str]) -> str:
    """The first names in order, and how many more there are."""
    shown = sorted(names)[:_NAMES_SHOWN]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more
