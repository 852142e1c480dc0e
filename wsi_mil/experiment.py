"""The loop over methods, folds and seeds: train each model, test it, and collect what they predicted."""

import logging
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from tiling.atomic import remove_leftovers
from wsi_mil import __version__
from wsi_mil.errors import CohortError, ConfigError, RunError, UserError
from wsi_mil.fitting.checkpoints import load_model, save_model
from wsi_mil.fitting.choices import Choices, choose_cuts
from wsi_mil.fitting.datasets import BagDataset, BagReader, Cache, Item, values_of
from wsi_mil.fitting.evaluation import (
    Answer,
    answer_each,
    answers_by_target,
    calibrated,
    prediction_columns,
    prediction_frame,
    split_by_slide,
)
from wsi_mil.fitting.search_spec import SearchSpec
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.lookup import find_model
from wsi_mil.malloc import keep_freed_memory
from wsi_mil.methods import MethodSpec, build, rehearse, score_columns
from wsi_mil.models._base import MILModel
from wsi_mil.outcomes import Failure
from wsi_mil.progress import Bar, progress
from wsi_mil.results.faithfulness import judge_of_classes, measure_bags
from wsi_mil.runs import FoldKey, RunDir, write_frame
from wsi_mil.settings import override
from wsi_mil.splits import Fold, folds_to_frame
from wsi_mil.study import Study, cohort_frame
from wsi_mil.targets._base import Answers
from wsi_mil.tasks import Task, check_training
from wsi_mil.training import FitFiles, check_metric, fit, weights_seed, why_fixed
from wsi_mil.workers import run_in_processes

if TYPE_CHECKING:
    from wsi_mil.fitting.search import Found

_LOG = logging.getLogger(__name__)
_PACKAGES = ("torch", "lightning", "numpy", "pandas", "h5py", "timm")


def begin(
    run: RunDir,
    study: Study,
    folds: Sequence[Fold],
    config: Mapping[str, Any],
    *,
    device: torch.device,
    workers: int = 1,
) -> None:
    """Claim the run folder and write what does not depend on any model. Raises RunError for another run's folder."""
    run.claim(config)
    remove_leftovers(run.path)
    slides = config["slides"]
    run.write_environment(environment(device, workers))
    write_frame(run.folds_path, folds_to_frame(folds))
    write_frame(run.cohort_path, cohort_frame(study, Path(slides) if slides else None))


def environment(device: torch.device, workers: int) -> dict[str, Any]:
    """Versions, device and threads, without any path or name of the machine."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {"wsi-mil": __version__, **{name: version(name) for name in _PACKAGES}},
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "threads": threads_of(workers),
    }


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What became of each model."""

    done: tuple[str, ...]
    reused: tuple[str, ...]
    failures: tuple[Failure, ...]


Plan = tuple[MethodSpec, TrainSpec]
"""A method and how it is trained."""


def plan_methods(
    study: Study,
    methods: Sequence[MethodSpec],
    train: TrainSpec,
    search: SearchSpec = SearchSpec(),  # noqa: B008
) -> list[Plan]:
    """Each method with its own training settings, tried on one made-up step before the run begins.

    Raises ConfigError.
    """
    plans = [(m, override(train, m.train, where=f"method {m.shown}, train")) for m in methods]
    for method, spec in plans:
        spec.check()
        check_training(study.task, bags_per_step=spec.bags_per_step, balance=study.balance)
        check_metric(study.task, spec)
        rehearse(method, in_dim=study.in_dim, task=study.task, bags_per_step=spec.bags_per_step)
        _check_sizes(method, spec, study)
        _check_baseline(method, spec, study, plans)
        if search.trials:
            from wsi_mil.fitting.search import check_space

            check_space(method, spec, search, task=study.task, in_dim=study.in_dim, balance=study.balance)
    return plans


