"""Findings about a predicted number -> metrics.json and CSV tables, for machines."""

from typing import Any

import pandas as pd

from wsi_mil.report.kinds.chapters import comparison_frame, interval_of, judged_by
from wsi_mil.report.kinds.regression import NAMES, NumberFigures
from wsi_mil.report.kinds.regression_findings import NumberFindings
from wsi_mil.report.pseudonyms import Names


def number_metrics(found: NumberFindings) -> dict[str, Any]:
    """All numbers of the chapter."""
    return {
        "kind": "regression",
        "primary": "r2",
        "patients": len(found.best.patients.ids),
        "methods": {
            method.label: {
                **{name: interval_of(method.figures[name]) for name in NAMES},
                "patients_without_one_label": len(method.mixed),
                "predictions_left_out": method.broken,
                "seeds": [
                    {"repeat": repeat, "seed": seed, "mae": mae}
                    for (repeat, seed), mae in sorted(method.by_seed.items())
                ],
                "folds": _fold_rows(method),
            }
            for method in found.methods
        },
        "comparisons": comparison_frame(found.comparisons, what="mae").to_dict("records"),
    }


def _fold_rows(method: NumberFigures) -> list[dict[str, Any]]:
    return [
        {
            "method": method.label,
            **judged_by(fold.key),
            "test_patients": fold.patients,
            **fold.values,
            "epoch": fold.epoch,
            "epoch_chosen_by": fold.chosen_by,
        }
        for fold in method.folds
    ]


def number_tables(found: NumberFindings, names: Names) -> dict[str, pd.DataFrame]:
    """File name -> table."""
    rows = [{"method": m.label} | _flat(m) for m in found.methods]
    return {
        "methods.csv": pd.DataFrame(rows),
        "folds.csv": pd.DataFrame([row for method in found.methods for row in _fold_rows(method)]),
        "comparisons.csv": comparison_frame(found.comparisons, what="mae"),
        "patients.csv": pd.concat([_patient_frame(method, names) for method in found.methods]),
    }


def _flat(method: NumberFigures) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name in NAMES:
        figure = method.figures[name]
        flat |= {name: figure.value, f"{name}_low": figure.interval.low, f"{name}_high": figure.interval.high}
    return flat


def _patient_frame(method: NumberFigures, names: Names) -> pd.DataFrame:
    patients = method.patients
    frame = pd.DataFrame(
        {
            "method": method.label,
            "patient": [names.patient(patient) for patient in patients.ids],
            "target": patients.truth,
            "prediction": patients.predicted,
            "off_by": patients.off,
        }
    )
    return frame.sort_values("patient", kind="stable")
