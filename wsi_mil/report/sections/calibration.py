"""Do probabilities mean what they say, before and after calibration, and would acting on them help?"""

from typing import Any

from wsi_mil.report import figures
from wsi_mil.report.choices import Choices
from wsi_mil.report.findings import Findings
from wsi_mil.report.method_figures import MethodFigures
from wsi_mil.report.probability_charts import benefit_chart, reliability_chart
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.wording import shown

TITLE = "Probabilities"


def context(found: Findings, names: Names) -> dict[str, Any]:
    """One chart and one table of distances a method, and the decision curves."""
    places = {method.label: place for place, method in enumerate(found.methods)}
    return {
        "methods": [
            _method(found, method, choice, places[method.label])
            for method, choice in zip(found.methods, found.choices, strict=True)
        ],
        "calibrated": any(method.calibrated is not None for method in found.methods),
        "benefit": benefit_chart(found.benefits, [places[one.method] for one in found.benefits])
        if found.benefits
        else None,
        "benefit_of": "calibrated" if any(one.calibrated for one in found.benefits) else "uncalibrated",
        "positive": found.study.positive,
        "binary": found.study.binary,
    }


def _method(found: Findings, method: MethodFigures, choice: Choices, place: int) -> dict[str, Any]:
    versions = [("as the model gives them", method.raw)]
    versions += [("after calibration", method.calibrated)] if method.calibrated is not None else []
    return {
        "label": method.label,
        "colour": figures.colour_of(place),
        "best": False,
        "chart": reliability_chart(method, place, found.study.classes) if len(method.patients.ids) else None,
        "fitted": fitted(choice),
        "versions": [(name, shown(one.brier, 3), shown(one.log_loss, 3), shown(one.ece, 3)) for name, one in versions],
    }


def fitted(choice: Choices) -> str:
    """Which patients fitted the calibration, or why there is none."""
    if not choice.calibrations:
        return "The run fitted no calibration."
    if choice.models == 1:
        return f"Calibration: {choice.calibrations[0][0]}. Test patients never fitted it."
    parts = [f"{how} in {count} of {choice.models} models" for how, count in choice.calibrations]
    return f"Calibration: {'; '.join(parts)}. Test patients never fitted it."
