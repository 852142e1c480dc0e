"""Sentences that numbers and times to an event share."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from wsi_mil.report.kinds.records import TargetStudy
from wsi_mil.report.wording import number
from wsi_mil.statistics.ranking import Floats


class _Counted(Protocol):
    @property
    def label(self) -> str: ...
    @property
    def mixed(self) -> tuple[str, ...]: ...
    @property
    def broken(self) -> int: ...


class _Kept(Protocol):
    @property
    def chosen_by(self) -> str: ...


def digits_for(values: Floats) -> int:
    """Decimals that show a hundredth of the spread of values: 0 for values in the hundreds, 3 for shares of 1."""
    spread = float(np.ptp(values)) if len(values) else 0.0
    return int(np.clip(2 - np.floor(np.log10(spread)), 0, 4)) if spread > 0 else 2


def about_left_out(study: TargetStudy, methods: Sequence[_Counted]) -> list[str]:
    """Who does not stand in the figures, and why."""
    lines = []
    mixed = {patient for method in methods for patient in method.mixed}
    if mixed:
        lines.append(f"{len(mixed)} patients have slides of different values of “{study.target.name}”; left out.")
    lines += [
        f"{method.label}: {method.broken} predictions are not finite numbers; left out."
        for method in methods
        if method.broken
    ]
    return lines


def chosen_by(folds: Sequence[_Kept]) -> str:
    """Who chose the epochs."""
    return f"Epoch chosen by: {'; '.join(sorted({fold.chosen_by for fold in folds}))}. Test patients chose nothing."


def spread_of_seeds(by_seed: Mapping[tuple[int, int], float], what: str, *, digits: int) -> str:
    """How far a figure runs over trainings; empty for a single one."""
    values = [value for value in by_seed.values() if np.isfinite(value)]
    if len(values) < 2:
        return ""
    return (
        f" Over {len(values)} trainings (repeats and seeds) the {what} runs from {number(min(values), digits)} to "
        f"{number(max(values), digits)}, standard deviation {number(float(np.std(values, ddof=1)), digits + 1)}. The "
        f"interval does not contain this."
    )