def check_parts(study: Study, folds: Sequence[Fold]) -> None:
    """Raise CohortError for a training part from which a target cannot be learnt, such as times without an event."""
    for fold in folds:
        try:
            study.task.fitted(values_of(study.of_patients(fold.train)))
        except CohortError as error:
            raise CohortError(f"repeat {fold.repeat}, fold {fold.fold}: {error}") from error


def selection_notes(study: Study, folds: Sequence[Fold], plans: Sequence[Plan]) -> list[str]:
    """A sentence for each method whose epoch validation was to choose and cannot; said at once, before hours of it."""
    notes = []
    for method, spec in plans:
        found = [why_fixed(study.of_patients(fold.validation), study.task, spec) for fold in folds]
        reasons = sorted({reason for reason in found if reason is not None})
        if spec.selection == "none" or not reasons:
            continue
        n = sum(reason is not None for reason in found)
        notes.append(
            f"{method.shown}: in {n} of {len(folds)} folds validation chooses no epoch ({'; '.join(reasons)}), so all "
            f"{spec.epochs} are trained. --train.selection none trains on the validation patients too, for a number of "
            f"epochs that you fix; more patients, or where they suffice a greater --folds.validation, give validation "
            f"a choice."
        )
        _LOG.warning("%s", notes[-1])
    return notes


def _check_sizes(method: MethodSpec, spec: TrainSpec, study: Study) -> None:
    """Raise ConfigError for bags with fewer tiles than the method can take."""
    least = find_model(method.name).min_tiles
    if spec.tile_cap is not None and spec.tile_cap < least:
        raise ConfigError(f"method {method.shown} needs {least} tiles a bag; train.tile_cap is {spec.tile_cap}.")
    tiles = {item.id: sum(study.headers[slide_id].n for slide_id in item.slide_ids) for item in study.items}
    short = sorted((n, name) for name, n in tiles.items() if n < least)
    if short:
        shown = ", ".join(f"{name} ({n})" for n, name in short[:3])
        raise ConfigError(
            f"method {method.shown} needs at least {least} tiles a bag; {len(short)} of {len(tiles)} bags have fewer: "
            f"{shown}. Leave them out in fixes.csv, or take another method."
        )


def _check_baseline(method: MethodSpec, spec: TrainSpec, study: Study, plans: Sequence[Plan]) -> None:
    """Raise ConfigError unless the method's starting point is trained in the same run, with the same seeds."""
    name = _baseline(method, study)
    if name is None:
        return
    try:
        label = _label_of(plans, name, own=method.shown)
        _check_start(method, next(one for one, _ in plans if one.shown == label), study)
    except ConfigError as error:
        raise ConfigError(f"method {method.shown}: {error}") from error
    seeds = next(other.seeds for one, other in plans if one.shown == label)
    if not set(spec.seeds) <= set(seeds):
        raise ConfigError(f"method {method.shown} starts from {label}, which has the seeds {list(seeds)} only.")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Job:
    """One model to train and test. Travels to another process."""

    run: RunDir
    study: Study
    reader: BagReader
    method: MethodSpec
    spec: TrainSpec
    fold: Fold
    seed: int
    plans: Sequence[Plan]
    """Of all methods of the run."""
    search: SearchSpec

    def parts(self) -> tuple[BagDataset, BagDataset]:
        """What is trained on, and what chooses the epoch; the latter is empty where it was merged into the former."""
        merged = self.spec.selection == "none"
        patients = [*self.fold.train, *self.fold.validation] if merged else self.fold.train
        held_out = () if merged else self.study.of_patients(self.fold.validation)
        return BagDataset(self.reader, self.study.of_patients(patients)), BagDataset(self.reader, held_out)

    @property
    def steps(self) -> int:
        """Units of progress: epochs, and models of the search."""
        return self.spec.epochs + self.search.trials * self.search.inner_folds

    @property
    def key(self) -> FoldKey:
        return FoldKey(self.fold.repeat, self.fold.fold, self.seed)

    @property
    def name(self) -> str:
        return f"{self.method.shown} {self.key}"

    def is_whole(self) -> bool:
        """Whether this model needs no work."""
        tested = self.study.of_patients(self.fold.test)
        return self.run.is_whole(self.method.shown, self.key, (s for item in tested for s in item.slide_ids))

    def steps_logged(self) -> int:
        """Of these, what stands in this model's files by now."""
        log = self.run.log_path(self.method.shown, self.key)
        trials = self.run.trials_path(self.method.shown, self.key)
        return _rows(log) + _rows(trials) * self.search.inner_folds


