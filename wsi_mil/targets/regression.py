"""A number: squared error on the scale of the training part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from wsi_mil.bags import full_precision
from wsi_mil.errors import CohortError
from wsi_mil.folding.strata import strata_of_numbers
from wsi_mil.models._base import Criterion
from wsi_mil.statistics.regression import regression
from wsi_mil.targets._base import MIN_PATIENTS, Answers, Cells, Target, Values, number_in


@dataclass(frozen=True, kw_only=True)
class RegressionTarget(Target):
    """A number in the units of its column."""

    mean: float = 0.0
    """Of the training part, in the column's units; the head answers in standard deviations from it."""
    deviation: float = 1.0

    figure: ClassVar[Literal["auc", "r2", "c_index"]] = "r2"

    @property
    def kind(self) -> str:
        """regression."""
        return "regression"

    def encode(self, cells: Cells) -> tuple[float, ...]:
        """The number."""
        cell = cells.get(self.name)
        return (np.nan if cell is None else number_in(cell, self.name),)

    def decode(self, values: Sequence[float]) -> dict[str, object]:
        """The number."""
        return {"target": "" if np.isnan(values[0]) else float(values[0])}

    def strata(self, values: Values) -> list[str]:
        """Quantiles."""
        return strata_of_numbers(values[:, 0])

    def fitted(self, values: Values) -> Self:
        """With mean and standard deviation of the labels; a constant column keeps its units."""
        numbers = values[~np.isnan(values[:, 0]), 0]
        deviation = float(numbers.std()) if len(numbers) else 0.0
        if not deviation and len(numbers) and np.ptp(numbers) > 0:
            raise CohortError(f"column {self.name!r}: its numbers are too small to compute with; use a larger unit.")
        return replace(self, mean=float(numbers.mean()) if len(numbers) else 0.0, deviation=deviation or 1.0)

    def n_outputs(self, binary_outputs: int) -> int:
        """One."""
        return 1

    def criterion(self, n_outputs: int, class_weights: Tensor | None = None) -> Criterion:
        """Mean squared error in squared standard deviations."""
        return SquaredError(self.mean, self.deviation)

    def answers(self, logits: Tensor) -> Answers:
        """`prediction`, in the column's units."""
        return {"prediction": logits[:, 0].double().numpy() * self.deviation + self.mean}

    def answer_columns(self) -> list[str]:
        """prediction."""
        return ["prediction"]

    def output_names(self, n_outputs: int) -> tuple[str, ...]:
        """The column."""
        return (self.name,)

    def measure(self, values: Values, logits: Tensor) -> float:
        """R2 against the mean of these rows."""
        return float(regression(values[:, 0], self.answers(logits)["prediction"]).r2[0])

    def too_few(self, patients: Sequence[str], values: Values) -> str | None:
        """Fewer than ten patients."""
        there = len(set(patients))
        return f"fewer than {MIN_PATIENTS} patients with {self.name} ({there})" if there < MIN_PATIENTS else None


class SquaredError(Criterion):
    """Mean of ((label - mean) / deviation - output)^2."""

    def __init__(self, mean: float, deviation: float) -> None:
        super().__init__()
        self.mean, self.deviation = mean, deviation

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean loss. logits: (b, 1).  target: (b, 1) in the column's units."""
        logits = full_precision(logits)
        scaled = (target.double() - self.mean) / self.deviation  # in double: a large offset would eat the digits
        return F.mse_loss(logits, scaled.to(logits.dtype))
