"""How well scores order two classes: AUC, ROC, precision-recall. An undefined figure is NaN, never a guess."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points of a curve; the first threshold is +inf, where nothing is called positive."""

    x: Floats
    y: Floats
    thresholds: Floats


def placements(scores: Floats, others: Floats) -> Floats:
    """Share of `others` below each score; a tie counts a half.

    scores: (m,).   others: (n,), n > 0.   Returns (m,).
    """
    ordered = np.sort(others)
    below = np.searchsorted(ordered, scores, side="left") + np.searchsorted(ordered, scores, side="right")
    return np.asarray(below / (2.0 * len(ordered)), dtype=np.float64)


def auc(positive: Bools, scores: Floats) -> float:
    """Probability that a positive scores above a negative, ties counted a half; NaN when a class is absent."""
    positive = np.asarray(positive, dtype=bool)
    scores = np.asarray(scores, dtype=np.float64)
    if positive.all() or not positive.any():
        return float("nan")
    return float(placements(scores[positive], scores[~positive]).mean())


def roc_curve(positive: Bools, scores: Floats) -> Curve:
    """ROC: x is 1 - specificity, y is sensitivity, one point a distinct score. Empty when a class is absent."""
    hits, false_alarms, thresholds = _counts_above(positive, scores)
    if hits[-1] == 0 or false_alarms[-1] == 0:
        return _empty()
    return Curve(x=false_alarms / false_alarms[-1], y=hits / hits[-1], thresholds=thresholds)


def precision_recall_curve(positive: Bools, scores: Floats) -> Curve:
    """Precision (y) over recall (x), one point a distinct score, starting at recall 0 with the first precision."""
    hits, false_alarms, thresholds = _counts_above(positive, scores)
    if hits[-1] == 0:
        return _empty()
    called = hits + false_alarms
    precision = np.divide(hits, called, out=np.ones_like(hits), where=called > 0)
    if len(precision) > 1:
        precision[0] = precision[1]
    return Curve(x=hits / hits[-1], y=precision, thresholds=thresholds)


def average_precision(positive: Bools, scores: Floats) -> float:
    """Area below the precision-recall steps (no interpolation). Chance is the prevalence; NaN without positives."""
    curve = precision_recall_curve(positive, scores)
    if not len(curve.x):
        return float("nan")
    return float(np.sum(np.diff(curve.x) * curve.y[1:]))


def one_vs_rest_auc(targets: Ints, probabilities: Floats) -> Floats:
    """AUC of each class against the rest, NaN for a class that is absent (or the only one).

    targets: (n,) column numbers.   probabilities: (n, k) in the configured class order.   Returns (k,).
    """
    columns = range(probabilities.shape[1])
    return np.array([auc(targets == column, probabilities[:, column]) for column in columns], dtype=np.float64)


def macro(values: Floats) -> float:
    """Mean of the defined values; NaN when none is defined."""
    defined = values[np.isfinite(values)]
    return float(defined.mean()) if len(defined) else float("nan")


def _counts_above(positive: Bools, scores: Floats) -> tuple[Floats, Floats, Floats]:
    """Positives and negatives at or above each distinct score, from the highest down; first entry 0, 0, +inf."""
    positive = np.asarray(positive, dtype=bool)
    scores = np.asarray(scores, dtype=np.float64)
    distinct, place = np.unique(scores, return_inverse=True)
    hits = np.bincount(place[positive], minlength=len(distinct))[::-1].cumsum()
    false_alarms = np.bincount(place[~positive], minlength=len(distinct))[::-1].cumsum()
    return (
        np.concatenate([[0.0], hits]),
        np.concatenate([[0.0], false_alarms]),
        np.concatenate([[np.inf], distinct[::-1]]),
    )


def _empty() -> Curve:
    nothing = np.empty(0, dtype=np.float64)
    return Curve(x=nothing, y=nothing, thresholds=nothing)
