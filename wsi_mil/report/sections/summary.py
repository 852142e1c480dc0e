"""What was asked, what came out, what to mind, and what the study does not show."""

from typing import Any

from wsi_mil.report import wording
from wsi_mil.report.findings import Findings
from wsi_mil.report.pseudonyms import Names

TITLE = "Summary"


def context(found: Findings, names: Names) -> dict[str, Any]:
    """Sentences."""
    return {
        "question": wording.question(found),
        "verdict": wording.verdict(found.best, found),
        "called": wording.called(found.best, found),
        "comparison": wording.comparison(found),
        "pointing": wording.pointing(found),
        "warnings": wording.warnings(found),
        "not_shown": wording.not_shown(found),
    }