def _rows(path: Path) -> int:
    return max(0, path.read_bytes().count(b"\n") - 1) if path.is_file() else 0


def train_all(
    run: RunDir,
    study: Study,
    folds: Sequence[Fold],
    plans: Sequence[Plan],
    *,
    workers: int = 1,
    search: SearchSpec = SearchSpec(),  # noqa: B008
) -> Loop:
    """Train and test every model that is not finished; a model that fails is recorded and the others go on.

    workers: processes; the threads of this machine are shared out among them.
    """
    keep_freed_memory()
    readers = _readers(study, plans)
    jobs = [
        _Job(
            run=run,
            study=study,
            reader=readers[spec.cache],
            method=method,
            spec=spec,
            fold=fold,
            seed=seed,
            plans=plans,
            search=search,
        )
        for method, spec in plans
        for fold in folds
        for seed in spec.seeds
    ]
    finished = [job for job in jobs if job.is_whole()]
    for job in jobs:
        if job in finished:
            run.resume_path(job.method.shown, job.key).unlink(missing_ok=True)
        else:  # a file of it was lost: what is left must not pass for a finished model
            run.selection_path(job.method.shown, job.key).unlink(missing_ok=True)
    todo = [job for job in jobs if job.name not in {other.name for other in finished}]
    done, failures = [], []
    with progress("training", sum(job.steps for job in todo), "epochs") as bar:
        for job, problem in _in_turn(todo, bar, workers):
            if problem:
                failures.append(Failure(item=job.name, outcome="failed", reason=problem))
            else:
                done.append(job.name)
    names = [job.name for job in jobs]
    return Loop(
        done=tuple(sorted(done, key=names.index)),
        reused=tuple(job.name for job in finished),
        failures=tuple(sorted(failures, key=lambda failure: names.index(failure.item))),
    )


def _readers(study: Study, plans: Sequence[Plan]) -> dict[Cache, BagReader]:
    """A reader for each wish; those that keep bags are one, so that no bag is kept twice."""
    readers = {spec.cache: BagReader(study.store, cache=spec.cache, total_bytes=study.total_bytes) for _, spec in plans}
    shared = {reader.keeps: reader for reader in readers.values()}
    return {cache: shared[reader.keeps] for cache, reader in readers.items()}


