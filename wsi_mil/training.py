"""TrainSpec and fit(): one model trained on the bags of one fold. The only `import lightning`.

Everything random is a function of (seed, epoch, step), and the state is stored whole, so a training that was killed at
any moment and started again ends with the same bytes. Lightning Fabric does precision, scaling and devices; the loop is
ours, since its trainer has no place for exact restarts within an epoch and costs more than a step on small bags.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.wrappers import _FabricOptimizer

from wsi_mil.bags import Bag, BagBatch, pack
from wsi_mil.errors import ConfigError, RunError
from wsi_mil.fitting.boards import Boards
from wsi_mil.fitting.checkpoints import State, load_state, save_state
from wsi_mil.fitting.datasets import BagDataset, Item, check_batches, plan_epoch, read_ahead, sample_tiles, values_of
from wsi_mil.fitting.evaluation import answer_each, stacked_logits
from wsi_mil.fitting.randomness import Stream, derive_seed, own_randomness, seed_step
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.models._base import MILModel, Objective, Progress
from wsi_mil.runs import Selection, write_frame
from wsi_mil.targets._base import Balance, labelled
from wsi_mil.tasks import Task, check_training

_LOG = logging.getLogger(__name__)
_PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


@dataclass(frozen=True, kw_only=True)
class FitFiles:
    """Where one training keeps its state and its log."""

    resume: Path
    log: Path
    tensorboard: Path | None = None


def fit(
    model: MILModel,
    objective: Objective,
    *,
    task: Task,
    train: BagDataset,
    validation: BagDataset,
    spec: TrainSpec,
    balance: Balance,
    seed: int,
    files: FitFiles,
    stop_after: int | None = None,
    on_epoch: Callable[[str], None] = lambda note: None,
) -> Selection:
    """Train `model` in place and leave the chosen epoch's weights in it. Goes on where `files.resume` ends.

    task: fitted on the training part.  validation: never trained on; may be empty.
    stop_after: so many epochs of a training whose schedules run over all of `spec.epochs`.
    on_epoch: called after each epoch with its figures in words.
    Raises ConfigError when the loss is no longer finite or the method cannot be trained this way.
    """
    check_training(task, bags_per_step=spec.bags_per_step, balance=balance)
    check_batches(bags_per_step=spec.bags_per_step, n_classes=len(task.classes), objective=objective)
    check_metric(task, spec)
    with own_randomness(spec.torch_device()):
        loop = _Loop(
            model,
            objective,
            task=task,
            train=train,
            validation=validation,
            spec=spec,
            balance=balance,
            seed=seed,
            files=files,
        )
        loop.restore()
        while not loop.is_over() and loop.at.epoch != stop_after:
            loop.run_epoch()
            on_epoch(loop.note())
        return loop.finish()


def weights_seed(seed: int) -> int:
    """Seed of a model's first weights."""
    return derive_seed(seed, Stream.WEIGHTS)


def why_fixed(validation: Sequence[Item], task: Task, spec: TrainSpec) -> str | None:
    """The reason why validation does not choose the epoch; None when it does."""
    if spec.selection == "none":
        return "selection is none"
    patients = np.array([item.patient for item in validation])
    for target, values in task.split(values_of(validation).reshape(-1, task.n_values)):
        there = labelled(values)
        few = target.too_few(patients[there].tolist(), values[there])
        if few:
            return f"the validation part holds {few}"
    return None


def check_metric(task: Task, spec: TrainSpec) -> None:
    """Raise ConfigError for a figure that the task does not have."""
    figure = task.single.figure if task.single else None
    if spec.metric not in ("loss", figure):
        own = f"loss or {figure}" if figure else "loss"
        raise ConfigError(f"train.metric is {spec.metric}; for {task.target} (kind {task.kind}) it can be {own}.")


@dataclass
class _Position:
    """Where training is. Everything here and the tensors is what a restart needs."""

    epoch: int = 0
    step: int = 0
    """Forward passes done in this epoch."""
    totals: dict[str, float] = field(default_factory=dict)
    """Sum over bags of each loss term in this epoch."""
    bags: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    best_epoch: int = 0
    best_value: float = math.nan


