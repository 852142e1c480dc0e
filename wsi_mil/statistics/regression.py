"""How near predicted numbers come to the true ones, in the units of the column.

Numbers of all fold models have one scale, that of the column, so rows of all folds stand together and there is no
within-fold version as for scores. One row a patient, or rows of slides with a patient's weight at each.
"""

from dataclasses import dataclass, fields

import numpy as np

from wsi_mil.statistics.intervals import Interval, percentile_interval
from wsi_mil.statistics.ranking import Floats

MIN_PATIENTS = 10
"""With fewer patients resampling cannot show the spread, and there is no interval."""
_ROUNDING = 1e-26
"""A variance below this share of the largest square is what rounding leaves of equal numbers."""


@dataclass(frozen=True, kw_only=True)
class Regression:
    """Figures of true and predicted numbers, each (draws,): one value for each set of weights.

    With a single patient only the two errors are defined; the rest is NaN where it would divide by no spread.
    """

    r2: Floats
    """1 - squared error / squared distance to the mean of these (test) rows; NaN when all true numbers are equal."""
    mae: Floats
    """Mean absolute error."""
    rmse: Floats
    """Root of the mean squared error."""
    pearson: Floats
    """Correlation; NaN when the true or the predicted numbers are all equal."""
    spearman: Floats
    """Correlation of ranks, equal numbers sharing their middle rank; NaN as above."""
    slope: Floats
    """Of the least-squares line true = intercept + slope * predicted; 1 is calibrated, NaN for equal predictions."""
    intercept: Floats


def regression(truth: Floats, predicted: Floats, *, weights: Floats | None = None) -> Regression:
    """All figures of each set of weights, of the plain rows when none are given.

    truth, predicted: (n,).   weights: (draws, n), for instance `patient_weights` at each patient's rows.
    Raises ValueError for a number that is missing or infinite, and for lists of different length.
    """
    truth, predicted = np.asarray(truth, dtype=np.float64), np.asarray(predicted, dtype=np.float64)
    if truth.shape != predicted.shape or truth.ndim != 1:
        raise ValueError(f"true numbers {truth.shape} and predicted ones {predicted.shape} must be lists of one length")
    if not (np.isfinite(truth).all() and np.isfinite(predicted).all()):
        raise ValueError("a true or predicted number is missing or infinite; leave such rows out beforehand")
    weights = np.ones((1, len(truth))) if weights is None else weights
    total = weights.sum(axis=1)
    shares = weights / np.where(total > 0, total, np.nan)[:, None]
    error = predicted - truth
    squared = _ratio(weights @ error**2, total)
    mean_truth, mean_predicted = shares @ truth, shares @ predicted
    var_truth, var_predicted, covariance = _moments(truth, predicted, shares)
    slope = _ratio(covariance, var_predicted)
    return Regression(
        r2=1.0 - _ratio(squared, var_truth),
        mae=_ratio(weights @ np.abs(error), total),
        rmse=np.sqrt(squared),
        pearson=_ratio(covariance, np.sqrt(var_truth * var_predicted)),
        spearman=_spearman(truth, predicted, shares),
        slope=slope,
        intercept=mean_truth - slope * mean_predicted,
    )


def regression_intervals(samples: Regression, *, n_patients: int, level: float = 0.95) -> dict[str, Interval]:
    """Percentile interval of each figure by its name; not defined below `MIN_PATIENTS`.

    samples: `regression` with bootstrap weights of patients.
    """
    few = n_patients < MIN_PATIENTS
    return {
        field.name: percentile_interval(np.empty(0) if few else getattr(samples, field.name), level=level)
        for field in fields(samples)
    }


def _moments(first: Floats, second: Floats, shares: Floats) -> tuple[Floats, Floats, Floats]:
    """Weighted variances and covariance of each draw; first, second: (n,) or (draws, n)."""
    offs = [values - (shares * values).sum(axis=1, keepdims=True) for values in (first, second)]
    floors = [_ROUNDING * np.max(values**2, initial=0.0) for values in (first, second)]
    variances = [(shares * off**2).sum(axis=1) for off in offs]
    var_first, var_second = (np.where(var <= floor, 0.0, var) for var, floor in zip(variances, floors, strict=True))
    return var_first, var_second, (shares * offs[0] * offs[1]).sum(axis=1)


def _spearman(truth: Floats, predicted: Floats, shares: Floats) -> Floats:
    var_truth, var_predicted, covariance = _moments(_mid_ranks(truth, shares), _mid_ranks(predicted, shares), shares)
    return _ratio(covariance, np.sqrt(var_truth * var_predicted))


def _mid_ranks(values: Floats, shares: Floats) -> Floats:
    """Share of the weight below each value, plus half of that at it (draws, n)."""
    distinct, place = np.unique(values, return_inverse=True)
    order = np.argsort(place, kind="stable")
    ends = np.searchsorted(place[order], np.arange(len(distinct)), side="right") - 1
    upto = np.cumsum(shares[:, order], axis=1)[:, ends]
    below = np.concatenate([np.zeros((len(shares), 1)), upto[:, :-1]], axis=1)
    return np.asarray(((below + upto) / 2)[:, place], dtype=np.float64)


def _ratio(above: Floats, below: Floats) -> Floats:
    undefined: Floats = np.full(len(above), np.nan)
    return np.divide(above, below, out=undefined, where=below > 0)
