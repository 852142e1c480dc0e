"""The bootstrap over patients as the report uses it, and what stands in where it cannot show a spread."""

from collections.abc import Sequence

import numpy as np

from wsi_mil.report.method_figures import Figure, Patients
from wsi_mil.report.study import Rows
from wsi_mil.runs import FoldKey
from wsi_mil.statistics import intervals
from wsi_mil.statistics.intervals import Interval
from wsi_mil.statistics.ranking import Floats, Ints

DRAWS = 2000
MAX_WEIGHTS = 8_000_000
"""Bootstrap weights held at once (64 MB); larger cohorts take fewer draws."""
SEED = 20240501
_NO_WIDTH = 1e-9


def patient_weights(rows: Rows, classes: Ints) -> Floats:
    """Bootstrap weights of the patients in sorted order, drawn within class and the first fold that tests them."""
    first_fold = np.zeros(len(classes), dtype=np.int64)
    for place, key in sorted(zip(codes(rows.patients).tolist(), rows.keys, strict=True), reverse=True):
        first_fold[place] = key.fold
    draws = max(200, min(DRAWS, MAX_WEIGHTS // max(len(classes), 1)))
    return intervals.patient_weights(first_fold, classes=classes, draws=draws, seed=SEED)


def codes(values: Sequence[object]) -> Ints:
    """Number of each value in the sorted list of distinct ones."""
    number = {value: place for place, value in enumerate(sorted(set(values), key=_sortable))}
    return np.array([number[value] for value in values], dtype=np.int64)


def places_of(patients: Sequence[str], ids: Sequence[str]) -> Ints:
    """Where each of `patients` stands in `ids`."""
    number = {patient: place for place, patient in enumerate(ids)}
    return np.array([number[patient] for patient in patients], dtype=np.int64)


def has_width(interval: Interval) -> bool:
    """Whether resampling showed any spread; False for an undefined interval."""
    return bool(interval.high - interval.low > _NO_WIDTH)


def too_few(targets: Ints, n_classes: int) -> bool:
    """Whether a class that is there has too few patients for the bootstrap."""
    counts = np.bincount(targets, minlength=n_classes)
    return bool(counts[counts > 0].min(initial=intervals.FEW) < intervals.FEW)


def undefined() -> Figure:
    """A figure that cannot be computed."""
    return Figure(value=float("nan"), interval=intervals.percentile_interval(np.empty(0)))


def resampled(value: float, samples: Floats, *, patients: Patients) -> Figure:
    """A figure with its percentile interval; none is claimed with few patients, or where the samples do not differ."""
    interval = intervals.percentile_interval(samples)
    if too_few(patients.targets, patients.probabilities.shape[1]) or not has_width(interval):
        interval = intervals.percentile_interval(np.empty(0))
    return Figure(value=value, interval=interval)


def reflected(value: float, samples: Floats, *, patients: Patients) -> Figure:
    """The same for a mean distance, which resampling inflates: the ends are reflected at the value."""
    figure = resampled(value, samples, patients=patients)
    if not has_width(figure.interval):
        return figure
    low, high = 2 * value - figure.interval.high, 2 * value - figure.interval.low
    interval = Interval(
        low=min(max(0.0, low), value),
        high=max(high, value),
        level=figure.interval.level,
        method="patient bootstrap, reflected, bins held fixed",
    )
    return Figure(value=value, interval=interval)


def _sortable(value: object) -> tuple[int, ...] | str:
    return tuple(value) if isinstance(value, FoldKey) else str(value)
