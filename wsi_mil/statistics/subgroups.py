"""One figure for each level of a column (a site, a scanner, a sex), with its interval and its counts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from wsi_mil.statistics.concordance import Concordance
from wsi_mil.statistics.intervals import FEW, Interval, auc_interval, percentile_interval
from wsi_mil.statistics.ranking import Bools, Ints


@dataclass(frozen=True, kw_only=True)
class Subgroup:
    """A figure among the rows of one level; NaN where they are too few."""

    level: str
    n_patients: int
    counts: tuple[int, int]
    """Patients of the two sides of its pairs: positives and negatives, or earlier and later; (n, n) for numbers."""
    value: float
    interval: Interval
    note: str
    """Why there is no figure; empty otherwise."""


def concordance_subgroups(
    levels: Sequence[str], patients: Ints, part_of: Callable[[Bools], Concordance]
) -> list[Subgroup]:
    """AUC or C-index of each level, sorted by name, from `FEW` (10) patients on each side.

    levels, patients: (n,) of each row.   part_of: the concordance of chosen rows, for instance
    `lambda rows: concordance(positive[rows], scores[rows], groups=..., patients=..., n_patients=...)`.
    """
    found = []
    for level, rows in _rows(levels):
        part = part_of(rows)
        counts = (part.n_positive, part.n_negative)
        note = _note(min(counts), FEW, "on a side of its pairs")
        if not note and not np.isfinite(part.auc):
            note = "no pair within one fold"
        found.append(
            Subgroup(
                level=level,
                n_patients=len(np.unique(patients[rows])),
                counts=counts,
                value=float("nan") if note else part.auc,
                interval=percentile_interval(np.empty(0)) if note else auc_interval(part),
                note=note,
            )
        )
    return found


def _rows(levels: Sequence[str]) -> list[tuple[str, Bools]]:
    names = np.asarray(levels, dtype=object).astype(str)
    return [(str(level), names == level) for level in np.unique(names)]


def _note(count: int, least: int, where: str) -> str:
    return "" if count >= least else f"too few: {count} patients {where}, {least} are needed"
