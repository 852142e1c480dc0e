"""Predicted numbers of one method -> all its figures. Patients are the unit."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from wsi_mil.report.kinds.pairs import first_places, patient_means, weights_of
from wsi_mil.report.kinds.records import Answered, Answers, patient_answers, seed_mean_answers
from wsi_mil.report.method_figures import Figure
from wsi_mil.report.resampling import has_width
from wsi_mil.runs import FoldKey
from wsi_mil.statistics.comparison import PairedTest
from wsi_mil.statistics.intervals import percentile_interval
from wsi_mil.statistics.paired_means import compare_means
from wsi_mil.statistics.ranking import Floats
from wsi_mil.statistics.regression import Regression, regression, regression_intervals

NAMES = ("r2", "mae", "rmse", "pearson", "spearman", "slope")


@dataclass(frozen=True, kw_only=True, eq=False)
class NumberPatients:
    """One row a patient."""

    ids: tuple[str, ...]
    truth: Floats
    predicted: Floats
    """Means over seeds and repeats."""
    weights: Floats

    @property
    def off(self) -> Floats:
        """Predicted minus measured."""
        return self.predicted - self.truth


@dataclass(frozen=True, kw_only=True)
class NumberFold:
    """What one model did on its test part."""

    key: FoldKey
    patients: int
    values: Mapping[str, float]
    """Figure of `NAMES` -> value."""
    epoch: int | None
    chosen_by: str


@dataclass(frozen=True, kw_only=True, eq=False)
class NumberFigures:
    """Everything the report says about a method."""

    label: str
    rows: Answers
    """One row a patient, repeat and fold: the mean over seeds."""
    mixed: tuple[str, ...]
    broken: int
    patients: NumberPatients
    figures: Mapping[str, Figure]
    """Figure of `NAMES` -> value over all patients, with interval."""
    folds: tuple[NumberFold, ...]
    by_seed: Mapping[tuple[int, int], float]
    """(repeat, seed) -> mean absolute error of that training alone."""

    @property
    def primary(self) -> Figure:
        """The share of the variation that is explained."""
        return self.figures["r2"]


def evaluate_numbers(method: Answered) -> NumberFigures:
    """All figures of one method."""
    models, mixed = patient_answers(method.test)
    rows = seed_mean_answers(models)
    patients = _patients(rows)
    samples = regression(patients.truth, patients.predicted, weights=patients.weights)
    return NumberFigures(
        label=method.label,
        rows=rows,
        mixed=mixed,
        broken=method.broken,
        patients=patients,
        figures=_figures(patients, samples),
        folds=tuple(_fold(method, models.of(key), key) for key in sorted(set(models.keys))),
        by_seed=_by_seed(models),
    )


def compare_numbers(first: Answers, second: Answers) -> PairedTest:
    """Paired test of the absolute error of two methods on the same rows; each patient counts once."""
    ids = tuple(sorted(set(first.patients)))
    gaps = np.abs(first.predicted - first.truth) - np.abs(second.predicted - second.truth)
    return compare_means(patient_means(first, ids, gaps))


def _patients(rows: Answers) -> NumberPatients:
    ids = tuple(sorted(set(rows.patients)))
    return NumberPatients(
        ids=ids,
        truth=rows.truth[first_places(rows, ids)],
        predicted=patient_means(rows, ids, rows.predicted),
        weights=weights_of(rows, np.zeros(len(ids), dtype=np.int64)),
    )


def _figures(patients: NumberPatients, samples: Regression) -> dict[str, Figure]:
    plain = regression(patients.truth, patients.predicted)
    spans = regression_intervals(samples, n_patients=len(patients.ids))
    found = {}
    for name in NAMES:
        value = float(getattr(plain, name)[0])
        sound = np.isfinite(value) and has_width(spans[name])
        found[name] = Figure(value=value, interval=spans[name] if sound else percentile_interval(np.empty(0)))
    return found


def _fold(method: Answered, rows: Answers, key: FoldKey) -> NumberFold:
    plain, selection = regression(rows.truth, rows.predicted), method.selections.get(key)
    return NumberFold(
        key=key,
        patients=len(rows),
        values={name: float(getattr(plain, name)[0]) for name in NAMES},
        epoch=selection.epoch if selection else None,
        chosen_by=selection.chosen_by if selection else "not recorded",
    )


def _by_seed(rows: Answers) -> dict[tuple[int, int], float]:
    found = {}
    for repeat, seed in sorted({(key.repeat, key.seed) for key in rows.keys}):
        own = [i for i, key in enumerate(rows.keys) if (key.repeat, key.seed) == (repeat, seed)]
        found[repeat, seed] = float(np.abs(rows.predicted[own] - rows.truth[own]).mean())
    return found
