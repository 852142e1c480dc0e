"""Findings -> metrics.json and CSV tables, for machines."""

import math
from typing import Any

import pandas as pd

from wsi_mil.report.findings import Comparison, Findings
from wsi_mil.report.method_figures import Figure, MethodFigures
from wsi_mil.report.pointing import Pointing
from wsi_mil.report.pseudonyms import Names
from wsi_mil.statistics import decisions
from wsi_mil.statistics.intervals import SMALL_SAMPLE_RULE, Interval

SCHEMA_VERSION = 1


def metrics(found: Findings, names: Names) -> dict[str, Any]:
    """All numbers of the report; null where a figure is not defined."""
    study = found.study
    plain: dict[str, Any] = _plain(
        {
            "kind": "metrics",
            "schema_version": SCHEMA_VERSION,
            "target": study.target,
            "level": study.level,
            "classes": study.classes,
            "positive": study.positive if study.binary else None,
            "patients": found.flow.patients,
            "slides": found.flow.used,
            "primary": "AUC over pairs of patients tested in the same fold; probabilities: mean over slides, seeds",
            "intervals": {
                "level": 0.95,
                "small_sample_rule": SMALL_SAMPLE_RULE,
                "conditional_on": "the trained models; the spread over seeds stands apart",
            },
            "methods": {method.label: _method(found, method, names) for method in found.methods},
            "comparisons": [
                {
                    "first": one.first,
                    "second": one.second,
                    "patients": one.patients,
                    "auc_difference": one.test.difference,
                    "interval": _interval(one.test.interval),
                    "p": one.test.p,
                    "p_holm": one.p_corrected,
                }
                for one in found.comparisons
            ],
            "audit": _audit(found),
        }
    )
    return plain


def tables(found: Findings, names: Names) -> dict[str, pd.DataFrame]:
    """File name -> table. All of them at every call, so that none of an earlier report is left behind."""
    return {
        "methods.csv": pd.DataFrame([_method_row(method) for method in found.methods]),
        "folds.csv": pd.DataFrame([row for method in found.methods for row in _fold_rows(method)]),
        "comparisons.csv": _comparisons(found.comparisons),
        "patients.csv": pd.concat([_patients(found, method, names) for method in found.methods]),
        "localisation.csv": _localisation(found.pointing, names),
        "cohort.csv": _cohort(found, names),
        "audit.csv": pd.DataFrame([_audit_row(fold) for fold in _audit(found)["folds"]]),
    }


def _method(found: Findings, method: MethodFigures, names: Names) -> dict[str, Any]:
    study, matrix = found.study, method.confusion
    binary = {
        "sensitivity": decisions.sensitivity(matrix),
        "specificity": decisions.specificity(matrix),
        "f1_positive": decisions.f1(matrix, average="positive"),
    }
    return {
        "auc": _figure(method.primary) | {"bootstrap": _interval(method.primary_bootstrap)},
        "auc_pooled": _figure(method.pooled),
        "auc_pooled_gap": method.pooled_gap,
        "auc_pooled_gap_flagged": method.flagged,
        "auc_slides": _figure(method.slide_auc) if method.slide_auc else None,
        "auc_class_vs_rest_pooled": dict(zip(study.classes, method.class_aucs, strict=True)),
        "average_precision": _figure(method.average_precision),
        "balanced_accuracy": _figure(method.balanced_accuracy),
        "accuracy": decisions.accuracy(matrix),
        "f1_macro": decisions.f1(matrix, average="macro"),
        **(binary if study.binary else {}),
        "brier": _figure(method.brier),
        "log_loss": method.log_loss,
        "ece": method.ece,
        "confusion": {"classes": study.classes, "rows_are_truth": matrix.tolist()},
        "seeds": [
            {"repeat": repeat, "seed": seed, "auc": auc} for (repeat, seed), auc in sorted(method.by_seed.items())
        ],
        "patients_without_one_label": len(method.mixed),
        "folds": _fold_rows(method),
        "localisation": [_pointing(one, names) for one in found.pointing if one.method == method.label],
    }


def _pointing(one: Pointing, names: Names) -> dict[str, Any]:
    together = one.together
    return {
        "score": one.kind,
        "drawn_by_default": one.own,
        "slides": together.n_slides,
        "tiles": together.n_tiles,
        "prevalence": together.mean_prevalence,
        "prevalence_pooled": together.prevalence,
        "auc_mean_over_slides": {"value": together.mean_auc, **_interval(one.interval)},
        "average_precision_mean_over_slides": together.mean_average_precision,
        "auc_within_slides": together.within_slide_auc,
        "auc_pooled": together.pooled_auc,
        "average_precision_pooled": together.pooled_average_precision,
        "by_slide": [
            {
                "slide": names.slide(slide.slide),
                "tiles": slide.figures.n_tiles,
                "lesion_tiles": slide.figures.n_lesion,
                "auc": slide.figures.auc,
                "average_precision": slide.figures.average_precision,
            }
            for slide in sorted(one.slides, key=lambda s: names.slide(s.slide))
        ],
    }


