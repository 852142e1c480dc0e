"""What was asked, what came out, what to mind, and what the study does not show."""

from typing import Any

from wsi_mil.report import wording
from wsi_mil.report.findings import Findings
from wsi_mil.report.pseudonyms import Names

TITLE = "Summary"


def context(found: Findings, names: Names) -> dict[str, Any]:
    """Sentences; the first line is the answer. `of`: the target that a line speaks of, where there are several."""
    lines = [wording.verdict(found.best, found), wording.called(found.best, found), wording.comparison(found)]
    return {
        "question": wording.question(found),
        "lines": [{"of": "", "text": line} for line in lines if line],
        "pointing": wording.pointing(found),
        "warnings": wording.warnings(found),
        "not_shown": wording.not_shown(found),
    }
