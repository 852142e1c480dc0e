"""Survival figures at stated times: dynamic AUC and integrated Brier score, weighted for censoring fold by fold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from wsi_mil.errors import RunError
from wsi_mil.report.external import USED
from wsi_mil.report.kinds.pairs import patient_means
from wsi_mil.report.kinds.records import Answers
from wsi_mil.report.method_figures import Figure
from wsi_mil.report.resampling import codes, has_width, places_of, undefined
from wsi_mil.results.reading import GIVE_AGAIN
from wsi_mil.runs import FoldKey
from wsi_mil.statistics import intervals
from wsi_mil.statistics.censoring import (
    censoring_weights,
    dynamic_auc,
    integrated_brier_terms,
    survival_at,
    why_undefined,
)
from wsi_mil.statistics.ranking import Floats
from wsi_mil.statistics.survival import SurvivalCurve, censoring_curve, kaplan_meier
from wsi_mil.table.files import EVENT_CELLS

QUARTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True, kw_only=True, eq=False)
class Followed:
    """Who is followed until when in the training part of each fold, and the times at which figures are stated.

    Of an external validation, which has no training part, in those tested: their own outcomes then make the null.
    """

    times: tuple[float, ...]
    """Quartiles of the times at which tested patients had the event: distinct, rising; none without an event."""
    censoring: Mapping[FoldKey, SurvivalCurve]
    """(repeat, fold, seed 0) -> share of these patients who are not yet censored."""
    events: Mapping[FoldKey, SurvivalCurve]
    """The same of those without the event: what is predicted by someone who has seen no slide."""
    trained: bool
    """Whether they are training patients."""

    @property
    def whose(self) -> str:
        """What they are called where a figure is not defined."""
        return "the training patients" if self.trained else "these patients"


@dataclass(frozen=True, kw_only=True)
class TimeAuc:
    """AUC at one time."""

    at: float
    figure: Figure
    patients: int
    """Patients whose state at that time is known."""
    reason: str
    """Why it is not defined, or which folds are left out; empty otherwise."""


@dataclass(frozen=True, kw_only=True)
class BrierFigures:
    """Brier score averaged over the times from 0 to `end`."""

    figure: Figure
    null: float
    """That of the Kaplan-Meier curve of the training part, or of those tested where there is none."""
    end: float
    reason: str
    """Why it is not defined, or which folds are left out; empty otherwise."""


def times_in_table(cohort: pd.DataFrame, *, time: str, event: str, source: str) -> dict[str, tuple[float, bool]]:
    """Patient -> time and whether the event was seen, as the run's cohort.csv has them of the slides that are used.

    time, event: columns there. Of a patient whose slides differ, the first; patients without either are left out.
    Raises RunError for a cell that is no time or no event.
    """
    found: dict[str, tuple[float, bool]] = {}
    used = cohort[(cohort["status"] == USED) & (cohort[time] != "") & (cohort[event] != "")]
    for patient, cell, seen in used[["patient", time, event]].itertuples(index=False):
        try:
            one = (float(cell), EVENT_CELLS[seen.lower()])
        except (ValueError, KeyError) as error:
            raise RunError(f"{source}: {patient} has no time or event in {cell!r}, {seen!r}. {GIVE_AGAIN}") from error
        found.setdefault(patient, one)
    return found


def followed_patients(
    tested: Sequence[Answers], folds: pd.DataFrame, table: Mapping[str, tuple[float, bool]] | None = None
) -> Followed:
    """tested: test rows of each method.   folds: repeat, fold, patient, part.   table: `times_in_table` of everybody,
    tested or not; None in an external validation, where nobody was trained on: those tested tell who is censored when.
    """
    judged = {
        patient: (time, event)
        for rows in tested
        for patient, time, event in zip(rows.patients, rows.truth.tolist(), rows.events.tolist(), strict=True)
    }
    had = np.array([time for time, event in judged.values() if event])
    times = tuple(sorted({float(time) for time in np.quantile(had, QUARTILES)})) if len(had) else ()
    part, known = ("test", judged) if table is None else ("train", table)
    censoring, events = {}, {}
    for (repeat, fold), parts in folds.groupby(["repeat", "fold"]):
        members = sorted(set(parts["patient"][parts["part"] == part]))
        seen = [known[patient] for patient in members if patient in known]
        lengths, happened = np.array([t for t, _ in seen]), np.array([e for _, e in seen], dtype=bool)
        key = FoldKey(int(repeat), int(fold), 0)
        censoring[key], events[key] = censoring_curve(lengths, happened), kaplan_meier(lengths, happened)
    return Followed(times=times, censoring=censoring, events=events, trained=table is not None)


def time_aucs(rows: Answers, ids: tuple[str, ...], weights: Floats, followed: Followed) -> tuple[TimeAuc, ...]:
    """One at each stated time.   rows: patients, mean over seeds.   weights: (draws, len(ids)) bootstrap."""
    return tuple(_time_auc(rows, ids, weights, followed, at=at) for at in followed.times)


def _time_auc(rows: Answers, ids: tuple[str, ...], weights: Floats, followed: Followed, *, at: float) -> TimeAuc:
    known, reasons = np.full(len(rows), np.nan), {}
    for key in sorted(set(rows.keys)):
        own = [i for i, other in enumerate(rows.keys) if other == key]
        curve = _curve(followed.censoring, key)
        known[own] = censoring_weights(curve, rows.truth[own], rows.events[own], at=at)
        if reason := why_undefined(curve, at=at, whose=followed.whose):
            reasons[key] = reason
    kept = np.flatnonzero(np.isfinite(known)).tolist()
    part, seen = rows.take(kept), known[kept]
    if not kept:
        return TimeAuc(at=at, figure=undefined(), patients=0, reason=_left_out(reasons, followed))
    plain = np.ones((1, len(part)))
    value, *samples = dynamic_auc(
        part.truth,
        part.predicted,
        at=at,
        weights=seen,
        groups=codes(part.keys),
        draws=np.concatenate([plain, weights[:, places_of(part.patients, ids)]]),
    ).tolist()
    early = {patient for patient, time, w in zip(part.patients, part.truth, seen, strict=True) if w and time <= at}
    later = {patient for patient, time, w in zip(part.patients, part.truth, seen, strict=True) if w and time > at}
    reason = _left_out(reasons, followed)
    if not np.isfinite(value):
        reason = "none tested together are both a patient with the event until then and one seen longer"
    figure = _resampled(value, np.array(samples), few=min(len(early), len(later)) < intervals.FEW)
    return TimeAuc(at=at, figure=figure, patients=len(early | later), reason=reason)


def brier_figures(rows: Answers, ids: tuple[str, ...], weights: Floats, followed: Followed) -> BrierFigures:
    """Until the last stated time. Methods that predict a risk alone have none."""
    if not followed.times or followed.times[-1] <= 0:
        return BrierFigures(figure=undefined(), null=float("nan"), end=float("nan"), reason="no event was seen")
    end = followed.times[-1]
    if not np.isfinite(rows.survival).any():
        reason = "the method predicts a risk, not the probability of being free of the event at a time"
        return BrierFigures(figure=undefined(), null=float("nan"), end=end, reason=reason)
    terms, null, reasons = np.full(len(rows), np.nan), np.full(len(rows), np.nan), {}
    for key in sorted(set(rows.keys)):
        own = [i for i, other in enumerate(rows.keys) if other == key]
        terms[own], null[own] = _terms(rows.take(own), followed, key, end=end)
        if not np.isfinite(terms[own]).all():
            reason = why_undefined(_curve(followed.censoring, key), at=end, whose=followed.whose)
            reasons[key] = reason or "nobody's state is known"
    kept = np.flatnonzero(np.isfinite(terms) & np.isfinite(null)).tolist()
    if not kept:
        return BrierFigures(figure=undefined(), null=float("nan"), end=end, reason=_left_out(reasons, followed))
    part = rows.take(kept)
    there = tuple(sorted(set(part.patients)))
    means = patient_means(part, there, terms[kept])
    samples = intervals.bootstrap_mean(means, weights=weights[:, places_of(there, ids)])
    few = min(int(part.events.sum()), len(there)) < intervals.FEW
    return BrierFigures(
        figure=_resampled(float(means.mean()), samples, few=few),
        null=float(patient_means(part, there, null[kept]).mean()),
        end=end,
        reason=_left_out(reasons, followed),
    )


def _terms(rows: Answers, followed: Followed, key: FoldKey, *, end: float) -> tuple[Floats, Floats]:
    """(n,) each: what the rows of one fold add to the score, and to that of the Kaplan-Meier curve."""
    censoring, free = _curve(followed.censoring, key), _curve(followed.events, key)
    given = np.isfinite(rows.cuts[0]) & np.isfinite(rows.survival).all(axis=0)
    cuts, survival = rows.cuts[0][given], rows.survival[:, given]

    def told(at: float) -> Floats:
        return survival_at(cuts, survival, at=at)

    def without_slides(at: float) -> Floats:
        return np.repeat(free.at(np.array([at])), len(rows))

    own, null = (
        integrated_brier_terms(rows.truth, rows.events, predicted=curve, knots=knots, censoring=censoring, end=end)
        for curve, knots in ((told, cuts), (without_slides, free.times))
    )
    return own, null


def _curve(curves: Mapping[FoldKey, SurvivalCurve], key: FoldKey) -> SurvivalCurve:
    """That of the fold's training part; one of nobody where it is not known."""
    nobody = np.empty(0)
    return curves.get(key) or kaplan_meier(nobody, nobody.astype(bool))


def _resampled(value: float, samples: Floats, *, few: bool) -> Figure:
    """With the percentile interval; none is claimed with few patients or where resampling shows no spread."""
    interval = intervals.percentile_interval(samples)
    if few or not has_width(interval) or not np.isfinite(value):
        interval = intervals.percentile_interval(np.empty(0))
    return Figure(value=value, interval=interval)


def _left_out(reasons: Mapping[FoldKey, str], followed: Followed) -> str:
    if not followed.trained:  # all are tested together, so there is one reason, and no fold to name
        return "; ".join(sorted(set(reasons.values())))
    parts = [f"repeat {key.repeat} fold {key.fold}: {reason}" for key, reason in sorted(reasons.items())]
    return f"left out: {'; '.join(parts)}" if parts else ""
