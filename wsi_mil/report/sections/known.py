"""Of an external validation, whether the models were trained on somebody who is tested here."""

from typing import Any

from wsi_mil.report.findings import SharedFindings
from wsi_mil.report.pseudonyms import Names

TITLE = "Who was trained on"
_SHOWN = 40


def context(found: SharedFindings, names: Names) -> dict[str, Any]:
    """Who was met again, and how that was looked for."""
    external = found.study.external
    trained_on = external.trained_on if external else {}
    return {
        "flagging": external.flagging if external else None,
        "how": "salted hashes in the bundle"
        if found.study.config.get("bundle")
        else "names in the cohort of the run that trained them, where files are not compared",
        "count": len(trained_on),
        "rows": [(names.patient(patient), ", ".join(by.split())) for patient, by in list(trained_on.items())[:_SHOWN]],
        "more": max(0, len(trained_on) - _SHOWN),
    }
