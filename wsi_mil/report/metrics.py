"""Findings -> metrics.json, for machines."""

import math
from typing import Any

from wsi_mil.leaks.leakage import LeakageAudit
from wsi_mil.report.choices import Choices
from wsi_mil.report.designs import design_of
from wsi_mil.report.detection import Detection
from wsi_mil.report.faithful import MethodFaithfulness
from wsi_mil.report.findings import Findings, SharedFindings
from wsi_mil.report.method_figures import Figure, MethodFigures
from wsi_mil.report.pointing import Pointing
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.subgroups import Column
from wsi_mil.statistics.faithfulness import STEPS
from wsi_mil.statistics.froc import RATES
from wsi_mil.statistics.intervals import SMALL_SAMPLE_RULE, Interval

SCHEMA_VERSION = 2


def metrics(found: Findings, names: Names) -> dict[str, Any]:
    """All numbers of the report; null where a figure is not defined."""
    study = found.study
    facts: dict[str, Any] = plain(
        {
            "kind": "metrics",
            "schema_version": SCHEMA_VERSION,
            "target": study.target,
            "level": study.level,
            "classes": study.classes,
            "positive": study.positive if study.binary else None,
            "patients": found.flow.patients,
            "slides": found.flow.used,
            "primary": "AUC over pairs of patients; probabilities: mean over slides and models"
            if study.external
            else "AUC over pairs of patients tested in the same fold; probabilities: mean over slides, seeds",
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
            "subgroups": {column.name: _column(column, names) for column in found.columns},
            "decision_curves": _benefits(found),
            "choices": {one.method: _choices(one, names) for one in found.choices},
            **run_facts(found, names),
        }
    )
    return facts


def run_facts(found: SharedFindings, names: Names) -> dict[str, Any]:
    """What is of the run as a whole, whatever it predicts."""
    return {
        "design": design_of(found.study).name,
        "external": _external(found, names),
        "faithfulness": {one.method: _faithfulness(one) for one in found.faithfulness},
        "audit": audit_facts(found),
        "audit_before_training": _leakage(found.leakage, names),
    }


def _external(found: SharedFindings, names: Names) -> dict[str, Any] | None:
    external, shift = found.study.external, found.shift
    if external is None:
        return None
    return {
        "patients_trained_on": {names.patient(patient): by for patient, by in external.trained_on.items()},
        "training_patients_known_to_the_models": external.flagging,
        "left_out_without_label": external.unlabelled,
        "domain_shift": {
            "slides": len(shift.slides),
            "unlike_the_training_slides": len(shift.unlike),
            "sentences": shift.sentences,
        }
        if shift
        else None,
    }


def named_figures(method: MethodFigures) -> dict[str, Figure]:
    """Every figure of a method that has an interval, by its name in files."""
    decided, operating, slides = method.decided, method.operating, method.slides
    found: dict[str, Figure | None] = {
        "auc": method.primary,
        "auc_pooled": method.pooled,
        "auc_slides": slides.auc if slides else None,
        "average_precision": method.average_precision,
        "sensitivity_at_specificity": operating.sensitivity if operating else None,
        "specificity_at_sensitivity": operating.specificity if operating else None,
        "balanced_accuracy": decided.balanced_accuracy,
        "balanced_accuracy_slides": slides.balanced_accuracy if slides else None,
        "accuracy": decided.accuracy,
        "sensitivity": decided.sensitivity,
        "specificity": decided.specificity,
        "f1_positive": decided.f1_positive,
        "f1_macro": decided.f1_macro,
        "kappa": decided.kappa,
    }
    for ending, figures in (("", method.raw), ("_calibrated", method.calibrated)):
        if figures is not None:
            found |= {
                f"brier{ending}": figures.brier,
                f"log_loss{ending}": figures.log_loss,
                f"ece{ending}": figures.ece,
            }
    return {name: figure for name, figure in found.items() if figure is not None}


def fold_rows(method: MethodFigures) -> list[dict[str, Any]]:
    """One row a model."""
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


def training_rows(method: MethodFigures) -> list[dict[str, Any]]:
    """One row a repeat and seed."""
    return [
        {
            "method": method.label,
            "repeat": repeat,
            "seed": seed,
            "auc": one.auc,
            "balanced_accuracy": one.balanced_accuracy,
            "brier": one.brier,
        }
        for (repeat, seed), one in sorted(method.by_training.items())
    ]


def _method(found: Findings, method: MethodFigures, names: Names) -> dict[str, Any]:
    study = found.study
    figures = {name: _figure(figure) for name, figure in named_figures(method).items()}
    figures["auc"] |= {"bootstrap": _interval(method.primary_bootstrap)}
    for name in ("sensitivity_at_specificity", "specificity_at_sensitivity"):
        if method.operating and name in figures:
            figures[name] |= {"fixed": method.operating.fixed}
    classes = study.classes[-len(method.classes) :]
    return {
        **figures,
        "auc_pooled_gap": method.pooled_gap,
        "auc_pooled_gap_flagged": method.flagged,
        "class_vs_rest": {
            name: {
                "auc": _figure(one.within),
                "auc_pooled": _figure(one.pooled),
                "average_precision": _figure(one.average_precision),
            }
            for name, one in zip(classes, method.classes, strict=True)
        },
        "confusion": {"classes": study.classes, "rows_are_truth": method.confusion.tolist()},
        "trainings": training_rows(method),
        "patients_without_one_label": len(method.mixed),
        "folds": fold_rows(method),
        "localisation": pointing_facts(found, method.label, names),
    }


