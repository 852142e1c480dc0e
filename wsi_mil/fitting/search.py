"""Settings searched inside the part that a model trains on. The only `import optuna`.

Each trial is trained and judged on inner folds of the training part, patients whole (sites are not kept whole there).
Neither the fold's validation nor its test part has a say, so what follows (epoch, threshold, calibration) is chosen on
patients the search did not see; with selection none, validation is part of training, here too.
Everything is a function of the fold, the seed and the earlier trials, so a search that was killed goes on: trials that
stand in its file are not trained again.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import optuna
import pandas as pd
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from wsi_mil.errors import ConfigError, RunError, UserError
from wsi_mil.fitting.datasets import BagDataset
from wsi_mil.fitting.evaluation import answer_each, stacked_logits
from wsi_mil.fitting.randomness import Stream, derive_seed
from wsi_mil.fitting.search_spec import SearchSpec, as_number
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.methods import MethodSpec, build, rehearse, resolve_methods
from wsi_mil.results.reading import read_frame
from wsi_mil.runs import write_frame
from wsi_mil.settings import override
from wsi_mil.splits import make_folds
from wsi_mil.targets._base import Balance
from wsi_mil.tasks import Task, check_training
from wsi_mil.training import FitFiles, fit, weights_seed

_Part = tuple[BagDataset, BagDataset]
_COLUMNS = ("trial", "settings", "loss", "problem")
_FAULT = "fault:"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search chose."""

    method: MethodSpec
    spec: TrainSpec
    trials: int
    failed: int
    loss: float
    chosen: Mapping[str, Any]

    def as_selection(self, inner_folds: int) -> dict[str, Any]:
        """The field `search` of `Selection`."""
        told = {"trials": self.trials, "failed": self.failed, "inner_folds": inner_folds, "metric": "loss"}
        return told | {"value": self.loss, "chosen": dict(self.chosen)}


