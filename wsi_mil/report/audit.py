"""Who took part, and whether anything of the test patients could have reached training."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from wsi_mil.report.external import USED
from wsi_mil.report.study import Study
from wsi_mil.runs import FoldKey

NO_SITE = "(no site)"


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Rows of the table -> slides that took part."""

    rows: int
    used: int
    patients: int
    reasons: tuple[tuple[str, int, tuple[str, ...]], ...]
    """(reason, count, slide ids), most frequent first."""
    classes: tuple[str, ...]
    sites: tuple[str, ...]
    by_site: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    """(site, (patients, slides) of each class); the last row is the sum."""
    mpp: tuple[float, ...]
    tiles: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FoldAudit:
    """One fold: who is where, and what two parts share (all must be 0)."""

    repeat: int
    fold: int
    counts: tuple[tuple[str, tuple[int, ...]], ...]
    """(part, patients of each class)"""
    train_validation: int
    train_test: int
    validation_test: int
    sites_train_test: int
    """Sites that stand on both sides: not a leak of patients, but of scanner and stain."""

    @property
    def clean(self) -> bool:
        """No patient stands in two parts."""
        return not (self.train_validation or self.train_test or self.validation_test)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The leakage audit."""

    folds: tuple[FoldAudit, ...]
    tested_once: bool
    """In each repeat every patient is tested exactly once: so with drawn folds, not with every file of folds."""
    tested_at_most_once: bool
    """In no repeat is a patient tested twice."""
    never_tested: int
    """Patients who stand in folds and are tested in none."""
    foreign_rows: int
    """Prediction rows of patients that are not in the test part of their model's fold, or the validation part of it."""
    missing_rows: int
    """Predictions that are not there, of test patients (slides, at level slide), over all methods and models."""
    duplicates: tuple[tuple[str, ...], ...]
    """Slides with the same fingerprint."""
    duplicates_across: int
    """Such groups that hold more than one patient."""
    fingerprints: int
    """Slides whose fingerprint is known."""

    @property
    def clean(self) -> bool:
        """Nothing of a test patient was seen before the test."""
        shared = all(fold.clean for fold in self.folds)
        return shared and self.tested_at_most_once and not self.foreign_rows and not self.duplicates_across


def cohort_flow(study: Study) -> Flow:
    """Count the cohort."""
    cohort, used = study.cohort, study.used
    excluded = cohort[cohort["status"] != USED]
    reasons = Counter(excluded["status"])
    sites = tuple(sorted(set(_filled(used["site"], NO_SITE))))
    by_site = [(site, used[_filled(used["site"], NO_SITE) == site]) for site in sites]
    numbers = pd.to_numeric(used["mpp_x"], errors="coerce")
    tiles = pd.to_numeric(used["tiles"], errors="coerce")
    return Flow(
        rows=len(cohort),
        used=len(used),
        patients=used["patient"].nunique(),
        reasons=tuple(
            (reason, count, tuple(excluded["slide"][excluded["status"] == reason]))
            for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        ),
        classes=study.classes,
        sites=sites,
        by_site=(
            *((site, class_counts(rows, study.classes)) for site, rows in by_site),
            ("all", class_counts(used, study.classes)),
        ),
        mpp=tuple(float(value) for value in numbers[np.isfinite(numbers)]),
        tiles=tuple(int(value) for value in tiles[np.isfinite(tiles)]),
    )


def tested_rows(study: Study) -> pd.DataFrame:
    """The slides that took part, of patients who stand in a test part: nobody else is in any figure."""
    return study.used[study.used["patient"].isin(study.folds["patient"][study.folds["part"] == "test"])]