def _column(column: Column, names: Names) -> list[dict[str, Any]]:
    return [
        {
            "method": one.method,
            "level": names.text(one.level),
            "patients": one.patients,
            "patients_by_class": one.by_class,
            "auc": _figure(one.auc),
            "called_rightly": _figure(one.right),
            "note": one.note,
        }
        for one in column.figures
    ]


def _benefits(found: Findings) -> dict[str, Any]:
    return {
        one.method: {
            "probabilities": "calibrated" if one.calibrated else "raw",
            "thresholds": one.curve.thresholds.tolist(),
            "net_benefit": one.curve.model.tolist(),
            "net_benefit_of_acting_on_everybody": one.curve.treat_all.tolist(),
        }
        for one in found.benefits
    }


def _choices(one: Choices, names: Names) -> dict[str, Any]:
    return {
        "models": one.models,
        "epoch": {names.text(how): count for how, count in one.epochs},
        "threshold": {names.text(how): count for how, count in one.thresholds},
        "calibration": {names.text(how): count for how, count in one.calibrations},
        "search": [
            {"model": key, "trials": found.trials, "metric": found.metric, "chosen": names.text(found.chosen)}
            for key, found in one.searches
        ],
    }


def pointing_facts(found: SharedFindings, label: str, names: Names) -> list[dict[str, Any]]:
    """Where one method looks, one entry a kind of score."""
    return [_pointing(one, names) for one in found.pointing if one.method == label]


def _pointing(one: Pointing, names: Names) -> dict[str, Any]:
    together, dice = one.together, one.overlap.figures
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
        "dice_mean_over_slides": {
            "value": dice.mean if dice else None,
            **_interval(one.overlap.interval),
            "pooled": dice.pooled if dice else None,
            "cut": one.overlap.cut,
        },
        "froc": _froc(one.detection) if one.detection else None,
        "by_slide": [
            {
                "slide": names.slide(slide.slide),
                "tiles": slide.figures.n_tiles,
                "lesion_tiles": slide.figures.n_lesion,
                "auc": slide.figures.auc,
                "average_precision": slide.figures.average_precision,
                "dice": slide.dice,
            }
            for slide in sorted(one.slides, key=lambda s: names.slide(s.slide))
        ],
    }


def _froc(detection: Detection) -> dict[str, Any]:
    curve = detection.froc
    return {
        "score": {"value": curve.score, **_interval(detection.interval)},
        "slides": curve.n_slides,
        "slides_without_lesion": curve.n_without_lesion,
        "lesions": curve.n_lesions,
        "isolated_tumour_cells_left_out": curve.n_isolated,
        "false_positives_a_slide": RATES,
        "sensitivity_at": curve.at_rates.tolist(),
    }


def _faithfulness(one: MethodFaithfulness) -> dict[str, Any]:
    figures = one.figures
    return {
        "faithfulness": {"value": figures.mean, **_interval(figures.interval)},
        "deletion": figures.deletion,
        "insertion": figures.insertion,
        "patients": figures.n_patients,
        "bags": figures.n_bags,
        "answer": one.answer,
        "percent_of_tiles": STEPS,
        "mean_answer": {name: curve.tolist() for name, curve in one.curves.items()},
    }


def leakage_rows(audit: LeakageAudit | None, names: Names) -> list[dict[str, Any]]:
    """One row a finding of the audit from before training."""
    return [
        {
            "severity": one.severity,
            "kind": one.kind,
            "slides": " ".join(map(names.slide, one.slides)),
            "patients": " ".join(map(names.patient, one.patients)),
            "value": one.value,
            "folds": " ".join(f"r{side.repeat}_f{side.fold}:{'+'.join(side.parts)}" for side in one.sides),
        }
        for one in (audit.findings if audit else ())
    ]


def audit_facts(found: SharedFindings) -> dict[str, Any]:
    """The audit as plain numbers."""
    audit = found.audit
    return {
        "clean": audit.clean,
        "every_patient_tested_once_a_repeat": audit.tested_once,
        "no_patient_tested_twice_in_a_repeat": audit.tested_at_most_once,
        "patients_never_tested": audit.never_tested,
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


def _leakage(audit: LeakageAudit | None, names: Names) -> dict[str, Any] | None:
    if audit is None:
        return None
    return {
        "slides": audit.slides,
        "patients": audit.patients,
        "compared_by_fingerprint": audit.fingerprints,
        "compared_by_picture": audit.pictures,
        "compared_by_tiles": audit.bags,
        "leaks": len(audit.of("leak")),
        "suspicious": len(audit.of("suspicious")),
        "notes": len(audit.of("note")),
        "not_followed_up": audit.left_out,
        "site_label_cramers_v": audit.association.cramers_v,
        "site_label_cramers_v_corrected": audit.association.corrected_v,
        "findings": leakage_rows(audit, names),
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return {"value": figure.value, **_interval(figure.interval)}


def _interval(interval: Interval) -> dict[str, Any]:
    return {"low": interval.low, "high": interval.high, "method": interval.method}


def plain(value: Any) -> Any:
    """JSON knows no NaN and no tuple."""
    if isinstance(value, dict):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
