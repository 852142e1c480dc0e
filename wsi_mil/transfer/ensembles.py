"""Trained models that answer together: the models of a run, or of a bundle, and how they decide."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wsi_mil.bags import Bag
from wsi_mil.bundle import Bundle, Known, is_bundle, open_bundle
from wsi_mil.errors import RunError
from wsi_mil.fitting.checkpoints import load_model
from wsi_mil.fitting.evaluation import answer, answers_by_target, calibrated
from wsi_mil.methods import score_columns
from wsi_mil.models._base import MILModel, StoredScores
from wsi_mil.runs import RunDir, Selection
from wsi_mil.statistics.recalibration import Calibrator
from wsi_mil.targets import ClassTarget, Target
from wsi_mil.targets._base import Answers
from wsi_mil.tasks import Task


@dataclass(frozen=True, kw_only=True)
class Ensemble:
    """The models of one method. What they say together is the mean of what each says."""

    label: str
    models: tuple[MILModel, ...]
    digests: tuple[str, ...]
    """Of each model's file, or of the bundle."""
    tasks: tuple[Task, ...]
    """Of each model: they differ in what each learnt from its own training part."""
    selections: tuple[Selection, ...]
    """Of each model."""

    @property
    def task(self) -> Task:
        """What is predicted."""
        return self.tasks[0]

    @property
    def columns(self) -> list[StoredScores]:
        """The scores of tiles that all these models give: a search may have chosen another number of heads for each."""
        first, *others = [score_columns(model, self.task) for model in self.models]
        return [column for column in first if all(column in found for found in others)]

    @property
    def selection(self) -> Selection:
        """How all of them decide together: the mean probability is held against the mean of their thresholds."""
        return mean_selection(self.selections)

    def say(self, bag: Bag, device: torch.device) -> "Said":
        """The mean answer on one bag; calibrated probabilities are the mean of what each model's calibration gives."""
        answers = [answer(model, bag, device=device, columns=self.columns) for model in self.models]
        tiles = np.mean([found.tile_scores for found in answers], axis=0, dtype=np.float64)
        each = [
            {t.name: calibrated(own[t.name], t, _calibrator(selection, t.name)) for t in task.targets}
            for found, task, selection in zip(answers, self.tasks, self.selections, strict=True)
            for own in [answers_by_target([found], task)]
        ]
        told = {t.name: t.combined([one[t.name] for one in each]) for t in self.task.targets}
        return Said(
            told=told,
            decisions={t.name: self._decide(t, told[t.name]) for t in self.task.targets},
            tile_scores=np.asarray(tiles, dtype=np.float32),
        )

    def _decide(self, target: Target, told: Answers) -> str:
        if not isinstance(target, ClassTarget):
            return ""
        shares = [float(told[f"prob_{name}"][0]) for name in target.classes]
        cut = self.selection.cut(target.name)
        if cut is None:
            return target.classes[int(np.argmax(shares))]
        return target.classes[int(shares[-1] >= cut.value)]


@dataclass(frozen=True, kw_only=True)
class Said:
    """What an ensemble says of one bag."""

    told: Mapping[str, Answers]
    """Name of each target -> the columns of predictions.csv, one row."""
    decisions: Mapping[str, str]
    """Name of each target -> the class that is called; empty where there are no classes."""
    tile_scores: NDArray[np.float32]
    """(tiles, columns)"""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the models come from: a run or a bundle."""

    path: Path
    config: Mapping[str, Any]
    """task, methods and encoder, as in a run's configuration."""
    ensembles: tuple[Ensemble, ...]
    known: Known | None
    """Those the models were trained on."""
    cautions: tuple[str, ...] = ()
    bundle: Bundle | None = None


def open_source(path: Path, device: torch.device) -> Source:
    """The models in a folder. Raises RunError or StoreError when it holds no trained model that can be used."""
    return _of_bundle(open_bundle(path), device) if is_bundle(path) else _of_run(RunDir(path), device)


