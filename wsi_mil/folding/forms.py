"""The forms in which tools write folds, each known by its columns. Pure; a further form is one more entry of FORMS.

Formats only, from files that the tools write: CLAM's splits_0.csv, STAMP's splits.json, Patho-Bench's k=all.tsv.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd

from wsi_mil.errors import CohortError
from wsi_mil.folding.folds import PARTS, folds_from_frame, names_of

_PARTS_OF_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_FOLD_COLUMN = re.compile(r"fold[_ ]?(\d+)", re.IGNORECASE)
_PATIENT_COLUMNS = ("case_id", "patient_id", "patient", "PATIENT")
_SLIDE_COLUMNS = ("slide_id", "slide")


@dataclass(frozen=True, kw_only=True)
class Split:
    """One split as its file says it."""

    name: str
    of: Literal["patient", "slide"]
    """What the names should be; where none of them is, they may be the other."""
    train: tuple[str, ...]
    validation: tuple[str, ...] | None
    """None where the form knows no validation part; it is drawn from the training part."""
    test: tuple[str, ...]
    place: tuple[int, int] | None = None
    """(repeat, fold), where the form says it."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of files of folds, known by its columns."""

    name: str
    fits: Callable[[Collection[str]], bool]
    read: Callable[[pd.DataFrame, str], list[Split]]
    """(table of text, name of the file) -> its splits."""


def splits_of_frame(frame: pd.DataFrame, where: str) -> list[Split]:
    """The splits that a table says. where: name of the file, for messages. Raises CohortError for an unknown form."""
    for form in FORMS:
        if form.fits(set(frame.columns)):
            return form.read(frame, where)
    hint = ""
    if {"train", "val"} <= set(frame.columns):
        hint = " A column test is missing; if the part val is the one to be tested, name it test."
    known = "\n".join(f"  {form.name}" for form in FORMS)
    raise CohortError(
        f"{where}: folds are in none of the known forms; its columns are {', '.join(map(str, frame.columns))}.{hint} "
        f"Known are:\n{known}"
    )


def _read_own(frame: pd.DataFrame, where: str) -> list[Split]:
    return [
        Split(
            name=f"repeat {fold.repeat}, fold {fold.fold}",
            of="patient",
            train=fold.train,
            validation=fold.validation,
            test=fold.test,
            place=(fold.repeat, fold.fold),
        )
        for fold in folds_from_frame(frame)
    ]


def _read_clam(frame: pd.DataFrame, where: str) -> list[Split]:
    """One split a file; columns of unequal length, a slide a cell."""
    columns = {c: tuple(cell.strip() for cell in frame[c] if cell.strip()) for c in ("train", "val", "test")}
    words = {cell.casefold() for cells in columns.values() for cell in cells}
    if words and words <= {"true", "false"}:
        raise CohortError(
            f"{where}: holds true and false, not slides. CLAM's file of the slides is beside it, without '_bool'."
        )
    train, validation, test = columns.values()
    return [Split(name=Path(where).stem, of="slide", train=train, validation=validation, test=test)]


def _read_stamp(frame: pd.DataFrame, where: str) -> list[Split]:
    """One split a row; a list of patients a cell."""
    splits = []
    for i, cells in enumerate(zip(frame["train_patients"], frame["test_patients"], strict=True)):
        if not all(isinstance(cell, list) for cell in cells):
            raise CohortError(f"{where}, split {i}: train_patients and test_patients must both be lists of patients.")
        train, test = (tuple(str(patient) for patient in cell) for cell in cells)
        splits.append(Split(name=f"split {i}", of="patient", train=train, validation=None, test=test))
    return splits


def _read_table_of_folds(frame: pd.DataFrame, where: str) -> list[Split]:
    """One split a column fold_0, fold_1 ...; the part of the row's patient or slide a cell, or nothing."""
    names = next(c for c in (*_PATIENT_COLUMNS, *_SLIDE_COLUMNS) if c in frame.columns)
    columns = sorted((c for c in frame.columns if _FOLD_COLUMN.fullmatch(c)), key=number_in)
    words = {cell.strip().casefold() for c in columns for cell in frame[c]} - {"", "nan"}
    if strange := words - set(_PARTS_OF_WORDS):
        raise CohortError(
            f"{where}: {names_of(strange)} in the columns of folds is none of {', '.join(_PARTS_OF_WORDS)}."
        )
    validates = "validation" in {_PARTS_OF_WORDS[word] for word in words}
    splits = []
    for column in columns:
        parts: dict[str, list[str]] = {part: [] for part in PARTS}
        for name, cell in zip(frame[names], frame[column], strict=True):
            if (word := cell.strip().casefold()) in _PARTS_OF_WORDS:
                parts[_PARTS_OF_WORDS[word]].append(name.strip())
        train, validation, test = (tuple(parts[part]) for part in PARTS)
        of: Literal["patient", "slide"] = "patient" if names in _PATIENT_COLUMNS else "slide"
        splits.append(Split(name=column, of=of, train=train, validation=validation if validates else None, test=test))
    return splits


def _is_table_of_folds(columns: Collection[str]) -> bool:
    named = set(columns) & {*_PATIENT_COLUMNS, *_SLIDE_COLUMNS}
    return bool(named) and any(_FOLD_COLUMN.fullmatch(column) for column in columns)


FORMS = (
    Form(
        name="folds.csv of a run: columns repeat, fold, patient, part",
        fits=lambda columns: {"repeat", "fold", "patient", "part"} <= set(columns),
        read=_read_own,
    ),
    Form(
        name="CLAM's splits_0.csv, or the folder of them: columns train, val, test with a slide a cell",
        fits=lambda columns: {"train", "val", "test"} <= set(columns),
        read=_read_clam,
    ),
    Form(
        name='STAMP\'s splits.json: {"splits": [{"train_patients": [...], "test_patients": [...]}, ...]}',
        fits=lambda columns: {"train_patients", "test_patients"} <= set(columns),
        read=_read_stamp,
    ),
    Form(
        name="Patho-Bench's k=all.tsv: columns case_id (or slide_id) and fold_0, fold_1 ... with train, val or test a "
        "cell",
        fits=_is_table_of_folds,
        read=_read_table_of_folds,
    ),
)
"""The forms that are read, the first that fits; further ones may be put in."""


def number_in(name: str) -> int:
    """The last number in a name; -1 without."""
    return int((re.findall(r"\d+", name) or ["-1"])[-1])
