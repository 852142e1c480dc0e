"""The report's sentences: what was asked, what came out, what to mind, and what it does not show."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from wsi_mil.report.audit import class_counts, tested_rows
from wsi_mil.report.designs import design_of
from wsi_mil.report.findings import Comparison, Findings, SharedFindings
from wsi_mil.report.method_figures import Figure, MethodFigures
from wsi_mil.report.study import Study
from wsi_mil.statistics import decisions
from wsi_mil.statistics.intervals import FEW, Interval

ALPHA = 0.05
CHANCE = 0.5
GAP_REASONS = (
    "the fold models may score on different scales, or patients were judged by means over several repeats. Trust the "
    "within-fold one."
)
UNKNOWN_TRAINING = "Nobody can tell whether the models were trained on a patient of this cohort."


def number(value: float, digits: int = 2) -> str:
    """A figure as text; 'not defined' where it is not."""
    return f"{value:.{digits}f}" if np.isfinite(value) else "not defined"


def span(interval: Interval, digits: int = 2) -> str:
    """An interval as text; a dash where none is claimed."""
    if not np.isfinite(interval.low):
        return "–"
    if interval.low < 0:
        return f"{signed(interval.low, digits)} to {signed(interval.high, digits)}"
    return f"{interval.low:.{digits}f}–{interval.high:.{digits}f}"


class Ranked(Protocol):
    """As much of a method as its place above or below chance needs."""

    @property
    def label(self) -> str:
        """Of the method."""

    @property
    def primary(self) -> Figure:
        """What methods are ranked by."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A figure as text."""

    value: str
    span: str
    how: str
    """The interval's method."""


def shown(figure: Figure, digits: int = 2) -> Shown:
    """A figure, its interval and where that comes from."""
    return Shown(value=number(figure.value, digits), span=span(figure.interval, digits), how=figure.interval.method)


def signed(value: float, digits: int = 2) -> str:
    """A difference with its sign, the minus as wide as the plus."""
    return f"{value:+.{digits}f}".replace("-", "−") if np.isfinite(value) else "not defined"


def spread(values: Sequence[float]) -> str:
    """Numbers in one phrase: the one there is, or from the least to the largest."""
    low, high = min(values), max(values)
    return f"{low:.4g}" if f"{low:.4g}" == f"{high:.4g}" else f"{low:.4g} to {high:.4g}, median {np.median(values):.4g}"


def threshold(method: MethodFigures, found: Findings) -> str:
    """How the decisions of a method came about."""
    if not found.study.binary:
        return "Each patient is called the class of the largest mean probability."
    if found.study.external:
        cut = method.folds[0].threshold
        return (
            f"A patient is called “{found.study.positive}” from a probability of {number(cut.value, 3)} up, the mean "
            f"of what the models brought along ({cut.source}). No patient here chose it."
        )
    chosen = sum(fold.threshold.from_validation for fold in method.folds)
    rest = len(method.folds) - chosen
    parts = [f"the Youden point of its validation patients in {chosen} of {len(method.folds)} models"] if chosen else []
    parts += [f"fixed at 0.5 in {rest} of {len(method.folds)}"] if rest else []
    return (
        f"A patient is called “{found.study.positive}” from the model's threshold up: {', '.join(parts)}. "
        f"Test patients never chose it."
    )