def methods_of(run: RunDir) -> list[str]:
    """The methods with a finished model. Raises RunError where there is none."""
    if run.config()["kind"] == "predict":
        raise RunError(f"{run.path} holds predictions, not models. Give the folder of the run that made them.")
    labels = [label for label in run.methods() if run.keys(label)]
    if not labels:
        raise RunError(f"{run.path} holds no finished model. Give its command again to finish it.")
    return labels


def mean_selection(selections: Sequence[Selection]) -> Selection:
    """What stands for several models: the mean of their thresholds, the latest of their epochs."""
    first, n = selections[0], len(selections)
    if n == 1:
        return first
    return Selection(
        epoch=max(s.epoch for s in selections),
        chosen_by=f"each of {n} models by {_joined(s.chosen_by for s in selections)}",
        metric=None,
        value=None,
        epochs_run=max(s.epochs_run for s in selections),
        thresholds={
            name: {
                "value": math.fsum(s.thresholds[name]["value"] for s in selections) / n,
                "source": _joined(str(s.thresholds[name]["source"]) for s in selections),
            }
            for name in first.thresholds
        },
        calibration={name: _mean_calibration([s.calibration[name] for s in selections]) for name in first.calibration},
    )


def _mean_calibration(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """No map of its own: calibrated probabilities are the mean of what the models' calibrations give."""
    return {"kind": "none", "reason": f"mean over the models of: {_joined(str(one['kind']) for one in each)}"}


def _joined(texts: Iterable[str]) -> str:
    return "; ".join(sorted(set(texts)))


def _calibrator(selection: Selection, target: str) -> Calibrator | None:
    found = selection.calibration.get(target)
    return None if found is None else Calibrator.from_config(found)


def _of_bundle(bundle: Bundle, device: torch.device) -> Source:
    facts, models = bundle.facts, bundle.models(device)
    ensemble = Ensemble(
        label=bundle.label,
        models=models,
        digests=(bundle.digest,),
        tasks=bundle.tasks,
        selections=bundle.selections,
    )
    return Source(
        path=bundle.path,
        config={"task": facts["task"], "methods": [facts["method"]], "encoder": facts["encoder"]},
        ensembles=(ensemble,),
        known=bundle.known,
        bundle=bundle,
    )


def _of_run(run: RunDir, device: torch.device) -> Source:
    config, labels = run.config(), methods_of(run)
    ensembles = tuple(_load(run, label, device) for label in labels)
    used = run.cohort("status").query("status == 'used'")
    return Source(
        path=run.path,
        config={**config, "methods": [method for method in config["methods"] if method["label"] in labels]},
        ensembles=ensembles,
        known=Known.of("", {"patient": used["patient"], "slide": used["slide"]}),
        cautions=tuple(_unfinished(run, config, {e.label: len(e.models) for e in ensembles})),
    )


def _load(run: RunDir, label: str, device: torch.device) -> Ensemble:
    keys = run.keys(label)
    paths = [run.checkpoint_path(label, key) for key in keys]
    loaded = [load_model(path, device) for path in paths]
    tasks = tuple(task for _, task in loaded)
    return Ensemble(
        label=label,
        models=tuple(model for model, _ in loaded),
        digests=tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths),
        tasks=tasks,
        selections=tuple(run.selection(label, key) for key in keys),
    )


def _unfinished(run: RunDir, config: Mapping[str, Any], trained: Mapping[str, int]) -> list[str]:
    """A sentence for each method of which models are missing."""
    notes = []
    folds = run.folds()[["repeat", "fold"]].drop_duplicates()
    for method in config["methods"]:
        seeds = (method.get("train") or {}).get("seeds") or config["train"]["seeds"]
        asked, there = len(folds) * len(seeds), trained.get(method["label"], 0)
        if there < asked:
            notes.append(
                f"{method['label']}: only {there} of {asked} models are finished. Give the command of {run.path} "
                f"again, then predict into another --out."
            )
    return notes
