"""`wsi-mil report`: a finished run -> report.html, metrics.json and tables beside it."""

import json
from pathlib import Path

from tiling.atomic import write_text
from wsi_mil.outcomes import Failure, Summary
from wsi_mil.report.findings import Findings, find
from wsi_mil.report.page import render
from wsi_mil.report.pseudonyms import Names, salt_of
from wsi_mil.report.study import Study, read_study
from wsi_mil.report.tables import metrics, tables
from wsi_mil.runs import write_frame


def report(run: Path, *, slides: Path | None = None, pseudonymise: bool = False) -> Summary:
    """Report on a cross-validation: figures with intervals, method comparison, audit, worst errors.

    Writes report.html (self-contained), metrics.json and tables/*.csv into the run folder.

    Args:
        run: the run folder that crossval wrote
        slides: folder of the slides, for thumbnails (default: where they were at the time of the run)
        pseudonymise: show stable stand-ins instead of patient and slide ids, and no paths
    """
    study = read_study(run)
    found = find(study, slides_root=slides or study.slides_root)
    names = _names(study, pseudonymise=pseudonymise)
    page = render(found, names)
    for file_name, table in tables(found, names).items():
        write_frame(study.run.tables_dir / file_name, table)
    text = json.dumps(metrics(found, names), indent=2, ensure_ascii=False, allow_nan=False)
    write_text(study.run.metrics_path, text + "\n")
    write_text(study.run.report_path, page)
    return Summary(
        stage="report",
        out=study.run.report_path,
        done=tuple(method.label for method in found.methods),
        failures=(*_gaps(found), *found.failures),
        notes=_notes(found, study),
    )


def _gaps(found: Findings) -> tuple[Failure, ...]:
    missing = found.audit.missing_rows
    if not missing:
        return ()
    reason = f"{missing} test predictions are missing: give the crossval command again, then report again"
    return (Failure(item=found.study.run.predictions_path.name, outcome="not finished", reason=reason),)


def _names(study: Study, *, pseudonymise: bool) -> Names:
    predicted = {patient for method in study.methods for patient in method.test.patients}
    patients = predicted | set(study.cohort["patient"]) | set(study.folds["patient"])
    salt = salt_of(study.run.salt_path) if pseudonymise else None
    return Names(patients, set(study.cohort["slide"]), salt=salt)


def _notes(found: Findings, study: Study) -> tuple[str, ...]:
    lines = [f"Open {study.run.report_path} in a browser; the numbers stand in {study.run.metrics_path.name}."]
    if not found.audit.clean:
        lines.append("The leakage audit is not clean: read it before you use any figure.")
    return tuple(lines)