def p_value(p: float) -> str:
    """A p-value as text."""
    return "not defined" if not np.isfinite(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def question(found: Findings) -> str:
    """What was asked, of whom."""
    study = found.study
    counts = class_counts(tested_rows(study), study.classes)
    groups = ", ".join(f"{patients} {name}" for name, (patients, _) in zip(study.classes, counts, strict=True))
    if study.binary:
        aim = f"Can the tissue alone tell “{study.positive}” from “{study.classes[0]}” (column “{study.target}”)?"
    else:
        aim = f"Can the tissue alone tell {len(study.classes)} classes apart (column “{study.target}”)?"
    mixed = _mixed(found)
    both = f"; {len(mixed)} of them with slides of different classes" if mixed else ""
    return f"{aim} {asked_of(study, f' ({groups}{both})')} {design_of(study).unseen}"


def asked_of(study: Study, groups: str = "") -> str:
    """Who was tested, and how many of the cohort were not. groups: what stands behind the number of patients."""
    rows = tested_rows(study)
    patients, sites = rows["patient"].nunique(), rows["site"].nunique()
    where = f" from {sites} sites" if sites > 1 else ""
    rest = study.used["patient"].nunique() - patients
    more = f" ({rest} more patients of the cohort are in no test part)" if rest else ""
    return f"Asked of {patients} patients{groups} with {len(rows)} slides{where}{more}."


def verdict(method: MethodFigures, found: Findings, *, beside: str = "") -> str:
    """The best method's figure and what an AUC means.   beside: what else must stand in the sentence of the AUC."""
    study = found.study
    if not np.isfinite(method.primary.value):
        where = "there are no" if design_of(study).one_group else "no test fold holds"
        return f"No method has a defined AUC: {where} patients of two classes."
    share = round(100 * float(f"{method.primary.value:.2f}"))  # of the figure as it is printed
    if study.binary:
        pair = f"of 100 pairs of one “{study.positive}” and one “{study.classes[0]}” patient, about {share} are ranked"
    else:
        pair = f"of 100 pairs of a patient of one class and one of the others, about {share} are ranked"
    tied = [one.label for one in found.methods if one is not method and one.primary.value == method.primary.value]
    others = "the highest AUC" if len(found.methods) > 1 else "an AUC"
    return (
        f"{method.label} reached {others}: {number(method.primary.value)} "
        f"(95 % interval {span(method.primary.interval)}){beside}. That means: {pair} rightly; 50 would be chance."
        f"{f' The same was reached by {_listed(tied)}.' if tied else ''}"
    )


def called(method: MethodFigures, found: Findings) -> str:
    """What the decisions of a method look like in patients."""
    matrix, classes = method.confusion, found.study.classes
    if len(classes) == 2:
        (spared, alarmed), (missed, hit) = matrix.tolist()
        return (
            f"At its threshold, {method.label} called {hit} of {hit + missed} “{classes[1]}” patients rightly "
            f"(sensitivity {number(decisions.sensitivity(matrix))}) and {spared} of {spared + alarmed} "
            f"“{classes[0]}” patients (specificity {number(decisions.specificity(matrix))})."
        )
    right, everyone = int(np.trace(matrix)), int(matrix.sum())
    return f"By its largest probability, {method.label} called {right} of {everyone} patients rightly."


def comparison(found: Findings) -> str:
    """Whether the methods differ by more than chance."""
    return compared_words(found.comparisons, n_methods=len(found.methods), higher_is_better=True)


def compared_words(compared: Sequence[Comparison], *, n_methods: int, higher_is_better: bool) -> str:
    """Whether the methods differ by more than chance; empty for a single method."""
    if n_methods < 2:
        return ""
    tested = [one for one in compared if np.isfinite(one.p_corrected)]
    apart = [one for one in tested if one.p_corrected < ALPHA]
    caution = "The best of several methods, picked after the test, looks better than it is."
    if not tested:
        return f"The methods could not be tested against each other with so few patients. {caution}"
    if not apart:
        pairs = f"{len(tested)} pairs" if len(tested) > 1 else "1 pair"
        return (
            f"With these patients, no method can be said to be better than another (paired tests, Holm-corrected "
            f"over {pairs}, no p below {ALPHA}). {caution}"
        )
    pairs = "; ".join(
        f"{better} better than {worse} (p {p_value(one.p_corrected)})"
        for one in apart
        for better, worse in [
            (one.first, one.second) if (one.test.difference > 0) == higher_is_better else (one.second, one.first)
        ]
    )
    return f"Larger than chance allows (paired tests, Holm-corrected): {pairs}. {caution}"


def pointing(found: SharedFindings) -> str:
    """Whether the heat maps find the lesion."""
    own = [one for one in found.pointing if one.own and np.isfinite(one.together.mean_auc)]
    if not own:
        return "How well heat maps find the lesion was not measured: no annotated slide could be compared."
    best = max(own, key=lambda one: one.together.mean_auc)
    sure = f" ({span(best.interval)})" if np.isfinite(best.interval.low) else ""
    return (
        f"On {best.together.n_slides} annotated slides the heat maps of {best.method} find the lesion best: tile AUC "
        f"{number(best.together.mean_auc)}{sure}, 0.50 being chance."
    )


def about_chance(methods: Sequence[Ranked], best: Ranked, *, what: str) -> list[str]:
    """That the best figure may be chance, and whose lie below it. what: the figure, of which 0.5 is chance."""
    lines = []
    if best.primary.interval.low <= CHANCE <= best.primary.interval.high:
        lines.append(
            f"The 95 % interval of the highest {what} ({best.label}, {span(best.primary.interval)}) includes chance "
            f"(0.50): it has not been shown that it does better than guessing."
        )
    below = [method.label for method in methods if method.primary.interval.high < CHANCE]
    if below:
        lines.append(
            f"Below chance with the whole interval: {_listed(below)}. To be above {'one' if len(below) > 1 else 'it'} "
            f"of them is no merit; look for turned labels, or folds that differ in their share of the classes."
        )
    return lines


def not_shown(found: SharedFindings) -> list[str]:
    """What must not be read out of the report."""
    external = found.study.external is not None
    lines = [
        _another_hospital(found.study),
        "It does not show benefit for patients, and no threshold here is fit for clinical use.",
        "Intervals hold the trained models fixed; training anew moves the figures further.",
        "Attention shows what a model weighed. It is not a segmentation, and not proof of a cause.",
    ]
    if external:
        lines.insert(
            1,
            "It does not show why figures differ from those of the training cohort: slides, patients and how common "
            "each outcome is may all differ. Nor does it show how models would do that were tuned to this cohort.",
        )
    if len(found.flow.sites) > 1 and any(fold.sites_train_test for fold in found.audit.folds):
        lines.insert(1, "Sites stand on both sides of the folds, so part of the figure may be site, not disease.")
    return lines


def _another_hospital(study: Study) -> str:
    if design_of(study).by_site:
        return (
            "Each site was new to the models that judged it. It does not show how the methods do in a hospital that "
            "differs from all of these sites in scanner, stain and referral."
        )
    hospital = "a third hospital: these patients" if study.external else "another hospital: all patients"
    return (
        f"It does not show how the methods do in {hospital} come from this cohort, and scanner, stain and referral "
        f"travel with it."
    )


def warnings(found: Findings) -> list[str]:
    """What to mind before trusting a figure, most serious first."""
    return [*run_warnings(found), *figure_warnings(found)]


def run_warnings(found: SharedFindings) -> list[str]:
    """Those of the run as a whole, whatever it predicts."""
    return [
        *_trained_on(found),
        *_leaks(found),
        *_shift(found),
        *_encoder(found),
        *_left_out(found),
        *_untested(found),
        *unused_validation(found.study),
    ]


def figure_warnings(found: Findings) -> list[str]:
    """Those of the figures of one target with classes."""
    return [*_cohort(found), *_figures(found), *_thresholds(found)]


def _mixed(found: Findings) -> list[str]:
    return sorted({patient for method in found.methods for patient in method.mixed})


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _trained_on(found: SharedFindings) -> list[str]:
    """Of an external validation, that somebody in it was trained on, or that nobody can tell."""
    external = found.study.external
    if external is None:
        return []
    if external.trained_on:
        return [
            f"{len(external.trained_on)} patients were trained on (known by name, slide or file). What the models say "
            f"of them is no test: they are left out of every figure."
        ]
    return [] if external.flagging else [f"{UNKNOWN_TRAINING} If one was, the figures flatter the models."]


def _shift(found: SharedFindings) -> list[str]:
    return list(found.shift.sentences) if found.shift else []


def _leaks(found: SharedFindings) -> list[str]:
    audit, lines = found.audit, []
    if any(not fold.clean for fold in audit.folds):
        lines.append("Leakage: patients stand in two parts of a fold. Do not use these figures.")
    if audit.foreign_rows:
        lines.append(f"Leakage: {audit.foreign_rows} predictions are of patients outside their part of the fold.")
    if audit.duplicates_across:
        lines.append(f"{audit.duplicates_across} groups of identical slides stand under different patients.")
    if not audit.tested_at_most_once:
        lines.append("Some patients are tested more than once in a repeat.")
    if audit.missing_rows:
        lines.append(
            f"{audit.missing_rows} test predictions are missing ({_unfinished(found)}). "
            f"Give the {design_of(found.study).again} command again."
        )
    return lines


def _unfinished(found: SharedFindings) -> str:
    """Which methods have no figure at all, where that is so."""
    there = set(found.labels)
    absent = [str(m["label"]) for m in found.study.config["methods"] if str(m["label"]) not in there]
    if found.study.external:
        return "of slides that could not be scored"
    return f"all of {', '.join(absent)}" if absent else "of models that failed or were not trained"


def _encoder(found: SharedFindings) -> list[str]:
    encoder = found.study.config.get("encoder") or {}
    if encoder.get("pathology", False):
        return []
    if "pathology" not in encoder:
        return ["The run does not record on what its encoder was trained."]
    return [
        f"The encoder ({encoder.get('name', 'unnamed')}) was trained on everyday photographs, not on tissue "
        f"(an ImageNet encoder). An encoder trained on pathology slides usually does better."
    ]


def _left_out(found: SharedFindings) -> list[str]:
    flow = found.flow
    if flow.rows == flow.used:
        return []
    return [f"{flow.rows - flow.used} of {flow.rows} slides of the table were left out; reasons below."]


def _untested(found: SharedFindings) -> list[str]:
    everyone = found.flow.patients
    rest = everyone - tested_rows(found.study)["patient"].nunique()
    if not rest:
        return []
    return [f"{rest} of {everyone} patients are in no test part: nobody judged them, and no figure speaks of them."]


def _cohort(found: Findings) -> list[str]:
    flow, lines = found.flow, []
    counts = np.bincount(found.best.patients.targets, minlength=len(flow.classes)).tolist()
    few = [f"{name} ({n})" for name, n in zip(flow.classes, counts, strict=True) if n < FEW]
    if few:
        lines.append(f"Fewer than {FEW} patients in a class: {', '.join(few)}. Intervals follow the small-sample rule.")
    if mixed := _mixed(found):
        lines.append(f"{len(mixed)} patients have slides of different classes; they count in slide figures only.")
    if not len(found.best.patients.ids):
        lines.append("No patient has a class of its own, so no figure by patient is defined. Read the AUC by slide.")
    return lines


def _figures(found: Findings) -> list[str]:
    lines = [
        f"{method.label}: pooled AUC {number(method.pooled.value)} and within-fold AUC {number(method.primary.value)} "
        f"differ by more than 0.03; {GAP_REASONS}"
        for method in found.methods
        if method.flagged
    ]
    lines += about_chance(found.methods, found.best, what="AUC")
    undefined = {str(fold.key) for method in found.methods for fold in method.folds if not np.isfinite(fold.auc)}
    if undefined and found.study.external:
        lines.append("A class is absent: no AUC is defined.")
    elif undefined:
        lines.append(f"A class is absent from the test part of {', '.join(sorted(undefined))}: AUC not defined there.")
    return lines


def _thresholds(found: Findings) -> list[str]:
    if not found.study.binary:
        return []
    folds = [fold for method in found.methods for fold in method.folds]
    fixed = [fold for fold in folds if not fold.threshold.from_validation]
    if not fixed:
        return []
    reasons = sorted({fold.threshold.source for fold in fixed})
    if found.study.external:
        return [f"Not every threshold was chosen by validation patients where the models were trained: {reasons[0]}."]
    return [f"The decision threshold of {len(fixed)} of {len(folds)} models is {'; or '.join(reasons)}."]


def unused_validation(study: Study) -> list[str]:
    """That patients were set aside for validation and chose no epoch, with the way to train on them."""
    if study.external or (study.config.get("train") or {}).get("selection", "validation") == "none":
        return []
    kept = [one for method in study.methods for one in method.selections.values()]
    unused = sum(one.chosen_by.startswith("fixed number of epochs") for one in kept)
    if not unused:
        return []
    return [
        f"The validation part was too small to choose the epoch of {unused} of {len(kept)} models, so these patients "
        f"chose no epoch and trained nothing. With so few, train on them: --train.selection none."
    ]
