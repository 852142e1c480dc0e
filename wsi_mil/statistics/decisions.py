"""Figures of decisions: what follows once a threshold, or the largest probability, has called each patient."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wsi_mil.statistics.patient_means import patient_means
from wsi_mil.statistics.ranking import Bools, Floats, Ints, roc_curve

MIN_PER_CLASS = 10
"""A validation part with fewer patients than this in a class chooses no threshold."""

DEFAULT_THRESHOLD = 0.5
_YOUDEN = "Youden point of the validation part"


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """A cut on the probability of the positive class: called positive at or above it."""

    value: float
    source: str
    """Where it comes from, as the report says it."""

    @property
    def from_validation(self) -> bool:
        """Whether validation patients chose it; else it was fixed beforehand."""
        return self.source == _YOUDEN


def choose_threshold(positive: Bools, scores: Floats) -> Threshold:
    """The Youden cut of a validation part, or 0.5 where that part cannot carry a choice. Test data never come here.

    The cut lies half-way between two neighbouring scores; of equally good cuts the one nearest to 0.5 is taken.
    """
    positive = np.asarray(positive, dtype=bool)
    smaller = int(min(positive.sum(), (~positive).sum()))
    if smaller < MIN_PER_CLASS:
        held = f"validation holds {smaller} patients of its smaller class, {MIN_PER_CLASS} are needed"
        why = held if len(positive) else "there is no validation part"
        return Threshold(value=DEFAULT_THRESHOLD, source=f"0.5, since {why}")
    curve = roc_curve(positive, scores)
    gain = curve.y - curve.x
    lower = np.append(curve.thresholds[1:], -np.inf)
    cuts = (np.where(np.isinf(curve.thresholds), 1.0, curve.thresholds) + np.where(np.isinf(lower), 0.0, lower)) / 2
    best = np.flatnonzero(gain >= gain.max() - 1e-12)
    value = float(cuts[best[np.argmin(np.abs(cuts[best] - DEFAULT_THRESHOLD))]])
    return Threshold(value=value, source=_YOUDEN)


def choose_threshold_of_patients(patients: Sequence[str], positive: Bools, scores: Floats) -> Threshold:
    """The same from rows of slides or seeds: a patient counts once, with the mean of its scores.

    A patient whose rows are of both classes has no label and no say.   patients, positive, scores: (n,).
    """
    truth, means = patient_means(patients, np.asarray(positive, dtype=np.int64), np.asarray(scores)[:, None])
    return choose_threshold(truth == 1, means[:, 0])


def confusion_matrix(targets: Ints, decisions: Ints, *, n_classes: int) -> NDArray[np.int64]:
    """Counts (n_classes, n_classes): row = true class, column = decision, always in the configured order."""
    flat = np.asarray(targets, dtype=np.int64) * n_classes + np.asarray(decisions, dtype=np.int64)
    return np.bincount(flat, minlength=n_classes * n_classes).reshape(n_classes, n_classes)


def accuracy(matrix: NDArray[np.int64]) -> float:
    """Share of right decisions."""
    return _ratio(float(np.trace(matrix)), float(matrix.sum()))


def recalls(matrix: NDArray[np.int64]) -> Floats:
    """Share of each true class that was found (k,); NaN for an absent class. In binary: specificity, sensitivity."""
    return _ratios(np.diag(matrix), matrix.sum(axis=1))


def balanced_accuracy(matrix: NDArray[np.int64]) -> float:
    """Mean recall of the classes that are present."""
    found = recalls(matrix)
    present = np.isfinite(found)
    return float(found[present].mean()) if present.any() else float("nan")


def sensitivity(matrix: NDArray[np.int64]) -> float:
    """Binary: share of the last (positive) class that was found."""
    return float(recalls(matrix)[-1])


def specificity(matrix: NDArray[np.int64]) -> float:
    """Binary: share of the first (negative) class that was left alone."""
    return float(recalls(matrix)[0])


def f1(matrix: NDArray[np.int64], *, average: Literal["positive", "macro", "micro"]) -> float:
    """F1 = 2 TP / (2 TP + FP + FN). Its averaging must be named, since the three differ.

    positive: the last class alone.   macro: plain mean over the classes that occur in truth or decision.
    micro: from summed counts; with one decision a patient it equals accuracy.
    """
    hits = np.diag(matrix).astype(np.float64)
    called_or_true = (matrix.sum(axis=0) + matrix.sum(axis=1)).astype(np.float64)
    if average == "micro":
        return _ratio(2 * hits.sum(), called_or_true.sum())
    each = _ratios(2 * hits, called_or_true)
    if average == "positive":
        return float(each[-1])
    present = np.isfinite(each)
    return float(each[present].mean()) if present.any() else float("nan")


def _ratio(above: float, below: float) -> float:
    return above / below if below else float("nan")


def _ratios(above: NDArray[Any], below: NDArray[Any]) -> Floats:
    undefined: Floats = np.full(len(above), np.nan)
    return np.divide(above.astype(np.float64), below.astype(np.float64), out=undefined, where=below > 0)
