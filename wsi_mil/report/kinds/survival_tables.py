"""Survival figures -> metrics.json and CSV tables, for machines."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from wsi_mil.report.findings import Comparison
from wsi_mil.report.kinds.chapters import comparison_frame, interval_of, judged_by
from wsi_mil.report.kinds.records import TargetStudy
from wsi_mil.report.kinds.survival import SurvivalFigures
from wsi_mil.report.method_figures import Figure
from wsi_mil.report.pseudonyms import Names


def survival_metrics(
    study: TargetStudy, methods: Sequence[SurvivalFigures], comparisons: tuple[Comparison, ...]
) -> dict[str, Any]:
    """All numbers of the chapter."""
    return {
        "kind": "survival",
        "event": study.target.event,
        "primary": "c_index",
        "patients": len(methods[0].patients.ids),
        "patients_with_event": int(methods[0].patients.events.sum()),
        "methods": {method.label: _method(method) for method in methods},
        "comparisons": comparison_frame(comparisons, what="c_index").to_dict("records"),
    }


def survival_tables(
    methods: Sequence[SurvivalFigures], comparisons: tuple[Comparison, ...], names: Names
) -> dict[str, pd.DataFrame]:
    """File name -> table."""
    return {
        "methods.csv": pd.DataFrame([_row(method) for method in methods]),
        "folds.csv": pd.DataFrame([row for method in methods for row in _fold_rows(method)]),
        "comparisons.csv": comparison_frame(comparisons, what="c_index"),
        "patients.csv": pd.concat([_patients(method, names) for method in methods]),
        "kaplan_meier.csv": pd.concat([_curves(method) for method in methods]),
    }


def _method(method: SurvivalFigures) -> dict[str, Any]:
    interval = method.primary_bootstrap
    return {
        "c_index": interval_of(method.primary)
        | {"bootstrap": {"low": interval.low, "high": interval.high, "method": interval.method}},
        "c_index_pooled": interval_of(method.pooled),
        "c_index_pooled_gap": method.pooled_gap,
        "c_index_pooled_gap_flagged": method.flagged,
        "auc_at_times": [
            {"time": one.at, "patients": one.patients, "reason": one.reason, **interval_of(one.figure)}
            for one in method.times
        ],
        "integrated_brier": {
            **interval_of(method.brier.figure),
            "null": method.brier.null,
            "until": method.brier.end,
            "reason": method.brier.reason,
        },
        "risk_groups": {
            "split": "median risk of the validation patients, else of the fold's test patients",
            "folds_split_by_validation": method.split_by_validation,
            "folds": method.splits,
            "log_rank_statistic": method.log_rank.statistic,
            "log_rank_p": method.log_rank.p,
            **{
                group.name: {
                    "patients": len(group.times),
                    "events": int(group.events.sum()),
                    "median_time": group.curve.median(),
                }
                for group in method.groups
            },
        },
        "patients_without_one_label": len(method.mixed),
        "predictions_left_out": method.broken,
        "seeds": [
            {"repeat": repeat, "seed": seed, "c_index": value}
            for (repeat, seed), value in sorted(method.by_seed.items())
        ],
        "folds": _fold_rows(method),
    }


def _row(method: SurvivalFigures) -> dict[str, Any]:
    figures: dict[str, Figure] = {
        "c_index": method.primary,
        "c_index_pooled": method.pooled,
        "integrated_brier": method.brier.figure,
    }
    row: dict[str, Any] = {"method": method.label}
    for name, figure in figures.items():
        row |= {name: figure.value, f"{name}_low": figure.interval.low, f"{name}_high": figure.interval.high}
    return row | {
        "integrated_brier_null": method.brier.null,
        "log_rank_p": method.log_rank.p,
        "pooled_gap_flagged": method.flagged,
    }


def _fold_rows(method: SurvivalFigures) -> list[dict[str, Any]]:
    return [
        {
            "method": method.label,
            **judged_by(fold.key),
            "test_patients": fold.patients,
            "test_events": fold.events,
            "c_index": fold.c_index,
            "reason": fold.reason,
            "epoch": fold.epoch,
            "epoch_chosen_by": fold.chosen_by,
        }
        for fold in method.folds
    ]


def _patients(method: SurvivalFigures, names: Names) -> pd.DataFrame:
    patients = method.patients
    frame = pd.DataFrame(
        {
            "method": method.label,
            "patient": [names.patient(patient) for patient in patients.ids],
            "time": patients.times,
            "event": patients.events.astype(int),
            "risk": patients.risks,
            "group": ["high" if high else "low" for high in patients.high],
            "pairs": patients.met,
            "pairs_ranked_wrongly": patients.wrong,
        }
    )
    return frame.sort_values("patient", kind="stable")


def _curves(method: SurvivalFigures) -> pd.DataFrame:
    rows = []
    for group in method.groups:
        low, high = group.curve.band()
        columns = (group.curve.times, group.curve.survival, low, high, group.curve.at_risk, group.curve.events)
        rows += [(method.label, group.name, *row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    return pd.DataFrame(rows, columns=["method", "group", "time", "survival", "low", "high", "at_risk", "events"])