def threads_of(workers: int) -> int:
    """Threads that each of some workers computes with."""
    return max(1, torch.get_num_threads() // workers)


def _check_start(method: MethodSpec, baseline: MethodSpec, study: Study) -> None:
    """Raise ConfigError unless a model of `method` can take over one of `baseline`."""
    model, objective = build(method, in_dim=study.in_dim, task=study.task, seed=0)
    other, first = build(baseline, in_dim=study.in_dim, task=study.task, seed=1)
    if first.init_from is not None:
        raise ConfigError(f"it starts from {baseline.shown}, which itself starts from another method.")
    try:
        objective.start_from(model, other)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ConfigError(f"it cannot start from {baseline.shown}: {reason}") from error


def _in_turn(jobs: Sequence[_Job], bar: Bar, workers: int) -> Iterator[tuple[_Job, str]]:
    """Those that start from another method's trained model come after all others."""
    methods = {job.method.shown: job.method for job in jobs}
    late = {label for label, method in methods.items() if _baseline(method, jobs[0].study) is not None}
    for wanted in (False, True):
        some = [job for job in jobs if (job.method.shown in late) == wanted]
        yield from _in_processes(some, bar, workers) if min(workers, len(some)) > 1 else _here(some, bar)


def _baseline(method: MethodSpec, study: Study) -> str | None:
    """Name of the method whose trained model this one starts from."""
    return build(method, in_dim=study.in_dim, task=study.task, seed=0)[1].init_from


def _label_of(plans: Sequence[Plan], name: str, *, own: str) -> str:
    """Label of the run's method of this label, or of this name without plug-ins. Raises ConfigError without one.

    own: label of the method that starts from it, which cannot be itself.
    """
    others = [method for method, _ in plans if method.shown != own]
    found = [m.shown for m in others if m.shown == name]
    found += [m.shown for m in others if m.name == name and not m.regularisers]
    if not found:
        raise ConfigError(f"it starts from a trained {name}, which is no method of this run. Add {name} to methods.")
    return found[0]


def _here(jobs: Sequence[_Job], bar: Bar) -> Iterator[tuple[_Job, str]]:
    for job in jobs:
        before = bar.done
        problem = _try_one(job, lambda note, name=job.name: bar.advance(1, f"{name} {note}"))  # type: ignore[misc]
        bar.advance(job.steps - (bar.done - before))
        yield job, problem


def _in_processes(jobs: Sequence[_Job], bar: Bar, workers: int) -> Iterator[tuple[_Job, str]]:
    """The same in several processes. What they have done by now is read off their logs."""
    finished: set[str] = set()
    over = Event()

    def watch() -> None:
        while not over.wait(1.0):
            now = sum(job.steps if job.name in finished else job.steps_logged() for job in jobs)
            bar.advance(max(0, now - bar.done))

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        start = partial(_start_worker, threads_of(workers))
        for job, problem in run_in_processes(_try_one, jobs, workers=workers, start=start):
            finished.add(job.name)
            yield job, "the process was killed, twice; is there enough memory?" if problem is None else problem
    finally:
        over.set()
        watcher.join()
        bar.advance(max(0, sum(job.steps for job in jobs if job.name in finished) - bar.done))


def _start_worker(threads: int) -> None:
    keep_freed_memory()
    torch.set_num_threads(threads)


def _try_one(job: _Job, on_epoch: Callable[[str], None] = lambda note: None) -> str:
    """Train and test one model; what went wrong, or nothing."""
    try:
        _train_one(job, on_epoch)
    except Exception as error:
        _LOG.debug("%s", job.name, exc_info=True)
        if isinstance(error, UserError):
            return str(error)
        own = job.method.name if job.method.name.endswith(".py") else ""
        return f"{type(error).__name__}: {error}" + (f" (`wsi-mil check {own}` says what it breaks)" if own else "")
    return ""


def _train_one(job: _Job, on_epoch: Callable[[str], None]) -> None:
    run, study, key, label = job.run, job.study, job.key, job.method.shown
    train, validation = job.parts()
    found = _searched(job, train, on_epoch) if job.search.trials else None
    method, spec = (found.method, found.spec) if found else (job.method, job.spec)
    task = study.task.fitted(train.values)
    weights = task.class_weights(train.values) if study.balance == "weight" else None
    model, objective = build(method, in_dim=study.in_dim, task=task, seed=weights_seed(key.seed), class_weights=weights)
    if objective.init_from is not None and not run.resume_path(label, key).is_file():
        baseline = run.checkpoint_path(_label_of(job.plans, objective.init_from, own=label), key)
        objective.start_from(model, load_model(baseline, torch.device("cpu"))[0])
    selection = fit(
        model,
        objective,
        task=task,
        train=train,
        validation=validation,
        spec=spec,
        balance=study.balance,
        seed=key.seed,
        files=FitFiles(
            resume=run.resume_path(label, key),
            log=run.log_path(label, key),
            tensorboard=run.tensorboard_dir(label, key) if spec.tensorboard else None,
        ),
        on_epoch=on_epoch,
    )
    save_model(run.checkpoint_path(label, key), model, method=method, task=task)
    told = answers_by_target([found for _, found in answer_each(model, validation, device=spec.torch_device())], task)
    choices = choose_cuts(validation.items, told, task, calibration=spec.calibration)
    rows = _frame(validation.items, told, task, choices, label=label, key=key)
    write_frame(run.validation_path(label, key), rows)
    test = BagDataset(job.reader, study.of_patients(job.fold.test))
    told = answers_by_target(list(_test(run, study, model, test, label=label, key=key, spec=spec)), task)
    write_frame(run.test_path(label, key), _frame(test.items, told, task, choices, label=label, key=key))
    if task.is_of_classes:
        judge = judge_of_classes(model, task=task, device=spec.torch_device())
        used = measure_bags(test, judge, min_tiles=model.min_tiles, seed=key.seed)
        write_frame(run.faithfulness_path(label, key), used)
    thresholds, calibration = choices.as_selection()
    searched = found.as_selection(job.search.inner_folds) if found else None
    run.write_selection(label, key, replace(selection, thresholds=thresholds, calibration=calibration, search=searched))
    run.resume_path(label, key).unlink(missing_ok=True)


def _searched(job: _Job, train: BagDataset, on_epoch: Callable[[str], None]) -> "Found":
    from wsi_mil.fitting.search import search

    return search(
        job.method,
        job.spec,
        job.search,
        task=job.study.task,
        in_dim=job.study.in_dim,
        balance=job.study.balance,
        train=train,
        seed=job.key.seed,
        trials_path=job.run.trials_path(job.method.shown, job.key),
        on_model=on_epoch,
    )


def _frame(
    items: Sequence[Item], told: Mapping[str, Answers], task: Task, choices: Choices, *, label: str, key: FoldKey
) -> pd.DataFrame:
    each = {t.name: calibrated(told[t.name], t, choices.calibrators.get(t.name)) for t in task.targets}
    return prediction_frame(items, each, task, method=label, key=key)


def _test(
    run: RunDir, study: Study, model: MILModel, test: BagDataset, *, label: str, key: FoldKey, spec: TrainSpec
) -> Iterator[Answer]:
    """What one model says of its test part; the scores of the tiles are written on the way."""
    columns = score_columns(model, study.task)
    for bag, found in answer_each(model, test, device=spec.torch_device(), columns=columns):
        headers = [study.headers[slide_id] for slide_id in bag.slide_ids]
        for scores in split_by_slide(bag, found.tile_scores, headers, columns):
            run.write_scores(label, key, scores)
        yield found


def collect_predictions(run: RunDir, study: Study, folds: Sequence[Fold]) -> None:
    """Write predictions.csv from the finished models. Raises RunError unless its key is unique and complete."""
    parts = {(f.repeat, f.fold): study.of_patients(f.test) for f in folds}
    frames = [pd.DataFrame(columns=prediction_columns(study.task))]
    for label in run.methods():
        for key in run.keys(label):
            frame = run.test(label, key)
            _check_rows(frame, parts[key.repeat, key.fold], study.task, where=f"{label} {key}")
            frames.append(frame)
    write_frame(run.predictions_path, pd.concat(frames[1:] or frames, ignore_index=True))


def _check_rows(frame: pd.DataFrame, items: Sequence[Item], task: Task, *, where: str) -> None:
    found = sorted(zip(frame["target_name"], frame["patient"], frame["slide"], strict=True))
    places = [(i.patient, i.slide_ids[0] if task.level == "slide" else "") for i in items]
    asked = sorted((target.name, *place) for target in task.targets for place in places)
    if found != asked:
        raise RunError(
            f"{where}: the test rows are not those of its fold ({len(found)} rows for {len(asked)} items). "
            f"Remove the selection.json of this model and give the same command again."
        )
