"""The loop over methods, folds and seeds: train each model, test it, and collect what they predicted."""

import logging
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from tiling.atomic import remove_leftovers
from wsi_mil import __version__
from wsi_mil.checkpoints import save_model
from wsi_mil.datasets import BagDataset, BagReader, Cache, Item
from wsi_mil.errors import RunError, UserError
from wsi_mil.evaluation import answer_each, prediction_columns, prediction_rows, split_by_slide
from wsi_mil.malloc import keep_freed_memory
from wsi_mil.methods import MethodSpec, build, override, rehearse
from wsi_mil.models._base import MILModel
from wsi_mil.outcomes import Failure
from wsi_mil.progress import Bar, progress
from wsi_mil.runs import FoldKey, RunDir, write_frame
from wsi_mil.splits import Fold, folds_to_frame
from wsi_mil.study import Study, cohort_frame
from wsi_mil.tasks import Task
from wsi_mil.thresholds import threshold_of_rows
from wsi_mil.train_spec import TrainSpec
from wsi_mil.training import FitFiles, fit, weights_seed
from wsi_mil.workers import run_in_processes

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


def plan_methods(study: Study, methods: Sequence[MethodSpec], train: TrainSpec) -> list[Plan]:
    """Each method with its own training settings, tried on one made-up step before the run begins.

    Raises ConfigError.
    """
    plans = [(m, override(train, m.train, where=f"method {m.shown}, train")) for m in methods]
    for method, spec in plans:
        spec.check()
        rehearse(method, in_dim=study.in_dim, task=study.task, bags_per_step=spec.bags_per_step)
    return plans


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

    def epochs_logged(self) -> int:
        """Epochs that the log of this model holds by now."""
        path = self.run.log_path(self.method.shown, self.key)
        return max(0, path.read_bytes().count(b"\n") - 1) if path.is_file() else 0


