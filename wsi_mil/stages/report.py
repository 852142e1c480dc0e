"""`wsi-mil report`: a finished run -> report.html, metrics.json and tables beside it."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tiling.atomic import write_text
from wsi_mil.outcomes import Failure, Summary
from wsi_mil.report.designs import design_of
from wsi_mil.report.findings import SharedFindings, find
from wsi_mil.report.kinds.findings import all_failures, find_run
from wsi_mil.report.kinds.page import chapters_of, render_run
from wsi_mil.report.kinds.reading import read_run
from wsi_mil.report.kinds.tables import run_metrics, run_tables
from wsi_mil.report.metrics import metrics
from wsi_mil.report.page import render
from wsi_mil.report.pseudonyms import Names, salt_of
from wsi_mil.report.study import Study, read_study
from wsi_mil.report.tables import tables
from wsi_mil.runs import RunDir, write_frame


def report(run: Path, *, slides: Path | None = None, pseudonymise: bool = False) -> Summary:
    """Report on a cross-validation or an external validation: figures with intervals, comparison, audit, worst errors.

    Writes report.html (self-contained), metrics.json and tables/*.csv into the run folder.

    Args:
        run: the run folder that crossval wrote, or predict with a table of labels
        slides: folder of the slides, for thumbnails (default: where they were at the time of the run)
        pseudonymise: show stable stand-ins instead of patient and slide ids, and no paths
    """
    of_classes = RunDir(run).config()["task"]["kind"] in ("binary", "multiclass")
    make = _of_classes if of_classes else _of_any_kind
    made = make(run, slides=slides, pseudonymise=pseudonymise)
    study = made.found.study
    for file_name, table in made.tables.items():
        write_frame(study.run.tables_dir / file_name, table)
    write_text(study.run.metrics_path, json.dumps(made.metrics, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    write_text(study.run.report_path, made.page)
    return Summary(
        stage="report",
        out=study.run.report_path,
        done=made.found.labels,
        failures=(*_gaps(made.found), *made.failures),
        notes=_notes(made.found, study),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Made:
    """A report before it is written."""

    found: SharedFindings
    page: str
    metrics: dict[str, Any]
    tables: dict[str, pd.DataFrame]
    failures: tuple[Failure, ...]


def _of_classes(run: Path, *, slides: Path | None, pseudonymise: bool) -> _Made:
    """One target of two or more classes without an order."""
    study = read_study(run)
    found = find(study, slides_root=slides or study.slides_root)
    predicted = {patient for method in study.methods for patient in method.test.patients}
    names = _names(study, predicted, pseudonymise=pseudonymise)
    return _Made(
        found=found,
        page=render(found, names),
        metrics=metrics(found, names),
        tables=tables(found, names),
        failures=found.failures,
    )


def _of_any_kind(run: Path, *, slides: Path | None, pseudonymise: bool) -> _Made:
    """Ordered classes, numbers, times to an event, or several targets."""
    studies = read_run(run)
    found = find_run(studies, slides_root=slides or studies.everyone.slides_root)
    names = _names(studies.everyone, studies.patients, pseudonymise=pseudonymise)
    chapters = chapters_of(found, names)
    return _Made(
        found=found.shared,
        page=render_run(found, chapters, names),
        metrics=run_metrics(found, chapters, names),
        tables=run_tables(found, chapters, names),
        failures=all_failures(found),
    )


def _gaps(found: SharedFindings) -> tuple[Failure, ...]:
    missing = found.audit.missing_rows
    if not missing:
        return ()
    again = design_of(found.study).again
    reason = f"{missing} test predictions are missing: give the {again} command again, then report again"
    return (Failure(item=found.study.run.predictions_path.name, outcome="not finished", reason=reason),)


def _names(study: Study, predicted: Collection[str], *, pseudonymise: bool) -> Names:
    patients = set(predicted) | set(study.cohort["patient"]) | set(study.folds["patient"])
    salt = salt_of(study.run.salt_path) if pseudonymise else None
    return Names(patients, set(study.cohort["slide"]), salt=salt)


def _notes(found: SharedFindings, study: Study) -> tuple[str, ...]:
    lines = [f"Open {study.run.report_path} in a browser; the numbers stand in {study.run.metrics_path.name}."]
    if study.external is not None and study.external.trained_on:
        lines.append(f"{len(study.external.trained_on)} patients were trained on: they are left out of every figure.")
    if not found.audit.clean:
        lines.append("The leakage audit is not clean: read it before you use any figure.")
    return tuple(lines)
