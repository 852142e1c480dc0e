"""Folds that a file says, in the patients of the cohort. The forms that are known are in wsi_mil.folding.forms.

A file names patients, or slides, whose patients the cohort knows. Nothing is dropped in silence: a name that nobody
knows, a patient that the file forgets and a patient whose slides lie in two parts are refused with their names. A slide
that the file does not name goes with its patient. Splits whose test parts do not overlap are the folds of one repeat;
where they overlap (Monte-Carlo splits) each is a repeat of its own.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from wsi_mil.errors import CohortError
from wsi_mil.folding.folds import PARTS, Fold, names_of
from wsi_mil.folding.forms import Split, number_in, splits_of_frame
from wsi_mil.splits import choose_validation
from wsi_mil.table.files import read_table
from wsi_mil.table.matching import index_ids


@dataclass(frozen=True, kw_only=True)
class ValidationDraw:
    """How a validation part is drawn where the file has none: see choose_validation."""

    fraction: float
    seed: int = 0
    sites: Mapping[str, str] | None = None
    essential: Collection[str] | None = None


def read_folds(
    path: Path,
    classes_of: Mapping[str, Collection[str]],
    *,
    slides: Mapping[str, str],
    left_out: Collection[str] = (),
    validation: ValidationDraw,
) -> list[Fold]:
    """The folds of a file, or of a folder of CLAM's files, in patients. classes_of: patient -> its labels.

    slides: slide id -> patient.  left_out: what the file may name although the study has it not. Raises CohortError
    where the form is unknown, or the file does not fit the cohort.
    """
    if path.is_dir():
        numbered = [file for file in path.glob("*.csv") if file.stem[-1:].isdigit()]  # neither _bool nor _descriptor
        files = sorted(numbered, key=lambda file: (number_in(file.stem), file.name))
        if not files:
            raise CohortError(
                f"{path}: no splits_0.csv, splits_1.csv ... in this folder, as CLAM writes them. Give the file of the "
                "folds itself, or the folder of CLAM's splits."
            )
        splits = [split for file in files for split in splits_of_frame(_frame(file), file.name)]
    else:
        splits = splits_of_frame(_frame(path), path.name)
    return folds_of_splits(splits, classes_of, where=path.name, slides=slides, left_out=left_out, validation=validation)


def folds_of_splits(
    splits: Sequence[Split],
    classes_of: Mapping[str, Collection[str]],
    *,
    where: str,
    slides: Mapping[str, str],
    left_out: Collection[str] = (),
    validation: ValidationDraw,
) -> list[Fold]:
    """The splits as folds of patients; see read_folds."""
    names = {name for split in splits for name in (*split.train, *(split.validation or ()), *split.test)}
    patient_of = _patients_of_names(names, splits, classes_of, where=where, slides=slides, left_out=left_out)
    parts = [_parts(split, patient_of, where) for split in splits]
    lost = set(classes_of).difference(*(members for part in parts for members in part.values()))
    if lost:
        raise CohortError(
            f"{where}: {len(lost)} of {len(classes_of)} patients are of the cohort in no part: {names_of(lost)}. Add "
            "them to the file, or leave them out of the study (take them out of the table, or exclude their slides in "
            "fixes.csv)."
        )
    tested = Counter(patient for part in parts for patient in part["test"])
    one_repeat = max(tested.values(), default=0) <= 1
    folds = []
    for i, (split, part) in enumerate(zip(splits, parts, strict=True)):
        if split.validation is None:
            left = {patient: classes_of[patient] for patient in part["train"]}
            part["validation"] = choose_validation(
                left,
                validation.fraction,
                seed=[validation.seed, i],
                sites=validation.sites,
                essential=validation.essential,
            )
            part["train"] -= part["validation"]
        repeat, fold = split.place or ((0, i) if one_repeat else (i, 0))
        train, held_out, test = (tuple(sorted(part[name])) for name in PARTS)
        folds.append(Fold(repeat=repeat, fold=fold, train=train, validation=held_out, test=test))
    return folds


def _patients_of_names(
    names: Collection[str],
    splits: Sequence[Split],
    classes_of: Mapping[str, Collection[str]],
    *,
    where: str,
    slides: Mapping[str, str],
    left_out: Collection[str],
) -> dict[str, str | None]:
    """Name in the file -> patient; None where the study does without."""
    of_slides = {name: slides[slide] for name, slide in _meant(names, slides).items() if slides[slide] in classes_of}
    of_patients = {name: name for name in names if name in classes_of}
    first, second = (of_slides, of_patients) if splits[:1] and splits[0].of == "slide" else (of_patients, of_slides)
    found: dict[str, str | None] = dict(first or second)
    rest = index_ids([name for name in names if name not in found])
    found |= dict.fromkeys(name for text in left_out for name in rest.find(text).hits)
    unknown = {name for name in names if name not in found}
    if unknown:
        index = index_ids([*slides, *classes_of])
        alike = {name: proposals[0] for name in sorted(unknown) if (proposals := index.find(name).proposals)}
        close = ", ".join(f"{theirs!r} for {name!r}" for name, theirs in list(alike.items())[:3])
        raise CohortError(
            f"{where}: {len(unknown)} of its {len(names)} names are not in this cohort, or without a label: "
            f"{names_of(unknown)}. They should be ids of {splits[0].of}s"
            + (f"; did you mean {close}? " if close else ". ")
            + "Take them out of the file, or bring them into the cohort."
        )
    return found


def _meant(names: Iterable[str], ids: Collection[str]) -> dict[str, str]:
    """Name -> the one id that it means, the suffix of a slide and folders aside; other names are left out."""
    index = index_ids(ids)
    hits = {name: (name,) if name in ids else index.find(name).hits for name in names}
    return {name: found[0] for name, found in hits.items() if len(found) == 1}


def _parts(split: Split, patient_of: Mapping[str, str | None], where: str) -> dict[str, set[str]]:
    """Part -> its patients. Raises CohortError for a patient that is in two."""
    members: dict[str, set[str]] = {part: set() for part in PARTS}
    said: dict[str, dict[str, str]] = {}
    for part in PARTS:
        for name in getattr(split, part) or ():
            patient = patient_of[name]
            if patient is not None:
                members[part].add(patient)
                said.setdefault(patient, {}).setdefault(part, name)
    torn = {patient: places for patient, places in said.items() if len(places) > 1}
    if torn:
        listed = [
            f"{patient} ({', '.join(f'{name} in {part}' for part, name in places.items())})"
            for patient, places in torn.items()
        ]
        raise CohortError(
            f"{where}, {split.name}: {len(torn)} patients are in more than one part, so the test would meet patients "
            f"that were learnt from: {names_of(listed)}. Put all slides of a patient into one part, or draw folds anew "
            "(leave folds.file out)."
        )
    return members


def _frame(path: Path) -> pd.DataFrame:
    if path.suffix.lower() == ".json":
        return _frame_of_json(path)
    table = read_table(path)
    return pd.DataFrame([dict(row.cells) for row in table.rows], columns=list(table.columns), dtype=str)


def _frame_of_json(path: Path) -> pd.DataFrame:
    """One row an entry of the list, which is the file or its "splits"."""
    try:
        said = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CohortError(f"{path}: no such file") from error
    except ValueError as error:
        raise CohortError(f"{path.name}: no JSON that can be read ({error})") from error
    rows = said.get("splits") if isinstance(said, dict) else said
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        rows = [said if isinstance(said, dict) else {}]
    return pd.DataFrame(rows)