class _Loop:
    def __init__(
        self,
        model: MILModel,
        objective: Objective,
        *,
        task: Task,
        train: BagDataset,
        validation: BagDataset,
        spec: TrainSpec,
        balance: Balance,
        seed: int,
        files: FitFiles,
    ) -> None:
        self.task, self.train, self.validation = task, train, validation
        self.spec, self.balance, self.seed, self.files = spec, balance, seed, files
        self.device = spec.torch_device()
        self.fabric = _fabric(spec)
        self.model, self.objective = model.to(self.device), objective.to(self.device)
        optimizer = objective.optimizer(model, lr=spec.lr, weight_decay=spec.weight_decay) or _adamw(
            model, objective, spec
        )
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.optimizer = cast(_FabricOptimizer, self.fabric.setup_optimizers(optimizer))
        self.why_fixed = why_fixed(validation.items, task, spec)
        self.at = _Position()
        self.best_weights: State | None = None
        self.saved_at = time.monotonic()
        self.boards = Boards(files.tensorboard)

    def is_over(self) -> bool:
        """All epochs done, or no improvement for too long."""
        waited = self.at.epoch - self.at.best_epoch
        chooses, patience = self.why_fixed is None, self.spec.patience
        return self.at.epoch >= self.spec.epochs or (chooses and patience is not None and waited >= patience)

    def run_epoch(self) -> None:
        """Train one epoch, or the rest of one, measure it, and keep its weights if validation says so."""
        batches = plan_epoch(
            self.task.labels(self.train.values),
            bags_per_step=self.spec.bags_per_step,
            balance=self.balance,
            both_classes=self.objective.needs_both_classes,
            seed=self.seed,
            epoch=self.at.epoch,
        )
        self.model.train()
        self.objective.train()
        groups = [batches[i : i + self.spec.accumulate] for i in range(0, len(batches), self.spec.accumulate)]
        done = self.at.step // self.spec.accumulate
        reader = read_ahead(self.train, [batch for group in groups[done:] for batch in group])
        for group in groups[done:]:
            self._step(group, reader, n_batches=len(batches))
            if self.at.step < len(batches):
                self._save_if_due()
        self._close_epoch()
        self._save_if_due()

    def _step(self, group: list[list[int]], reader: Iterator[list[Bag]], *, n_batches: int) -> None:
        """One step of the optimiser on the batches of `group`, their gradients added as if they were one batch."""
        lr_factor = 1.0
        if self.spec.schedule == "cosine":
            done = (self.at.epoch * n_batches + self.at.step) / (self.spec.epochs * n_batches)
            lr_factor = 0.5 * (1 + math.cos(math.pi * done))
        for parameters, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            parameters["lr"] = base * lr_factor
        n_bags = sum(map(len, group))
        for indices in group:
            packed = pack(self._sampled(next(reader), indices)).to(self.device)
            loss = self._loss(packed, indices, n_batches=n_batches)
            self.fabric.backward(loss * (len(indices) / n_bags))
            self.at.step += 1
        self._update()
        with torch.no_grad():
            self.objective.after_optimizer_step(self.model, packed, self.spec.lr * lr_factor)

    def _loss(self, batch: BagBatch, indices: list[int], *, n_batches: int) -> torch.Tensor:
        """Sum of the objective's terms on one batch, with the randomness of this step."""
        target = self.task.tensor(self.train.values[indices]).to(self.device)
        seed = derive_seed(self.seed, self.at.epoch, self.at.step, Stream.MODEL)
        seed_step(seed, self.device)
        progress = Progress(
            step=self.at.epoch * n_batches + self.at.step,
            total_steps=self.spec.epochs * n_batches,
            generator=torch.Generator(self.device).manual_seed(seed),
        )
        with self.fabric.autocast():
            terms = self.objective.loss(self.model, batch, target, progress)
            loss = torch.stack([term.float() for term in terms.values()]).sum()
        self._count(terms, loss, len(indices))
        return loss

    def _update(self) -> None:
        if self.spec.clip_norm is not None:
            self.fabric.clip_gradients(
                self.model, self.optimizer, max_norm=self.spec.clip_norm, error_if_nonfinite=False
            )
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _sampled(self, bags: list[Bag], indices: list[int]) -> list[Bag]:
        caps = [cap for cap in (self.spec.tile_cap, self.objective.tiles_per_bag) if cap is not None]
        return [
            sample_tiles(bag, min(caps, default=None), seed=self.seed, epoch=self.at.epoch, position=index)
            for bag, index in zip(bags, indices, strict=True)
        ]

    def _count(self, terms: dict[str, torch.Tensor], loss: torch.Tensor, n_bags: int) -> None:
        if not math.isfinite(loss.item()):
            values = ", ".join(f"{name} {term.item():g}" for name, term in terms.items())
            raise ConfigError(
                f"the loss is not finite any more in epoch {self.at.epoch + 1}, step {self.at.step + 1} ({values}). "
                f"Try a smaller train.lr, a train.clip_norm, or train.precision bf16 or fp32."
            )
        for name, value in [("loss", loss), *((f"loss_{name}", term) for name, term in terms.items())]:
            self.at.totals[name] = self.at.totals.get(name, 0.0) + value.item() * n_bags
        self.at.bags += n_bags

    def _close_epoch(self) -> None:
        at = self.at
        lr = float(self.optimizer.param_groups[0]["lr"])
        row = {"epoch": float(at.epoch + 1), "lr": lr} | {n: total / at.bags for n, total in at.totals.items()}
        row |= self._validate()
        at.history.append(row)
        at.epoch, at.step, at.totals, at.bags = at.epoch + 1, 0, {}, 0
        self.boards.add(row)
        if self.why_fixed is None and self._improves(row[f"val_{self.spec.metric}"]):
            at.best_epoch, at.best_value = at.epoch, row[f"val_{self.spec.metric}"]
            self.best_weights = {name: tensor.cpu().clone() for name, tensor in self.model.state_dict().items()}

    def _improves(self, value: float) -> bool:
        if math.isnan(self.at.best_value):
            return True
        return value < self.at.best_value if self.spec.metric == "loss" else value > self.at.best_value

    def _validate(self) -> dict[str, float]:
        """Loss and figure over the whole validation part at once, never averaged over batches."""
        figure = f"val_{self.task.single.figure}" if self.task.single else None
        if not len(self.validation):
            return {"val_loss": math.nan} | ({figure: math.nan} if figure else {})
        logits = stacked_logits([found for _, found in answer_each(self.model, self.validation, device=self.device)])
        values = self.validation.values
        criterion = self.task.criterion(logits.shape[1])
        row = {"val_loss": criterion(logits, self.task.tensor(values)).item()}
        if figure and self.task.single:
            there = labelled(values)
            row[figure] = self.task.single.measure(values[there], logits[torch.from_numpy(there)])
        return row

    def note(self) -> str:
        """The last epoch in words."""
        row = self.at.history[-1]
        text = f"epoch {self.at.epoch}/{self.spec.epochs} loss {row['loss']:.3f}"
        if math.isnan(row["val_loss"]):
            return text
        shown = dict.fromkeys(["loss", self.spec.metric])
        return " ".join([text, "val", *(f"{name} {row['val_' + name]:.3f}" for name in shown)])

    def finish(self) -> Selection:
        """Put the chosen weights into the model, write the log and say what was chosen."""
        self._write_log()
        self.boards.close()
        at = self.at
        if self.best_weights is None:
            reason = f"fixed number of epochs: {self.why_fixed}"
            return Selection(epoch=at.epoch, chosen_by=reason, metric=None, value=None, epochs_run=at.epoch)
        self.model.load_state_dict(self.best_weights)
        metric = self.spec.metric
        return Selection(
            epoch=at.best_epoch,
            chosen_by=f"validation {metric}",
            metric=metric,
            value=at.best_value,
            epochs_run=at.epoch,
        )

    def restore(self) -> None:
        """Go on where the stored state ends, if there is one."""
        if not self.files.resume.is_file():
            self.boards.open(0)
            return
        try:
            state = load_state(self.files.resume)
        except RunError as error:
            _LOG.warning("%s This training begins anew; it ends with the same bytes.", error)
            self.boards.open(0)
            return
        self.model.load_state_dict(state["model"])
        self.objective.load_state_dict(state["objective"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.fabric.strategy.precision.load_state_dict(state["precision"])
        self.best_weights = state["best_weights"]
        self.at = _Position(**state["position"])
        self.boards.open(self.at.epoch)

    def _save_if_due(self) -> None:
        if time.monotonic() - self.saved_at < self.spec.checkpoint_seconds:
            return
        state = {
            "model": self.model.state_dict(),
            "objective": self.objective.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "precision": self.fabric.strategy.precision.state_dict(),
            "best_weights": self.best_weights,
            "position": vars(self.at),
        }
        save_state(self.files.resume, state)
        self._write_log()
        self.saved_at = time.monotonic()

    def _write_log(self) -> None:
        if self.at.history:
            write_frame(self.files.log, pd.DataFrame(self.at.history).astype({"epoch": int}))


def _adamw(model: MILModel, objective: Objective, spec: TrainSpec) -> torch.optim.Optimizer:
    groups = [dict(group) for group in objective.parameter_groups(model)]
    fused = spec.precision != "fp16"  # a fused optimiser unscales by itself, and then norms cannot be clipped
    return torch.optim.AdamW(groups, lr=spec.lr, weight_decay=spec.weight_decay, fused=fused)


def _fabric(spec: TrainSpec) -> Fabric:
    for name in ("lightning", "lightning.fabric", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    device = spec.torch_device()
    return Fabric(
        accelerator=device.type,
        devices=1,
        precision=_PRECISIONS[spec.precision],  # type: ignore[arg-type]
        plugins=[LightningEnvironment()],
    )
