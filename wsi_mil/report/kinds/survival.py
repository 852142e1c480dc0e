"""Predicted risks of one method -> all its figures. Patients are the unit; nothing is tuned on the outcome."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from wsi_mil.report.kinds.pairs import first_places, patient_means, weights_of
from wsi_mil.report.kinds.records import Answered, Answers, patient_answers, seed_mean_answers
from wsi_mil.report.kinds.survival_times import BrierFigures, Followed, TimeAuc, brier_figures, time_aucs
from wsi_mil.report.method_figures import GAP, Figure
from wsi_mil.report.resampling import codes, has_width, places_of
from wsi_mil.runs import FoldKey
from wsi_mil.statistics import intervals
from wsi_mil.statistics.concordance import Concordance
from wsi_mil.statistics.intervals import Interval
from wsi_mil.statistics.ranking import Bools, Floats, Ints
from wsi_mil.statistics.survival import LogRank, SurvivalCurve, kaplan_meier, log_rank
from wsi_mil.statistics.survival_concordance import bootstrap_c_index, survival_concordance

GROUPS = ("low", "high")


@dataclass(frozen=True, kw_only=True, eq=False)
class RiskGroup:
    """Patients on one side of the split."""

    name: str
    times: Floats
    events: Bools
    curve: SurvivalCurve


@dataclass(frozen=True, kw_only=True, eq=False)
class SurvivalPatients:
    """One row a patient."""

    ids: tuple[str, ...]
    times: Floats
    events: Bools
    risks: Floats
    """Means over seeds and repeats."""
    high: Bools
    """Above the split in at least half of the repeats."""
    met: Floats
    """Pairs within folds of whom it is known who had the event first; mean over repeats."""
    wrong: Floats
    """Those of them that are ranked wrongly, ties counted a half."""
    weights: Floats


@dataclass(frozen=True, kw_only=True)
class SurvivalFold:
    """What one model did on its test part."""

    key: FoldKey
    patients: int
    events: int
    c_index: float
    reason: str
    """Why the C-index is not defined; empty otherwise."""
    epoch: int | None
    chosen_by: str


@dataclass(frozen=True, kw_only=True, eq=False)
class SurvivalFigures:
    """Everything the report says about a method."""

    label: str
    rows: Answers
    """One row a patient, repeat and fold: the mean over seeds."""
    mixed: tuple[str, ...]
    broken: int
    patients: SurvivalPatients
    within: Concordance
    primary: Figure
    primary_bootstrap: Interval
    pooled: Figure
    times: tuple[TimeAuc, ...]
    brier: BrierFigures
    groups: tuple[RiskGroup, ...]
    split_by_validation: int
    """Of `splits` models, so many were split at the median risk of their validation patients."""
    splits: int
    log_rank: LogRank
    folds: tuple[SurvivalFold, ...]
    by_seed: Mapping[tuple[int, int], float]
    """(repeat, seed) -> within-fold C-index of that training alone."""

    @property
    def pooled_gap(self) -> float:
        """Distance of the pooled C-index from the within-fold one; NaN where one of them is not defined."""
        return abs(self.pooled.value - self.primary.value)

    @property
    def flagged(self) -> bool:
        """Pooled and within-fold C-index disagree."""
        return bool(self.pooled_gap > GAP)


def within_folds(rows: Answers, ids: tuple[str, ...]) -> Concordance:
    """C-index over pairs tested in one fold of one repeat."""
    return _c_index(rows, ids, groups=codes(rows.keys))


def evaluate_survival(method: Answered, followed: Followed) -> SurvivalFigures:
    """All figures of one method."""
    models, mixed = patient_answers(method.test)
    rows = seed_mean_answers(models)
    split, by_validation, splits = _split(rows, method)
    patients = _patients(rows, split)
    within = within_folds(rows, patients.ids)
    pooled = _pooled(patients)
    primary = Figure(value=within.auc, interval=intervals.auc_interval(within))
    return SurvivalFigures(
        label=method.label,
        rows=rows,
        mixed=mixed,
        broken=method.broken,
        patients=patients,
        within=within,
        primary=primary,
        primary_bootstrap=_bootstrap(rows, patients, within, primary.interval),
        pooled=Figure(value=pooled.auc, interval=intervals.auc_interval(pooled)),
        times=time_aucs(rows, patients.ids, patients.weights, followed),
        brier=brier_figures(rows, patients.ids, patients.weights, followed),
        groups=_groups(patients),
        split_by_validation=by_validation,
        splits=splits,
        log_rank=log_rank(patients.times, patients.events, patients.high.astype(np.int64)),
        folds=tuple(_fold(method, models.of(key), key) for key in sorted(set(models.keys))),
        by_seed=_by_seed(models, patients.ids),
    )


def _c_index(rows: Answers, ids: tuple[str, ...], *, groups: Ints) -> Concordance:
    places = places_of(rows.patients, ids)
    return survival_concordance(
        rows.truth, rows.events, rows.predicted, groups=groups, patients=places, n_patients=len(ids)
    )


def _pooled(patients: SurvivalPatients) -> Concordance:
    everyone = np.arange(len(patients.ids))
    return survival_concordance(
        patients.times,
        patients.events,
        patients.risks,
        groups=np.zeros_like(everyone),
        patients=everyone,
        n_patients=len(everyone),
    )


def _bootstrap(rows: Answers, patients: SurvivalPatients, part: Concordance, stand_in: Interval) -> Interval:
    """The percentile interval, or the analytic one where resampling cannot show any spread."""
    weights = patients.weights[:, places_of(rows.patients, patients.ids)]
    samples = bootstrap_c_index(rows.truth, rows.events, rows.predicted, groups=codes(rows.keys), weights=weights)
    interval = intervals.percentile_interval(samples)
    few = min(part.n_positive, part.n_negative) < intervals.FEW
    return stand_in if few or not has_width(interval) else interval


def _split(rows: Answers, method: Answered) -> tuple[Bools, int, int]:
    """Whether each row's risk is above the split of its models: the median risk of the validation patients of the same
    models, else of the test patients of the fold. No outcome is looked at. Also how many came from validation, and of
    how many."""
    high = np.zeros(len(rows), dtype=bool)
    groups = sorted(set(rows.keys))
    by_validation = 0
    for group in groups:
        own = np.array([key == group for key in rows.keys])
        held = [part for key, part in method.validation.items() if key._replace(seed=0) == group and len(part)]
        judged = [seed_mean_answers(patient_answers(part)[0]) for part in held]
        medians = [float(np.median(part.predicted)) for part in judged if len(part)]
        by_validation += bool(medians)
        cut = float(np.mean(medians)) if medians else float(np.median(rows.predicted[own]))
        high[own] = rows.predicted[own] > cut
    return high, by_validation, len(groups)


def _patients(rows: Answers, high: Bools) -> SurvivalPatients:
    ids = tuple(sorted(set(rows.patients)))
    first = rows.take(first_places(rows, ids))
    met, wrong = _pairs(rows)
    return SurvivalPatients(
        ids=ids,
        times=first.truth,
        events=first.events,
        risks=patient_means(rows, ids, rows.predicted),
        high=patient_means(rows, ids, high.astype(np.float64)) >= 0.5,
        met=patient_means(rows, ids, met),
        wrong=patient_means(rows, ids, wrong),
        weights=weights_of(rows, first.events.astype(np.int64)),
    )


def _pairs(rows: Answers) -> tuple[Floats, Floats]:
    """(n,) each: of every row the pairs of its fold that can be compared, and those of them that are ranked wrongly."""
    met, wrong, groups = np.zeros(len(rows)), np.zeros(len(rows)), codes(rows.keys)
    for group in np.unique(groups):
        own = np.flatnonzero(groups == group)
        times, events, risks = rows.truth[own], rows.events[own], rows.predicted[own]
        earlier = events[:, None] & ((times[:, None] < times) | ((times[:, None] == times) & ~events))
        lost = earlier * ((risks[:, None] < risks) + 0.5 * (risks[:, None] == risks))
        met[own] = earlier.sum(axis=0) + earlier.sum(axis=1)
        wrong[own] = lost.sum(axis=0) + lost.sum(axis=1)
    return met, wrong


def _groups(patients: SurvivalPatients) -> tuple[RiskGroup, ...]:
    found = []
    for name, members in zip(GROUPS, (~patients.high, patients.high), strict=True):
        times, events = patients.times[members], patients.events[members]
        found.append(RiskGroup(name=name, times=times, events=events, curve=kaplan_meier(times, events)))
    return tuple(found)


def _fold(method: Answered, rows: Answers, key: FoldKey) -> SurvivalFold:
    ids = tuple(sorted(set(rows.patients)))
    part = within_folds(rows, ids)
    events = int(rows.events.sum())
    none = "no event" if not events else "no pair of whom it is known who had the event first"
    selection = method.selections.get(key)
    return SurvivalFold(
        key=key,
        patients=len(ids),
        events=events,
        c_index=part.auc,
        reason="" if np.isfinite(part.auc) else none,
        epoch=selection.epoch if selection else None,
        chosen_by=selection.chosen_by if selection else "not recorded",
    )


def _by_seed(rows: Answers, ids: tuple[str, ...]) -> dict[tuple[int, int], float]:
    found = {}
    for repeat, seed in sorted({(key.repeat, key.seed) for key in rows.keys}):
        own = rows.take(i for i, key in enumerate(rows.keys) if (key.repeat, key.seed) == (repeat, seed))
        found[repeat, seed] = within_folds(own, ids).auc
    return found
