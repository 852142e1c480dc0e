"""How every figure was computed, in words, and by which method each interval came about."""

from typing import Any

from wsi_mil.report.designs import design_of
from wsi_mil.report.findings import Findings
from wsi_mil.report.metrics import named_figures
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.wording import span
from wsi_mil.statistics.intervals import SMALL_SAMPLE_RULE

TITLE = "How it was computed"
_TITLES = {
    "auc_pooled": "AUC pooled",
    "auc_slides": "AUC by slide",
    "average_precision": "Average precision",
    "sensitivity_at_specificity": "Sensitivity at fixed specificity",
    "specificity_at_sensitivity": "Specificity at fixed sensitivity",
    "balanced_accuracy": "Balanced accuracy",
    "balanced_accuracy_slides": "Balanced accuracy by slide",
    "accuracy": "Accuracy",
    "sensitivity": "Sensitivity",
    "specificity": "Specificity",
    "f1_positive": "F1 of the positive class",
    "f1_macro": "F1, macro mean",
    "kappa": "Cohen’s kappa",
    "brier": "Brier score",
    "log_loss": "Log-loss",
    "ece": "Calibration error",
    "brier_calibrated": "Brier score, calibrated",
    "log_loss_calibrated": "Log-loss, calibrated",
    "ece_calibrated": "Calibration error, calibrated",
}


def context(found: Findings, names: Names) -> dict[str, Any]:
    """The rules, and a table figure -> methods of its intervals."""
    return {
        "design": design_of(found.study),
        "level": found.study.level,
        "binary": found.study.binary,
        "positive": found.study.positive,
        "small_sample_rule": SMALL_SAMPLE_RULE,
        "bootstrap": [(method.label, span(method.primary_bootstrap)) for method in found.methods],
        "draws": len(found.best.patients.weights),
        "intervals": _intervals(found),
    }


def _intervals(found: Findings) -> list[tuple[str, str]]:
    """Of each figure the methods of its intervals, with whose they are where they differ."""
    used: dict[str, dict[str, list[str]]] = {}
    design = design_of(found.study)
    hidden = {"auc_pooled"} if design.one_group else set()
    titles = _TITLES | {"auc": design.within("AUC")}
    for method in found.methods:
        for name, figure in named_figures(method).items():
            used.setdefault(name, {}).setdefault(figure.interval.method, []).append(method.label)
    return [(titles[name], _listed(how)) for name, how in used.items() if name not in hidden]


def _listed(how: dict[str, list[str]]) -> str:
    words = {text: "none claimed" if text == "not defined" else text for text in how}
    if len(how) == 1:
        return next(iter(words.values()))
    return "; ".join(f"{words[text]} ({', '.join(labels)})" for text, labels in how.items())