def train_all(run: RunDir, study: Study, folds: Sequence[Fold], plans: Sequence[Plan], *, workers: int = 1) -> Loop:
    """Train and test every model that is not finished; a model that fails is recorded and the others go on.

    workers: processes; the threads of this machine are shared out among them.
    """
    keep_freed_memory()
    readers = _readers(study, plans)
    jobs = [
        _Job(run=run, study=study, reader=readers[spec.cache], method=method, spec=spec, fold=fold, seed=seed)
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
    with progress("training", sum(job.spec.epochs for job in todo), "epochs") as bar:
        for job, problem in _in_processes(todo, bar, workers) if min(workers, len(todo)) > 1 else _here(todo, bar):
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


def _here(jobs: Sequence[_Job], bar: Bar) -> Iterator[tuple[_Job, str]]:
    for job in jobs:
        before = bar.done
        problem = _try_one(job, lambda note, name=job.name: bar.advance(1, f"{name} {note}"))  # type: ignore[misc]
        bar.advance(job.spec.epochs - (bar.done - before))
        yield job, problem


def _in_processes(jobs: Sequence[_Job], bar: Bar, workers: int) -> Iterator[tuple[_Job, str]]:
    """The same in several processes. What they have done by now is read off their logs."""
    finished: set[str] = set()
    over = Event()

    def watch() -> None:
        while not over.wait(1.0):
            now = sum(job.spec.epochs if job.name in finished else job.epochs_logged() for job in jobs)
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
        bar.advance(max(0, sum(job.spec.epochs for job in jobs if job.name in finished) - bar.done))


def _start_worker(threads: int) -> None:
    keep_freed_memory()
    torch.set_num_threads(threads)


def _try_one(job: _Job, on_epoch: Callable[[str], None] = lambda note: None) -> str:
    """Train and test one model; what went wrong, or nothing."""
    try:
        _train_one(job, on_epoch)
    except Exception as error:
        _LOG.debug("%s", job.name, exc_info=True)
        return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return ""


def _train_one(job: _Job, on_epoch: Callable[[str], None]) -> None:
    run, study, reader, method, spec, fold, key = (
        job.run,
        job.study,
        job.reader,
        job.method,
        job.spec,
        job.fold,
        job.key,
    )
    label = method.shown
    merged = spec.selection == "none"
    train = study.of_patients([*fold.train, *fold.validation] if merged else fold.train)
    validation = BagDataset(reader, () if merged else study.of_patients(fold.validation))
    weights = class_weights(train, len(study.task.classes)) if study.balance == "weight" else None
    model, objective = build(
        method, in_dim=study.in_dim, task=study.task, seed=weights_seed(key.seed), class_weights=weights
    )
    boards = run.tensorboard_dir(label, key) if spec.tensorboard else None
    selection = fit(
        model,
        objective,
        task=study.task,
        train=BagDataset(reader, train),
        validation=validation,
        spec=spec,
        balance=study.balance,
        seed=key.seed,
        files=FitFiles(resume=run.resume_path(label, key), log=run.log_path(label, key), tensorboard=boards),
        on_epoch=on_epoch,
    )
    save_model(run.checkpoint_path(label, key), model, method=method, task=study.task)
    answers = [found for _, found in answer_each(model, validation, device=spec.torch_device())]
    rows = prediction_rows(validation.items, answers, study.task, method=label, key=key)
    write_frame(run.validation_path(label, key), rows)
    test = BagDataset(reader, study.of_patients(fold.test))
    write_frame(run.test_path(label, key), _test(run, study, model, test, label=label, key=key, spec=spec))
    cut = threshold_of_rows(rows, study.task.classes)
    value = None if math.isnan(cut.value) else cut.value
    run.write_selection(label, key, replace(selection, threshold=value, threshold_source=cut.source))
    run.resume_path(label, key).unlink(missing_ok=True)


def _test(
    run: RunDir, study: Study, model: MILModel, test: BagDataset, *, label: str, key: FoldKey, spec: TrainSpec
) -> pd.DataFrame:
    """Test rows of one model; the scores of its tiles are written on the way."""
    columns = model.score_columns(study.task.classes)
    answers = []
    for bag, found in answer_each(model, test, device=spec.torch_device(), columns=columns):
        headers = [study.headers[slide_id] for slide_id in bag.slide_ids]
        for scores in split_by_slide(bag, found.tile_scores, headers, columns):
            run.write_scores(label, key, scores)
        answers.append(found)
    return prediction_rows(test.items, answers, study.task, method=label, key=key)


def class_weights(items: Sequence[Item], n_classes: int) -> Tensor:
    """Weight of each class, inverse to its share: n / (classes * n_class)."""
    counts = torch.bincount(torch.tensor([item.label for item in items]), minlength=n_classes)
    return len(items) / (n_classes * counts.clamp(min=1)).float()


def collect_predictions(run: RunDir, study: Study, folds: Sequence[Fold]) -> None:
    """Write predictions.csv from the finished models. Raises RunError unless its key is unique and complete."""
    parts = {(f.repeat, f.fold): study.of_patients(f.test) for f in folds}
    frames = [pd.DataFrame(columns=prediction_columns(study.task.classes))]
    for label in run.methods():
        for key in run.keys(label):
            frame = run.test(label, key)
            _check_rows(frame, parts[key.repeat, key.fold], study.task, where=f"{label} {key}")
            frames.append(frame)
    write_frame(run.predictions_path, pd.concat(frames[1:] or frames, ignore_index=True))


def _check_rows(frame: pd.DataFrame, items: Sequence[Item], task: Task, *, where: str) -> None:
    found = sorted(zip(frame["patient"], frame["slide"], strict=True))
    asked = sorted((i.patient, i.slide_ids[0] if task.level == "slide" else "") for i in items)
    if found != asked:
        raise RunError(
            f"{where}: the test rows are not those of its fold ({len(found)} rows for {len(asked)} items). "
            f"Remove the selection.json of this model and give the same command again."
        )
