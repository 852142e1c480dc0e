"""Two methods on the same patients and folds: a paired test, corrected for many comparisons."""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from wsi_mil.statistics.concordance import Concordance
from wsi_mil.statistics.intervals import FEW, Interval


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """Difference of two AUCs (first minus second) with DeLong's paired interval and two-sided p."""

    difference: float
    interval: Interval
    p: float


def compare_aucs(first: Concordance, second: Concordance, *, level: float = 0.95) -> PairedTest:
    """DeLong's paired test: both AUCs must come from the same rows, so that influences belong to the same patients.

    Below 10 patients in a class the normal approximation is not trusted and nothing is tested: p is NaN. With zero
    variance (identical orderings, or both perfect) p is 1 for equal AUCs and NaN otherwise.
    """
    if len(first.influence) != len(second.influence):
        raise ValueError(f"the methods speak of {len(first.influence)} and {len(second.influence)} patients")
    difference = first.auc - second.auc
    error = float(np.sqrt(np.sum((first.influence - second.influence) ** 2)))
    few = min(first.n_positive, first.n_negative) < FEW
    if few or not np.isfinite(difference) or error < 1e-12:
        p = 1.0 if difference == 0 and not few else float("nan")
        nothing = Interval(low=float("nan"), high=float("nan"), level=level, method="not defined")
        return PairedTest(difference=difference, interval=nothing, p=p)
    reach = NormalDist().inv_cdf((1 + level) / 2) * error
    interval = Interval(low=difference - reach, high=difference + reach, level=level, method="paired DeLong")
    return PairedTest(difference=difference, interval=interval, p=2 * NormalDist().cdf(-abs(difference) / error))


def holm(p_values: list[float]) -> list[float]:
    """Holm's step-down correction; undefined p-values stay undefined and count for nothing."""
    defined = sorted((p, place) for place, p in enumerate(p_values) if np.isfinite(p))
    corrected = [float("nan")] * len(p_values)
    highest = 0.0
    for rank, (p, place) in enumerate(defined):
        highest = max(highest, min(1.0, p * (len(defined) - rank)))
        corrected[place] = highest
    return corrected
