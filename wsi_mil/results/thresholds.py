"""Where the decisions of a model are cut, the same for the report and the viewer. Test rows have no say."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from wsi_mil.runs import FoldKey, RunDir
from wsi_mil.statistics.decisions import Threshold, choose_threshold, choose_threshold_of_patients


def threshold_of(run: RunDir, method: str, key: FoldKey, classes: Sequence[str], *, target: str) -> Threshold:
    """The cut of one model on one target: as it was stored, else from its validation rows."""
    if run.selection_path(method, key).is_file():
        stored = run.selection(method, key).cut(target)
        if stored is not None:
            return stored
    there = run.validation_path(method, key).is_file()
    return threshold_of_rows(run.validation(method, key) if there else pd.DataFrame(), classes)


def threshold_of_rows(validation: pd.DataFrame, classes: Sequence[str]) -> Threshold:
    """The cut that validation rows (in the columns of predictions.csv) give; NaN with more than two classes."""
    if len(classes) != 2:
        return Threshold(value=math.nan, source="largest probability")
    if validation.empty:
        return choose_threshold(np.empty(0, dtype=bool), np.empty(0))
    return choose_threshold_of_patients(
        tuple(validation["patient"]),
        (validation["target"] == classes[-1]).to_numpy(),
        validation[f"prob_{classes[-1]}"].to_numpy(dtype=np.float64),
    )
