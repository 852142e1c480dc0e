"""How well a method orders the patients: AUC within folds and pooled, average precision, points on the ROC curve."""

import numpy as np

from wsi_mil.report.method_figures import ClassFigures, Figure, Patients
from wsi_mil.report.resampling import codes, has_width, patient_weights, places_of, resampled, undefined
from wsi_mil.report.study import Rows, seed_means
from wsi_mil.statistics import intervals, ranking
from wsi_mil.statistics.concordance import Concordance, concordance, mean_concordance
from wsi_mil.statistics.intervals import Interval
from wsi_mil.statistics.ranking import Floats, Ints


def scored_columns(n_classes: int) -> range:
    """Columns that are looked at one against the rest: the positive one of two, else each."""
    return range(1, 2) if n_classes == 2 else range(n_classes)


def within_folds(rows: Rows, ids: tuple[str, ...]) -> Concordance:
    """AUC over pairs tested in one fold of one repeat; macro over classes when there are more than two."""
    return mean_concordance(_each_class(rows, ids, groups=codes(rows.keys)))


def pooled(patients: Patients) -> Figure:
    """AUC over all pairs of patients."""
    part = mean_concordance(_pooled_classes(patients))
    return Figure(value=part.auc, interval=intervals.auc_interval(part))


def class_figures(rows: Rows, patients: Patients) -> tuple[ClassFigures, ...]:
    """Each scored class against the rest."""
    within = _each_class(rows, patients.ids, groups=codes(rows.keys))
    columns = scored_columns(patients.probabilities.shape[1])
    return tuple(
        ClassFigures(
            within=Figure(value=inner.auc, interval=intervals.auc_interval(inner)),
            pooled=Figure(value=outer.auc, interval=intervals.auc_interval(outer)),
            average_precision=average_precision(patients, (column,)),
        )
        for column, inner, outer in zip(columns, within, _pooled_classes(patients), strict=True)
    )


def bootstrap_within(rows: Rows, ids: tuple[str, ...], weights: Floats, part: Concordance) -> Interval:
    """Bootstrap (BCa) interval of the within-fold AUC, or the analytic one where resampling cannot show any spread.

    weights: (draws, len(ids)).   part: that AUC.
    """
    weights = weights[:, places_of(rows.patients, ids)]
    groups = codes(rows.keys)
    samples = [
        intervals.bootstrap_auc(rows.targets == column, rows.probabilities[:, column], groups=groups, weights=weights)
        for column in scored_columns(rows.probabilities.shape[1])
    ]
    defined = [sample for sample in samples if np.isfinite(sample).any()]
    mean = np.asarray(np.mean(defined, axis=0)) if defined else samples[0]
    interval = intervals.bca_interval(mean, value=part.auc, influence=part.influence)
    few = min(part.n_positive, part.n_negative) < intervals.FEW
    return intervals.auc_interval(part) if few or not has_width(interval) else interval


def average_precision(patients: Patients, columns: tuple[int, ...] | range) -> Figure:
    """Mean over the columns that have patients. No interval of a perfect order."""
    if not len(patients.ids):
        return undefined()
    values, samples = [], []
    for column in columns:
        truth, scores = patients.targets == column, patients.probabilities[:, column]
        values.append(ranking.average_precision(truth, scores))
        samples.append(intervals.bootstrap_average_precision(truth, scores, weights=patients.weights))
    kept = [place for place, value in enumerate(values) if np.isfinite(value)]
    if not kept:
        return undefined()
    mean = np.mean([samples[place] for place in kept], axis=0)
    return resampled(ranking.macro(np.array(values)), mean, patients=patients)


def slide_auc(rows: Rows) -> Figure:
    """Over all slides, those of patients with slides of several classes too; these patients are a class of their own
    when the bootstrap draws."""
    rows = seed_means(rows)
    ids = tuple(sorted(set(rows.patients)))
    part = within_folds(rows, ids)
    weights = patient_weights(rows, mixed_classes(rows, ids))
    return Figure(value=part.auc, interval=bootstrap_within(rows, ids, weights, part))


def mixed_classes(rows: Rows, ids: tuple[str, ...]) -> Ints:
    """(len(ids),) a number for each set of classes that a patient's slides have."""
    labels: dict[str, set[int]] = {patient: set() for patient in ids}
    for patient, target in zip(rows.patients, rows.targets.tolist(), strict=True):
        labels[patient].add(target)
    return codes(tuple(str(sorted(labels[patient])) for patient in ids))


def _each_class(rows: Rows, ids: tuple[str, ...], *, groups: Ints) -> list[Concordance]:
    patients = places_of(rows.patients, ids)
    return [
        concordance(
            rows.targets == column, rows.probabilities[:, column], groups=groups, patients=patients, n_patients=len(ids)
        )
        for column in scored_columns(rows.probabilities.shape[1])
    ]


def _pooled_classes(patients: Patients) -> list[Concordance]:
    everyone = np.arange(len(patients.ids))
    return [
        concordance(
            patients.targets == column,
            patients.probabilities[:, column],
            groups=np.zeros_like(everyone),
            patients=everyone,
            n_patients=len(everyone),
        )
        for column in scored_columns(patients.probabilities.shape[1])
    ]
