"""All methods side by side: order, decisions and probabilities, with intervals; paired tests; curves; spread."""

from typing import Any

import numpy as np

from wsi_mil.report import figures, wording
from wsi_mil.report.designs import design_of
from wsi_mil.report.findings import Comparison, Findings
from wsi_mil.report.method_figures import MethodFigures
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.wording import number, shown, signed, span

TITLE = "Methods compared"


def context(found: Findings, names: Names) -> dict[str, Any]:
    """Tables and charts over all methods."""
    operating = found.best.operating
    design = design_of(found.study)
    return {
        "design": design,
        "methods": [_method(found, method, place) for place, method in enumerate(found.methods)],
        "binary": found.study.binary,
        "positive": found.study.positive,
        "by_slide": found.best.slides is not None,
        "fixed": f"{operating.fixed:.2f}" if operating else "",
        "comparisons": [_comparison(one) for one in found.comparisons],
        "forest": figures.forest_chart(found.methods),
        "curves": figures.curves_chart(found.methods, found.study.classes),
        "folds": None if design.external else figures.folds_chart(found.methods),
        "trainings": [row for method in found.methods for row in _trainings(method)],
    }


def _method(found: Findings, method: MethodFigures, place: int) -> dict[str, Any]:
    decided, operating, slides = method.decided, method.operating, method.slides
    return {
        "label": method.label,
        "colour": figures.colour_of(place),
        "best": method.primary.value == found.best.primary.value and len(found.methods) > 1,
        "flagged": method.flagged,
        "auc": shown(method.primary),
        "pooled": shown(method.pooled),
        "slides": shown(slides.auc) if slides else None,
        "slides_balanced": shown(slides.balanced_accuracy) if slides else None,
        "ap": shown(method.average_precision),
        "accuracy": shown(decided.accuracy),
        "balanced": shown(decided.balanced_accuracy),
        "f1": shown(decided.f1_positive or decided.f1_macro),
        "kappa": shown(decided.kappa),
        "sensitivity": shown(decided.sensitivity) if decided.sensitivity else None,
        "specificity": shown(decided.specificity) if decided.specificity else None,
        "sensitivity_at": shown(operating.sensitivity) if operating else None,
        "specificity_at": shown(operating.specificity) if operating else None,
        "brier": shown(method.raw.brier, 3),
        "log_loss": shown(method.raw.log_loss, 3),
        "ece": shown(method.raw.ece, 3),
    }


def _comparison(one: Comparison) -> dict[str, Any]:
    return {
        "first": one.first,
        "second": one.second,
        "patients": one.patients,
        "difference": signed(one.test.difference, 3),
        "span": span(one.test.interval, 3),
        "p": wording.p_value(one.test.p),
        "corrected": wording.p_value(one.p_corrected),
        "apart": bool(one.p_corrected < wording.ALPHA),
    }


def _trainings(method: MethodFigures) -> list[dict[str, str]]:
    """Mean and spread over repeats and seeds of a method that was trained more than once."""
    if len(method.by_training) < 2:
        return []
    every = list(method.by_training.values())
    return [
        {"label": method.label, "trainings": str(len(every))}
        | {
            name: _spread([getattr(one, name) for one in every], digits)
            for name, digits in (("auc", 2), ("balanced_accuracy", 2), ("brier", 3))
        }
    ]


def _spread(values: list[float], digits: int) -> str:
    defined = [value for value in values if np.isfinite(value)]
    if len(defined) < 2:
        return "not defined"
    spread = f"{number(float(np.mean(defined)), digits)} ± {number(float(np.std(defined, ddof=1)), 3)}"
    return f"{spread} ({min(defined):.{digits}f} to {max(defined):.{digits}f})"
