"""Which part of the patients chose what: the epoch, the threshold, the calibration, the settings of a method."""

from collections import Counter
from dataclasses import dataclass

from wsi_mil.report.method_figures import MethodFigures
from wsi_mil.report.study import Trained
from wsi_mil.runs import Selection

_MEAN = "mean over the models of: "
"""How models that answer together word the calibration of each (wsi_mil.transfer.ensembles)."""

Counted = tuple[tuple[str, int], ...]
"""(how, models), most frequent first."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search over the settings of a method, made inside one fold's training part."""

    trials: int
    metric: str
    chosen: str
    """The settings, as text."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What was chosen for the models of one method, and by whom."""

    method: str
    models: int
    epochs: Counted
    thresholds: Counted
    """Empty with more than two classes: the largest probability decides."""
    calibrations: Counted
    """Which patients fitted it, or why nothing was fitted; empty where the run does not record any."""
    searches: tuple[tuple[str, Search], ...]
    """(model, search) of the models that have one."""


def choices_of(method: Trained, figures: MethodFigures) -> Choices:
    """Count what the selections of a method's models say."""
    binary = len(figures.confusion) == 2
    kept = sorted(method.selections.items())
    return Choices(
        method=method.label,
        models=len(figures.folds),
        epochs=_counted([fold.chosen_by for fold in figures.folds]),
        thresholds=_counted([fold.threshold.source for fold in figures.folds]) if binary else (),
        calibrations=_counted([text for _, one in kept if (text := _calibration(one, method.target))]),
        searches=tuple((str(key), found) for key, one in kept if (found := _search(one))),
    )


def calibrations_of(selection: Selection, target: str) -> frozenset[str]:
    """The kinds of calibration behind the answers: of one model, or of each of those that answer together."""
    found = selection.calibration.get(target) or {}
    reason = str(found.get("reason") or "")
    if reason.startswith(_MEAN):
        return frozenset(reason.removeprefix(_MEAN).split("; "))
    return frozenset({str(found.get("kind", "none"))})


def _calibration(selection: Selection, target: str) -> str:
    found = selection.calibration.get(target) or {}
    kind, reason = str(found.get("kind", "")), str(found.get("reason") or "")
    if reason.startswith(_MEAN):
        own = reason.removeprefix(_MEAN)
        return "none in any of the models" if own == "none" else f"mean of what each model's own gives ({own})"
    if kind == "none":
        return f"none, since {reason}" if reason else "none"
    return reason or (f"{kind}, fitted on validation patients" if kind else "")


def _search(selection: Selection) -> Search | None:
    found = selection.search
    if not found:
        return None
    chosen = found.get("chosen") or {}
    return Search(
        trials=int(found.get("trials", 0)),
        metric=str(found.get("metric", "")),
        chosen=", ".join(f"{name} {value}" for name, value in chosen.items()) if isinstance(chosen, dict) else "",
    )


def _counted(words: list[str]) -> Counted:
    return tuple(sorted(Counter(words).items(), key=lambda item: (-item[1], item[0])))
