"""What validation chooses once a model is trained: where decisions are cut, and how probabilities are calibrated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wsi_mil.fitting.datasets import Item, values_of
from wsi_mil.statistics.decisions import Threshold, choose_threshold_of_patients
from wsi_mil.statistics.recalibration import Calibrator, fit_calibrator
from wsi_mil.targets import ClassTarget
from wsi_mil.targets._base import Answers, labelled
from wsi_mil.tasks import Task


@dataclass(frozen=True, kw_only=True)
class Choices:
    """By name of the target. Thresholds of binary targets, calibrators of all with classes."""

    thresholds: Mapping[str, Threshold]
    calibrators: Mapping[str, Calibrator]

    def as_selection(self) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """`thresholds` and `calibration` of `Selection`."""
        cuts = {name: {"value": cut.value, "source": cut.source} for name, cut in self.thresholds.items()}
        return cuts, {name: found.as_config() for name, found in self.calibrators.items()}


def choose_cuts(
    items: Sequence[Item],
    told: Mapping[str, Answers],
    task: Task,
    *,
    calibration: Literal["temperature", "isotonic", "none"],
) -> Choices:
    """From the validation part alone. items: its bags, may be none.  told: what the model says of them."""
    thresholds, calibrators = {}, {}
    values = values_of(items).reshape(len(items), task.n_values)
    for target, own in task.split(values):
        if not isinstance(target, ClassTarget):
            continue
        there = labelled(own)
        patients = [item.patient for item, known in zip(items, there, strict=True) if known]
        labels, shares = own[there, 0].astype(np.int64), _shares(told[target.name], target)[there]
        if target.kind == "binary":
            thresholds[target.name] = choose_threshold_of_patients(patients, labels == 1, shares[:, 1])
        calibrators[target.name] = fit_calibrator(patients, labels, shares, calibration)
    return Choices(thresholds=thresholds, calibrators=calibrators)


def _shares(told: Answers, target: ClassTarget) -> NDArray[np.float64]:
    """(n, classes) probabilities."""
    return np.stack([told[f"prob_{name}"] for name in target.classes], axis=1)
