"""A finished run of any kind of target, read from its folder: one study a target, one for the audit."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from wsi_mil.errors import RunError
from wsi_mil.report.external import admit, refuse_unlabelled
from wsi_mil.report.kinds.records import Answered, Answers, Target, TargetStudy, bare_rows, patient_answers
from wsi_mil.report.study import Rows, Study, Trained, calibrated_rows, rows_of
from wsi_mil.results.reading import GIVE_AGAIN, NUMBERED
from wsi_mil.runs import FoldKey, RunDir
from wsi_mil.statistics.ranking import Floats

EVERYBODY = ("patients",)
OUTCOMES = ("no event", "event")
_COHORT = ("site", "target", "path", "annotation", "mpp_x", "mpp_y", "status", "tiles")
_ITEM = ["method", *NUMBERED, "patient", "slide"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RunStudies:
    """All that a run predicted."""

    everyone: Study
    """Who stood where and who was predicted, without any answer: what cohort flow, audit and pictures look at."""
    studies: tuple[Study | TargetStudy, ...]
    """One a target, in the configured order."""
    targets: tuple[Target, ...]
    patients: frozenset[str]
    """Everybody with a prediction."""
    unlabelled: tuple[int, ...]
    """Of each target the tested patients without a label; no figure counts them."""


def targets_of(config: dict[str, Any]) -> tuple[Target, ...]:
    """The targets of a run's configuration, in order."""
    task = config["task"]
    listed = task.get("targets") or [{**task, "name": task["target"]}]
    return tuple(
        Target(
            name=str(one["name"]),
            kind=str(one["kind"]),
            classes=tuple(str(name) for name in one.get("classes") or ()),
            event=str(one.get("event") or ""),
        )
        for one in listed
    )


def read_run(path: Path) -> RunStudies:
    """Read a finished cross-validation or external validation. Raises RunError when it cannot be reported."""
    run = RunDir(path)
    config = run.config()
    refuse_unlabelled(path, config)
    targets, predictions = targets_of(config), run.predictions()
    if predictions.empty:
        raise RunError(f"{run.predictions_path} has no row. Give the same command again to finish the run.")
    _check_once(predictions, source=str(run.predictions_path))
    own = admit(path, config, cohort=run.cohort(*_COHORT), folds=run.folds(), predictions=predictions)
    predictions, cohort = own.predictions, own.cohort
    shared: dict[str, Any] = {"run": run, "config": config, "level": str(config["task"]["level"])}
    shared |= {"folds": own.folds, "external": own.external}
    studies = tuple(_study(target, targets[0], predictions, cohort=cohort, shared=shared) for target in targets)
    if not any(study.methods for study in studies):
        listed = ", ".join(target.name for target in targets)
        raise RunError(f"{run.predictions_path}: no tested patient has a label of its own of {listed}. {GIVE_AGAIN}")
    return RunStudies(
        everyone=_everyone(targets, studies, predictions, cohort=cohort, shared=shared),
        studies=studies,
        targets=targets,
        patients=frozenset(predictions["patient"]),
        unlabelled=tuple(_unlabelled(predictions, target) for target in targets),
    )


def _unlabelled(predictions: pd.DataFrame, target: Target) -> int:
    own = predictions[predictions["target_name"] == target.name]
    return len(set(own["patient"]) - set(own["patient"][own["target"] != ""]))


def _check_once(frame: pd.DataFrame, *, source: str) -> None:
    twice = frame.duplicated([*_ITEM, "target_name"])
    if twice.any():
        name = " ".join(str(frame[twice].iloc[0][column]) for column in [*_ITEM, "target_name"])
        raise RunError(f"{source}: {int(twice.sum())} rows stand there twice, such as {name}. {GIVE_AGAIN}")


def _study(
    target: Target, first: Target, predictions: pd.DataFrame, *, cohort: pd.DataFrame, shared: dict[str, Any]
) -> Study | TargetStudy:
    own = predictions[predictions["target_name"] == target.name]
    column = "target" if target == first else f"value:{target.name}"
    cells = cohort[column] if column in cohort.columns else pd.Series("", index=cohort.index)
    cohort = cohort.assign(target=cells)
    labels = shared["run"].methods()
    if target.has_classes:
        trained = (_trained(shared["run"], label, target, own) for label in labels)
        kept = tuple(method for method in trained if len(method.test))
        return Study(classes=target.classes, target=target.name, cohort=cohort, methods=kept, **shared)
    answered = (_answered(shared["run"], label, target, own) for label in labels)
    return TargetStudy(
        target=target,
        cohort=cohort,
        methods=tuple(method for method in answered if len(patient_answers(method.test)[0])),
        **shared,
    )


def _trained(run: RunDir, label: str, target: Target, predictions: pd.DataFrame) -> Trained:
    labelled = predictions[(predictions["method"] == label) & (predictions["target"] != "")]
    source = str(run.predictions_path)
    test = rows_of(labelled, target.classes, source=source)
    keys = sorted(set(test.keys))
    there = [key for key in keys if run.selection_path(label, key).is_file()]
    return Trained(
        label=label,
        test=test,
        validation={
            key: rows_of(
                _validation(run, label, key, target), target.classes, source=str(run.validation_path(label, key))
            )
            for key in keys
        },
        selections={key: run.selection(label, key) for key in there},
        target=target.name,
        calibrated=calibrated_rows(labelled, test, target.classes, source=source),
    )


