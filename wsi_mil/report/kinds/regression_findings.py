"""All that is said of one predicted number, computed once."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wsi_mil.outcomes import Failure
from wsi_mil.report.findings import Comparison
from wsi_mil.report.kinds.cases import worst_errors
from wsi_mil.report.kinds.pairs import compare_methods
from wsi_mil.report.kinds.records import TargetStudy
from wsi_mil.report.kinds.regression import NumberFigures, compare_numbers, evaluate_numbers
from wsi_mil.report.kinds.wording import digits_for
from wsi_mil.report.pictures import Case
from wsi_mil.report.study import Study


@dataclass(frozen=True, kw_only=True, eq=False)
class NumberFindings:
    """All that is said of one number."""

    study: TargetStudy
    methods: tuple[NumberFigures, ...]
    comparisons: tuple[Comparison, ...]
    cases: dict[str, tuple[Case, ...]]
    failures: tuple[Failure, ...]

    @property
    def best(self) -> NumberFigures:
        """The method that explains most; the first one where none is defined."""
        return max(self.methods, key=lambda method: np.nan_to_num(method.primary.value, nan=-np.inf))

    @property
    def digits(self) -> int:
        """Decimals that tell values in the column's units apart."""
        return digits_for(self.best.patients.truth)


def find_numbers(study: TargetStudy, everyone: Study, *, slides_root: Path | None) -> NumberFindings:
    """Compute all figures of a number."""
    methods, cases, failures = [], {}, []
    for method in study.methods:
        figures = evaluate_numbers(method)
        methods.append(figures)
        off = np.abs(figures.patients.off)
        cases[method.label], failed = worst_errors(
            everyone, method.label, figures.patients.ids, off, slides_root=slides_root
        )
        failures.extend(failed)
    return NumberFindings(
        study=study,
        methods=tuple(methods),
        comparisons=compare_methods([(m.label, m.rows) for m in methods], compare_numbers),
        cases=cases,
        failures=tuple(failures),
    )
