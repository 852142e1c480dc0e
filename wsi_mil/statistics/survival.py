"""Time to an event: the Kaplan-Meier curve, the curve of censoring, and the log-rank test.

An event at the time of a censoring counts as the earlier of the two, so whoever is censored then was still at risk.
"""

from dataclasses import dataclass
from math import erfc, exp, lgamma, log, sqrt
from statistics import NormalDist

import numpy as np

from wsi_mil.statistics.ranking import Bools, Floats, Ints


@dataclass(frozen=True, kw_only=True)
class SurvivalCurve:
    """A step function that falls at each of its times and is 1 before the first."""

    times: Floats
    """(m,) distinct times at which it falls, rising."""
    survival: Floats
    """(m,) its value from each of these times on."""
    at_risk: Ints
    """(m,) patients who could have had the event just then."""
    events: Ints
    last: float
    """Last time at which anybody was seen; -inf without a patient."""

    def at(self, times: Floats) -> Floats:
        """S(t); NaN later than anybody was seen, unless the curve has come down to 0."""
        return self._read(times, side="right")

    def before(self, times: Floats) -> Floats:
        """S(t-), the value just before each time; NaN as for `at`."""
        return self._read(times, side="left")

    def median(self) -> float:
        """First time at which at most half are left; NaN when the curve stays above a half."""
        below = np.flatnonzero(self.survival <= 0.5 + 1e-12)
        return float(self.times[below[0]]) if len(below) else float("nan")

    def variance(self) -> Floats:
        """Greenwood's variance of the survival (m,); NaN where the curve is 0."""
        return self.survival**2 * self._greenwood()

    def band(self, *, level: float = 0.95) -> tuple[Floats, Floats]:
        """Low and high ends (m,) at each time, from the log-log scale; NaN where the curve is 0.

        Kalbfleisch and Prentice 2002, 1.4: S ** exp(-+ z sqrt(sum d / (Y (Y - d))) / log S).
        """
        positive = self.survival > 0
        safe = np.where(positive, self.survival, 0.5)
        reach = NormalDist().inv_cdf((1 + level) / 2) * np.sqrt(self._greenwood()) / np.log(safe)
        low, high = safe ** np.exp(-reach), safe ** np.exp(reach)
        return np.where(positive, low, np.nan), np.where(positive, high, np.nan)

    def _greenwood(self) -> Floats:
        below = (self.at_risk * (self.at_risk - self.events)).astype(np.float64)
        undefined: Floats = np.full(len(below), np.nan)
        steps: Floats = np.divide(self.events.astype(np.float64), below, out=undefined, where=below > 0)
        return np.cumsum(steps)

    def _read(self, times: Floats, *, side: str) -> Floats:
        times = np.asarray(times, dtype=np.float64)
        places = np.searchsorted(self.times, times, side="right" if side == "right" else "left")
        values = np.concatenate([[1.0], self.survival])[places]
        return np.where((times > self.last) & (values > 0), np.nan, values)


@dataclass(frozen=True, kw_only=True)
class LogRank:
    """Do groups have the same survival? Chi-square of observed against expected events."""

    observed: Floats
    """(k,) events of each group, in the order of the sorted group numbers."""
    expected: Floats
    """(k,) events that each group would have had if all died alike."""
    statistic: float
    degrees: int
    p: float
    reason: str
    """Why nothing was tested; empty otherwise."""


def kaplan_meier(times: Floats, events: Bools) -> SurvivalCurve:
    """Share of patients who are free of the event (Kaplan and Meier 1958), one row a patient.

    times: (n,) >= 0 and finite.   events: (n,) whether the time is that of an event.   Raises ValueError otherwise.
    """
    times, events = checked_times(times, events)
    return _product_limit(times, falls=events, gone=np.zeros_like(events))


def censoring_curve(times: Floats, events: Bools) -> SurvivalCurve:
    """Share of patients who are not yet censored: who has the event at a time can no longer be censored at it.

    times, events: as for `kaplan_meier`.
    """
    times, events = checked_times(times, events)
    return _product_limit(times, falls=~events, gone=events)


