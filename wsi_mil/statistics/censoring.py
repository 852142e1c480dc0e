"""Scores of survival predictions at a time when some patients are censored: weights, Brier score, AUC.

Patients who are censored before the time are replaced by those who are still seen, weighted by the inverse
probability of not being censored (IPCW). That probability comes from the training patients of each fold, so weights and
terms are made fold by fold and then laid together. In an external validation it comes from the tested patients
themselves, as is usual where there is no training part (Graf et al. 1999): it knows follow-up, no prediction.
"""

from collections.abc import Callable
from math import sqrt

import numpy as np

from wsi_mil.statistics.intervals import bootstrap_auc
from wsi_mil.statistics.ranking import Bools, Floats, Ints
from wsi_mil.statistics.survival import SurvivalCurve, checked_times

_GAUSS = ((1 - 1 / sqrt(3)) / 2, (1 + 1 / sqrt(3)) / 2)
"""Places within an interval whose mean value is that of a polynomial of third degree or less."""


def why_undefined(censoring: SurvivalCurve, *, at: float, whose: str) -> str:
    """Why nothing can be said at that time from who was censored when; empty where something can.

    whose: of whom `censoring` is the curve, such as "the training patients".
    """
    if _is_followed(censoring, at=at):
        return ""
    if censoring.last == -np.inf:
        return f"the time of none of {whose} is known"
    if at > censoring.last:
        return f"{whose} were followed until {censoring.last:g} only"
    return f"none of {whose} was followed beyond {at:g}"


def _is_followed(censoring: SurvivalCurve, *, at: float) -> bool:
    return at <= censoring.last and bool(censoring.at(np.array([at]))[0] > 0)


def censoring_weights(censoring: SurvivalCurve, times: Floats, events: Bools, *, at: float) -> Floats:
    """Weight of each test patient at a time (Graf et al. 1999).

    censoring: `survival.censoring_curve`, G.   times, events: (n,) of test patients.
    1 / G(T-) for an event until the time, 1 / G(time) for whoever is seen longer, 0 for who was censored before; all
    NaN where `why_undefined` has a reason. G(T-) rather than G(T): an event at the time of a censoring is the earlier.
    """
    times, events = checked_times(times, events)
    if not _is_followed(censoring, at=at):
        return np.full(len(times), np.nan)
    weights = np.zeros(len(times))
    had, longer = (times <= at) & events, times > at
    weights[had] = 1.0 / censoring.before(times[had])
    weights[longer] = 1.0 / censoring.at(np.array([at]))[0]
    return weights


def survival_brier_terms(times: Floats, survival: Floats, *, at: float, weights: Floats) -> Floats:
    """(n,) what each test patient adds to the Brier score at a time; their mean is the score (Graf et al. 1999).

    survival: (n,) predicted probability of being free of the event at that time.   weights: `censoring_weights`.
    NaN throughout when every patient has weight 0, since nobody's state is known then.
    """
    if not weights.any():
        return np.full(len(times), np.nan)
    return np.asarray(weights * ((np.asarray(times) > at) - survival) ** 2, dtype=np.float64)


def integrated_brier_terms(
    times: Floats,
    events: Bools,
    *,
    predicted: Callable[[float], Floats],
    knots: Floats,
    censoring: SurvivalCurve,
    end: float,
) -> Floats:
    """(n,) what each test patient adds to the Brier score averaged over the times 0 to `end`.

    predicted: time -> (n,) survival then.   knots: the times at which these curves bend or fall.
    Between two neighbours of knots and of times at which anybody is last seen, weights are constant, so Gauss's rule
    with two points is exact for curves that are straight or level there: no grid is chosen, and a time at which a curve
    falls is never read. NaN when nobody behind `censoring` was followed until `end`. Raises ValueError at end <= 0.
    """
    times, events = checked_times(times, events)
    if not end > 0:
        raise ValueError(f"the Brier score is integrated from 0 to a time above it, not to {end}")
    if end > censoring.last:
        return np.full(len(times), np.nan)
    steps = np.unique(np.concatenate([[0.0], times, censoring.times, np.asarray(knots, dtype=np.float64)]))
    steps = steps[(steps >= 0) & (steps < end)]
    total = np.zeros(len(times))
    for start, width in zip(steps.tolist(), np.diff(np.append(steps, end)).tolist(), strict=True):
        weights = censoring_weights(censoring, times, events, at=start)
        for share in _GAUSS:
            survival = predicted(start + share * width)
            total += width / 2 * survival_brier_terms(times, survival, at=start, weights=weights)
    return total / end


def survival_at(cuts: Floats, survival: Floats, *, at: float) -> Floats:
    """Predicted survival at a time from its values at cuts: straight between them, level after the last.

    It begins with 1 at time 0. A hazard says how many have the event in its interval, not when; spread evenly over it,
    the curve is straight.
    cuts: (m,) rising, above 0.   survival: (n, m) at each cut.   Returns (n,).
    """
    survival = np.asarray(survival, dtype=np.float64)
    knots = np.concatenate([[0.0], np.asarray(cuts, dtype=np.float64)])
    if survival.ndim != 2 or survival.shape[1] != len(cuts) or not (np.diff(knots) > 0).all():
        raise ValueError(f"survival {survival.shape} needs one column for each of {len(cuts)} rising cuts above 0")
    curves = np.column_stack([np.ones(len(survival)), survival])
    place = float(np.interp(at, knots, np.arange(len(knots))))
    before, after = int(np.floor(place)), int(np.ceil(place))
    return np.asarray(curves[:, before] + (place - before) * (curves[:, after] - curves[:, before]), dtype=np.float64)


def dynamic_auc(
    times: Floats, risks: Floats, *, at: float, weights: Floats, groups: Ints, draws: Floats | None = None
) -> Floats:
    """Cumulative / dynamic AUC at a time: have those with an event until then higher risks than those seen longer?

    times, risks, weights, groups: (n,); weights from `censoring_weights`, so that a pair counts with the product of its
    two (Uno et al. 2007; Hung and Chiang 2010); a pair lies within one group, ties of risk count a half.
    draws: (b, n) bootstrap weights of the rows, one plain draw when not given.
    Returns (b,): NaN where the weight of a pair is, and where no case or nobody beyond the time is left.
    """
    times, risks, weights = (np.asarray(values, dtype=np.float64) for values in (times, risks, weights))
    draws = np.ones((1, len(times))) if draws is None else draws
    return bootstrap_auc(times <= at, risks, groups=groups, weights=draws * weights)
