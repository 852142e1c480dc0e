"""Who stood where, who was predicted by whom, and which patients chose what."""

from typing import Any

from wsi_mil.report.choices import Choices, Counted
from wsi_mil.report.designs import design_of
from wsi_mil.report.findings import SharedFindings
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.sections.calibration import fitted

TITLE = "Audit of the predictions"


def context(found: SharedFindings, names: Names) -> dict[str, Any]:
    """The audit's numbers and sentences."""
    return {
        "audit": found.audit,
        "design": design_of(found.study),
        "classes": found.study.classes,
        "duplicates": [", ".join(sorted(map(names.slide, group))) for group in found.audit.duplicates],
        "choices": [_choice(one, names) for one in found.choices],
        "searched": any(one.searches for one in found.choices),
    }


def _choice(one: Choices, names: Names) -> dict[str, Any]:
    return {
        "method": one.method,
        "epoch": names.text(_words(one.epochs, one.models)),
        "threshold": names.text(_words(one.thresholds, one.models)) if one.thresholds else "largest probability",
        "calibration": names.text(fitted(one)),
        "searches": [(key, search.trials, search.metric, names.text(search.chosen)) for key, search in one.searches],
    }


def _words(counted: Counted, models: int) -> str:
    if len(counted) == 1:
        return counted[0][0]
    return "; ".join(f"{how} ({count} of {models} models)" for how, count in counted)
