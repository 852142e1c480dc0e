"""Target: what is read from the table, what the head answers, and the loss between them."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from wsi_mil.errors import CohortError
from wsi_mil.models._base import Criterion

Cells = Mapping[str, str | None]
"""The cells of one slide; None where empty."""
Values = NDArray[np.float64]
"""(n, n_values) labels as numbers; a row without a label is NaN."""
Answers = dict[str, NDArray[np.float64]]
"""Column of predictions.csv -> (n,) what the model says."""
Balance = Literal["none", "weight", "sampler"]
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
MIN_PATIENTS = 10
"""A validation part with fewer patients than this (of a class, with an event) chooses nothing."""


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """One more target that the same model learns."""

    target: str
    """Column of the cohort table that holds the label."""
    kind: Literal["classes", "ordinal", "regression", "survival"] = "classes"
    """classes: two or more. ordinal: classes from low to high. regression: a number. survival: a time with `event`."""
    classes: tuple[str, ...] | None = None
    """The classes in order; the last of two is the positive one. Default: the values found, sorted."""
    event: str | None = None
    """Of survival: the column that says whether the event was seen (1) or the time is only a lower bound (0)."""
    loss: Literal["discrete", "cox"] = "discrete"
    """Of survival: hazards of time intervals, or Cox's partial likelihood, which needs large steps."""


@dataclass(frozen=True, kw_only=True)
class Target(ABC):
    """What one column (survival: two) of the cohort table asks of a model.

    Subclasses are frozen; what training must learn from its part (scale, time cuts) is a field that `fitted` fills.
    """

    name: str
    """The column, and the `target_name` of predictions.csv."""

    n_values: ClassVar[int] = 1
    """Numbers that a label takes."""
    figure: ClassVar[Literal["auc", "r2", "c_index"]]
    """The figure, beside the loss, by which validation may choose; higher is better."""
    essential: ClassVar[bool] = False
    """Whether every training part must hold every stratum."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """binary, multiclass, ordinal, regression or survival."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the cohort table that are read."""
        return (self.name,)

    @abstractmethod
    def encode(self, cells: Cells) -> tuple[float, ...]:
        """The label as `n_values` numbers, NaN without one. Raises CohortError for one that is none."""

    @abstractmethod
    def decode(self, values: Sequence[float]) -> dict[str, object]:
        """The cells `target` (survival: `event` too) of predictions.csv; empty texts without a label."""

    @abstractmethod
    def strata(self, values: Values) -> list[str]:
        """(n,) what each label is stratified by; an empty text without one."""

    def fitted(self, values: Values) -> Self:
        """The same with what must be learnt from the labels of a training part."""
        return self

    @abstractmethod
    def n_outputs(self, binary_outputs: int) -> int:
        """Width of the head. binary_outputs: what the method declares for two classes."""

    @abstractmethod
    def criterion(self, n_outputs: int, class_weights: Tensor | None = None) -> Criterion:
        """The bag loss. Its target is (b, n_values), without a NaN."""

    @abstractmethod
    def answers(self, logits: Tensor) -> Answers:
        """What a head's logits (n, k) say, in the columns of predictions.csv."""

    @abstractmethod
    def answer_columns(self) -> list[str]:
        """Names and order of these columns."""

    def combined(self, each: Sequence[Answers]) -> Answers:
        """One answer of several models: the mean of each column."""
        return {name: np.mean([one[name] for one in each], axis=0) for name in each[0]}

    @abstractmethod
    def output_names(self, n_outputs: int) -> tuple[str, ...]:
        """A name for each output of the head."""

    @abstractmethod
    def measure(self, values: Values, logits: Tensor) -> float:
        """`figure` over rows with labels; NaN where it is not defined. logits: (n, k)."""

    @abstractmethod
    def too_few(self, patients: Sequence[str], values: Values) -> str | None:
        """Why a validation part cannot choose by this target; None when it can. values: labelled rows."""

    def as_config(self) -> dict[str, Any]:
        """What stands in config.yaml and in a model's file."""
        return {"kind": self.kind, **asdict(self)}


def number_in(cell: str, column: str) -> float:
    """A finite number in plain digits (no 1_000, no ½). Raises CohortError for another text."""
    value = float(cell) if _NUMBER.fullmatch(cell.strip()) else np.nan
    if not np.isfinite(value):
        raise CohortError(f"column {column!r}: {cell!r} is no number. Correct the cell, or empty it.")
    return float(value)


def labelled(values: Values) -> NDArray[np.bool_]:
    """(n,) which rows have a label."""
    return np.asarray(~np.isnan(values).any(axis=1))
