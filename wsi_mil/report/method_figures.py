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


@dataclass(frozen=True, kw_only=True)
class ClassFigures:
    """One class against the rest."""

    within: Figure
    pooled: Figure
    average_precision: Figure


@dataclass(frozen=True, kw_only=True)
class DecisionFigures:
    """What follows once everybody has been called a class."""

    accuracy: Figure
    balanced_accuracy: Figure
    f1_macro: Figure
    kappa: Figure
    """Cohen's, unweighted: agreement with the truth beyond what the marginal counts give by chance."""
    f1_positive: Figure | None
    """This and the next two: binary only."""
    sensitivity: Figure | None
    specificity: Figure | None


@dataclass(frozen=True, kw_only=True)
class OperatingPoints:
    """What the pooled ROC curve offers where one of its two sides is fixed."""

    fixed: float
    sensitivity: Figure
    """The highest, where specificity is at least `fixed`."""
    specificity: Figure
    """The highest, where sensitivity is at least `fixed`."""


@dataclass(frozen=True, kw_only=True)
class ProbabilityFigures:
    """How far the probabilities are from the truth; 0 is best."""

    brier: Figure
    log_loss: Figure
    ece: Figure


@dataclass(frozen=True, kw_only=True)
class TrainingFigures:
    """All folds of one repeat and seed: one training of the method."""

    auc: float
    """Within folds."""
    balanced_accuracy: float
    brier: float


@dataclass(frozen=True, kw_only=True)
class SlideFigures:
    """At level slide: over slides, intervals by patients."""

    auc: Figure
    balanced_accuracy: Figure


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
    classes: tuple[ClassFigures, ...]
    """In the configured order; of a binary task the positive class alone."""
    average_precision: Figure
    confusion: NDArray[np.int64]
    decided: DecisionFigures
    operating: OperatingPoints | None
    raw: ProbabilityFigures
    calibrated: ProbabilityFigures | None
    """After the calibration that validation fitted; None where the run holds none."""
    calibrated_probabilities: Floats | None
    """(n, n_classes) of the patients, like `patients.probabilities`."""
    folds: tuple[FoldFigures, ...]
    by_training: dict[tuple[int, int], TrainingFigures]
    """(repeat, seed) -> that training alone."""
    slides: SlideFigures | None

    @property
    def pooled_gap(self) -> float:
        """Distance of the pooled AUC from the within-fold one; NaN where one of them is not defined."""
        return abs(self.pooled.value - self.primary.value)

    @property
    def flagged(self) -> bool:
        """Pooled and within-fold AUC disagree."""
        return bool(self.pooled_gap > GAP)
