"""Who chose the epoch, the cut and the calibration of each method's models, over all targets of a run."""

from collections.abc import Sequence
from typing import Any

from wsi_mil.report.kinds.class_chapter import ClassFindings
from wsi_mil.report.kinds.findings import RunFindings
from wsi_mil.report.kinds.regression_findings import NumberFindings
from wsi_mil.report.kinds.survival_chapter import SurvivalFindings
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.sections import audit


def who_chose(found: RunFindings, names: Names) -> list[dict[str, Any]]:
    """One row a method, in the words of the audit section."""
    return [_row(found, label, names) for label in found.shared.labels]


def _row(found: RunFindings, label: str, names: Names) -> dict[str, Any]:
    several = len(found.targets) > 1
    epochs: list[str] = []
    thresholds: list[str] = []
    calibrations: list[str] = []
    searches: list[Any] = []
    for target, part in found.targets:
        prefix = f"{target.name}: " if several else ""
        if isinstance(part, ClassFindings):
            rows = [row for row in audit.context(part.found, names)["choices"] if row["method"] == label]
            epochs += [str(row["epoch"]) for row in rows]
            thresholds += [f"{prefix}{row['threshold']}" for row in rows]
            calibrations += [f"{prefix}{row['calibration']}" for row in rows]
            searches = searches or [search for row in rows for search in row["searches"]]
        elif part is not None:
            epochs += _epochs(part, label)
            thresholds.append(f"{prefix}{_cut(part)}")
            calibrations.append(f"{prefix}none")
    return {
        "method": label,
        "epoch": names.text("; ".join(dict.fromkeys(epochs))) if epochs else "not recorded",
        "threshold": "; ".join(thresholds),
        "calibration": "; ".join(calibrations),
        "searches": searches,
    }


def _epochs(part: NumberFindings | SurvivalFindings, label: str) -> Sequence[str]:
    methods: Sequence[Any] = part.methods
    return sorted({fold.chosen_by for method in methods if method.label == label for fold in method.folds})


def _cut(part: NumberFindings | SurvivalFindings) -> str:
    if isinstance(part, NumberFindings):
        return "none, a number is predicted"
    return "risk groups split at a median risk, without a look at the outcome"
