"""Rows of slides or seeds -> one row a patient, as wherever validation patients choose something."""

from collections.abc import Sequence

import numpy as np

from wsi_mil.statistics.ranking import Floats, Ints


def patient_means(patients: Sequence[str], targets: Ints, values: Floats) -> tuple[Ints, Floats]:
    """Class and mean value of each patient, sorted by name. A patient whose rows differ in class is left out.

    patients, targets: (n,).   values: (n, k).   Returns (m,) and (m, k).
    """
    _, first, places = np.unique(np.asarray(patients, dtype=object).astype(str), return_index=True, return_inverse=True)
    values = np.asarray(values, dtype=np.float64)
    counts = np.bincount(places).astype(np.float64)
    sums = [np.bincount(places, weights=column) for column in values.T]
    mixed = np.bincount(places, weights=targets != targets[first][places]) > 0
    means = np.stack(sums, axis=1) / counts[:, None]
    return targets[first][~mixed], means[~mixed]