def _method_row(method: MethodFigures) -> dict[str, Any]:
    row: dict[str, Any] = {"method": method.label}
    for name, figure in (
        ("auc", method.primary),
        ("auc_pooled", method.pooled),
        ("average_precision", method.average_precision),
        ("balanced_accuracy", method.balanced_accuracy),
        ("brier", method.brier),
    ):
        row |= {name: figure.value, f"{name}_low": figure.interval.low, f"{name}_high": figure.interval.high}
        row[f"{name}_interval"] = figure.interval.method
    return row | {"log_loss": method.log_loss, "ece": method.ece, "pooled_gap_flagged": method.flagged}


def _fold_rows(method: MethodFigures) -> list[dict[str, Any]]:
    return [
        {
            "method": method.label,
            "repeat": fold.key.repeat,
            "fold": fold.key.fold,
            "seed": fold.key.seed,
            "test_patients": sum(fold.counts),
            "test_patients_by_class": " ".join(map(str, fold.counts)),
            "auc": fold.auc,
            "balanced_accuracy": fold.balanced_accuracy,
            "brier": fold.brier,
            "threshold": fold.threshold.value,
            "threshold_source": fold.threshold.source,
            "epoch": fold.epoch,
            "epoch_chosen_by": fold.chosen_by,
        }
        for fold in method.folds
    ]


def _patients(found: Findings, method: MethodFigures, names: Names) -> pd.DataFrame:
    patients, classes = method.patients, found.study.classes
    frame = pd.DataFrame(
        {
            "method": method.label,
            "patient": [names.patient(patient) for patient in patients.ids],
            "target": [classes[place] for place in patients.targets],
            **{f"prob_{name}": patients.probabilities[:, place] for place, name in enumerate(classes)},
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
    columns = ["method", "score", "slide", "patient", "tiles", "lesion_tiles", "prevalence", "auc", "average_precision"]
    rows = []
    for one in pointing:
        for slide in sorted(one.slides, key=lambda s: names.slide(s.slide)):
            about = (one.method, one.kind, names.slide(slide.slide), names.patient(slide.patient))
            tiles = (slide.figures.n_tiles, slide.figures.n_lesion, slide.figures.prevalence)
            rows.append((*about, *tiles, slide.figures.auc, slide.figures.average_precision))
    return pd.DataFrame(rows, columns=columns)


def _cohort(found: Findings, names: Names) -> pd.DataFrame:
    cohort = found.study.cohort
    frame = pd.DataFrame(
        {
            "slide": [names.slide(slide) for slide in cohort["slide"]],
            "patient": [names.patient(patient) for patient in cohort["patient"]],
            "site": cohort["site"],
            "target": cohort["target"],
            "status": [names.text(status) for status in cohort["status"]],
            "mpp_x": cohort["mpp_x"],
            "mpp_y": cohort["mpp_y"],
            "tiles": cohort["tiles"],
        }
    )
    return frame.sort_values("slide", kind="stable")


def _audit(found: Findings) -> dict[str, Any]:
    audit = found.audit
    return {
        "clean": audit.clean,
        "every_patient_tested_once_a_repeat": audit.tested_once,
        "prediction_rows_outside_test": audit.foreign_rows,
        "test_patients_without_prediction": audit.missing_rows,
        "fingerprints_known": audit.fingerprints,
        "duplicate_slide_groups": len(audit.duplicates),
        "duplicate_slide_groups_across_patients": audit.duplicates_across,
        "folds": [
            {
                "repeat": fold.repeat,
                "fold": fold.fold,
                "patients": {part: list(counts) for part, counts in fold.counts},
                "train_and_validation": fold.train_validation,
                "train_and_test": fold.train_test,
                "validation_and_test": fold.validation_test,
                "sites_on_both_sides": fold.sites_train_test,
            }
            for fold in audit.folds
        ],
    }


def _audit_row(fold: dict[str, Any]) -> dict[str, Any]:
    counts = {f"{part}_patients": sum(numbers) for part, numbers in fold["patients"].items()}
    return {name: value for name, value in fold.items() if name != "patients"} | counts


def _figure(figure: Figure) -> dict[str, Any]:
    return {"value": figure.value, **_interval(figure.interval)}


def _interval(interval: Interval) -> dict[str, Any]:
    return {"low": interval.low, "high": interval.high, "method": interval.method}


def _plain(value: Any) -> Any:
    """JSON knows no NaN and no tuple."""
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
