"""Two methods whose errors are numbers, on the same patients: a paired test of the mean difference."""

import numpy as np

from wsi_mil.statistics.comparison import PairedTest
from wsi_mil.statistics.intervals import FEW, Interval, bootstrap_mean, patient_weights, percentile_interval
from wsi_mil.statistics.ranking import Floats

DRAWS = 10_000
SEED = 20240503
_SAME = 1e-12


def compare_means(differences: Floats, *, level: float = 0.95) -> PairedTest:
    """Is the mean of the patients' differences (n,) other than 0? First minus second.

    p: of the means with each sign flipped at random (Fisher 1935), the share at least as far from 0, the observed one
    counted in; no shape of the distribution is assumed. Interval: bootstrap over patients. Below 10 patients nothing
    is tested and p is NaN; it is 1 when no patient differs.
    """
    differences = np.asarray(differences, dtype=np.float64)
    mean = float(differences.mean()) if len(differences) else float("nan")
    nothing = Interval(low=float("nan"), high=float("nan"), level=level, method="not defined")
    if len(differences) < FEW:
        return PairedTest(difference=mean, interval=nothing, p=float("nan"))
    if np.abs(differences).max() < _SAME:
        return PairedTest(difference=mean, interval=nothing, p=1.0)
    signs = np.random.default_rng(SEED).integers(0, 2, size=(DRAWS, len(differences)), dtype=np.int8) * 2 - 1
    means = (signs @ differences) / len(differences)
    p = (1 + int((np.abs(means) >= abs(mean) - _SAME).sum())) / (1 + DRAWS)
    weights = patient_weights(np.zeros(len(differences), dtype=np.int64), seed=SEED)
    interval = percentile_interval(bootstrap_mean(differences, weights=weights), level=level)
    return PairedTest(difference=mean, interval=interval, p=p)
