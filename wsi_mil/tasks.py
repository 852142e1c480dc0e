"""What a label means: at which level it counts, its classes, the loss and the probabilities."""

import difflib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from wsi_mil.bags import full_precision
from wsi_mil.enrolment import RESERVED
from wsi_mil.errors import CohortError, ConfigError
from wsi_mil.models._base import Criterion, MILModel
from wsi_mil.tables import spelled_alike

Level = Literal["slide", "patient"]
MAX_CLASSES = 20
"""More distinct values than this in a target column look like a measurement, unless the classes are given."""


class LabelledSlide(Protocol):
    """What of a row of the cohort matters here."""

    @property
    def slide_id(self) -> str:
        """Name of the slide."""

    @property
    def patient(self) -> str:
        """Name of the patient."""

    @property
    def values(self) -> Mapping[str, str | None]:
        """Every other column; None where the cell is empty."""


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """What is to be predicted."""

    target: str
    """Column of the cohort table that holds the label."""
    level: Level | None = None
    """slide: one label a slide. patient: one label a patient. Needed when a patient has several slides."""
    classes: tuple[str, ...] | None = None
    """The classes in order; the last of two is the positive one. Default: the values found, sorted."""
    balance: Literal["none", "weight", "sampler"] = "none"
    """How training treats rare classes: weights in the loss, or drawing their bags more often."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is predicted, as resolved on a cohort."""

    target: str
    level: Level
    classes: tuple[str, ...]

    @property
    def kind(self) -> Literal["binary", "multiclass"]:
        """binary with two classes, else multiclass."""
        return "binary" if len(self.classes) == 2 else "multiclass"

    @property
    def positive(self) -> str | None:
        """The positive class of a binary task, the last one; None in a multiclass task."""
        return self.classes[-1] if self.kind == "binary" else None

    def encode(self, label: str) -> int:
        """Index of a class. Raises CohortError for a label that is none."""
        if label not in self.classes:
            raise CohortError(f"{self.target}: {label!r} is not one of the classes {', '.join(self.classes)}")
        return self.classes.index(label)

    def n_outputs(self, model_cls: type[MILModel]) -> int:
        """Width of the head: one column a class, or what the method declares for two classes."""
        return model_cls.binary_outputs if self.kind == "binary" else len(self.classes)

    def criterion(self, n_outputs: int, class_weights: Sequence[float] | Tensor | None = None) -> Criterion:
        """Cross-entropy for a head of this width. class_weights: one a class, multiplied into each bag's loss."""
        self._check_width(n_outputs)
        weights = torch.ones(len(self.classes)) if class_weights is None else torch.as_tensor(class_weights)
        if weights.shape != (len(self.classes),):
            raise ConfigError(f"{self.target}: {len(weights)} class weights for {len(self.classes)} classes")
        return BinaryCrossEntropy(weights) if n_outputs == 1 else CrossEntropy(weights)

    def class_logits(self, logits: Tensor) -> Tensor:
        """One column a class, at least in fp32; their softmax are the probabilities. logits: (b, k)."""
        self._check_width(logits.shape[1])
        logits = full_precision(logits)
        return torch.cat([torch.zeros_like(logits), logits], dim=1) if logits.shape[1] == 1 else logits

    def probabilities(self, logits: Tensor) -> Tensor:
        """One column a class whatever the head, at least in fp32; rows sum to 1. logits: (b, k)."""
        return self.class_logits(logits).softmax(dim=1)

    def _check_width(self, n_outputs: int) -> None:
        allowed = (1, 2) if self.kind == "binary" else (len(self.classes),)
        if n_outputs not in allowed:
            raise ConfigError(
                f"{self.target}: a head of {n_outputs} outputs for {len(self.classes)} classes; "
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
        """Mean loss. logits: (b, k).  target: (b,) class indices."""
        losses = F.cross_entropy(full_precision(logits), target, reduction="none")
        return (losses * self.weights.to(losses)[target]).mean()


class BinaryCrossEntropy(Criterion):
    """The same for one output, the logit of the positive class (index 1)."""

    weights: Tensor

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.register_buffer("weights", weights.to(torch.float32))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean loss. logits: (b, 1).  target: (b,) class indices."""
        values = full_precision(logits)[:, 0]
        losses = F.binary_cross_entropy_with_logits(values, target.to(values), reduction="none")
        return (losses * self.weights.to(losses)[target]).mean()


def resolve_task(spec: TaskSpec, records: Sequence[LabelledSlide]) -> Task:
    """Settle level and classes on the labelled rows of a cohort.

    Raises CohortError, with counts, for an unknown column, no label, one class only, a label outside the given
    classes, a patient with several slides and no level, and at level patient a patient with several labels.
    """
    labels = _labels(spec, records)
    patients: dict[str, dict[str, str]] = defaultdict(dict)
    for record in records:
        if record.slide_id in labels:
            patients[record.patient][record.slide_id] = labels[record.slide_id]
    level = _level(spec, patients)
    if level == "patient":
        _refuse_conflicts(spec, patients)
        counts = Counter(next(iter(slides.values())) for slides in patients.values())
    else:
        counts = Counter(labels.values())
    return Task(target=spec.target, level=level, classes=_classes(spec, counts, level))


def _labels(spec: TaskSpec, records: Sequence[LabelledSlide]) -> dict[str, str]:
    """Label by slide id, of the slides that have one."""
    if spec.target in RESERVED:
        raise CohortError(
            f"column {spec.target!r} has a meaning of its own in a cohort table and cannot be the target as it is. "
            f"Copy it under another name, such as {spec.target + '_label'!r}, and give that as the target."
        )
    columns = sorted({name for record in records for name in record.values})
    if spec.target not in columns:
        near = difflib.get_close_matches(spec.target, columns, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        there = ", ".join(columns) or "none"
        raise CohortError(f"no column {spec.target!r} in the cohort table.{meant} It has {there}.")
    found = {record.slide_id: record.values.get(spec.target) for record in records}
    labels = {slide: label for slide, label in found.items() if label is not None}
    if not labels:
        raise CohortError(f"column {spec.target!r}: all of {len(found)} slides are without a label")
    return labels


def _level(spec: TaskSpec, patients: Mapping[str, Mapping[str, str]]) -> Level:
    several = sum(len(slides) > 1 for slides in patients.values())
    if spec.level is not None:
        return spec.level
    if several:
        n_slides = sum(map(len, patients.values()))
        raise CohortError(
            f"{several} of {len(patients)} patients have several slides ({n_slides} slides). Say whether "
            f"{spec.target!r} is a label of the slide or of the patient: level slide or level patient."
        )
    return "slide"


def _refuse_conflicts(spec: TaskSpec, patients: Mapping[str, Mapping[str, str]]) -> None:
    conflicts = {patient: Counter(slides.values()) for patient, slides in sorted(patients.items())}
    conflicts = {patient: counts for patient, counts in conflicts.items() if len(counts) > 1}
    if not conflicts:
        return
    shown = [f"{patient} ({_spell(counts, 'slide')})" for patient, counts in list(conflicts.items())[:5]]
    more = f" and {len(conflicts) - 5} more" if len(conflicts) > 5 else ""
    raise CohortError(
        f"column {spec.target!r}: {len(conflicts)} of {len(patients)} patients have slides with different labels: "
        f"{'; '.join(shown)}{more}. Correct the table, or use level slide."
    )


def _classes(spec: TaskSpec, counts: Counter[str], level: Level) -> tuple[str, ...]:
    told = f"column {spec.target!r} ({_spell(counts, level)})"
    if spec.classes is None:
        if len(counts) > MAX_CLASSES:
            raise CohortError(
                f"column {spec.target!r} has {len(counts)} different values in {counts.total()} {level}s, which looks "
                f"like a measurement or an id. Name a column of classes, or give the classes one by one."
            )
        for group in spelled_alike(counts):
            raise CohortError(f"{told}: {' and '.join(map(repr, group))} are one class to people; spell it in one way.")
        classes = tuple(sorted(counts, key=_natural))
    else:
        classes = spec.classes
        if len(set(classes)) != len(classes):
            raise ConfigError(f"classes of {spec.target!r} are named twice: {', '.join(classes)}")
        outside = {label: n for label, n in counts.items() if label not in classes}
        if outside:
            raise CohortError(
                f"{told}: {_spell(outside, level)} in none of the given classes {', '.join(classes)}. "
                f"Add the class, or empty those cells."
            )
        absent = [label for label in classes if label not in counts]
        if absent:
            raise CohortError(f"{told}: nothing of the given classes {', '.join(absent)}")
    if len(classes) < 2:
        raise CohortError(f"{told}: one class only. A study needs at least two.")
    return classes


def _natural(label: str) -> tuple[int, float, str]:
    """Numbers by size, then words by the alphabet."""
    try:
        return 0, float(label), label
    except ValueError:
        return 1, 0.0, label


def _spell(counts: Mapping[str, int], unit: str) -> str:
    """'12 slides tumour, 1 slide normal'."""
    return ", ".join(f"{n} {unit}{'' if n == 1 else 's'} {label}" for label, n in sorted(counts.items()))
