"""Predictions of one method -> all its figures. Patients are the unit; test rows never choose anything."""

import numpy as np
from numpy.typing import NDArray

from wsi_mil.report.method_figures import Figure, FoldFigures, MethodFigures, Patients
from wsi_mil.report.study import Rows, Trained, patient_rows, seed_means
from wsi_mil.runs import FoldKey
from wsi_mil.statistics import calibration, decisions, intervals, ranking
from wsi_mil.statistics.concordance import Concordance, concordance, mean_concordance
from wsi_mil.statistics.intervals import Interval
from wsi_mil.statistics.ranking import Floats, Ints

DRAWS = 2000
MAX_WEIGHTS = 8_000_000
"""Bootstrap weights held at once (64 MB); larger cohorts take fewer draws."""
SEED = 20240501
_NO_WIDTH = 1e-9


def scored_columns(n_classes: int) -> range:
    """Columns that are looked at one against the rest: the positive one of two, else each."""
    return range(1, 2) if n_classes == 2 else range(n_classes)


def within_folds(rows: Rows, ids: tuple[str, ...]) -> Concordance:
    """AUC over pairs tested in one fold of one repeat; macro over classes when there are more than two."""
    return _concordance(rows, ids, groups=_codes(rows.keys))


def evaluate(method: Trained) -> MethodFigures:
    """All figures of one method."""
    models, mixed = patient_rows(method.test)
    thresholds = {key: _threshold(method, key) for key in sorted(set(method.test.keys))}
    patients = _patients(models, thresholds)
    rows = seed_means(models)
    n_classes = rows.probabilities.shape[1]
    within = within_folds(rows, patients.ids)
    pooled = _pooled(patients)
    confusion = decisions.confusion_matrix(patients.targets, patients.decisions, n_classes=n_classes)
    primary = Figure(value=within.auc, interval=intervals.auc_interval(within))
    return MethodFigures(
        label=method.label,
        rows=rows,
        mixed=mixed,
        patients=patients,
        within=within,
        primary=primary,
        primary_bootstrap=_never_zero(
            _bootstrap_within(rows, patients.ids, patients.weights), within, primary.interval
        ),
        pooled=Figure(value=pooled.auc, interval=intervals.auc_interval(pooled)),
        pooled_gap=_gap(rows, patients.ids, within),
        class_aucs=tuple(ranking.one_vs_rest_auc(patients.targets, patients.probabilities).tolist()),
        average_precision=_average_precision(patients),
        balanced_accuracy=_balanced_accuracy(patients, confusion),
        brier=_brier(patients),
        log_loss=calibration.log_loss(patients.targets, patients.probabilities),
        ece=_ece(patients),
        confusion=confusion,
        folds=tuple(_fold(method, models.of(key), key, thresholds[key]) for key in sorted(thresholds)),
        by_seed=_by_seed(models, patients.ids),
        slide_auc=_slide_auc(method.test),
    )


def _threshold(method: Trained, key: FoldKey) -> decisions.Threshold:
    if method.test.probabilities.shape[1] > 2:
        return decisions.Threshold(value=float("nan"), source="largest probability")
    selection = method.selections.get(key)
    if selection is not None and selection.cut is not None:
        return selection.cut
    validation = method.validation.get(key)
    if validation is None or not len(validation):
        return decisions.choose_threshold(np.empty(0, dtype=bool), np.empty(0))
    return decisions.choose_threshold_of_patients(
        validation.patients, validation.targets == 1, validation.probabilities[:, 1]
    )


def _patients(rows: Rows, thresholds: dict[FoldKey, decisions.Threshold]) -> Patients:
    ids = tuple(sorted(set(rows.patients)))
    places = _codes(rows.patients)
    counts = np.bincount(places, minlength=len(ids)).astype(np.float64)
    probabilities = np.zeros((len(ids), rows.probabilities.shape[1]))
    np.add.at(probabilities, places, rows.probabilities)
    probabilities /= counts[:, None]
    targets = np.zeros(len(ids), dtype=np.int64)
    targets[places] = rows.targets
    cuts = np.bincount(places, weights=[thresholds[key].value for key in rows.keys], minlength=len(ids)) / counts
    called = np.where(np.isnan(cuts), probabilities.argmax(axis=1), probabilities[:, -1] >= cuts)
    return Patients(
        ids=ids,
        targets=targets,
        probabilities=probabilities,
        cuts=cuts,
        decisions=called.astype(np.int64),
        losses=calibration.log_loss_terms(targets, probabilities),
        weights=_weights(rows, targets),
    )


