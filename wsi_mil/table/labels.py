"""The labels of a table -> the task that they pose: classes and their order, level, contradictions."""

import difflib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from wsi_mil.errors import CohortError, ConfigError
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
from wsi_mil.targets._base import labelled
from wsi_mil.tasks import Level, Task, TaskSpec

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
