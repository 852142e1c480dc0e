"""The patients that each method got most wrong, with the slide, the heat map and the tiles behind it."""

from typing import Any
from urllib.parse import urlencode

from wsi_mil.heatmap import colour_table
from wsi_mil.report import figures
from wsi_mil.report.case_notes import pictures_note
from wsi_mil.report.findings import Findings
from wsi_mil.report.method_figures import MethodFigures
from wsi_mil.report.pictures import Case
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.wording import number

TITLE = "Worst errors"
VIEWER = "http://localhost:8501"
"""Where `wsi-mil view` listens unless told otherwise."""


def context(found: Findings, names: Names) -> dict[str, Any]:
    """The cases of each method, worst first."""
    return {
        "methods": [_method(found, method, place, names) for place, method in enumerate(found.methods)],
        "gradient": gradient(),
        "pictures_note": pictures_note(
            [case for cases in found.cases.values() for case in cases], external=found.study.external is not None
        ),
        "binary": found.study.binary,
        "positive": found.study.positive,
        "linked": not names.hidden and any(one.picture for cases in found.cases.values() for one in cases),
    }


def _method(found: Findings, method: MethodFigures, place: int, names: Names) -> dict[str, Any]:
    cases = found.cases[method.label]
    return {
        "label": method.label,
        "colour": figures.colour_of(place),
        "n_wrong": sum(_is_wrong(method, case) for case in cases),
        "cases": [_case(found, method, case, names) for case in cases],
    }


def _case(found: Findings, method: MethodFigures, case: Case, names: Names) -> dict[str, Any]:
    patients, classes, place = method.patients, found.study.classes, case.place
    decided, picture = int(patients.decisions[place]), case.picture
    return {
        "patient": names.patient(patients.ids[place]),
        "truth": classes[int(patients.targets[place])],
        "decided": classes[decided],
        "wrong": _is_wrong(method, case),
        "probability": f"{patients.probabilities[place, -1 if found.study.binary else decided]:.2f}",
        "cut": number(float(patients.cuts[place])) if found.study.binary else "",
        "loss": f"{patients.losses[place]:.2f}",
        "slide": names.slide(picture.slide) if picture else "",
        "picture": picture,
        "link": _link(method.label, picture.slide) if picture and not names.hidden else "",
    }


def _link(method: str, slide: str) -> str:
    return f"{VIEWER}/?{urlencode({'method': method, 'slide': slide})}"


def _is_wrong(method: MethodFigures, case: Case) -> bool:
    return bool(method.patients.decisions[case.place] != method.patients.targets[case.place])


def gradient() -> str:
    """The colours of a heat map from low to high, as CSS."""
    table = colour_table("viridis")[[0, 32, 64, 96, 128, 160, 192, 224, 255]]
    return ", ".join(f"rgb({red},{green},{blue})" for red, green, blue in table.tolist())
