"""`wsi-mil train`: one model a method on the whole cohort."""

from pathlib import Path

from wsi_mil.fitting.search_spec import SearchSpec
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.methods import MethodSpec, resolve_methods
from wsi_mil.outcomes import Summary
from wsi_mil.runs import RunDir
from wsi_mil.splits import Fold, HoldOutSpec, choose_validation
from wsi_mil.table.records import CohortSpec
from wsi_mil.tasks import TaskSpec


def train(
    table: Path,
    *,
    bags: Path,
    out: Path,
    task: TaskSpec,
    methods: list[str | MethodSpec],
    folds: HoldOutSpec = HoldOutSpec(),  # noqa: B008
    train: TrainSpec = TrainSpec(),  # noqa: B008
    search: SearchSpec = SearchSpec(),  # noqa: B008
    cohort: CohortSpec = CohortSpec(),  # noqa: B008
    slides: Path | None = None,
    allow_missing: bool = False,
) -> Summary:
    """Train one model a method on the whole cohort, with a validation part and no test part, for `wsi-mil predict`.

    Args:
        table: cohort table with slides, patients and labels (CSV, TSV, XLSX, Parquet)
        bags: folder of bags that `wsi-mil encode` made
        out: run folder to write
        task: what is predicted
        methods: names such as [mean_pool, abmil+aem], or mappings with name, label, params, regularisers, train ...
        folds: who is held out to choose epoch and threshold
        train: how models are trained
        search: settings that are searched inside each training part (needs the extra hpo)
        cohort: how the table is read
        slides: root of the slides, for pictures
        allow_missing: go on without the slides that have no bag
    """
    train.check()
    search.check()
    specs = resolve_methods(methods)
    from wsi_mil.experiment import (
        begin,
        check_parts,
        collect_predictions,
        plan_methods,
        selection_notes,
        train_all,
    )
    from wsi_mil.study import open_study, study_config

    study = open_study(table, bags=bags, task=task, cohort=cohort, slides=slides, allow_missing=allow_missing)
    split = [
        whole_cohort(study.classes_of, folds, essential=study.essential, sites=study.sites() if folds.by_site else None)
    ]
    # whole paths, so that the run can be looked at from any folder
    paths = {"table": table.resolve(), "slides": slides.resolve() if slides else None, "bags": bags.resolve()}
    config = study_config(
        study, split, specs, kind="train", fold_spec=folds, train=train, cohort=cohort, search=search, **paths
    )
    check_parts(study, split)
    plans = plan_methods(study, specs, train, search)
    run = RunDir(out)
    begin(run, study, split, config, device=train.torch_device())
    unchosen = selection_notes(study, split, plans)
    loop = train_all(run, study, split, plans, search=search)
    collect_predictions(run, study, split)
    return Summary(
        stage="train",
        out=out,
        done=loop.done,
        reused=loop.reused,
        failures=loop.failures,
        notes=(*study.notes(), *unchosen, f"Next: wsi-mil predict {out} --bags DIR --out DIR"),
    )


def whole_cohort(
    classes_of: dict[str, set[str]],
    spec: HoldOutSpec,
    *,
    sites: dict[str, str] | None,
    essential: set[str] | None = None,
) -> Fold:
    """Everybody trains, apart from a stratified validation part of about `spec.validation`; nobody is tested."""
    held_out = choose_validation(classes_of, spec.validation, seed=spec.seed, sites=sites, essential=essential)
    train, validation = sorted(classes_of.keys() - held_out), sorted(held_out)
    return Fold(repeat=0, fold=0, train=tuple(train), validation=tuple(validation), test=())
