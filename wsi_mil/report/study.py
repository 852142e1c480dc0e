"""What a finished run holds, read once: predictions as arrays, cohort, folds, who chose the epoch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from wsi_mil.errors import RunError
from wsi_mil.report.external import USED, External, admit, refuse_unlabelled
from wsi_mil.results.reading import GIVE_AGAIN, NUMBERED
from wsi_mil.runs import FoldKey, RunDir, Selection
from wsi_mil.statistics.ranking import Floats, Ints

_ROUNDING = 1e-6
"""Rows of probabilities sum to 1 within this."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Predictions, one row a scored patient or slide and model."""

    patients: tuple[str, ...]
    slides: tuple[str, ...]
    """Empty text at patient level."""
    keys: tuple[FoldKey, ...]
    targets: Ints
    """(n,) column of the true class."""
    probabilities: Floats
    """(n, n_classes) in the configured class order."""

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, places: Iterable[int]) -> "Rows":
        """The rows at `places`."""
        chosen = list(places)
        return Rows(
            patients=tuple(self.patients[i] for i in chosen),
            slides=tuple(self.slides[i] for i in chosen),
            keys=tuple(self.keys[i] for i in chosen),
            targets=self.targets[chosen],
            probabilities=self.probabilities[chosen],
        )

    def of(self, key: FoldKey) -> "Rows":
        """The rows of one model."""
        return self.take(i for i, own in enumerate(self.keys) if own == key)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """What one method left behind: test rows, and of each model the validation rows and who chose the epoch."""

    label: str
    test: Rows
    validation: dict[FoldKey, Rows]
    selections: dict[FoldKey, Selection]
    target: str = ""
    """Name of the target: a selection keeps thresholds and calibrations by it."""
    calibrated: Rows | None = None
    """The test rows with the probabilities that the calibration fitted on validation gives; None without any."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Study:
    """A run, read."""

    run: RunDir
    config: dict[str, Any]
    classes: tuple[str, ...]
    target: str
    level: str
    cohort: pd.DataFrame
    folds: pd.DataFrame
    methods: tuple[Trained, ...]
    external: External | None = None
    """Of an external validation, who is left out; None of a cross-validation."""

    @property
    def binary(self) -> bool:
        """Two classes, of which the last is the positive one."""
        return len(self.classes) == 2

    @property
    def positive(self) -> str:
        """The class that a binary study looks for."""
        return self.classes[-1]

    @property
    def slides_root(self) -> Path | None:
        """Folder of the slides at the time of the run."""
        root = self.config.get("slides")
        return Path(root) if root else None

    @property
    def used(self) -> pd.DataFrame:
        """The slides that took part."""
        return self.cohort[self.cohort["status"] == USED]


def read_study(path: Path) -> Study:
    """Read a finished cross-validation or external validation. Raises RunError when it cannot be reported."""
    run = RunDir(path)
    config = run.config()
    refuse_unlabelled(path, config)
    task = config["task"]
    classes = tuple(str(name) for name in task["classes"])
    cohort = run.cohort("site", "target", "path", "annotation", "mpp_x", "mpp_y", "status", "tiles")
    own = admit(path, config, cohort=cohort, folds=run.folds(), predictions=run.predictions())
    methods = tuple(_trained(run, label, own.predictions, classes, str(task["target"])) for label in run.methods())
    if not any(len(method.test) for method in methods):
        raise RunError(f"{run.predictions_path} has no row. Give the same crossval command again to finish the run.")
    return Study(
        run=run,
        config=config,
        classes=classes,
        target=str(task["target"]),
        level=str(task["level"]),
        cohort=own.cohort,
        folds=own.folds,
        methods=tuple(method for method in methods if len(method.test)),
        external=own.external,
    )


def rows_of(frame: pd.DataFrame, classes: tuple[str, ...], *, source: str) -> Rows:
    """Rows of a table of predictions. Raises RunError for a class or a column that the run does not know."""
    columns = [f"prob_{name}" for name in classes]
    missing = [column for column in columns if column not in frame.columns]
    unknown = sorted(set(frame["target"]) - set(classes))
    if missing or unknown:
        raise RunError(
            f"{source}: columns missing: {', '.join(missing) or 'none'}; classes unknown to the run: "
            f"{', '.join(unknown) or 'none'}. The run has {', '.join(classes)}. Restore the file or run crossval anew."
        )
    numbers = frame[["repeat", "fold", "seed"]].to_numpy().tolist()
    probabilities = frame[columns].to_numpy(dtype=np.float64)
    sums = probabilities.sum(axis=1)
    if not (np.isfinite(probabilities) & (probabilities >= 0)).all() or (np.abs(sums - 1) > _ROUNDING).any():
        raise RunError(f"{source}: a row of probabilities is no distribution over the classes. {GIVE_AGAIN}")
    twice = frame.duplicated(["method", *NUMBERED, "patient", "slide"])
    if twice.any():
        row = frame[twice].iloc[0]
        name = " ".join(str(row[column]) for column in ("method", *NUMBERED, "patient", "slide"))
        raise RunError(f"{source}: {int(twice.sum())} rows stand there twice, such as {name}. {GIVE_AGAIN}")
    return Rows(
        patients=tuple(frame["patient"]),
        slides=tuple(frame["slide"]),
        keys=tuple(FoldKey(*map(int, row)) for row in numbers),
        targets=np.array([classes.index(name) for name in frame["target"]], dtype=np.int64),
        probabilities=probabilities,
    )


def calibrated_rows(frame: pd.DataFrame, rows: Rows, classes: tuple[str, ...], *, source: str) -> Rows | None:
    """`rows` (read from `frame`) with calibrated probabilities; None where the run holds none for every row."""
    columns = [f"calibrated_{name}" for name in classes]
    if not rows or not set(columns) <= set(frame.columns) or (frame[columns] == "").any(axis=None):
        return None
    try:
        probabilities = frame[columns].to_numpy(dtype=np.float64)
    except ValueError as error:
        raise RunError(f"{source}: a calibrated probability is no number ({error}). {GIVE_AGAIN}") from error
    if not (np.isfinite(probabilities) & (probabilities >= 0) & (probabilities <= 1)).all():
        raise RunError(f"{source}: a calibrated probability lies outside 0 to 1. {GIVE_AGAIN}")
    return replace(rows, probabilities=probabilities)


def patient_rows(rows: Rows) -> tuple[Rows, tuple[str, ...]]:
    """One row a patient and model: the mean probability over the patient's slides. Sorted by model and patient.

    Also returns the patients left out because their slides carry different classes: they have no patient label.
    """
    labels: dict[str, set[int]] = {}
    places: dict[tuple[FoldKey, str], list[int]] = {}
    for i, patient in enumerate(rows.patients):
        labels.setdefault(patient, set()).add(int(rows.targets[i]))
        places.setdefault((rows.keys[i], patient), []).append(i)
    mixed = tuple(sorted(patient for patient, found in labels.items() if len(found) > 1))
    kept = sorted(item for item in places if item[1] not in mixed)
    k = rows.probabilities.shape[1]
    return Rows(
        patients=tuple(patient for _, patient in kept),
        slides=tuple("" for _ in kept),
        keys=tuple(key for key, _ in kept),
        targets=np.array([rows.targets[places[item][0]] for item in kept], dtype=np.int64),
        probabilities=np.array([rows.probabilities[places[item]].mean(axis=0) for item in kept]).reshape(-1, k),
    ), mixed


def seed_means(rows: Rows) -> Rows:
    """One row an item, repeat and fold: the mean probability over seeds. The keys' seed is 0."""
    places: dict[tuple[FoldKey, str, str], list[int]] = {}
    for i, key in enumerate(rows.keys):
        places.setdefault((key._replace(seed=0), rows.patients[i], rows.slides[i]), []).append(i)
    kept = sorted(places)
    means = [rows.probabilities[places[item]].mean(axis=0) for item in kept]
    return Rows(
        patients=tuple(patient for _, patient, _ in kept),
        slides=tuple(slide for _, _, slide in kept),
        keys=tuple(key for key, _, _ in kept),
        targets=np.array([rows.targets[places[item][0]] for item in kept], dtype=np.int64),
        probabilities=np.array(means).reshape(-1, rows.probabilities.shape[1]),
    )


def _trained(run: RunDir, label: str, predictions: pd.DataFrame, classes: tuple[str, ...], target: str) -> Trained:
    own, source = predictions[predictions["method"] == label], str(run.predictions_path)
    test = rows_of(own, classes, source=source)
    keys = sorted(set(test.keys))
    return Trained(
        label=label,
        test=test,
        validation={
            key: rows_of(run.validation(label, key), classes, source=str(run.validation_path(label, key)))
            for key in keys
        },
        selections={key: run.selection(label, key) for key in keys if run.selection_path(label, key).is_file()},
        target=target,
        calibrated=calibrated_rows(own, test, classes, source=source),
    )
