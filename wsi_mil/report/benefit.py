"""Decision curve of each method of a binary study: is acting on it better than acting on everybody, or on nobody?"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wsi_mil.report.method_figures import MethodFigures
from wsi_mil.statistics.decision_curve import DecisionCurve, decision_curve

THRESHOLDS = np.round(np.arange(0.02, 0.90, 0.01), 2)
"""Beyond, a curve of few patients is noise."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Benefit:
    """One method's net benefit over the thresholds."""

    method: str
    calibrated: bool
    """Whether the probabilities are those after calibration, else as the model gives them."""
    curve: DecisionCurve


def benefits(methods: Sequence[MethodFigures]) -> tuple[Benefit, ...]:
    """With calibrated probabilities where there are any, else the raw ones; nothing with more than two classes."""
    found = []
    for method in methods:
        calibrated = method.calibrated_probabilities
        probabilities = method.patients.probabilities if calibrated is None else calibrated
        if probabilities.shape[1] != 2 or not len(probabilities):
            continue
        curve = decision_curve(method.patients.targets == 1, probabilities[:, 1], thresholds=THRESHOLDS)
        found.append(Benefit(method=method.label, calibrated=calibrated is not None, curve=curve))
    return tuple(found)
