"""Two or more classes: softmax or, with one output, logistic cross-entropy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from wsi_mil.bags import full_precision
from wsi_mil.errors import CohortError, ConfigError
from wsi_mil.models._base import Criterion
from wsi_mil.statistics.ranking import macro, one_vs_rest_auc
from wsi_mil.targets._base import MIN_PATIENTS, Answers, Cells, Target, Values


@dataclass(frozen=True, kw_only=True)
class ClassTarget(Target):
    """Which of some classes a bag belongs to."""

    classes: tuple[str, ...]
    """In order; the last of two is the positive one."""

    figure: ClassVar[Literal["auc", "r2", "c_index"]] = "auc"
    essential: ClassVar[bool] = True

    @property
    def kind(self) -> str:
        """binary with two classes, else multiclass."""
        return "binary" if len(self.classes) == 2 else "multiclass"

    def index_of(self, label: str) -> int:
        """Index of a class. Raises CohortError for a label that is none."""
        if label not in self.classes:
            raise CohortError(f"{self.name}: {label!r} is not one of the classes {', '.join(self.classes)}")
        return self.classes.index(label)

    def encode(self, cells: Cells) -> tuple[float, ...]:
        """The index of the class."""
        cell = cells.get(self.name)
        return (np.nan if cell is None else float(self.index_of(cell)),)

    def decode(self, values: Sequence[float]) -> dict[str, object]:
        """The class's name."""
        return {"target": "" if np.isnan(values[0]) else self.classes[int(values[0])]}

    def strata(self, values: Values) -> list[str]:
        """The class."""
        return [str(self.decode(row)["target"]) for row in values]

    def n_outputs(self, binary_outputs: int) -> int:
        """One a class, or what the method declares for two."""
        return binary_outputs if self.kind == "binary" else len(self.classes)

    def criterion(self, n_outputs: int, class_weights: Tensor | None = None) -> Criterion:
        """Cross-entropy. class_weights: one a class, multiplied into each bag's loss."""
        self._check_width(n_outputs)
        weights = torch.ones(len(self.classes)) if class_weights is None else class_weights
        if weights.shape != (len(self.classes),):
            raise ConfigError(f"{self.name}: {len(weights)} class weights for {len(self.classes)} classes")
        return BinaryCrossEntropy(weights) if n_outputs == 1 else CrossEntropy(weights)

    def class_logits(self, logits: Tensor) -> Tensor:
        """(n, classes), at least in fp32; their softmax are the probabilities. logits: (n, k)."""
        self._check_width(logits.shape[1])
        logits = full_precision(logits)
        return torch.cat([torch.zeros_like(logits), logits], dim=1) if logits.shape[1] == 1 else logits

    def answers(self, logits: Tensor) -> Answers:
        """A logit and a probability a class."""
        values = self.class_logits(logits)
        columns = torch.cat([values, values.softmax(dim=1)], dim=1).T.numpy()
        return dict(zip(self.answer_columns(), columns, strict=True))

    def answer_columns(self) -> list[str]:
        """logit_<class>, then prob_<class>."""
        return [f"{what}_{name}" for what in ("logit", "prob") for name in self.classes]

    def output_names(self, n_outputs: int) -> tuple[str, ...]:
        """The classes; the positive one for a single output."""
        return self.classes[-1:] if n_outputs == 1 else self.classes

    def measure(self, values: Values, logits: Tensor) -> float:
        """AUC, with more than two classes the macro mean of one against the rest."""
        shares = self.class_logits(logits).softmax(dim=1).numpy()
        per_class = one_vs_rest_auc(values[:, 0].astype(np.int64), shares)
        return float(per_class[-1]) if len(self.classes) == 2 else macro(per_class)

    def too_few(self, patients: Sequence[str], values: Values) -> str | None:
        """Fewer than ten patients in a class."""
        named = {
            name: {p for p, row in zip(patients, values, strict=True) if row[0] == place}
            for place, name in enumerate(self.classes)
        }
        few = [f"{len(found)} of {name}" for name, found in named.items() if len(found) < MIN_PATIENTS]
        return f"fewer than {MIN_PATIENTS} patients in a class ({', '.join(few)})" if few else None

    def _check_width(self, n_outputs: int) -> None:
        allowed = (1, 2) if self.kind == "binary" else (len(self.classes),)
        if n_outputs not in allowed:
            raise ConfigError(
                f"{self.name}: a head of {n_outputs} outputs for {len(self.classes)} classes; "
                f"it needs {' or '.join(map(str, allowed))}"
            )


class CrossEntropy(Criterion):
    """Softmax cross-entropy; each bag's loss times the weight of its class, then the mean over bags.

    Not divided by the sum of the weights: with one bag a step that would cancel them.
    """

    weights: Tensor

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.register_buffer("weights", weights.to(torch.float32))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean loss. logits: (b, k).  target: (b,) or (b, 1) class indices."""
        target = class_indices(target)
        losses = F.cross_entropy(full_precision(logits), target, reduction="none")
        return (losses * self.weights.to(losses)[target]).mean()


class BinaryCrossEntropy(Criterion):
    """The same for one output, the logit of the positive class (index 1)."""

    weights: Tensor

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.register_buffer("weights", weights.to(torch.float32))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean loss. logits: (b, 1).  target: (b,) or (b, 1) class indices."""
        target = class_indices(target)
        values = full_precision(logits)[:, 0]
        losses = F.binary_cross_entropy_with_logits(values, target.to(values), reduction="none")
        return (losses * self.weights.to(losses)[target]).mean()


def class_indices(target: Tensor) -> Tensor:
    """(b,) whole numbers from (b,) or, of a target among several, (b, 1)."""
    return (target[:, 0] if target.dim() == 2 else target).long()
