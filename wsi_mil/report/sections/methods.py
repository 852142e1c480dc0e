"""Each method for itself: decisions in patients, curves with bands, each class against the rest, each fold model."""

from typing import Any

from wsi_mil.report import figures, wording
from wsi_mil.report.designs import design_of
from wsi_mil.report.findings import Findings
from wsi_mil.report.method_figures import FoldFigures, MethodFigures
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.wording import number, shown
from wsi_mil.statistics import decisions

TITLE = "Each method"


def context(found: Findings, names: Names) -> dict[str, Any]:
    """Confusion matrix, chart and folds of each method."""
    return {
        "methods": [_method(found, method, place) for place, method in enumerate(found.methods)],
        "classes": found.study.classes,
        "design": design_of(found.study),
    }


def _method(found: Findings, method: MethodFigures, place: int) -> dict[str, Any]:
    matrix, binary, classes = method.confusion, found.study.binary, found.study.classes
    recalls = decisions.recalls(matrix)
    return {
        "label": method.label,
        "colour": figures.colour_of(place),
        "called": wording.called(method, found),
        "threshold": wording.threshold(method, found),
        "confusion": [
            (name, row.tolist(), number(recall)) for name, row, recall in zip(classes, matrix, recalls, strict=True)
        ],
        "most": int(matrix.max(initial=1)) or 1,
        "classes": []
        if binary
        else [
            (name, shown(one.within), shown(one.pooled), shown(one.average_precision))
            for name, one in zip(classes, method.classes, strict=True)
        ],
        "chart": figures.method_chart(method, place, classes),
        "folds": [_fold(fold, binary) for fold in method.folds],
        "chosen_by": "; ".join(sorted({fold.chosen_by for fold in method.folds})),
    }


def _fold(fold: FoldFigures, binary: bool) -> dict[str, Any]:
    return {
        "key": fold.key,
        "counts": fold.counts,
        "auc": number(fold.auc),
        "balanced": number(fold.balanced_accuracy),
        "brier": number(fold.brier, 3),
        "threshold": number(fold.threshold.value, 3) if binary else "largest probability",
        "source": "validation" if fold.threshold.from_validation else ("fixed" if binary else ""),
        "epoch": fold.epoch if fold.epoch is not None else "–",
    }
