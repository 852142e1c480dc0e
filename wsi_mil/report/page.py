"""Findings -> one self-contained HTML page. Every word from a file is escaped by the template engine."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import yaml

import wsi_mil
from wsi_mil.heatmap import colour_table
from wsi_mil.report import figures, wording
from wsi_mil.report.findings import Findings
from wsi_mil.report.method_figures import MethodFigures
from wsi_mil.report.pictures import LISTED, Case
from wsi_mil.report.pointing import LESION_TILE, Pointing
from wsi_mil.report.pseudonyms import WITHHELD, Names
from wsi_mil.report.wording import number, p_value, signed, span
from wsi_mil.statistics import decisions
from wsi_mil.statistics.intervals import SMALL_SAMPLE_RULE

_SHOWN_ITEMS = 12
_PATH_KEYS = frozenset({"table", "slides", "bags", "file", "fixes", "out", "path", "weights", "mask", "annotation"})


def render(found: Findings, names: Names) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(_context(found, names))


def _context(found: Findings, names: Names) -> dict[str, Any]:
    study, best = found.study, found.best
    return {
        "title": f"{study.target}: {len(found.methods)} methods on {found.flow.patients} patients",
        "study": study,
        "question": wording.question(found),
        "verdict": wording.verdict(best, found),
        "called": wording.called(best, found),
        "comparison": wording.comparison(found),
        "pointing_words": wording.pointing(found),
        "not_shown": wording.not_shown(found),
        "warnings": wording.warnings(found),
        "flow": found.flow,
        "reasons": [
            (names.text(reason), count, _few([names.slide(item) for item in items]))
            for reason, count, items in found.flow.reasons
        ],
        "mpp": figures.mpp_chart(found.flow.mpp) if found.flow.mpp else None,
        "tiles": _tiles(found.flow.tiles),
        "audit": found.audit,
        "duplicates": [", ".join(sorted(map(names.slide, group))) for group in found.audit.duplicates],
        "encoder": _known_facts(study.config.get("encoder") or {}, names),
        "pathology": (study.config.get("encoder") or {}).get("pathology"),
        "methods": [_method(found, method, place, names) for place, method in enumerate(found.methods)],
        "comparisons": [_comparison(one) for one in found.comparisons],
        "forest": figures.forest_chart(found.methods),
        "curves": figures.curves_chart(found.methods),
        "folds_chart": figures.folds_chart(found.methods),
        "small_sample_rule": SMALL_SAMPLE_RULE,
        "pointing": [_pointing(one, found) for one in found.pointing],
        "lesion_tile": f"{LESION_TILE:.0%}",
        "failures": [(names.item(f.item), f.outcome, names.text(f.reason)) for f in found.failures],
        "listed": LISTED,
        "heat_gradient": _gradient(),
        "appendix": _appendix(found, names),
        "version": wsi_mil.__version__,
        "hidden": names.hidden,
    }


def _method(found: Findings, method: MethodFigures, place: int, names: Names) -> dict[str, Any]:
    matrix, binary = method.confusion, found.study.binary
    recalls = decisions.recalls(matrix)
    return {
        "label": method.label,
        "colour": figures.colour_of(place),
        "best": method.primary.value == found.best.primary.value and len(found.methods) > 1,
        "auc": number(method.primary.value),
        "auc_span": span(method.primary.interval),
        "auc_how": method.primary.interval.method,
        "bootstrap": span(method.primary_bootstrap),
        "pooled": number(method.pooled.value),
        "pooled_span": span(method.pooled.interval),
        "flagged": method.flagged,
        "slides": number(method.slide_auc.value) if method.slide_auc else "",
        "slides_span": span(method.slide_auc.interval) if method.slide_auc else "",
        "ap": number(method.average_precision.value),
        "ap_span": span(method.average_precision.interval),
        "balanced": number(method.balanced_accuracy.value),
        "balanced_span": span(method.balanced_accuracy.interval),
        "brier": number(method.brier.value, 3),
        "brier_span": span(method.brier.interval, 3),
        "ece": number(method.ece, 3),
        "log_loss": number(method.log_loss, 3),
        "accuracy": number(decisions.accuracy(matrix)),
        "f1": number(decisions.f1(matrix, average="positive" if binary else "macro")),
        "f1_name": f"F1 of “{found.study.positive}”" if binary else "F1, macro mean over classes",
        "sensitivity": number(decisions.sensitivity(matrix)) if binary else "",
        "specificity": number(decisions.specificity(matrix)) if binary else "",
        "called": wording.called(method, found),
        "threshold": wording.threshold(method, found),
        "confusion": [
            (name, row.tolist(), number(recall))
            for name, row, recall in zip(found.study.classes, matrix, recalls, strict=True)
        ],
        "most": int(matrix.max(initial=1)) or 1,
        "class_aucs": [] if binary else list(zip(found.study.classes, map(number, method.class_aucs), strict=True)),
        "chart": figures.method_chart(method, place),
        "folds": [_fold(fold, binary) for fold in method.folds],
        "chosen_by": _chosen_by(method),
        "seeds": _seeds(method),
        "n_wrong": sum(_is_wrong(method, case) for case in found.cases[method.label]),
        "cases": [_case(found, method, case, names) for case in found.cases[method.label]],
    }


def _fold(fold: Any, binary: bool) -> dict[str, Any]:
    return {
        "key": fold.key,
        "counts": fold.counts,
        "auc": number(fold.auc),
        "balanced": number(fold.balanced_accuracy),
        "brier": number(fold.brier, 3),
        "threshold": number(fold.threshold.value, 3) if binary else "largest probability",
        "source": "validation" if fold.threshold.from_validation else ("fixed" if binary else ""),
        "epoch": fold.epoch if fold.epoch is not None else "–",
    }


def _chosen_by(method: MethodFigures) -> str:
    return "; ".join(sorted({fold.chosen_by for fold in method.folds}))


def _seeds(method: MethodFigures) -> str:
    values = [value for value in method.by_seed.values() if np.isfinite(value)]
    if len(values) < 2:
        return ""
    return (
        f"Over {len(values)} trainings (repeats and seeds) the within-fold AUC runs from {min(values):.2f} to "
        f"{max(values):.2f}, standard deviation {np.std(values, ddof=1):.3f}. The interval does not contain this."
    )


def _case(found: Findings, method: MethodFigures, case: Case, names: Names) -> dict[str, Any]:
    patients, classes, place = method.patients, found.study.classes, case.place
    decided = int(patients.decisions[place])
    return {
        "patient": names.patient(patients.ids[place]),
        "truth": classes[int(patients.targets[place])],
        "decided": classes[decided],
        "wrong": _is_wrong(method, case),
        "probability": f"{patients.probabilities[place, -1 if found.study.binary else decided]:.2f}",
        "cut": number(float(patients.cuts[place])) if found.study.binary else "",
        "loss": f"{patients.losses[place]:.2f}",
        "slide": names.slide(case.picture.slide) if case.picture else "",
        "picture": case.picture,
    }


def _is_wrong(method: MethodFigures, case: Case) -> bool:
    return bool(method.patients.decisions[case.place] != method.patients.targets[case.place])


def _comparison(one: Any) -> dict[str, Any]:
    return {
        "first": one.first,
        "second": one.second,
        "patients": one.patients,
        "difference": signed(one.test.difference, 3),
        "span": span(one.test.interval, 3),
        "p": p_value(one.test.p),
        "corrected": p_value(one.p_corrected),
        "apart": bool(one.p_corrected < wording.ALPHA),
    }


def _pointing(one: Pointing, found: Findings) -> dict[str, Any]:
    together = one.together
    place = [method.label for method in found.methods].index(one.method)
    return {
        "method": one.method,
        "colour": figures.colour_of(place),
        "kind": one.kind,
        "own": one.own,
        "slides": together.n_slides,
        "tiles": f"{together.n_tiles:,}",
        "prevalence": number(together.mean_prevalence, 3),
        "pooled_prevalence": number(together.prevalence, 3),
        "auc": number(together.mean_auc),
        "span": span(one.interval),
        "ap": number(together.mean_average_precision),
        "pooled_auc": number(together.pooled_auc),
        "pooled_ap": number(together.pooled_average_precision),
    }


def _appendix(found: Findings, names: Names) -> dict[str, Any]:
    run = found.study.run
    config = _known_facts(found.study.config, names)
    paths = (run.config_path, run.cohort_path, run.folds_path, run.predictions_path, run.environment_path)
    there = [path for path in paths if path.is_file()]
    environment = run.environment() if run.environment_path.is_file() else {}
    return {
        "config": yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=110),
        "environment": json.dumps(_known_facts(environment, names), indent=2, ensure_ascii=False),
        "digests": [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in there],
    }


def _known_facts(value: Any, names: Names, *, key: str = "") -> Any:
    """A configuration as it is, or without paths and ids where these are to be hidden."""
    if isinstance(value, dict):
        return {str(name): _known_facts(inner, names, key=str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_known_facts(inner, names, key=key) for inner in value]
    if not names.hidden or not isinstance(value, str):
        return value
    return WITHHELD if key in _PATH_KEYS else names.text(value)


def _few(items: list[str]) -> str:
    shown = sorted(items)[:_SHOWN_ITEMS]
    more = len(items) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _tiles(tiles: tuple[int, ...]) -> str:
    if not tiles:
        return ""
    return f"{sum(tiles):,} tiles, {min(tiles):,} to {max(tiles):,} a slide, median {int(np.median(tiles)):,}"


def _gradient() -> str:
    table = colour_table("viridis")[[0, 32, 64, 96, 128, 160, 192, 224, 255]]
    return ", ".join(f"rgb({red},{green},{blue})" for red, green, blue in table.tolist())