def _weights(rows: Rows, classes: Ints) -> Floats:
    """Bootstrap weights of the patients in sorted order, drawn within class and the first fold that tests them."""
    first_fold = np.zeros(len(classes), dtype=np.int64)
    for place, key in sorted(zip(_codes(rows.patients).tolist(), rows.keys, strict=True), reverse=True):
        first_fold[place] = key.fold
    return intervals.patient_weights(first_fold, classes=classes, draws=_draws(len(classes)), seed=SEED)


def _draws(n_patients: int) -> int:
    return max(200, min(DRAWS, MAX_WEIGHTS // max(n_patients, 1)))


def _codes(values: tuple[object, ...]) -> Ints:
    """Number of each value in the sorted list of distinct ones."""
    number = {value: place for place, value in enumerate(sorted(set(values), key=_sortable))}
    return np.array([number[value] for value in values], dtype=np.int64)


def _sortable(value: object) -> tuple[int, ...] | str:
    return tuple(value) if isinstance(value, FoldKey) else str(value)


def _concordance(rows: Rows, ids: tuple[str, ...], *, groups: Ints) -> Concordance:
    number = {patient: place for place, patient in enumerate(ids)}
    patients = np.array([number[patient] for patient in rows.patients], dtype=np.int64)
    return mean_concordance(
        [
            concordance(
                rows.targets == column,
                rows.probabilities[:, column],
                groups=groups,
                patients=patients,
                n_patients=len(ids),
            )
            for column in scored_columns(rows.probabilities.shape[1])
        ]
    )


def _pooled(patients: Patients) -> Concordance:
    everyone = np.arange(len(patients.ids))
    return mean_concordance(
        [
            concordance(
                patients.targets == column,
                patients.probabilities[:, column],
                groups=np.zeros_like(everyone),
                patients=everyone,
                n_patients=len(everyone),
            )
            for column in scored_columns(patients.probabilities.shape[1])
        ]
    )


def _gap(rows: Rows, ids: tuple[str, ...], within: Concordance) -> float:
    """Distance of the pooled AUC, repeat by repeat on the same scores, from the within-fold one."""
    repeats = np.array([key.repeat for key in rows.keys], dtype=np.int64)
    return abs(_concordance(rows, ids, groups=repeats).auc - within.auc)


def _bootstrap_within(rows: Rows, ids: tuple[str, ...], weights: Floats) -> Floats:
    """Within-fold AUC of each bootstrap sample. weights: (draws, len(ids))."""
    number = {patient: place for place, patient in enumerate(ids)}
    weights = weights[:, np.array([number[patient] for patient in rows.patients], dtype=np.int64)]
    groups = _codes(rows.keys)
    samples = [
        intervals.bootstrap_auc(rows.targets == column, rows.probabilities[:, column], groups=groups, weights=weights)
        for column in scored_columns(rows.probabilities.shape[1])
    ]
    defined = [sample for sample in samples if np.isfinite(sample).any()]
    return np.asarray(np.mean(defined, axis=0)) if defined else samples[0]


def _never_zero(samples: Floats, part: Concordance, stand_in: Interval) -> Interval:
    """The percentile interval, or the bound of the analytic one where resampling cannot show any spread."""
    few = min(part.n_positive, part.n_negative) < intervals.FEW
    interval = intervals.percentile_interval(samples)
    return stand_in if few or not _has_width(interval) else interval


def _has_width(interval: Interval) -> bool:
    return bool(interval.high - interval.low > _NO_WIDTH)


def _few(patients: Patients) -> bool:
    counts = np.bincount(patients.targets, minlength=patients.probabilities.shape[1])
    return bool(counts[counts > 0].min(initial=intervals.FEW) < intervals.FEW)


def _undefined() -> Figure:
    return Figure(value=float("nan"), interval=intervals.percentile_interval(np.empty(0)))


def _average_precision(patients: Patients) -> Figure:
    if not len(patients.ids):
        return _undefined()
    values, samples = [], []
    for column in scored_columns(patients.probabilities.shape[1]):
        truth, scores = patients.targets == column, patients.probabilities[:, column]
        values.append(ranking.average_precision(truth, scores))
        samples.append(intervals.bootstrap_average_precision(truth, scores, weights=patients.weights))
    kept = [place for place, value in enumerate(values) if np.isfinite(value)]
    if not kept:
        return _undefined()
    mean = np.mean([samples[place] for place in kept], axis=0)
    if np.ptp(mean) < _NO_WIDTH or _few(patients):
        mean = np.empty(0)  # a perfect order or a handful of patients: resampling cannot show the spread
    return Figure(value=ranking.macro(np.array(values)), interval=intervals.percentile_interval(mean))


def _balanced_accuracy(patients: Patients, confusion: NDArray[np.int64]) -> Figure:
    right = (patients.decisions == patients.targets).astype(np.float64)
    found = [
        intervals.bootstrap_mean(right[members], weights=patients.weights[:, members])
        for column in range(len(confusion))
        if len(members := np.flatnonzero(patients.targets == column))
    ]
    if not found:
        return _undefined()
    value, interval = decisions.balanced_accuracy(confusion), intervals.percentile_interval(np.mean(found, axis=0))
    if _few(patients) or not _has_width(interval):
        smallest = int(min(count for count in confusion.sum(axis=1) if count))
        interval = intervals.wilson_interval(value, smallest, of="patients of the smallest class")
    return Figure(value=value, interval=interval)


def _brier(patients: Patients) -> Figure:
    terms = calibration.brier_terms(patients.targets, patients.probabilities)
    samples = np.empty(0) if _few(patients) else intervals.bootstrap_mean(terms, weights=patients.weights)
    return Figure(
        value=calibration.brier(patients.targets, patients.probabilities),
        interval=intervals.percentile_interval(samples),
    )


def _ece(patients: Patients) -> float:
    columns = scored_columns(patients.probabilities.shape[1])
    return float(
        np.mean(
            [
                calibration.expected_calibration_error(patients.targets == column, patients.probabilities[:, column])
                for column in columns
            ]
        )
    )


def _fold(method: Trained, rows: Rows, key: FoldKey, threshold: decisions.Threshold) -> FoldFigures:
    n_classes = rows.probabilities.shape[1]
    aucs = ranking.one_vs_rest_auc(rows.targets, rows.probabilities)
    if n_classes == 2:
        called = (rows.probabilities[:, 1] >= threshold.value).astype(np.int64)
    else:
        called = rows.probabilities.argmax(axis=1)
    selection = method.selections.get(key)
    return FoldFigures(
        key=key,
        counts=tuple(np.bincount(rows.targets, minlength=n_classes).tolist()),
        auc=ranking.macro(aucs[list(scored_columns(n_classes))]),
        class_aucs=tuple(aucs.tolist()),
        balanced_accuracy=decisions.balanced_accuracy(
            decisions.confusion_matrix(rows.targets, called, n_classes=n_classes)
        ),
        brier=calibration.brier(rows.targets, rows.probabilities),
        threshold=threshold,
        epoch=selection.epoch if selection else None,
        chosen_by=selection.chosen_by if selection else "not recorded",
    )


def _by_seed(rows: Rows, ids: tuple[str, ...]) -> dict[tuple[int, int], float]:
    found = {}
    for repeat, seed in sorted({(key.repeat, key.seed) for key in rows.keys}):
        own = rows.take(i for i, key in enumerate(rows.keys) if (key.repeat, key.seed) == (repeat, seed))
        found[repeat, seed] = within_folds(own, ids).auc
    return found


def _slide_auc(rows: Rows) -> Figure | None:
    """Over all slides, those of patients with slides of several classes too; these patients are a class of their own
    when the bootstrap draws."""
    if not any(rows.slides):
        return None
    rows = seed_means(rows)
    ids = tuple(sorted(set(rows.patients)))
    labels: dict[str, set[int]] = {patient: set() for patient in ids}
    for patient, target in zip(rows.patients, rows.targets.tolist(), strict=True):
        labels[patient].add(target)
    part = within_folds(rows, ids)
    weights = _weights(rows, _codes(tuple(str(sorted(labels[patient])) for patient in ids)))
    interval = _never_zero(_bootstrap_within(rows, ids, weights), part, intervals.auc_interval(part))
    return Figure(value=part.auc, interval=interval)
