"""How far a method's probabilities are from the truth: Brier score, log-loss, calibration error, with intervals."""

import numpy as np

from wsi_mil.report.method_figures import Patients, ProbabilityFigures
from wsi_mil.report.ranking_figures import scored_columns
from wsi_mil.report.resampling import reflected, resampled
from wsi_mil.statistics import calibration, intervals
from wsi_mil.statistics.ranking import Floats

N_BINS = 10


def probability_figures(patients: Patients, probabilities: Floats) -> ProbabilityFigures:
    """probabilities: (n, n_classes) of the patients, raw or calibrated."""
    targets = patients.targets
    brier, loss = calibration.brier_terms(targets, probabilities), calibration.log_loss_terms(targets, probabilities)
    columns = list(scored_columns(probabilities.shape[1]))
    ece = [calibration.expected_calibration_error(targets == c, probabilities[:, c], n_bins=N_BINS) for c in columns]
    gaps = [_bootstrap_ece(targets == c, probabilities[:, c], weights=patients.weights) for c in columns]
    return ProbabilityFigures(
        brier=resampled(
            calibration.brier(targets, probabilities),
            intervals.bootstrap_mean(brier, weights=patients.weights),
            patients=patients,
        ),
        log_loss=resampled(
            calibration.log_loss(targets, probabilities),
            intervals.bootstrap_mean(loss, weights=patients.weights),
            patients=patients,
        ),
        ece=reflected(float(np.mean(ece)), np.mean(gaps, axis=0), patients=patients),
    )


def _bootstrap_ece(positive: np.ndarray, scores: Floats, *, weights: Floats) -> Floats:
    """Calibration error of each bootstrap sample (draws,), in the bins of the whole."""
    counts = calibration.calibration_curve(positive, scores, n_bins=N_BINS).counts
    if not len(counts):
        return np.full(len(weights), np.nan)
    order = np.argsort(scores, kind="stable")
    gap = (positive.astype(np.float64) - scores)[order]
    starts = np.append(0, np.cumsum(counts)[:-1])
    sums = np.add.reduceat(weights[:, order] * gap, starts, axis=1)
    return np.asarray(np.abs(sums).sum(axis=1) / weights.sum(axis=1))
