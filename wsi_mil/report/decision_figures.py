"""How well a method's decisions hit: counts of a confusion matrix and what follows from them, with intervals."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_mil.report.method_figures import DecisionFigures, Figure, OperatingPoints, Patients
from wsi_mil.report.resampling import has_width, too_few, undefined
from wsi_mil.statistics import agreement, decisions, intervals, operating
from wsi_mil.statistics.intervals import Interval
from wsi_mil.statistics.ranking import Floats, Ints

FIXED = 0.90
"""The side of the ROC curve that is held, to read off the other."""

Matrix = NDArray[Any]
Measure = Callable[[Matrix], float]


def decision_figures(patients: Patients) -> tuple[NDArray[np.int64], DecisionFigures]:
    """The confusion matrix of the patients and its figures."""
    n_classes = patients.probabilities.shape[1]
    matrix = decisions.confusion_matrix(patients.targets, patients.decisions, n_classes=n_classes)
    samples = _bootstrap_matrices(patients.targets, patients.decisions, n_classes, patients.weights)
    few = too_few(patients.targets, n_classes)
    binary = n_classes == 2

    def of(measure: Measure) -> Figure:
        return _resampled(matrix, samples, measure, few=few)

    return matrix, DecisionFigures(
        accuracy=_share(decisions.accuracy(matrix), int(matrix.sum()), of="patients"),
        balanced_accuracy=balanced_accuracy(matrix, samples, patients=matrix.sum(axis=1)),
        f1_macro=of(lambda m: decisions.f1(m, average="macro")),
        kappa=_kappa(patients, matrix, few=few),
        f1_positive=of(lambda m: decisions.f1(m, average="positive")) if binary else None,
        sensitivity=_share(decisions.sensitivity(matrix), int(matrix[1].sum()), of="patients") if binary else None,
        specificity=_share(decisions.specificity(matrix), int(matrix[0].sum()), of="patients") if binary else None,
    )


def balanced_accuracy(matrix: NDArray[np.int64], samples: Floats, *, patients: Ints) -> Figure:
    """With Wilson's interval over the smallest class where that is small, or resampling shows no spread.

    patients: (k,) how many patients stand behind each row of the matrix.
    """
    value = decisions.balanced_accuracy(matrix)
    if not np.isfinite(value):
        return undefined()
    interval = _percentile(samples, decisions.balanced_accuracy)
    smallest = int(patients[patients > 0].min())
    if smallest < intervals.FEW or not has_width(interval):
        interval = intervals.wilson_interval(value, smallest, of="patients of the smallest class")
    return Figure(value=value, interval=interval)


def slide_matrices(targets: Ints, called: Ints, n_classes: int, weights: Floats) -> tuple[NDArray[np.int64], Floats]:
    """The confusion matrix over slides and its bootstrap samples. weights: (draws, slides), of each slide's patient."""
    matrix = decisions.confusion_matrix(targets, called, n_classes=n_classes)
    return matrix, _bootstrap_matrices(targets, called, n_classes, weights)


def operating_points(patients: Patients) -> OperatingPoints | None:
    """Points of the pooled ROC curve of a binary task: what the order would allow, not what was decided."""
    if patients.probabilities.shape[1] != 2:
        return None
    positive, scores, weights = patients.targets == 1, patients.probabilities[:, 1], patients.weights
    sensitivity = operating.sensitivity_at(positive, scores, specificity=FIXED, weights=weights)
    specificity = operating.specificity_at(positive, scores, sensitivity=FIXED, weights=weights)
    return OperatingPoints(
        fixed=FIXED,
        sensitivity=Figure(value=sensitivity.value, interval=sensitivity.interval),
        specificity=Figure(value=specificity.value, interval=specificity.interval),
    )


def _kappa(patients: Patients, matrix: NDArray[np.int64], *, few: bool) -> Figure:
    samples = agreement.bootstrap_kappa(
        patients.targets,
        patients.decisions,
        n_classes=len(matrix),
        distance="unweighted",
        weights=patients.weights,
    )
    interval = intervals.percentile_interval(np.empty(0) if few else samples)
    nothing = intervals.percentile_interval(np.empty(0))
    return Figure(
        value=agreement.kappa(matrix, distance="unweighted"), interval=interval if has_width(interval) else nothing
    )


def _bootstrap_matrices(targets: Ints, called: Ints, n_classes: int, weights: Floats) -> Floats:
    """(draws, n_classes, n_classes) weighted confusion matrices."""
    cells = np.eye(n_classes * n_classes)[targets * n_classes + called]
    return np.asarray(weights @ cells, dtype=np.float64).reshape(-1, n_classes, n_classes)


def _percentile(samples: Floats, measure: Measure) -> Interval:
    return intervals.percentile_interval(np.array([measure(sample) for sample in samples]))


def _resampled(matrix: Matrix, samples: Floats, measure: Measure, *, few: bool) -> Figure:
    nothing = intervals.percentile_interval(np.empty(0))
    interval = nothing if few else _percentile(samples, measure)
    return Figure(value=measure(matrix), interval=interval if has_width(interval) else nothing)


def _share(value: float, trials: int, *, of: str) -> Figure:
    """A share of patients; each is one trial."""
    if not trials:
        return undefined()
    return Figure(value=value, interval=intervals.wilson_interval(value, trials, of=of))
