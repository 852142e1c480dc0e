"""Before anything was trained: whether the same content stood on two sides of a fold, and what stood on one alone."""

from collections import Counter
from typing import Any

import numpy as np

from wsi_mil.folding.confinement import Association, Confined
from wsi_mil.leaks.leakage import LeakageFinding
from wsi_mil.report.findings import SharedFindings
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.wording import number

TITLE = "Audit before training"
_SHOWN = 40
_WORDS = {
    "same patient": "stands in two parts of a fold",
    "same slide": "the same file",
    "same tiles": "tiles in common",
    "same picture": "pictures that look alike",
}
_SEVERITIES = {"leak": "leak", "suspicious": "look at it", "note": "one patient, counts twice"}


def context(found: SharedFindings, names: Names) -> dict[str, Any]:
    """The audit's counts and findings; `audit` is None where the run holds none."""
    audit = found.leakage
    if audit is None:
        return {"audit": None}
    return {
        "audit": audit,
        "counts": [(words, len(audit.of(severity))) for severity, words in _counted()],
        "findings": [_finding(one, names) for one in audit.findings[:_SHOWN]],
        "more": max(0, len(audit.findings) - _SHOWN),
        "not_compared": [(names.slide_or_text(slide), names.text(why)) for slide, why in audit.not_compared.items()],
        "association": association(audit.association, names),
        "confined": [_confined(name, kind, own, names) for (kind, name), own in _grouped(audit.confined)],
    }


def association(found: Association, names: Names) -> str:
    """How far site and label go together, in words."""
    value = found.corrected_v if np.isfinite(found.corrected_v) else found.cramers_v
    if not np.isfinite(value):
        return "Whether site and label go together cannot be said: there are less than two sites or labels."
    how = "hardly" if value < 0.1 else "a little" if value < 0.3 else "clearly" if value < 0.6 else "strongly"
    lonely = "; ".join(
        f"{title}: {', '.join(map(names.text, some))}"
        for title, some in (
            ("sites with patients of one label only", found.one_label_sites),
            ("labels that one site alone has", found.one_site_labels),
        )
        if some
    )
    said = f"Site and label go {how} together (Cramér’s V {number(value)}, 0: not at all, 1: one tells the other)."
    return f"{said} {lonely[:1].upper()}{lonely[1:]}." if lonely else said


def _counted() -> list[tuple[Any, str]]:
    return [("leak", "leaks"), ("suspicious", "pairs to look at"), ("note", "pairs within one patient")]


def _finding(one: LeakageFinding, names: Names) -> dict[str, Any]:
    value = ""
    if one.value is not None:
        value = f", {one.value:.0%} of the tiles" if one.kind == "same tiles" else f", {one.value:.0f} bits apart"
    return {
        "severity": _SEVERITIES[one.severity],
        "bad": one.severity == "leak",
        "who": [names.slide(slide) for slide in one.slides] or [names.patient(patient) for patient in one.patients],
        "patients": list(dict.fromkeys(names.patient(patient) for patient in one.patients)),
        "what": f"{_WORDS[one.kind]}{value}",
        "sides": ", ".join(f"repeat {side.repeat} fold {side.fold} ({' and '.join(side.parts)})" for side in one.sides),
    }


def _grouped(confined: tuple[Confined, ...]) -> list[tuple[tuple[str, str], list[Confined]]]:
    groups: dict[tuple[str, str], list[Confined]] = {}
    for one in confined:
        groups.setdefault((one.kind, one.name), []).append(one)
    return list(groups.items())


def _confined(name: str, kind: str, own: list[Confined], names: Names) -> tuple[str, str, str]:
    where = Counter("not trained on" if not one.learnt else "not tested" for one in own)
    return (
        kind,
        names.text(name),
        "; ".join(f"{words} in {count} of the folds" for words, count in sorted(where.items())),
    )
