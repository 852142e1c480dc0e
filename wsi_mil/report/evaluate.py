"""Predictions of one method -> all its figures. Patients are the unit; test rows never choose anything."""

import numpy as np

from wsi_mil.report.choices import calibrations_of
from wsi_mil.report.decision_figures import balanced_accuracy, decision_figures, operating_points, slide_matrices
from wsi_mil.report.method_figures import Figure, FoldFigures, MethodFigures, Patients, SlideFigures, TrainingFigures
from wsi_mil.report.probability_figures import probability_figures
from wsi_mil.report.ranking_figures import (
    average_precision,
    bootstrap_within,
    class_figures,
    mixed_classes,
    pooled,
    scored_columns,
    slide_auc,
    within_folds,
)
from wsi_mil.report.resampling import patient_weights, places_of
from wsi_mil.report.study import Rows, Trained, patient_rows, seed_means
from wsi_mil.runs import FoldKey
from wsi_mil.statistics import calibration, decisions, intervals, ranking
from wsi_mil.statistics.ranking import Floats, Ints

Cuts = dict[FoldKey, decisions.Threshold]


def evaluate(method: Trained) -> MethodFigures:
    """All figures of one method."""
    models, mixed = patient_rows(method.test)
    cuts = {key: _threshold(method, key) for key in sorted(set(method.test.keys))}
    patients = _patients(models, cuts)
    rows = seed_means(models)
    within = within_folds(rows, patients.ids)
    confusion, decided = decision_figures(patients)
    calibrated = _calibrated(method, patients)
    return MethodFigures(
        label=method.label,
        rows=rows,
        mixed=mixed,
        patients=patients,
        within=within,
        primary=Figure(value=within.auc, interval=intervals.auc_interval(within)),
        primary_bootstrap=bootstrap_within(rows, patients.ids, patients.weights, within),
        pooled=pooled(patients),
        classes=class_figures(rows, patients),
        average_precision=average_precision(patients, scored_columns(rows.probabilities.shape[1])),
        confusion=confusion,
        decided=decided,
        operating=operating_points(patients),
        raw=probability_figures(patients, patients.probabilities),
        calibrated=None if calibrated is None else probability_figures(patients, calibrated),
        calibrated_probabilities=calibrated,
        folds=tuple(_fold(method, models.of(key), key, cuts[key]) for key in cuts),
        by_training=_by_training(models, patients.ids, cuts),
        slides=_slides(method.test, cuts),
    )


def _threshold(method: Trained, key: FoldKey) -> decisions.Threshold:
    if method.test.probabilities.shape[1] > 2:
        return decisions.Threshold(value=float("nan"), source="largest probability")
    selection = method.selections.get(key)
    cut = selection.cut(method.target) if selection is not None else None
    if cut is not None:
        return cut
    validation = method.validation.get(key)
    if validation is None or not len(validation):
        return decisions.choose_threshold(np.empty(0, dtype=bool), np.empty(0))
    return decisions.choose_threshold_of_patients(
        validation.patients, validation.targets == 1, validation.probabilities[:, 1]
    )


def _patients(rows: Rows, cuts: Cuts) -> Patients:
    ids = tuple(sorted(set(rows.patients)))
    places = places_of(rows.patients, ids)
    probabilities, targets = _means(rows.probabilities, places, len(ids)), np.zeros(len(ids), dtype=np.int64)
    targets[places] = rows.targets
    mean_cuts = _mean_cuts(rows, cuts, places, len(ids))
    return Patients(
        ids=ids,
        targets=targets,
        probabilities=probabilities,
        cuts=mean_cuts,
        decisions=_called(probabilities, mean_cuts),
        losses=calibration.log_loss_terms(targets, probabilities),
        weights=patient_weights(rows, targets),
    )


def _means(values: Floats, places: Ints, n: int) -> Floats:
    """(n, k) means of the rows (m, k) that stand at each place."""
    total = np.zeros((n, values.shape[1]))
    np.add.at(total, places, values)
    return np.asarray(total / np.bincount(places, minlength=n)[:, None])


def _mean_cuts(rows: Rows, cuts: Cuts, places: Ints, n: int) -> Floats:
    values = np.array([cuts[key].value for key in rows.keys], dtype=np.float64).reshape(-1, 1)
    return _means(values, places, n)[:, 0]


def _called(probabilities: Floats, cuts: Floats) -> Ints:
    """(n,) the class that each row is called: at its cut, or the largest probability where there is none."""
    called = np.where(np.isnan(cuts), probabilities.argmax(axis=1), probabilities[:, -1] >= cuts)
    return called.astype(np.int64)


def _calibrated(method: Trained, patients: Patients) -> Floats | None:
    """Of the patients; None also where validation fitted nothing for any model, so that they are the raw ones."""
    fitted = {kind for one in method.selections.values() for kind in calibrations_of(one, method.target)}
    if method.calibrated is None or fitted <= {"none"}:
        return None
    rows, _ = patient_rows(method.calibrated)
    return _means(rows.probabilities, places_of(rows.patients, patients.ids), len(patients.ids))


def _fold(method: Trained, rows: Rows, key: FoldKey, threshold: decisions.Threshold) -> FoldFigures:
    n_classes = rows.probabilities.shape[1]
    aucs = ranking.one_vs_rest_auc(rows.targets, rows.probabilities)
    called = _called(rows.probabilities, np.full(len(rows), threshold.value))
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


def _by_training(rows: Rows, ids: tuple[str, ...], cuts: Cuts) -> dict[tuple[int, int], TrainingFigures]:
    found = {}
    for repeat, seed in sorted({(key.repeat, key.seed) for key in rows.keys}):
        own = rows.take(i for i, key in enumerate(rows.keys) if (key.repeat, key.seed) == (repeat, seed))
        called = _called(own.probabilities, np.array([cuts[key].value for key in own.keys]))
        matrix = decisions.confusion_matrix(own.targets, called, n_classes=own.probabilities.shape[1])
        found[repeat, seed] = TrainingFigures(
            auc=within_folds(own, ids).auc,
            balanced_accuracy=decisions.balanced_accuracy(matrix),
            brier=calibration.brier(own.targets, own.probabilities),
        )
    return found


def _slides(rows: Rows, cuts: Cuts) -> SlideFigures | None:
    if not any(rows.slides):
        return None
    slides = tuple(sorted(set(rows.slides)))
    places = places_of(rows.slides, slides)
    targets, owners = np.zeros(len(slides), dtype=np.int64), np.zeros(len(slides), dtype=np.int64)
    ids = tuple(sorted(set(rows.patients)))
    targets[places], owners[places] = rows.targets, places_of(rows.patients, ids)
    probabilities = _means(rows.probabilities, places, len(slides))
    called = _called(probabilities, _mean_cuts(rows, cuts, places, len(slides)))
    weights = patient_weights(rows, mixed_classes(rows, ids))[:, owners]
    matrix, samples = slide_matrices(targets, called, probabilities.shape[1], weights)
    patients = [len(np.unique(owners[targets == column])) for column in range(probabilities.shape[1])]
    return SlideFigures(
        auc=slide_auc(rows),
        balanced_accuracy=balanced_accuracy(matrix, samples, patients=np.array(patients, dtype=np.int64)),
    )
