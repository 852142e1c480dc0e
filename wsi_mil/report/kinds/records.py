"""What a run predicted of one target, read once: numbers or risks, one row an item and model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from wsi_mil.report.external import External
from wsi_mil.report.study import Rows
from wsi_mil.runs import FoldKey, RunDir, Selection
from wsi_mil.statistics.ranking import Bools, Floats

CLASS_KINDS = ("binary", "multiclass", "ordinal")


@dataclass(frozen=True, kw_only=True)
class Target:
    """One column that the run predicts."""

    name: str
    kind: str
    """binary, multiclass, ordinal, regression or survival"""
    classes: tuple[str, ...] = ()
    """In order; empty for regression and survival."""
    event: str = ""
    """Survival: the column that says whether the event was seen."""

    @property
    def has_classes(self) -> bool:
        """Whether the answer is a probability of each class."""
        return self.kind in CLASS_KINDS


@dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """Predictions of a number or a risk."""

    patients: tuple[str, ...]
    slides: tuple[str, ...]
    """Empty text at patient level."""
    keys: tuple[FoldKey, ...]
    truth: Floats
    """(n,) the number, or the time until the event or the last look."""
    events: Bools
    """(n,) survival: whether the event was seen; True throughout otherwise."""
    predicted: Floats
    """(n,) the number in the column's units, or the risk (higher: earlier event)."""
    survival: Floats
    """(n, m) probability of no event until just after each cut; m = 0 where the method gives none."""
    cuts: Floats
    """(n, m) times of the cuts."""

    def __len__(self) -> int:
        return len(self.truth)

    def take(self, places: Iterable[int]) -> "Answers":
        """The rows at `places`."""
        chosen = list(places)
        return Answers(
            patients=tuple(self.patients[i] for i in chosen),
            slides=tuple(self.slides[i] for i in chosen),
            keys=tuple(self.keys[i] for i in chosen),
            truth=self.truth[chosen],
            events=self.events[chosen],
            predicted=self.predicted[chosen],
            survival=self.survival[chosen],
            cuts=self.cuts[chosen],
        )

    def of(self, key: FoldKey) -> "Answers":
        """The rows of one model."""
        return self.take(i for i, own in enumerate(self.keys) if own == key)

    def bare(self) -> Rows:
        """Who was judged by which model, without the answer."""
        return bare_rows(self.keys, self.patients, self.slides)


@dataclass(frozen=True, kw_only=True, eq=False)
class Answered:
    """What one method left behind of one target: labelled rows alone."""

    label: str
    test: Answers
    validation: dict[FoldKey, Answers]
    selections: dict[FoldKey, Selection]
    broken: int
    """Test rows left out because what was predicted is not a finite number."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetStudy:
    """A run seen from one target."""

    run: RunDir
    config: dict[str, Any]
    target: Target
    level: str
    cohort: pd.DataFrame
    folds: pd.DataFrame
    external: External | None
    methods: tuple[Answered, ...]


def bare_rows(keys: Sequence[FoldKey], patients: Sequence[str], slides: Sequence[str]) -> Rows:
    """Rows of a single class that everybody has for certain."""
    n = len(keys)
    return Rows(
        patients=tuple(patients),
        slides=tuple(slides),
        keys=tuple(keys),
        targets=np.zeros(n, dtype=np.int64),
        probabilities=np.ones((n, 1)),
    )


def patient_answers(rows: Answers) -> tuple[Answers, tuple[str, ...]]:
    """One row a patient and model: means over the patient's slides. Sorted by model and patient.

    Also returns the patients left out because their slides carry different values: they have no value of their own.
    """
    values: dict[str, set[tuple[float, bool]]] = {}
    for patient, truth, event in zip(rows.patients, rows.truth.tolist(), rows.events.tolist(), strict=True):
        values.setdefault(patient, set()).add((truth, event))
    mixed = tuple(sorted(patient for patient, found in values.items() if len(found) > 1))
    of_one_value = rows.take(i for i, patient in enumerate(rows.patients) if len(values[patient]) == 1)
    items = [(key, patient, "") for key, patient in zip(of_one_value.keys, of_one_value.patients, strict=True)]
    return _means(of_one_value, items), mixed


def seed_mean_answers(rows: Answers) -> Answers:
    """One row an item, repeat and fold: means over seeds. The keys' seed is 0."""
    keys = (key._replace(seed=0) for key in rows.keys)
    return _means(rows, list(zip(keys, rows.patients, rows.slides, strict=True)))


def _means(rows: Answers, items: list[tuple[FoldKey, str, str]]) -> Answers:
    """Rows of one item made one, sorted by item. Labels and cuts of an item are the same in all of its rows."""
    places: dict[tuple[FoldKey, str, str], list[int]] = {}
    for place, item in enumerate(items):
        places.setdefault(item, []).append(place)
    kept = sorted(places)
    first = rows.take(places[item][0] for item in kept)
    survival = [rows.survival[places[item]].mean(axis=0) for item in kept]
    shape = (len(kept), rows.survival.shape[1])
    return Answers(
        patients=first.patients,
        slides=tuple(slide for _, _, slide in kept),
        keys=tuple(key for key, _, _ in kept),
        truth=first.truth,
        events=first.events,
        predicted=np.array([rows.predicted[places[item]].mean() for item in kept], dtype=np.float64),
        survival=np.array(survival, dtype=np.float64).reshape(shape),
        cuts=first.cuts,
    )
