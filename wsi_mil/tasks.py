"""Task: what a model is asked, at which level, and how its targets share one head and one loss."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from wsi_mil.errors import ConfigError
from wsi_mil.models._base import Criterion, MILModel
from wsi_mil.targets import (
    Cells,
    ClassTarget,
    CoxTarget,
    OrdinalTarget,
    RegressionTarget,
    SurvivalTarget,
    Target,
    TargetSpec,
)
from wsi_mil.targets._base import Balance, Values
from wsi_mil.targets.survival import MIN_RISK_SET

Level = Literal["slide", "patient"]


@dataclass(frozen=True, kw_only=True)
class TaskSpec(TargetSpec):
    """What is to be predicted."""

    level: Level | None = None
    """slide: one label a slide. patient: one label a patient. Needed when a patient has several slides."""
    balance: Balance = "none"
    """How training treats rare classes: weights in the loss, or drawing their bags more often."""
    others: tuple[str | TargetSpec, ...] = ()
    """Further targets that the same model learns: columns of classes, or mappings with target, kind ... Any of them may
    be missing in some rows."""

    @property
    def targets(self) -> tuple[TargetSpec, ...]:
        """All of them."""
        first = TargetSpec(target=self.target, kind=self.kind, classes=self.classes, event=self.event, loss=self.loss)
        return (first, *(TargetSpec(target=one) if isinstance(one, str) else one for one in self.others))


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is predicted, as resolved on a cohort."""

    level: Level
    targets: tuple[Target, ...]

    @property
    def single(self) -> Target | None:
        """The target, where there is one only."""
        return self.targets[0] if len(self.targets) == 1 else None

    @property
    def target(self) -> str:
        """Names of the targets."""
        return "+".join(target.name for target in self.targets)

    @property
    def kind(self) -> str:
        """binary, multiclass, ordinal, regression, survival, or several."""
        return self.single.kind if self.single else "several"

    @property
    def classes(self) -> tuple[str, ...]:
        """Of a single target with classes; else none."""
        return self.single.classes if isinstance(self.single, ClassTarget) else ()

    @property
    def positive(self) -> str | None:
        """The positive class of a binary task, the last one; else None."""
        return self.classes[-1] if self.kind == "binary" else None

    @property
    def is_of_classes(self) -> bool:
        """Whether the target is one of classes without an order, which is what every method can learn."""
        return self.kind in ("binary", "multiclass")

    @property
    def n_values(self) -> int:
        """Numbers that the labels of one bag take."""
        return sum(target.n_values for target in self.targets)

    def encode(self, cells: Cells) -> tuple[float, ...]:
        """All labels of a row, NaN where one is missing. Raises CohortError for a label that is none."""
        return tuple(value for target in self.targets for value in target.encode(cells))

    def split(self, values: Values) -> Iterator[tuple[Target, Values]]:
        """Each target with its own columns of (n, n_values)."""
        start = 0
        for target in self.targets:
            yield target, values[:, start : start + target.n_values]
            start += target.n_values

    def strata(self, values: Values) -> list[set[str]]:
        """(n,) what each item is stratified by: a stratum of every target that it has a label for."""
        each = [(target, target.strata(own)) for target, own in self.split(values)]
        names = [[self._stratum(target, text) if text else "" for text in texts] for target, texts in each]
        return [{name for name in row if name} for row in zip(*names, strict=True)]

    def essential(self, values: Values) -> set[str]:
        """The strata that every training part must hold."""
        return {
            self._stratum(target, text)
            for target, own in self.split(values)
            if target.essential
            for text in target.strata(own)
            if text
        }

    def _stratum(self, target: Target, text: str) -> str:
        return text if self.single else f"{target.name}: {text}"

    def labels(self, values: Values) -> np.ndarray:
        """(n,) class of each item, where the task is one of classes (-1: unknown); else zeros."""
        if not self.classes:
            return np.zeros(len(values), dtype=np.int64)
        return np.where(np.isnan(values[:, 0]), -1, values[:, 0]).astype(np.int64)

    def fitted(self, values: Values) -> Self:
        """The same with what targets learn from the labels of a training part."""
        targets = tuple(target.fitted(own) for target, own in self.split(values))
        return type(self)(level=self.level, targets=targets)

    def tensor(self, values: Values) -> Tensor:
        """What a criterion takes: (b,) class indices of a task of classes, else (b, n_values)."""
        if self.is_of_classes:
            return torch.from_numpy(self.labels(values))
        return torch.from_numpy(np.ascontiguousarray(values))

    def class_weights(self, values: Values) -> Tensor:
        """Weight of each class, inverse to its share in a training part: n / (classes * n_class)."""
        counts = torch.bincount(torch.from_numpy(self.labels(values)), minlength=len(self.classes))
        return len(values) / (len(self.classes) * counts.clamp(min=1)).float()

    def n_outputs(self, model_cls: type[MILModel]) -> int:
        """Width of the head: the targets' outputs one after the other."""
        return sum(target.n_outputs(model_cls.binary_outputs) for target in self.targets)

    def criterion(self, n_outputs: int, class_weights: Sequence[float] | Tensor | None = None) -> Criterion:
        """The loss for a head of this width. class_weights: of a single target, one a class."""
        weights = None if class_weights is None else torch.as_tensor(class_weights)
        if self.single is not None:
            own = self.single.criterion(n_outputs, weights)
            return own if self.is_of_classes else MaskedCriterion([(n_outputs, self.single.n_values, own)])
        widths = self._widths(n_outputs)
        parts = [(k, t.n_values, t.criterion(k)) for t, k in zip(self.targets, widths, strict=True)]
        return MaskedCriterion(parts)

    def own_logits(self, logits: Tensor) -> list[tuple[Target, Tensor]]:
        """Each target with its own columns of a head's logits (n, k)."""
        widths = self._widths(logits.shape[1])
        return list(zip(self.targets, _columns(logits, widths), strict=True))

    def output_names(self, n_outputs: int) -> tuple[str, ...]:
        """A name for each output of the head."""
        widths = self._widths(n_outputs)
        named = [(t.name, t.output_names(k)) for t, k in zip(self.targets, widths, strict=True)]
        return tuple(name if self.single else f"{target}: {name}" for target, names in named for name in names)

    def class_logits(self, logits: Tensor) -> Tensor:
        """(n, classes) of a single target with classes; their softmax are the probabilities. logits: (n, k)."""
        if not isinstance(self.single, ClassTarget):
            raise ValueError(f"{self.target} has no classes")
        return self.single.class_logits(logits)

    def probabilities(self, logits: Tensor) -> Tensor:
        """(n, classes) of a single target with classes, rows sum to 1. logits: (n, k)."""
        return self.class_logits(logits).softmax(dim=1)

    def _widths(self, n_outputs: int) -> list[int]:
        for binary_outputs in (1, 2):
            widths = [target.n_outputs(binary_outputs) for target in self.targets]
            if sum(widths) == n_outputs:
                return widths
        raise ConfigError(
            f"{self.target}: a head of {n_outputs} outputs; it needs {sum(t.n_outputs(1) for t in self.targets)}"
        )

    def as_config(self) -> dict[str, Any]:
        """What stands in config.yaml and in a model's file."""
        return {
            "target": self.target,
            "level": self.level,
            "classes": list(self.classes),
            "kind": self.kind,
            "positive": self.positive,
            "targets": [target.as_config() for target in self.targets],
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The task of such a mapping. Raises KeyError, TypeError or ValueError when it is none."""
        return cls(level=config["level"], targets=tuple(_from_config(one) for one in config["targets"]))


def class_task(target: str, classes: Sequence[str], *, level: Level = "slide") -> Task:
    """A task of one target with classes."""
    return Task(level=level, targets=(ClassTarget(name=target, classes=tuple(classes)),))


class MaskedCriterion(Criterion):
    """The mean over targets of each one's loss on the bags that have its label.

    A target without a label in the step adds nothing, with a gradient of 0.
    """

    def __init__(self, parts: Sequence[tuple[int, int, Criterion]]) -> None:
        """parts: of each target, its outputs, its numbers and its own loss."""
        super().__init__()
        self.widths = [width for width, _, _ in parts]
        self.n_values = [count for _, count, _ in parts]
        self.each = nn.ModuleList([criterion for _, _, criterion in parts])

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean loss. logits: (b, sum of outputs).  target: (b, sum of numbers), NaN where a label is missing."""
        losses = []
        columns = zip(self.each, _columns(logits, self.widths), _columns(target, self.n_values), strict=True)
        for criterion, own_logits, own_target in columns:
            there = ~own_target.isnan().any(dim=1)
            losses.append(criterion(own_logits[there], own_target[there]) if there.any() else 0 * own_logits.sum())
        return torch.stack(losses).mean()


def _columns(values: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """(n, k) in pieces of some widths."""
    ends = np.cumsum(widths)
    return [values[:, end - width : end] for width, end in zip(widths, ends, strict=True)]


def check_training(task: Task, *, bags_per_step: int, balance: Balance) -> None:
    """Raise ConfigError for a way of training that the task cannot have."""
    if balance != "none" and not task.is_of_classes:
        raise ConfigError(f"task.balance is {balance}, which needs classes; {task.target} is of kind {task.kind}.")
    if any(isinstance(target, CoxTarget) for target in task.targets) and bags_per_step < MIN_RISK_SET:
        raise ConfigError(
            f"train.bags_per_step is {bags_per_step}, but Cox's partial likelihood compares the bags of a step with "
            f"each other: give {MIN_RISK_SET} or more, or take task.loss discrete, which needs no risk set."
        )


def _from_config(config: Mapping[str, Any]) -> Target:
    fields: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in config.items() if name != "kind"
    }
    if config["kind"] == "survival":
        return SurvivalTarget(**fields) if "cuts" in fields else CoxTarget(**fields)
    if config["kind"] == "regression":
        return RegressionTarget(**fields)
    return OrdinalTarget(**fields) if config["kind"] == "ordinal" else ClassTarget(**fields)
