"""Classes in an order: how many steps a decision is off, and how well each cut between two classes is found."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wsi_mil.report.method_figures import Figure, MethodFigures
from wsi_mil.report.ranking_figures import within_folds
from wsi_mil.report.resampling import resampled
from wsi_mil.report.study import Rows
from wsi_mil.statistics import intervals
from wsi_mil.statistics.agreement import bootstrap_kappa, kappa
from wsi_mil.statistics.concordance import Concordance, mean_concordance
from wsi_mil.statistics.ranking import Floats, Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class OrdinalFigures:
    """What the order adds to the figures of a method."""

    label: str
    kappa: Figure
    """Quadratic weights: an error of two steps counts four times."""
    steps: Figure
    """Mean number of classes between decision and truth."""
    splits: tuple[tuple[str, Figure], ...]
    """(class, AUC within folds of that class or a higher one against the lower ones)"""
    splits_mean: Figure


def ordinal_figures(method: MethodFigures, classes: Sequence[str]) -> OrdinalFigures:
    """All of them for one method."""
    patients = method.patients
    parts = [_split(method.rows, patients.ids, at=place) for place in range(1, len(classes))]
    return OrdinalFigures(
        label=method.label,
        kappa=resampled(
            kappa(method.confusion, distance="quadratic"),
            bootstrap_kappa(
                patients.targets,
                patients.decisions,
                n_classes=len(classes),
                distance="quadratic",
                weights=patients.weights,
            ),
            patients=patients,
        ),
        steps=_steps(method),
        splits=tuple((name, _auc(part)) for name, part in zip(classes[1:], parts, strict=True)),
        splits_mean=_auc(mean_concordance(parts)),
    )


def steps_off(targets: Ints, decisions: Ints) -> Floats:
    """(n,) classes between decision and truth."""
    return np.asarray(np.abs(decisions - targets), dtype=np.float64)


def _steps(method: MethodFigures) -> Figure:
    patients = method.patients
    off = steps_off(patients.targets, patients.decisions)
    value = float(off.mean()) if len(off) else float("nan")
    return resampled(value, intervals.bootstrap_mean(off, weights=patients.weights), patients=patients)


def _split(rows: Rows, ids: tuple[str, ...], *, at: int) -> Concordance:
    """AUC within folds of the probability to be at or above class `at`."""
    above = rows.probabilities[:, at:].sum(axis=1)
    binary = Rows(
        patients=rows.patients,
        slides=rows.slides,
        keys=rows.keys,
        targets=(rows.targets >= at).astype(np.int64),
        probabilities=np.stack([1 - above, above], axis=1),
    )
    return within_folds(binary, ids)


def _auc(part: Concordance) -> Figure:
    return Figure(value=part.auc, interval=intervals.auc_interval(part))