def _answered(run: RunDir, label: str, target: Target, predictions: pd.DataFrame) -> Answered:
    labelled = predictions[(predictions["method"] == label) & (predictions["target"] != "")]
    test = answers_of(labelled, target, source=str(run.predictions_path))
    sound = np.flatnonzero(np.isfinite(test.predicted)).tolist()
    keys = sorted(set(test.keys))
    validation = {}
    for key in keys:
        rows = answers_of(_validation(run, label, key, target), target, source=str(run.validation_path(label, key)))
        validation[key] = rows.take(np.flatnonzero(np.isfinite(rows.predicted)).tolist())
    there = [key for key in keys if run.selection_path(label, key).is_file()]
    return Answered(
        label=label,
        test=test.take(sound),
        validation=validation,
        selections={key: run.selection(label, key) for key in there},
        broken=len(test) - len(sound),
    )


def _validation(run: RunDir, label: str, key: FoldKey, target: Target) -> pd.DataFrame:
    frame = run.validation(label, key)
    return frame[(frame["target_name"] == target.name) & (frame["target"] != "")]


def answers_of(frame: pd.DataFrame, target: Target, *, source: str) -> Answers:
    """Rows of a table of predictions of a number or a time. Raises RunError for a cell that is no number."""
    survival = target.kind == "survival"
    asked = "risk" if survival else "prediction"
    missing = [name for name in (asked, *(["event"] if survival else [])) if name not in frame.columns]
    if missing:
        raise RunError(f"{source}: columns missing: {', '.join(missing)}. {GIVE_AGAIN}")
    stems = sorted(int(name[9:]) for name in frame.columns if name.startswith("survival_") and name[9:].isdigit())
    keys = frame[list(NUMBERED)].to_numpy().tolist()
    truth = _numbers(frame, ["target"], source=source)[:, 0]
    events = _numbers(frame, ["event"], source=source)[:, 0] if survival else np.ones(len(frame))
    if not np.isfinite(truth).all() or (survival and (truth < 0).any()) or not np.isin(events, (0, 1)).all():
        asked_for = "a time of 0 or more and an event of 0 or 1" if survival else "a finite number"
        raise RunError(f"{source}: a label of “{target.name}” is not {asked_for}. {GIVE_AGAIN}")
    return Answers(
        patients=tuple(frame["patient"]),
        slides=tuple(frame["slide"]),
        keys=tuple(FoldKey(*map(int, row)) for row in keys),
        truth=truth,
        events=events == 1,
        predicted=_numbers(frame, [asked], source=source)[:, 0],
        survival=_numbers(frame, [f"survival_{place}" for place in stems if survival], source=source),
        cuts=_numbers(frame, [f"cut_{place}" for place in stems if survival], source=source),
    )


def _numbers(frame: pd.DataFrame, columns: Sequence[str], *, source: str) -> Floats:
    """(n, columns); NaN where a cell is empty."""
    try:
        cells = [frame[name].replace("", "nan").to_numpy(dtype=np.float64) for name in columns]
    except KeyError as error:
        raise RunError(f"{source}: column {error} is missing. {GIVE_AGAIN}") from error
    except ValueError as error:
        raise RunError(f"{source}: a cell of {', '.join(columns)} is no number ({error}). {GIVE_AGAIN}") from error
    return np.stack(cells, axis=1) if cells else np.empty((len(frame), 0))


def _everyone(
    targets: Sequence[Target],
    studies: Sequence[Study | TargetStudy],
    predictions: pd.DataFrame,
    *,
    cohort: pd.DataFrame,
    shared: dict[str, Any],
) -> Study:
    """The run without answers. A prediction counts as there when every target of the item has its row."""
    classes, grouped = _grouped(cohort, targets, studies)
    counted = predictions.groupby(_ITEM, sort=True)["target_name"].nunique()
    whole = [item for item, n in counted.items() if n == len(targets)]
    run: RunDir = shared["run"]
    methods = []
    for label in run.methods():
        test = _bare([item[1:] for item in whole if item[0] == label])
        validation = {
            key: _bare(sorted(set(map(tuple, run.validation(label, key)[[*NUMBERED, "patient", "slide"]].to_numpy()))))
            for key in sorted(set(test.keys))
        }
        there = {key: run.selection(label, key) for key in validation if run.selection_path(label, key).is_file()}
        methods.append(Trained(label=label, test=test, validation=validation, selections=there, target=""))
    return Study(
        classes=classes,
        target=str(shared["config"]["task"]["target"]),
        cohort=grouped,
        methods=tuple(method for method in methods if len(method.test)),
        **shared,
    )


def _grouped(
    cohort: pd.DataFrame, targets: Sequence[Target], studies: Sequence[Study | TargetStudy]
) -> tuple[tuple[str, ...], pd.DataFrame]:
    """By what patients are counted: the classes or the events of a single target, else patients as such."""
    if len(targets) > 1 or targets[0].kind == "regression":
        return EVERYBODY, cohort.assign(target=EVERYBODY[0])
    study = studies[0]
    if isinstance(study, Study):
        return study.classes, cohort
    seen = {
        patient: OUTCOMES[int(event)]
        for method in study.methods
        for patient, event in zip(method.test.patients, method.test.events, strict=True)
    }
    return OUTCOMES, cohort.assign(target=[seen.get(patient, "") for patient in cohort["patient"]])


def _bare(items: Sequence[tuple[Any, ...]]) -> Rows:
    """Rows of (repeat, fold, seed, patient, slide)."""
    keys = [FoldKey(*map(int, item[:3])) for item in items]
    return bare_rows(keys, [str(item[3]) for item in items], [str(item[4]) for item in items])