def search(
    method: MethodSpec,
    spec: TrainSpec,
    wished: SearchSpec,
    *,
    task: Task,
    in_dim: int,
    balance: Balance,
    train: BagDataset,
    seed: int,
    trials_path: Path,
    on_model: Callable[[str], None] = lambda note: None,
) -> Found:
    """The settings with the least mean loss on inner folds of `train`, the training part of one fold.

    task: not yet fitted.  on_model: called after each trained model with the trial's number in words.
    Raises RunError when every trial failed.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = {name: _distribution(bounds) for name, bounds in wished.space.items()}
    sampler = optuna.samplers.TPESampler(seed=derive_seed(seed, Stream.SAMPLER) % 2**32)
    study = optuna.create_study(direction="minimize", sampler=sampler)
    judge = _Judge(task=task, in_dim=in_dim, balance=balance, parts=_inner_parts(train, task, wished, seed), seed=seed)
    rows = _stored(trials_path)
    for number in range(wished.trials):
        trial = study.ask(space)
        if number == len(rows):
            told = partial(on_model, f"search trial {number + 1}/{wished.trials}")
            loss, problem = judge.loss(*_with(method, spec, trial.params), on_model=told)
            rows.append({"trial": number, "settings": json.dumps(trial.params), "loss": loss, "problem": problem})
            write_frame(trials_path, pd.DataFrame(rows, columns=list(_COLUMNS)))
        elif rows[number]["settings"] != json.dumps(trial.params):
            raise RunError(f"{trials_path} is of another search. Remove it and give the same command again.")
        value = float(rows[number]["loss"])
        if math.isfinite(value):
            study.tell(trial, value)
        else:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
    if all(not math.isfinite(float(row["loss"])) for row in rows):
        raise RunError(f"all {len(rows)} trials of the search failed; the first: {rows[0]['problem']}")
    chosen = study.best_trial.params
    own_method, own_spec = _with(method, spec, chosen)
    failed = sum(not math.isfinite(float(row["loss"])) for row in rows)
    return Found(
        method=own_method, spec=own_spec, trials=len(rows), failed=failed, loss=study.best_value, chosen=chosen
    )


def check_space(
    method: MethodSpec, spec: TrainSpec, wished: SearchSpec, *, task: Task, in_dim: int, balance: Balance
) -> None:
    """Raise ConfigError for choices, or ends of a range, that the method or its training cannot have."""
    if build(method, in_dim=in_dim, task=task, seed=0)[1].init_from is not None:
        raise ConfigError(
            f"method {method.shown}: it starts from another trained method, which a search does not train. Give its "
            f"settings, and search without it."
        )
    foreign = [n for n in wished.space if n.startswith("regularisers.") and n.split(".")[1] not in method.regularisers]
    if foreign:
        raise ConfigError(f"search.space: {', '.join(foreign)}: method {method.shown} has no such plug-in.")
    values = {name: _values(bounds) for name, bounds in wished.space.items()}
    for place in range(max(map(len, values.values()))):
        settings = {name: found[place % len(found)] for name, found in values.items()}
        own_method, own_spec = _with(method, spec, settings)
        own_spec.check()
        check_training(task, bags_per_step=own_spec.bags_per_step, balance=balance)
        rehearse(own_method, in_dim=in_dim, task=task, bags_per_step=own_spec.bags_per_step)


def _values(bounds: Any) -> list[Any]:
    """All choices, or both ends."""
    return bounds if isinstance(bounds, list) else [as_number(bounds["low"]), as_number(bounds["high"])]


def _distribution(bounds: Any) -> BaseDistribution:
    if isinstance(bounds, list):
        return CategoricalDistribution(bounds)
    low, high, log = as_number(bounds["low"]), as_number(bounds["high"]), bool(bounds.get("log", False))
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log)
    return FloatDistribution(float(low), float(high), log=log)


def _with(method: MethodSpec, spec: TrainSpec, settings: Mapping[str, Any]) -> tuple[MethodSpec, TrainSpec]:
    """A method and its training with these settings. Raises ConfigError for one that is not there."""
    groups: dict[str, dict[str, Any]] = {"train": {}, "params": {}, "objective": {}}
    regularisers = {name: dict(params) for name, params in method.regularisers.items()}
    for name, value in settings.items():
        place, _, rest = name.partition(".")
        if place == "regularisers":
            plug_in, _, setting = rest.partition(".")
            regularisers.setdefault(plug_in, {})[setting] = value
        else:
            groups[place][rest] = value
    changed = replace(
        method,
        label=method.shown,
        params=method.params | groups["params"],
        objective=method.objective | groups["objective"],
        regularisers=regularisers,
    )
    own = override(spec, groups["train"], where="search.space, train")
    return resolve_methods([changed])[0], own


def _inner_parts(train: BagDataset, task: Task, wished: SearchSpec, seed: int) -> tuple[_Part, ...]:
    """What trains and what judges in each inner fold."""
    strata: dict[str, set[str]] = {}
    for item, found in zip(train.items, task.strata(train.values), strict=True):
        strata.setdefault(item.patient, set()).update(found)
    folds = make_folds(
        strata,
        n_folds=wished.inner_folds,
        seed=derive_seed(seed, Stream.SPLIT) % 2**31,
        validation=0.0,
        allow_absent_class=True,
        essential=task.essential(train.values),
    )
    parts = [[[i for i in train.items if i.patient in set(who)] for who in (f.train, f.test)] for f in folds]
    return tuple((BagDataset(train.reader, ours), BagDataset(train.reader, theirs)) for ours, theirs in parts)


@dataclass(frozen=True, kw_only=True)
class _Judge:
    """Trains on inner folds and says how well settings do on the rest."""

    task: Task
    in_dim: int
    balance: Balance
    parts: tuple[_Part, ...]
    seed: int

    def loss(self, method: MethodSpec, spec: TrainSpec, *, on_model: Callable[[], None]) -> tuple[float, str]:
        """Mean loss over the inner folds and nothing, or NaN and the reason."""
        losses = []
        try:
            for train, judged in self.parts:
                losses.append(self._loss(method, spec, train, judged))
                on_model()
        except Exception as error:
            told = str(error) if isinstance(error, UserError) else f"{_FAULT} {type(error).__name__}: {error}"
            return math.nan, told
        return math.fsum(losses) / len(losses), ""

    def _loss(self, method: MethodSpec, spec: TrainSpec, train: BagDataset, judged: BagDataset) -> float:
        """After a fixed number of epochs, so that no trial is judged at its luckiest one."""
        task = self.task.fitted(train.values)
        weights = task.class_weights(train.values) if self.balance == "weight" else None
        start = weights_seed(self.seed)
        model, objective = build(method, in_dim=self.in_dim, task=task, seed=start, class_weights=weights)
        with TemporaryDirectory() as folder:
            fit(
                model,
                objective,
                task=task,
                train=train,
                validation=BagDataset(train.reader, ()),
                spec=replace(spec, selection="none", tensorboard=False, checkpoint_seconds=math.inf),
                balance=self.balance,
                seed=self.seed,
                files=FitFiles(resume=Path(folder) / "resume.ckpt", log=Path(folder) / "log.csv"),
            )
        logits = stacked_logits([found for _, found in answer_each(model, judged, device=spec.torch_device())])
        return float(task.criterion(logits.shape[1])(logits, task.tensor(judged.values)))


def _stored(path: Path) -> list[dict[str, Any]]:
    """The trials of an earlier start, up to the first that a fault stopped (memory, a share): it is made again."""
    if not path.is_file():
        return []
    rows = [row | {"loss": row["loss"] or "nan"} for row in read_frame(path, _COLUMNS).to_dict("records")]
    faults = (number for number, row in enumerate(rows) if row["problem"].startswith(_FAULT))
    return rows[: next(faults, len(rows))]
