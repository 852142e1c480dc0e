"""What the report says about one method: records only, filled by `evaluate`."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wsi_mil.report.study import Rows
from wsi_mil.runs import FoldKey
from wsi_mil.statistics.concordance import Concordance
from wsi_mil.statistics.decisions import Threshold
from wsi_mil.statistics.intervals import Interval
from wsi_mil.statistics.ranking import Floats, Ints

GAP = 0.03
"""A larger distance between pooled and within-fold AUC is flagged."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number with its interval."""

    value: float
    interval: Interval


@dataclass(frozen=True, kw_only=True)
class FoldFigures:
    """What one model did on its test part."""

    key: FoldKey
    counts: tuple[int, ...]
    """Test patients a class."""
    auc: float
    """NaN: not defined, a class is absent."""
    class_aucs: tuple[float, ...]
    balanced_accuracy: float
    brier: float
    threshold: Threshold
    epoch: int | None
    chosen_by: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Patients:
    """One row a patient: means over seeds and repeats."""

    ids: tuple[str, ...]
    targets: Ints
    probabilities: Floats
    cuts: Floats
    """(n,) mean threshold of the models that scored the patient; NaN with more than two classes."""
    decisions: Ints
    losses: Floats
    weights: Floats
    """(draws, n) bootstrap."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MethodFigures:
    """Everything the report says about a method."""

    label: str
    rows: Rows
    """Patient level, one row a patient, repeat and fold: the mean over seeds."""
    mixed: tuple[str, ...]
    patients: Patients
    within: Concordance
    primary: Figure
    primary_bootstrap: Interval
    pooled: Figure
    pooled_gap: float
    class_aucs: tuple[float, ...]
    average_precision: Figure
    balanced_accuracy: Figure
    brier: Figure
    log_loss: float
    ece: float
    confusion: NDArray[np.int64]
    folds: tuple[FoldFigures, ...]
    by_seed: dict[tuple[int, int], float]
    """(repeat, seed) -> within-fold AUC of that training alone."""
    slide_auc: Figure | None
    """At level slide: within-fold AUC over slides, interval by patients."""

    @property
    def flagged(self) -> bool:
        """Pooled and within-fold AUC disagree: fold models score on different scales."""
        return bool(self.pooled_gap > GAP)
