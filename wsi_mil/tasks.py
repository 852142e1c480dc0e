"""Task: what a model is asked, at which level, and how its targets share one head and one loss."""

import difflib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from wsi_mil.errors import CohortError, ConfigError
from wsi_mil.models._base import Criterion, MILModel
from wsi_mil.table.enrolment import RESERVED
from wsi_mil.table.files import spelled_alike
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
from wsi_mil.targets._base import Balance, Values, labelled
from wsi_mil.targets.survival import MIN_RISK_SET

Level = Literal["slide", "patient"]
Label = tuple[str, ...]
"""The cells of one label."""
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


def resolve_task(spec: TaskSpec, records: Sequence[LabelledSlide]) -> Task:
    """Settle level and targets on the rows of a cohort that have a label.

    Raises CohortError, with counts, for an unknown column, no label, one class only, a label outside the given
    classes, a patient with several slides and no level, and at level patient a patient with several labels.
    """
    names = Counter(one.target for one in spec.targets)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ConfigError(f"task: {', '.join(twice)} is a target twice.")
    labels = {one.target: _labels(one, records) for one in spec.targets}
    patients: dict[str, set[str]] = defaultdict(set)
    for record in records:
        if any(record.slide_id in found for found in labels.values()):
            patients[record.patient].add(record.slide_id)
    level = _level(spec, patients)
    targets = tuple(_resolve(one, records, labels[one.target], level) for one in spec.targets)
    task = Task(level=level, targets=targets)
    for record in records:
        task.encode(record.values)  # a cell that is no number, no event
    return task


def is_labelled(task: Task, cells: Cells) -> bool:
    """Whether a row has a label of any target."""
    values = np.array([task.encode(cells)])
    return any(bool(labelled(own)[0]) for _, own in task.split(values))


def _from_config(config: Mapping[str, Any]) -> Target:
    fields: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in config.items() if name != "kind"
    }
    if config["kind"] == "survival":
        return SurvivalTarget(**fields) if "cuts" in fields else CoxTarget(**fields)
    if config["kind"] == "regression":
        return RegressionTarget(**fields)
    return OrdinalTarget(**fields) if config["kind"] == "ordinal" else ClassTarget(**fields)


def _resolve(spec: TargetSpec, records: Sequence[LabelledSlide], labels: Mapping[str, Label], level: Level) -> Target:
    """One target, on its labels by slide id."""
    by_patient: dict[str, dict[str, Label]] = defaultdict(dict)
    for record in records:
        if record.slide_id in labels:
            by_patient[record.patient][record.slide_id] = labels[record.slide_id]
    if level == "patient":
        _refuse_conflicts(spec, by_patient, _meaning(spec))
        counts = Counter(next(iter(slides.values())) for slides in by_patient.values())
    else:
        counts = Counter(labels.values())
    if spec.kind in ("regression", "survival"):
        if spec.classes is not None:
            raise ConfigError(f"task: {spec.target!r} is of kind {spec.kind}, which has no classes. Leave them out.")
        return _number_target(spec)
    if spec.kind == "ordinal" and spec.classes is None and not all(_is_number(label[0]) for label in counts):
        raise ConfigError(
            f"task: {spec.target!r} is ordinal and its classes are words, which have no order by themselves. Give them "
            f"from low to high: task.classes."
        )
    classes = _classes(spec, Counter({label[0]: n for label, n in counts.items()}), level)
    if spec.kind == "classes":
        return ClassTarget(name=spec.target, classes=classes)
    if len(classes) < 3:
        raise ConfigError(f"task: {spec.target!r} has two classes, which have no order to learn. Use kind classes.")
    return OrdinalTarget(name=spec.target, classes=classes)


def _meaning(spec: TargetSpec) -> Callable[[Label], object]:
    """What the cells of one label stand for: numbers where the kind has them, else the text."""
    if spec.kind not in ("regression", "survival"):
        return lambda label: label
    target = _number_target(spec)
    return lambda label: target.encode(dict(zip(target.columns, label, strict=True)))


