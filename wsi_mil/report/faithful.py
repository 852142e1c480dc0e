"""Whether heat maps show what the models use: the deletion and insertion figures that cross-validation left."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from wsi_mil.errors import RunError
from wsi_mil.outcomes import Failure
from wsi_mil.report.study import Study
from wsi_mil.results.reading import read_frame
from wsi_mil.statistics.faithfulness import CURVES, STEPS, Faithfulness, summarise
from wsi_mil.statistics.ranking import Floats, macro

SEED = 20240504
_FIGURES = [
    "answer",
    "deletion",
    "insertion",
    "faithfulness",
    *(f"{curve}_{step}" for curve in CURVES for step in STEPS),
]


@dataclass(frozen=True, kw_only=True, eq=False)
class MethodFaithfulness:
    """One method, its own score, over the test bags that were measured. No annotation is needed."""

    method: str
    figures: Faithfulness
    answer: float
    """Mean answer for the whole bags: where the curves of `without` begin."""
    curves: dict[str, Floats]
    """Each of CURVES -> (6,) mean answer at STEPS per cent of the tiles."""


def read_faithfulness(study: Study) -> tuple[list[MethodFaithfulness], list[Failure]]:
    """The methods that were measured, in the run's order. A damaged file is a Failure, and the rest goes on."""
    found: list[MethodFaithfulness] = []
    failures: list[Failure] = []
    for method in study.methods:
        tables = []
        for key in study.run.keys(method.label):
            path = study.run.faithfulness_path(method.label, key)
            if not path.is_file():
                continue
            try:
                tables.append(_read(path))
            except RunError as error:
                failures.append(Failure(item=f"{method.label} {key}", outcome="not measured", reason=str(error)))
        if tables:
            found.append(_of_method(method.label, pd.concat(tables, ignore_index=True)))
    return found, failures


def _read(path: Path) -> pd.DataFrame:
    try:
        frame = read_frame(path, ["patient", "bag", *_FIGURES])
        return frame.replace("", "nan").astype(dict.fromkeys(_FIGURES, float))
    except (RunError, ValueError) as error:
        raise RunError(
            f"{path} is damaged: columns are missing, or a figure is no number. Remove it: the report does without it."
        ) from error


def _of_method(method: str, rows: pd.DataFrame) -> MethodFaithfulness:
    numbers = {name: rows[name].to_numpy(dtype=np.float64) for name in _FIGURES}
    return MethodFaithfulness(
        method=method,
        figures=summarise(
            numbers["deletion"], numbers["insertion"], numbers["faithfulness"], tuple(rows["patient"]), seed=SEED
        ),
        answer=macro(numbers["answer"]),
        curves={curve: np.array([macro(numbers[f"{curve}_{step}"]) for step in STEPS]) for curve in CURVES},
    )
