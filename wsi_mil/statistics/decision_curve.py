"""Is acting on the model better than acting on everybody, or on nobody? Net benefit over thresholds."""

from dataclasses import dataclass

import numpy as np

from wsi_mil.statistics.ranking import Bools, Floats


@dataclass(frozen=True, kw_only=True)
class DecisionCurve:
    """Net benefit, in true positives a patient, at each threshold probability. Treating nobody has 0 throughout."""

    thresholds: Floats
    model: Floats
    treat_all: Floats


def decision_curve(positive: Bools, probabilities: Floats, *, thresholds: Floats) -> DecisionCurve:
    """Net benefit = TP / n - FP / n * t / (1 - t) (Vickers and Elkin 2006); a patient is treated at p >= t.

    positive, probabilities: (n,) one row a patient, probabilities calibrated.   thresholds: (m,) in [0, 1).
    NaN without a patient. Raises ValueError for a threshold outside [0, 1).
    """
    thresholds = np.asarray(thresholds, dtype=np.float64)
    if not ((thresholds >= 0) & (thresholds < 1)).all():
        raise ValueError("a threshold of a decision curve lies in [0, 1): it is the probability at which one acts")
    positive, count = np.asarray(positive, dtype=bool), len(positive)
    odds = thresholds / (1 - thresholds)
    if not count:
        nothing = np.full(len(thresholds), np.nan)
        return DecisionCurve(thresholds=thresholds, model=nothing, treat_all=nothing)
    hits, alarms = (_at_or_above(np.asarray(probabilities)[own], thresholds) for own in (positive, ~positive))
    prevalence = positive.mean()
    return DecisionCurve(
        thresholds=thresholds,
        model=(hits - alarms * odds) / count,
        treat_all=prevalence - (1 - prevalence) * odds,
    )


def _at_or_above(values: Floats, thresholds: Floats) -> Floats:
    return (len(values) - np.searchsorted(np.sort(values), thresholds, side="left")).astype(np.float64)