def _number_target(spec: TargetSpec) -> Target:
    if spec.kind == "regression":
        return RegressionTarget(name=spec.target)
    kind = CoxTarget if spec.loss == "cox" else SurvivalTarget
    return kind(name=spec.target, event=str(spec.event))


def _labels(spec: TargetSpec, records: Sequence[LabelledSlide]) -> dict[str, Label]:
    """Label by slide id, of the slides that have one."""
    if (spec.event is not None) != (spec.kind == "survival"):
        raise ConfigError(
            f"task: {spec.target!r} is of kind {spec.kind}; task.event, the column that says whether the event was "
            f"seen, belongs to kind survival, which needs it."
        )
    if spec.event == spec.target or (spec.loss != "discrete" and spec.kind != "survival"):
        raise ConfigError(
            f"task: {spec.target!r}: task.event is another column, and task.loss is of kind survival only."
        )
    columns = [spec.target] if spec.event is None else [spec.target, spec.event]
    there = sorted({name for record in records for name in record.values})
    for column in columns:
        _check_column(column, there)
    found = {record.slide_id: tuple(record.values.get(column) for column in columns) for record in records}
    labels = {s: tuple(map(str, cells)) for s, cells in found.items() if all(cell is not None for cell in cells)}
    if not labels:
        raise CohortError(f"column {spec.target!r}: all of {len(found)} slides are without a label")
    return labels


def _check_column(column: str, columns: Sequence[str]) -> None:
    if column in RESERVED:
        raise CohortError(
            f"column {column!r} has a meaning of its own in a cohort table and cannot be the target as it is. "
            f"Copy it under another name, such as {column + '_label'!r}, and give that as the target."
        )
    if column not in columns:
        near = difflib.get_close_matches(column, columns, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise CohortError(f"no column {column!r} in the cohort table.{meant} It has {', '.join(columns) or 'none'}.")


def _level(spec: TaskSpec, patients: Mapping[str, Collection[str]]) -> Level:
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


def _refuse_conflicts(
    spec: TargetSpec, patients: Mapping[str, Mapping[str, Label]], meaning: Callable[[Label], object]
) -> None:
    """meaning: what a label stands for, so that 10 and 10.0 are no conflict."""
    conflicts = {
        patient: Counter(", ".join(label) for label in slides.values())
        for patient, slides in sorted(patients.items())
        if len({meaning(label) for label in slides.values()}) > 1
    }
    if not conflicts:
        return
    shown = [f"{patient} ({_spell(counts, 'slide')})" for patient, counts in list(conflicts.items())[:5]]
    more = f" and {len(conflicts) - 5} more" if len(conflicts) > 5 else ""
    raise CohortError(
        f"column {spec.target!r}: {len(conflicts)} of {len(patients)} patients have slides with different labels: "
        f"{'; '.join(shown)}{more}. Correct the table, or use level slide."
    )


def _classes(spec: TargetSpec, counts: Counter[str], level: Level) -> tuple[str, ...]:
    told = f"column {spec.target!r} ({_spell(counts, level)})"
    if spec.classes is None:
        if len(counts) > MAX_CLASSES:
            raise CohortError(
                f"column {spec.target!r} has {len(counts)} different values in {counts.total()} {level}s, which looks "
                f"like a measurement or an id. For a measurement say task.kind regression; else name a column of "
                f"classes, or give the classes one by one."
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


def _is_number(label: str) -> bool:
    return _natural(label)[0] == 0


def _natural(label: str) -> tuple[int, float, str]:
    """Numbers by size, then words by the alphabet."""
    try:
        return 0, float(label), label
    except ValueError:
        return 1, 0.0, label


def _spell(counts: Mapping[str, int], unit: str) -> str:
    """'12 slides tumour, 1 slide normal'."""
    return ", ".join(f"{n} {unit}{'' if n == 1 else 's'} {label}" for label, n in sorted(counts.items()))
