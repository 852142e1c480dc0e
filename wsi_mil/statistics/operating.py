"""Sensitivity at a wished specificity, and the other way round, on the ROC of the given rows.

The cut is chosen on the very rows that it is judged on, so this describes a ROC and is no promise for a fixed cut; the
threshold that validation chose has its own figures. The interval chooses the cut anew in each bootstrap sample, since
Wilson's would treat it as known beforehand. Where resampling shows no spread, and below 10 patients in a class, it is
Wilson's nevertheless, and says so.
"""

from dataclasses import dataclass

import numpy as np

from wsi_mil.statistics.intervals import FEW, Interval, bootstrap_curves, percentile_interval, wilson_interval
from wsi_mil.statistics.ranking import Bools, Floats

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class OperatingPoint:
    """One point of a ROC: patients with a score at or above `cut` are called positive."""

    value: float
    """The figure asked for; NaN when a class is absent."""
    reached: float
    """What the other one is at this cut: at least what was wished."""
    cut: float
    """+inf where nobody may be called positive."""
    interval: Interval
    """Of `value`."""


def sensitivity_at(
    positive: Bools, scores: Floats, *, specificity: float, weights: Floats, level: float = 0.95
) -> OperatingPoint:
    """Highest sensitivity among cuts that keep at least the wished specificity.

    positive, scores: (n,) one row a patient.   weights: (draws, n), `patient_weights`.
    Equal scores are called alike and nothing is interpolated, so ties can only lower the value. Of cuts with one
    sensitivity the highest is named.
    """
    return _point(np.asarray(positive, dtype=bool), np.asarray(scores, dtype=np.float64), specificity, weights, level)


def specificity_at(
    positive: Bools, scores: Floats, *, sensitivity: float, weights: Floats, level: float = 0.95
) -> OperatingPoint:
    """Highest specificity among cuts that keep at least the wished sensitivity; otherwise as `sensitivity_at`."""
    positive, scores = np.asarray(positive, dtype=bool), np.asarray(scores, dtype=np.float64)
    point = _point(~positive, -scores, sensitivity, weights, level, of="negative patients")
    called = scores[scores > -point.cut]  # the mirrored cut calls negative at or below -cut: positive is above it
    return OperatingPoint(
        value=point.value,
        reached=point.reached,
        cut=float(called.min(initial=np.inf)),
        interval=point.interval,
    )


def _point(
    positive: Bools, scores: Floats, kept: float, weights: Floats, level: float, of: str = "positive patients"
) -> OperatingPoint:
    ups, downs = int(positive.sum()), int((~positive).sum())
    if not ups or not downs:
        nothing = float("nan")
        return OperatingPoint(value=nothing, reached=nothing, cut=nothing, interval=percentile_interval(np.empty(0)))
    hits, alarms, cuts = bootstrap_curves(positive, scores, weights=np.vstack([np.ones(len(scores)), weights]))
    shares = _best(hits, alarms, kept)
    value = float(shares[0])
    interval = percentile_interval(shares[1:], level=level)
    if min(ups, downs) < FEW or not interval.high - interval.low > _ROUNDING:
        interval = wilson_interval(value, ups, of=of, level=level)
    allowed = (1 - alarms[0] / downs >= kept - _ROUNDING) & (hits[0] >= value * ups - _ROUNDING)
    place = int(np.flatnonzero(allowed)[0]) if value > 0 else -1
    return OperatingPoint(
        value=value,
        reached=float(1 - alarms[0, place] / downs) if value > 0 else 1.0,
        cut=float(cuts[place]) if value > 0 else float("inf"),
        interval=interval,
    )


def _best(hits: Floats, alarms: Floats, kept: float) -> Floats:
    """Largest share of hits of each draw with at most 1 - kept false alarms; 0 where no cut is allowed."""
    ups, downs = hits[:, -1:], alarms[:, -1:]
    drawn = ((ups > 0) & (downs > 0))[:, 0]
    safe_ups, safe_downs = np.where(ups > 0, ups, 1.0), np.where(downs > 0, downs, 1.0)
    best = np.where(1 - alarms / safe_downs >= kept - _ROUNDING, hits / safe_ups, 0.0).max(axis=1)
    return np.where(drawn, best, np.nan)