def class_counts(rows: pd.DataFrame, classes: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """(patients, slides) of each class."""
    parts = [rows[rows["target"] == name] for name in classes]
    return tuple((part["patient"].nunique(), len(part)) for part in parts)


def audit(study: Study, fingerprints: dict[str, str]) -> Audit:
    """Compare the parts of each fold, the predictions with the folds, and the slides among each other.

    fingerprints: slide id -> fingerprint, of the slides where it is known.
    """
    tested = study.folds[study.folds["part"] == "test"]
    times = tested.groupby(["repeat", "patient"]).size()
    everyone = set(study.folds["patient"])
    complete = all(set(rows["patient"]) == everyone for _, rows in tested.groupby("repeat"))
    owner = dict(zip(study.used["slide"], study.used["patient"], strict=True))
    groups: dict[str, list[str]] = {}
    for slide, fingerprint in sorted(fingerprints.items()):
        groups.setdefault(fingerprint, []).append(slide)
    duplicates = tuple(tuple(slides) for slides in groups.values() if len(slides) > 1)
    foreign, missing = _coverage(study, tested)
    foreign += _foreign_validation(study)
    return Audit(
        folds=tuple(
            _audit_fold(study, int(repeat), int(fold), rows)
            for (repeat, fold), rows in study.folds.groupby(["repeat", "fold"], sort=True)
        ),
        tested_once=bool(complete and (times == 1).all()),
        tested_at_most_once=bool((times <= 1).all()),
        never_tested=len(everyone - set(tested["patient"])),
        foreign_rows=foreign,
        missing_rows=missing,
        duplicates=duplicates,
        duplicates_across=sum(len({owner.get(slide, slide) for slide in slides}) > 1 for slides in duplicates),
        fingerprints=len(fingerprints),
    )


def _filled(column: pd.Series, empty: str) -> pd.Series:
    return column.where(column != "", empty)


def _audit_fold(study: Study, repeat: int, fold: int, rows: pd.DataFrame) -> FoldAudit:
    parts = {part: set(rows["patient"][rows["part"] == part]) for part in ("train", "validation", "test")}
    cohort = study.used
    sites = {part: set(cohort["site"][cohort["patient"].isin(patients)]) - {""} for part, patients in parts.items()}
    return FoldAudit(
        repeat=repeat,
        fold=fold,
        counts=tuple(
            (part, tuple(n for n, _ in class_counts(cohort[cohort["patient"].isin(patients)], study.classes)))
            for part, patients in parts.items()
        ),
        train_validation=len(parts["train"] & parts["validation"]),
        train_test=len(parts["train"] & parts["test"]),
        validation_test=len(parts["validation"] & parts["test"]),
        sites_train_test=len((sites["train"] | sites["validation"]) & sites["test"]),
    )


def _coverage(study: Study, tested: pd.DataFrame) -> tuple[int, int]:
    """Prediction rows outside the test part of their fold, and rows that are missing."""
    wanted: dict[tuple[int, int], set[str]] = {}
    for repeat, fold, patient in tested[["repeat", "fold", "patient"]].itertuples(index=False):
        wanted.setdefault((int(repeat), int(fold)), set()).add(str(patient))
    items = _items(study, wanted)
    tests = {method.label: method.test for method in study.methods}
    foreign = missing = 0
    for label, seeds in _seeds(study).items():
        test = tests.get(label)
        seen: dict[FoldKey, set[tuple[str, str]]] = {}
        for key, patient, slide in zip(test.keys, test.patients, test.slides, strict=True) if test else ():
            foreign += patient not in wanted.get((key.repeat, key.fold), set())
            seen.setdefault(key, set()).add((patient, slide))
        for (repeat, fold), asked in items.items():
            every = {*seeds, *(key.seed for key in seen)}
            missing += sum(len(asked - seen.get(FoldKey(repeat, fold, seed), set())) for seed in every)
    return foreign, missing


def _foreign_validation(study: Study) -> int:
    """Validation rows of patients outside the validation part: a threshold must not come from anybody else."""
    held = study.folds[study.folds["part"] == "validation"]
    allowed = set(held[["repeat", "fold", "patient"]].itertuples(index=False, name=None))
    return sum(
        (key.repeat, key.fold, patient) not in allowed
        for method in study.methods
        for key, rows in method.validation.items()
        for patient in rows.patients
    )


def _items(study: Study, wanted: dict[tuple[int, int], set[str]]) -> dict[tuple[int, int], set[tuple[str, str]]]:
    """(patient, slide) of what each test part holds; no slide at patient level."""
    slides: dict[str, set[tuple[str, str]]] = {}
    for patient, slide in study.used[["patient", "slide"]].itertuples(index=False):
        slides.setdefault(patient, set()).add((patient, slide if study.level == "slide" else ""))
    return {key: {item for p in patients for item in slides.get(p, {(p, "")})} for key, patients in wanted.items()}


def _seeds(study: Study) -> dict[str, set[int]]:
    """Of every method of the run, the failed ones too, the seeds that it was to be trained with."""
    common = (study.config.get("train") or {}).get("seeds") or ()
    methods = study.config["methods"]
    return {str(m["label"]): set((m.get("train") or {}).get("seeds") or common) for m in methods}
