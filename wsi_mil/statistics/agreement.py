"""Do decisions and truth agree beyond chance? Cohen's kappa, also for classes in an order."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from wsi_mil.statistics.ranking import Floats, Ints

Distance = Literal["unweighted", "linear", "quadratic"]


def kappa(matrix: NDArray[np.int64], *, distance: Distance) -> float:
    """Cohen's kappa: 1 - observed disagreement / that of independent decisions with the same totals.

    matrix: (k, k) of `decisions.confusion_matrix`, in the order of the classes.
    distance: how far two classes are apart: 1 for any two, |i - j|, or (i - j) ** 2 (Cohen 1960, 1968).
    NaN without a row and where truth and decisions are all of one and the same class.
    """
    return float(_kappas(np.asarray(matrix, dtype=np.float64)[None], distance)[0])


def bootstrap_kappa(targets: Ints, decisions: Ints, *, n_classes: int, distance: Distance, weights: Floats) -> Floats:
    """Kappa of each bootstrap sample (draws,).

    targets, decisions: (n,) class numbers.   weights: (draws, n) of the rows.
    """
    cells = np.eye(n_classes * n_classes)[np.asarray(targets) * n_classes + np.asarray(decisions)]
    return _kappas((weights @ cells).reshape(len(weights), n_classes, n_classes), distance)


def _kappas(matrices: Floats, distance: Distance) -> Floats:
    places = np.arange(matrices.shape[1], dtype=np.float64)
    apart = np.abs(places[:, None] - places)
    cost = {"unweighted": (apart > 0).astype(np.float64), "linear": apart, "quadratic": apart**2}[distance]
    observed = np.einsum("bij,ij->b", matrices, cost)
    total = matrices.sum(axis=(1, 2))
    chance = np.einsum("bi,bj,ij->b", matrices.sum(axis=2), matrices.sum(axis=1), cost)
    undefined: Floats = np.full(len(matrices), np.nan)
    disagreement: Floats = np.divide(observed * total, chance, out=undefined, where=chance > 0)
    return 1.0 - disagreement