def log_rank(times: Floats, events: Bools, groups: Ints) -> LogRank:
    """Log-rank test of k groups with the hypergeometric variance (Mantel 1966; Peto and Peto 1972).

    times, events, groups: (n,) one row a patient. p is NaN, with a reason, without an event and where no event finds
    two groups at risk.
    """
    times, events = checked_times(times, events)
    moments = np.unique(times[events])
    members = [np.asarray(groups) == group for group in np.unique(groups)]
    at_risk = np.stack([_at_risk(times[own], moments) for own in members], axis=1).astype(np.float64)
    died = np.stack([_counts(times[own & events], moments) for own in members], axis=1).astype(np.float64)
    total, deaths = at_risk.sum(axis=1), died.sum(axis=1)
    share = at_risk / total[:, None]
    observed, expected = died.sum(axis=0), (deaths[:, None] * share).sum(axis=0)
    spread = deaths * (total - deaths) / np.maximum(total - 1, 1)
    covariance = np.diag((spread[:, None] * share).sum(axis=0)) - np.einsum("t,tg,th->gh", spread, share, share)
    degrees = int(np.linalg.matrix_rank(covariance, hermitian=True)) if len(moments) else 0
    if degrees == 0:
        reason = "no event was seen" if not len(moments) else "no event finds patients of two groups at risk"
        nothing = float("nan")
        return LogRank(observed=observed, expected=expected, statistic=nothing, degrees=0, p=nothing, reason=reason)
    gap = observed - expected
    statistic = float(gap @ np.linalg.pinv(covariance, hermitian=True) @ gap)
    return LogRank(
        observed=observed,
        expected=expected,
        statistic=statistic,
        degrees=degrees,
        p=_chi_square_tail(statistic, degrees),
        reason="",
    )


def checked_times(times: Floats, events: Bools) -> tuple[Floats, Bools]:
    """The two as arrays; ValueError where they cannot be the times of patients."""
    times, events = np.asarray(times, dtype=np.float64), np.asarray(events).astype(bool)
    if times.shape != events.shape or times.ndim != 1:
        raise ValueError(f"times {times.shape} and events {events.shape} must be two lists of one length")
    if not np.isfinite(times).all() or (times < 0).any():
        raise ValueError("a time to an event must be a number >= 0; leave patients without one out beforehand")
    return times, events


def _product_limit(times: Floats, *, falls: Bools, gone: Bools) -> SurvivalCurve:
    """falls: who makes the curve fall at its time.   gone: who left the risk set just before that fall."""
    moments = np.unique(times[falls])
    at_risk = _at_risk(times, moments) - _counts(times[gone], moments)
    fallen = _counts(times[falls], moments)
    return SurvivalCurve(
        times=moments,
        survival=np.asarray(np.cumprod(1.0 - fallen / at_risk), dtype=np.float64),
        at_risk=at_risk,
        events=fallen,
        last=float(times.max(initial=-np.inf)),
    )


def _at_risk(times: Floats, moments: Floats) -> Ints:
    return np.asarray(len(times) - np.searchsorted(np.sort(times), moments, side="left"), dtype=np.int64)


def _counts(times: Floats, moments: Floats) -> Ints:
    """How many of the times are each of the moments."""
    ordered = np.sort(times)
    upto, before = (np.searchsorted(ordered, moments, side=side) for side in ("right", "left"))
    return np.asarray(upto - before, dtype=np.int64)


def _chi_square_tail(statistic: float, degrees: int) -> float:
    """P(chi-square > statistic), by the recurrence of the incomplete gamma function in steps of two degrees."""
    half = max(statistic, 0.0) / 2
    if half == 0:
        return 1.0
    odd = degrees % 2
    tail = erfc(sqrt(half)) if odd else exp(-half)
    shape = 0.5 if odd else 1.0
    while shape < degrees / 2:
        tail += exp(shape * log(half) - half - lgamma(shape + 1))
        shape += 1
    return min(1.0, tail)
