"""`wsi-mil crossval`: train and test methods on patient-grouped folds."""

from pathlib import Path

from wsi_mil.errors import ConfigError
from wsi_mil.fitting.search_spec import SearchSpec
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.methods import MethodSpec, resolve_methods
from wsi_mil.outcomes import Summary
from wsi_mil.runs import RunDir, write_frame
from wsi_mil.splits import FoldSpec, fold_notes
from wsi_mil.table.records import CohortSpec
from wsi_mil.tasks import TaskSpec


def crossval(
    table: Path,
    *,
    bags: Path,
    out: Path,
    task: TaskSpec,
    methods: list[str | MethodSpec],
    folds: FoldSpec = FoldSpec(),  # noqa: B008
    train: TrainSpec = TrainSpec(),  # noqa: B008
    search: SearchSpec = SearchSpec(),  # noqa: B008
    cohort: CohortSpec = CohortSpec(),  # noqa: B008
    slides: Path | None = None,
    allow_missing: bool = False,
    workers: int = 1,
) -> Summary:
    """Cross-validate one or more MIL methods on the same folds; the folder can then be reported and viewed.

    Given again after an interruption, the same command goes on where it stopped and ends with the same bytes.

    Args:
        table: cohort table with slides, patients and labels (CSV, TSV, XLSX, Parquet)
        bags: folder of bags that `wsi-mil encode` made
        out: run folder to write
        task: what is predicted
        methods: names such as [mean_pool, abmil+aem], or mappings with name, label, params, regularisers, train ...
        folds: how patients are split
        train: how models are trained
        search: settings that are searched inside each training part (needs the extra hpo)
        cohort: how the table is read
        slides: root of the slides, for pictures in report and viewer
        allow_missing: go on without the slides that have no bag
        workers: models that are trained at the same time, each in a process with its share of the cores
    """
    train.check()
    search.check()
    if workers < 1:
        raise ConfigError(f"workers is {workers}; it must be 1 or more.")
    specs = resolve_methods(methods)
    from wsi_mil.cohort import folds_for
    from wsi_mil.experiment import (
        begin,
        check_parts,
        collect_predictions,
        plan_methods,
        selection_notes,
        train_all,
    )
    from wsi_mil.folding.confinement import balance_frame
    from wsi_mil.leaks.leakage import refuse_leaks
    from wsi_mil.leaks.search import audit_before, find_same_slides
    from wsi_mil.study import open_study, study_config

    study = open_study(table, bags=bags, task=task, cohort=cohort, slides=slides, allow_missing=allow_missing)
    split = folds_for(
        folds,
        study.classes_of,
        sites=study.sites() if folds.needs_sites else None,
        essential=study.essential,
        slides=study.patients_of_slides,
        left_out=study.left_out,
    )
    # whole paths, so that the run can be looked at from any folder
    paths = {"table": table.resolve(), "slides": slides.resolve() if slides else None, "bags": bags.resolve()}
    config = study_config(
        study, split, specs, kind="crossval", fold_spec=folds, train=train, cohort=cohort, search=search, **paths
    )
    check_parts(study, split)
    plans = plan_methods(study, specs, train, search)
    refuse_leaks(find_same_slides(study.cohort.records, study.headers, split))
    run = RunDir(out)
    begin(run, study, split, config, device=train.torch_device(), workers=workers)
    audit = audit_before(
        run.leakage_path,
        records=study.cohort.records,
        headers=study.headers,
        store=study.store,
        folds=split,
        classes_of={patient: strata & study.essential for patient, strata in study.classes_of.items()},
    )
    refuse_leaks(audit.findings)
    write_frame(run.balance_path, balance_frame(split, study.classes_of, study.known_sites))
    unchosen = selection_notes(study, split, plans)
    loop = train_all(run, study, split, plans, workers=workers, search=search)
    collect_predictions(run, study, split)
    return Summary(
        stage="crossval",
        out=out,
        done=loop.done,
        reused=loop.reused,
        failures=loop.failures,
        notes=(
            *study.notes(),
            *unchosen,
            *fold_notes(split, study.classes_of),
            *audit.notes(),
            f"Next: wsi-mil report {out}",
        ),
    )
