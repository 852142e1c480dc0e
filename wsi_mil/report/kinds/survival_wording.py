"""Sentences about a time to an event."""

from collections.abc import Sequence

import numpy as np

from wsi_mil.report.designs import Design
from wsi_mil.report.kinds.records import TargetStudy
from wsi_mil.report.kinds.survival import SurvivalFigures
from wsi_mil.report.kinds.survival_times import Followed
from wsi_mil.report.kinds.wording import about_left_out
from wsi_mil.report.wording import GAP_REASONS, about_chance, number, p_value, span
from wsi_mil.statistics.intervals import FEW


def survival_how(design: Design) -> tuple[str, ...]:
    """How the figures were computed."""
    if design.one_group:
        pairs, pooled = "of patients", ""
    else:
        pairs = "of patients tested in the same fold of the same repeat,"
        pooled = " The pooled one takes all pairs of patients' mean risks; a gap of more than 0.03 to it is flagged."
    if design.external:
        followed = "among these patients themselves, as is usual where models come from elsewhere"
        null = (
            "of these patients, which has seen no slide, but what became of them; it is harder to beat than a curve of "
            "other patients"
        )
        split = "the median risk of these patients. No outcome is looked at."
    else:
        followed, null = "in the training part of the same fold", "of the training part, which has seen no slide"
        split = (
            "the median risk of the validation patients of the same models; where there are none, of the test patients "
            "of the fold. No outcome is looked at. With several repeats a patient is called high risk when at least "
            "half of them say so."
        )
    return (
        f"C-index (Harrell): over pairs {pairs} of whom it is known who had the event first; equal risks count a half, "
        f"two events at the same time are no pair.{pooled} Interval and paired tests: jackknife of the pairs by "
        f"patient, on the logit scale for intervals; with few events the small-sample rule.",
        f"AUC at a time: do patients with the event until then have higher risks than those seen longer? Those "
        f"censored before are replaced through weights, the inverse of the share not yet censored {followed}. The "
        f"times are the quartiles of the times of the events. Intervals: bootstrap over patients.",
        f"Brier score, averaged over the times until the last of these: squared distance of the predicted probability "
        f"of no event to what happened, with the same weights. Null: the Kaplan-Meier curve {null}.",
        f"Risk groups: above or below {split}",
    )


def survival_question(study: TargetStudy, method: SurvivalFigures, digits: int) -> str:
    """What was asked, of whom."""
    patients = method.patients
    had = int(patients.events.sum())
    event = f" (column “{study.target.event}”)" if study.target.event else ""
    longest = number(float(patients.times.max()), digits)
    return (
        f"Can the tissue alone tell who has the event{event} earlier (time in column “{study.target.name}”)? Asked of "
        f"{len(patients.ids)} patients, {had} of them with the event, {len(patients.ids) - had} without it until their "
        f"last look; the longest was followed until {longest}."
    )


def survival_verdict(method: SurvivalFigures, design: Design, *, alone: bool) -> str:
    """The best method's figure and what a C-index means."""
    if not np.isfinite(method.primary.value):
        where = "there are no" if design.one_group else "no test fold holds"
        return f"No method has a defined C-index: {where} two patients of whom it is known who was first."
    share = round(100 * float(f"{method.primary.value:.2f}"))  # of the figure as it is printed
    return (
        f"{method.label} reached {'a C-index' if alone else 'the highest C-index'}: {number(method.primary.value)} "
        f"(95 % interval {span(method.primary.interval)}). That means: of 100 pairs of patients of whom it is known "
        f"who had the event first, about {share} are ranked rightly; 50 would be chance."
    )


def groups_words(method: SurvivalFigures, design: Design) -> str:
    """How the split into two groups came out, and who chose it."""
    low, high = method.groups
    own, of = method.split_by_validation, method.splits
    source = "the median risk of the validation patients" if own else "the median risk of the fold's test patients"
    if design.external:
        source = "their median risk"
    elif 0 < own < of:
        source += f" (of the fold's test patients in {of - own} of {of} folds without any)"
    if not len(low.times) or not len(high.times):
        return f"Split at {source}, all patients of {method.label} fall into one group: there is nothing to compare."
    test = method.log_rank
    p = f"log-rank p {p_value(test.p)}" if np.isfinite(test.p) else f"log-rank test not defined: {test.reason}"
    return (
        f"Split at {source}, {method.label} calls {len(high.times)} patients high risk, {int(high.events.sum())} of "
        f"whom had the event, and {len(low.times)} low risk, {int(low.events.sum())} of whom had it ({p})."
    )


def brier_words(method: SurvivalFigures, digits: int, design: Design) -> str:
    """Whether predicted probabilities over time are better than a curve that is the same for everyone."""
    brier = method.brier
    if not np.isfinite(brier.figure.value):
        return f"Brier score over time: not defined; {brier.reason}."
    rest = f" ({brier.reason})" if brier.reason else ""
    whose = "these patients, which knows what became of them," if design.external else "the training patients"
    return (
        f"Averaged over the times until {number(brier.end, digits)}, its Brier score is "
        f"{number(brier.figure.value, 3)} ({span(brier.figure.interval, 3)}), lower being better; telling everyone the "
        f"Kaplan-Meier curve of {whose} would give {number(brier.null, 3)}{rest}."
    )


def range_words() -> str:
    """What the small figures and the dashes are."""
    return (
        "Small figures are 95 % intervals. Brier score: 0 is best. A dash: no interval can be claimed, since the order "
        "is perfect or there are fewer than 10 patients with the event or seen longer."
    )


def time_words(followed: Followed, methods: Sequence[SurvivalFigures], digits: int) -> str:
    """At which times the AUCs stand, and why some of them do not."""
    if not followed.times:
        return "No event was seen, so there is no time at which to state an AUC."
    reasons = sorted(
        {
            f"AUC at {number(one.at, digits)}: {'' if np.isfinite(one.figure.value) else 'not defined, '}{one.reason}"
            for method in methods
            for one in method.times
            if one.reason
        }
    )
    stated = "The AUCs stand at the quartiles of the times of the events."
    return f"{stated} {'. '.join(reasons)}." if reasons else stated


def survival_warnings(study: TargetStudy, methods: Sequence[SurvivalFigures], followed: Followed) -> list[str]:
    """What to mind before trusting a figure."""
    lines = about_left_out(study, methods)
    events = int(methods[0].patients.events.sum())
    if events < FEW:
        lines.append(f"Only {events} patients had the event. Intervals follow the small-sample rule.")
    lines += [
        f"{method.label}: pooled C-index {number(method.pooled.value)} and within-fold C-index "
        f"{number(method.primary.value)} differ by more than 0.03; {GAP_REASONS}"
        for method in methods
        if method.flagged
    ]
    best = max(methods, key=lambda method: np.nan_to_num(method.primary.value, nan=-1.0))
    lines += about_chance(methods, best, what="C-index")
    undefined = {str(fold.key) for method in methods for fold in method.folds if not np.isfinite(fold.c_index)}
    if undefined and study.external is not None:
        lines.append("No C-index is defined: there is no event, or no pair.")
    elif undefined:
        lines.append(
            f"No C-index is defined in {', '.join(sorted(undefined))}: no event, or no pair, in its test part."
        )
    constant = [m.label for m in methods if len(m.patients.ids) > 1 and not np.ptp(m.rows.predicted)]
    if constant:
        lines.append(f"{', '.join(constant)}: every patient got the same risk.")
    return lines
