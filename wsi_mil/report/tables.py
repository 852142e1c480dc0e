"""Findings -> CSV tables, for machines."""

from typing import Any

import pandas as pd

from wsi_mil.report.findings import Comparison, Findings, SharedFindings
from wsi_mil.report.method_figures import Figure, MethodFigures
from wsi_mil.report.metrics import audit_facts, fold_rows, leakage_rows, named_figures, training_rows
from wsi_mil.report.pointing import Pointing
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.shift import Shift
from wsi_mil.statistics.intervals import Interval

_LEAKAGE = ["severity", "kind", "slides", "patients", "value", "folds"]


def tables(found: Findings, names: Names) -> dict[str, pd.DataFrame]:
    """File name -> table. All of them at every call, so that none of an earlier report is left behind."""
    return {
        "methods.csv": pd.DataFrame([_method_row(method) for method in found.methods]),
        "classes.csv": _classes(found),
        "folds.csv": pd.DataFrame([row for method in found.methods for row in fold_rows(method)]),
        "trainings.csv": pd.DataFrame([row for method in found.methods for row in training_rows(method)]),
        "comparisons.csv": _comparisons(found.comparisons),
        "subgroups.csv": _subgroups(found, names),
        "decision_curves.csv": _benefits(found),
        "patients.csv": pd.concat([_patients(found, method, names) for method in found.methods]),
        **run_tables(found, names),
    }


def run_tables(found: SharedFindings, names: Names) -> dict[str, pd.DataFrame]:
    """Those of the run as a whole, whatever it predicts."""
    shift = {"domain_shift.csv": _shift(found.shift, names)} if found.shift else {}
    return shift | {
        "localisation.csv": _localisation(found.pointing, names),
        "cohort.csv": _cohort(found, names),
        "leakage.csv": pd.DataFrame(leakage_rows(found.leakage, names), columns=_LEAKAGE),
        "audit.csv": pd.DataFrame([_audit_row(fold) for fold in audit_facts(found)["folds"]]),
    }


def _method_row(method: MethodFigures) -> dict[str, Any]:
    row: dict[str, Any] = {"method": method.label}
    for name, figure in named_figures(method).items():
        row |= {name: figure.value, **_span(name, figure.interval)}
    return row | _span("auc_bootstrap", method.primary_bootstrap) | {"pooled_gap_flagged": method.flagged}


def _span(name: str, interval: Interval) -> dict[str, Any]:
    return {f"{name}_low": interval.low, f"{name}_high": interval.high, f"{name}_interval": interval.method}


def _classes(found: Findings) -> pd.DataFrame:
    """One row a method and class against the rest."""
    rows = []
    for method in found.methods:
        for name, one in zip(found.study.classes[-len(method.classes) :], method.classes, strict=True):
            row: dict[str, Any] = {"method": method.label, "class": name}
            figures = {"auc": one.within, "auc_pooled": one.pooled, "average_precision": one.average_precision}
            for title, figure in figures.items():
                row |= {title: figure.value, **_span(title, figure.interval)}
            rows.append(row)
    return pd.DataFrame(rows)


def _subgroups(found: Findings, names: Names) -> pd.DataFrame:
    columns = ["column", "level", "method", "patients", *(f"patients_{name}" for name in found.study.classes)]
    for name in ("auc", "called_rightly"):
        columns += [name, f"{name}_low", f"{name}_high", f"{name}_interval"]
    rows = [
        (*about, *_cells(one.auc), *_cells(one.right), one.note)
        for column in found.columns
        for one in column.figures
        for about in [(column.name, names.text(one.level), one.method, one.patients, *one.by_class)]
    ]
    return pd.DataFrame(rows, columns=[*columns, "note"])


def _cells(figure: Figure) -> tuple[float, float, float, str]:
    return figure.value, figure.interval.low, figure.interval.high, figure.interval.method


def _benefits(found: Findings) -> pd.DataFrame:
    columns = ["method", "probabilities", "threshold", "net_benefit", "net_benefit_of_acting_on_everybody"]
    rows = [
        (one.method, "calibrated" if one.calibrated else "raw", *row)
        for one in found.benefits
        for row in zip(one.curve.thresholds, one.curve.model, one.curve.treat_all, strict=True)
    ]
    return pd.DataFrame(rows, columns=columns)


def _patients(found: Findings, method: MethodFigures, names: Names) -> pd.DataFrame:
    patients, classes, calibrated = method.patients, found.study.classes, method.calibrated_probabilities
    frame = pd.DataFrame(
        {
            "method": method.label,
            "patient": [names.patient(patient) for patient in patients.ids],
            "target": [classes[place] for place in patients.targets],
            **{f"prob_{name}": patients.probabilities[:, place] for place, name in enumerate(classes)},
            **({} if calibrated is None else {f"calibrated_{n}": calibrated[:, i] for i, n in enumerate(classes)}),
            "threshold": patients.cuts,
            "decision": [classes[place] for place in patients.decisions],
            "loss": patients.losses,
        }
    )
    return frame.sort_values("patient", kind="stable")


def _comparisons(comparisons: tuple[Comparison, ...]) -> pd.DataFrame:
    columns = ["first", "second", "patients", "auc_difference", "low", "high", "p", "p_holm"]
    rows = [
        (c.first, c.second, c.patients, c.test.difference, *_ends(c.test.interval), c.test.p, c.p_corrected)
        for c in comparisons
    ]
    return pd.DataFrame(rows, columns=columns)


def _ends(interval: Interval) -> tuple[float, float]:
    return interval.low, interval.high


def _localisation(pointing: tuple[Pointing, ...], names: Names) -> pd.DataFrame:
    columns = [
        "method",
        "score",
        "slide",
        "patient",
        "tiles",
        "lesion_tiles",
        "prevalence",
        "auc",
        "average_precision",
        "dice",
    ]
    rows = []
    for one in pointing:
        for slide in sorted(one.slides, key=lambda s: names.slide(s.slide)):
            about = (one.method, one.kind, names.slide(slide.slide), names.patient(slide.patient))
            tiles = (slide.figures.n_tiles, slide.figures.n_lesion, slide.figures.prevalence)
            rows.append((*about, *tiles, slide.figures.auc, slide.figures.average_precision, slide.dice))
    return pd.DataFrame(rows, columns=columns)


def _cohort(found: SharedFindings, names: Names) -> pd.DataFrame:
    cohort = found.study.cohort
    frame = pd.DataFrame(
        {
            "slide": [names.slide(slide) for slide in cohort["slide"]],
            "patient": [names.patient(patient) for patient in cohort["patient"]],
            "site": [names.text(site) for site in cohort["site"]],
            "target": cohort["target"],
            "status": [names.text(status) for status in cohort["status"]],
            "mpp_x": cohort["mpp_x"],
            "mpp_y": cohort["mpp_y"],
            "tiles": cohort["tiles"],
        }
    )
    return frame.sort_values("slide", kind="stable")


def _shift(shift: Shift, names: Names) -> pd.DataFrame:
    return shift.slides.assign(slide=[names.slide_or_text(slide) for slide in shift.slides["slide"]])


def _audit_row(fold: dict[str, Any]) -> dict[str, Any]:
    counts = {f"{part}_patients": sum(numbers) for part, numbers in fold["patients"].items()}
    return {name: value for name, value in fold.items() if name != "patients"} | counts
