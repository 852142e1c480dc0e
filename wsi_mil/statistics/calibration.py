"""Do probabilities mean what they say? Brier score, log-loss, expected calibration error, calibration curve."""

from dataclasses import dataclass

import numpy as np

from wsi_mil.statistics.ranking import Bools, Floats, Ints

PROBABILITY_FLOOR = 1e-15


@dataclass(frozen=True, kw_only=True)
class CalibrationCurve:
    """Equal-mass bins of a predicted probability, from low to high."""

    predicted: Floats
    """Mean predicted probability of each bin."""
    observed: Floats
    """Share of positives in each bin."""
    counts: Ints


def brier(targets: Ints, probabilities: Floats) -> float:
    """Mean squared distance to the truth, 0 is perfect; NaN without a row.

    probabilities: (n, k). With two classes the usual binary form (of the last column); with more the sum over classes.
    """
    return _mean(brier_terms(targets, probabilities))


def brier_terms(targets: Ints, probabilities: Floats) -> Floats:
    """(n,) what each row adds to the Brier score."""
    truth = np.eye(probabilities.shape[1])[targets]
    squared = (probabilities - truth) ** 2
    return np.asarray(squared[:, -1] if squared.shape[1] == 2 else squared.sum(axis=1), dtype=np.float64)


def log_loss(targets: Ints, probabilities: Floats) -> float:
    """Mean of -log p(true class); NaN without a row."""
    return _mean(log_loss_terms(targets, probabilities))


def log_loss_terms(targets: Ints, probabilities: Floats) -> Floats:
    """(n,) -log p(true class), with p held above 1e-15."""
    chosen = probabilities[np.arange(len(targets)), targets]
    return np.asarray(-np.log(np.maximum(chosen, PROBABILITY_FLOOR)), dtype=np.float64)


def _mean(terms: Floats) -> float:
    return float(terms.mean()) if len(terms) else float("nan")


def calibration_curve(positive: Bools, scores: Floats, *, n_bins: int = 10) -> CalibrationCurve:
    """Bins of equal mass; equal scores are never cut apart, so there may be fewer bins than asked."""
    order = np.argsort(scores, kind="stable")
    ordered, truth = np.asarray(scores, dtype=np.float64)[order], np.asarray(positive, dtype=np.float64)[order]
    wished = np.round(np.linspace(0, len(ordered), min(n_bins, max(len(ordered), 1)) + 1)[1:-1]).astype(np.int64)
    bounds = np.unique(np.concatenate([[0], _between_ties(ordered, wished), [len(ordered)]]))
    counts = np.diff(bounds)
    if not len(counts):
        nothing = np.empty(0, dtype=np.float64)
        return CalibrationCurve(predicted=nothing, observed=nothing, counts=counts)
    return CalibrationCurve(
        predicted=np.add.reduceat(ordered, bounds[:-1]) / counts,
        observed=np.add.reduceat(truth, bounds[:-1]) / counts,
        counts=counts,
    )


def _between_ties(ordered: Floats, wished: Ints) -> Ints:
    """The wished cuts, each moved to the nearer end of its run of equal scores."""
    left = np.searchsorted(ordered, ordered[wished], side="left")
    right = np.searchsorted(ordered, ordered[wished], side="right")
    return np.where(wished - left <= right - wished, left, right).astype(np.int64)


def expected_calibration_error(positive: Bools, scores: Floats, *, n_bins: int = 10) -> float:
    """Mean gap between predicted and observed over equal-mass bins, weighted by their size."""
    curve = calibration_curve(positive, scores, n_bins=n_bins)
    if not len(curve.counts):
        return float("nan")
    return float(np.average(np.abs(curve.predicted - curve.observed), weights=curve.counts))
