"""Maps from predicted to calibrated probabilities, fitted on validation patients: temperature and isotonic.

Each has a least number of patients; below it nothing is fitted and the record says why.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from wsi_mil.statistics.calibration import PROBABILITY_FLOOR
from wsi_mil.statistics.decisions import MIN_PER_CLASS
from wsi_mil.statistics.patient_means import patient_means
from wsi_mil.statistics.ranking import Bools, Floats, Ints

Kind = Literal["temperature", "isotonic", "none"]
MIN_ISOTONIC = 50
"""A free monotone curve needs this many patients in each class."""
MAX_TEMPERATURE = 100.0
"""A temperature lies between 1 / 100 and 100."""


@dataclass(frozen=True, kw_only=True)
class Calibrator:
    """A fitted map of probabilities; kind "none" gives back what it is given."""

    kind: Kind
    reason: str
    """Which patients fitted it, or why nothing was fitted, as the report says it."""
    temperature: float | None = None
    x: tuple[float, ...] = ()
    """Isotonic: probabilities of the positive class, rising."""
    y: tuple[float, ...] = ()
    """Isotonic: calibrated values at `x`, never falling; straight between them, level outside."""

    def apply(self, probabilities: Floats) -> Floats:
        """Calibrated probabilities (n, k) of given ones (n, k); rows add up to 1."""
        probabilities = np.asarray(probabilities, dtype=np.float64)
        if self.kind == "temperature" and self.temperature is not None:
            return _softmax(_logits(probabilities) / self.temperature)
        if self.kind == "isotonic":
            positive = np.interp(probabilities[:, -1], self.x, self.y)
            return np.stack([1.0 - positive, positive], axis=1)
        return probabilities

    def as_config(self) -> dict[str, Any]:
        """Plain values for a file; only what its kind has."""
        found: dict[str, Any] = {"kind": self.kind, "reason": self.reason}
        if self.kind == "temperature":
            found["temperature"] = self.temperature
        if self.kind == "isotonic":
            found |= {"x": list(self.x), "y": list(self.y)}
        return found

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Calibrator":
        """The calibrator that `as_config` described. Raises ValueError for anything else."""
        kind, x, y = config.get("kind"), tuple(config.get("x", ())), tuple(config.get("y", ()))
        temperature = config.get("temperature")
        bad_temperature = kind == "temperature" and not (isinstance(temperature, float | int) and temperature > 0)
        bad_curve = kind == "isotonic" and (not x or len(x) != len(y))
        if kind not in ("temperature", "isotonic", "none") or bad_temperature or bad_curve:
            raise ValueError(f"not a calibration: {dict(config)}")
        return cls(kind=kind, reason=str(config.get("reason", "")), temperature=temperature, x=x, y=y)


def fit_calibrator(patients: Sequence[str], targets: Ints, probabilities: Floats, kind: Kind) -> Calibrator:
    """Fit on the given (validation) rows; a patient counts once, with the mean of its rows.

    patients, targets: (n,), target -1 for a row without a label, which has no say.   probabilities: (n, k).
    Raises ValueError for a kind that is none of the three and for a probability that is no number.
    """
    fits: dict[str, Callable[[Ints, Floats], Calibrator]] = {"temperature": _temperature, "isotonic": _isotonic}
    if kind == "none":
        return Calibrator(kind="none", reason="no calibration was asked for")
    if kind not in fits:
        raise ValueError(f"no calibration is called {kind!r}; there are temperature, isotonic and none")
    known = np.asarray(targets) >= 0
    if not known.any():
        return Calibrator(kind="none", reason="there is no validation patient with a label")
    names = [patient for patient, has in zip(patients, known, strict=True) if has]
    rows = np.asarray(probabilities, dtype=np.float64)[known]
    if not np.isfinite(rows).all():
        raise ValueError("a probability to calibrate is missing or infinite")
    return fits[kind](*patient_means(names, np.asarray(targets)[known], rows))


def _temperature(targets: Ints, probabilities: Floats) -> Calibrator:
    """Divide all logits by the one number that minimises the log-loss (Guo et al. 2017).

    The log-loss is convex in 1 / T, so its slope is bisected. Where the true class is on top for every patient the
    loss falls for ever as T goes to 0, and nothing is fitted.
    """
    few = _too_few(targets, n_classes=probabilities.shape[1], least=MIN_PER_CLASS)
    if few:
        return Calibrator(kind="none", reason=few)
    logits = _logits(probabilities)
    true = logits[np.arange(len(targets)), targets]
    if (true >= logits.max(axis=1)).all():
        return Calibrator(kind="none", reason="no validation patient is called wrong, so no temperature is best")

    def slope(inverse: float) -> float:
        return float(np.mean(np.einsum("nk,nk->n", _softmax(logits * inverse), logits) - true))

    low, high = -np.log(MAX_TEMPERATURE), np.log(MAX_TEMPERATURE)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if slope(float(np.exp(middle))) > 0 else (middle, high)
    reason = f"temperature of {len(targets)} validation patients"
    return Calibrator(kind="temperature", reason=reason, temperature=float(np.exp(-(low + high) / 2)))


def _isotonic(targets: Ints, probabilities: Floats) -> Calibrator:
    """The best never-falling curve in squared error (pool adjacent violators), joined by straight lines.

    Equal probabilities are one point. Values stay 1 / (patients + 2) away from 0 and 1, as one patient more would.
    """
    if probabilities.shape[1] != 2:
        return Calibrator(kind="none", reason=f"isotonic needs two classes, there are {probabilities.shape[1]}")
    few = _too_few(targets, n_classes=2, least=MIN_ISOTONIC)
    if few:
        return Calibrator(kind="none", reason=few)
    x, place = np.unique(probabilities[:, -1], return_inverse=True)
    counts = np.bincount(place).astype(np.float64)
    y = _pool(np.bincount(place, weights=targets == 1) / counts, counts)
    margin = 1.0 / (len(targets) + 2)
    kept = _corners(y)
    reason = f"isotonic curve of {len(targets)} validation patients"
    held = np.clip(y, margin, 1 - margin)
    return Calibrator(kind="isotonic", reason=reason, x=tuple(x[kept].tolist()), y=tuple(held[kept].tolist()))


def _too_few(targets: Ints, *, n_classes: int, least: int) -> str:
    smallest = int(np.bincount(targets, minlength=n_classes).min())
    if smallest >= least:
        return ""
    return f"validation holds {smallest} patients of its smallest class, {least} are needed"


def _pool(values: Floats, counts: Floats) -> Floats:
    """Weighted means of neighbours, joined until nothing falls."""
    blocks: list[tuple[float, float, int]] = []
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        mean, weight, length = value, count, 1
        while blocks and blocks[-1][0] >= mean:
            before, other, points = blocks.pop()
            mean = (before * other + mean * weight) / (other + weight)
            weight, length = weight + other, length + points
        blocks.append((mean, weight, length))
    return np.repeat([mean for mean, _, _ in blocks], [length for _, _, length in blocks])


def _corners(y: Floats) -> Bools:
    """Points that the straight lines need: the ends of each level stretch."""
    level = np.diff(y) == 0
    inner = np.append(False, level) & np.append(level, False)
    return np.asarray(~inner)


def _logits(probabilities: Floats) -> Floats:
    return np.log(np.maximum(probabilities, PROBABILITY_FLOOR))


def _softmax(logits: Floats) -> Floats:
    grown = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(grown / grown.sum(axis=1, keepdims=True), dtype=np.float64)
