"""The same figures among patients of one site, or of one level of another column of the table."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from wsi_mil.report.method_figures import Figure, MethodFigures
from wsi_mil.report.ranking_figures import within_folds
from wsi_mil.report.resampling import codes
from wsi_mil.report.study import Study
from wsi_mil.statistics import intervals
from wsi_mil.statistics.subgroups import concordance_subgroups

FEWEST_LEVELS, MOST_LEVELS = 2, 10
VALUE = "value:"
"""Before the name of a column that the cohort took over from the table."""
UNKNOWN, SEVERAL = "(not recorded)", "(several)"


@dataclass(frozen=True, kw_only=True)
class SubgroupFigures:
    """One method among the patients of one level."""

    method: str
    level: str
    patients: int
    by_class: tuple[int, ...]
    auc: Figure
    """Within folds; NaN with the reason in `note`."""
    right: Figure
    """Share of patients that were called their class."""
    note: str


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the cohort and its levels."""

    name: str
    figures: tuple[SubgroupFigures, ...]
    """Level by level, in each the methods in their order."""


def subgroups(study: Study, methods: Sequence[MethodFigures]) -> tuple[Column, ...]:
    """Site and every other column with 2 to 10 levels, cells that say nothing not counted; the target is no group."""
    names = ["site", *(name for name in study.cohort.columns if name.startswith(VALUE))]
    found = []
    for name in names:
        if name == f"{VALUE}{study.target}" or name not in study.cohort.columns:
            continue
        levels = levels_of(study.used, name)
        known = set(levels.values()) - {UNKNOWN, SEVERAL}
        figures = _figures(levels, methods) if FEWEST_LEVELS <= len(known) <= MOST_LEVELS else ()
        if figures:  # there are none where no patient has a class of its own
            found.append(Column(name=name.removeprefix(VALUE), figures=figures))
    return tuple(found)


def levels_of(used: pd.DataFrame, column: str) -> dict[str, str]:
    """Patient -> level; patients whose slides differ are a level of their own."""
    cells: dict[str, set[str]] = {}
    for patient, cell in used[["patient", column]].itertuples(index=False):
        cells.setdefault(patient, set()).add(str(cell) or UNKNOWN)
    return {patient: found.pop() if len(found) == 1 else SEVERAL for patient, found in cells.items()}


def _figures(levels: dict[str, str], methods: Sequence[MethodFigures]) -> tuple[SubgroupFigures, ...]:
    found = [one for method in methods for one in _of_method(levels, method)]
    order = {level: place for place, level in enumerate(sorted({one.level for one in found}))}
    return tuple(sorted(found, key=lambda one: order[one.level]))  # stable: methods keep their order


def _of_method(levels: dict[str, str], method: MethodFigures) -> list[SubgroupFigures]:
    patients, rows = method.patients, method.rows
    own = np.array([levels.get(patient, UNKNOWN) for patient in patients.ids], dtype=object)
    ranked = concordance_subgroups(
        [levels.get(patient, UNKNOWN) for patient in rows.patients],
        codes(rows.patients),
        lambda kept: within_folds(rows.take(np.flatnonzero(kept).tolist()), patients.ids),
    )
    found = []
    for one in ranked:
        members = np.flatnonzero(own == one.level)
        right = float((patients.decisions[members] == patients.targets[members]).mean())
        counts = np.bincount(patients.targets[members], minlength=patients.probabilities.shape[1])
        found.append(
            SubgroupFigures(
                method=method.label,
                level=one.level,
                patients=len(members),
                by_class=tuple(counts.tolist()),
                auc=Figure(value=one.value, interval=one.interval),
                right=Figure(
                    value=right, interval=intervals.wilson_interval(right, len(members), of="patients of the group")
                ),
                note=one.note,
            )
        )
    return found
