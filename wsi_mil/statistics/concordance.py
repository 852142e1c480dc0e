"""AUC over pairs within groups (test folds), with the part that each patient has in it.

The scores of two fold models have no common scale, so a pair counts only when both of it were scored by one model.
With a single group everything here is the ordinary AUC and its variance is DeLong's.
"""

from dataclasses import dataclass

import numpy as np

from wsi_mil.statistics.ranking import Bools, Floats, Ints, placements


@dataclass(frozen=True, kw_only=True)
class Concordance:
    """An AUC, or a C-index as its kin, and what its interval needs."""

    auc: float
    """NaN when no group holds both classes (or no pair of a C-index)."""
    influence: Floats
    """(n_patients,) how far each patient moves the AUC; the sum of squares is the variance."""
    n_positive: int
    """Patients with a positive row."""
    n_negative: int
    disjoint_pairs: int
    """Independent positive-negative pairs that can be formed within the groups, each patient used once."""
    source: str = "DeLong"
    """Where the influence comes from; names the interval."""

    @property
    def variance(self) -> float:
        """DeLong's variance (summed over groups; a patient's rows move together)."""
        return float(np.sum(self.influence**2))


def concordance(positive: Bools, scores: Floats, *, groups: Ints, patients: Ints, n_patients: int) -> Concordance:
    """AUC over the pairs within each group.

    positive, scores, groups, patients: (n,) one row a scored item; patients in 0 .. n_patients - 1.
    A group is what one model scored: (repeat, fold, seed). The influence of row i of group g with m positives and
    n negatives is n (V_i - AUC_g) sqrt(m / (m - 1)) / N for a positive, likewise for a negative; N = all pairs.
    """
    positive = np.asarray(positive, dtype=bool)
    scores = np.asarray(scores, dtype=np.float64)
    influence, concordant, pairs, disjoint, seen = np.zeros(n_patients), 0.0, 0.0, 0, 0
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        up, down = rows[positive[rows]], rows[~positive[rows]]
        n_up, n_down = len(np.unique(patients[up])), len(np.unique(patients[down]))
        disjoint, seen = disjoint + min(n_up, n_down), seen + len(np.unique(patients[rows]))
        if not len(up) or not len(down):
            continue
        v_up, v_down = placements(scores[up], scores[down]), 1.0 - placements(scores[down], scores[up])
        np.add.at(influence, patients[up], len(down) * _centred(v_up, n_up))
        np.add.at(influence, patients[down], len(up) * _centred(v_down, n_down))
        concordant += float(v_up.sum()) * len(down)
        pairs += float(len(up) * len(down))
    times_seen = seen / max(len(np.unique(patients)), 1)
    return Concordance(
        auc=concordant / pairs if pairs else float("nan"),
        influence=influence / pairs if pairs else influence,
        n_positive=len(np.unique(patients[positive])),
        n_negative=len(np.unique(patients[~positive])),
        disjoint_pairs=int(disjoint / times_seen) if seen else 0,
    )


def mean_concordance(parts: list[Concordance]) -> Concordance:
    """Macro mean of one-versus-rest AUCs: the undefined ones are left out, the small-sample numbers are the least."""
    defined = [part for part in parts if np.isfinite(part.auc)]
    if not defined:
        return parts[0]
    return Concordance(
        auc=float(np.mean([part.auc for part in defined])),
        influence=np.mean([part.influence for part in defined], axis=0),
        n_positive=min(part.n_positive for part in defined),
        n_negative=min(part.n_negative for part in defined),
        disjoint_pairs=min(part.disjoint_pairs for part in defined),
        source=defined[0].source,
    )


def _centred(placement: Floats, count: int) -> Floats:
    """Distance from the group's mean, enlarged for the degree of freedom that the mean took."""
    if count < 2:
        # One patient tells nothing about spread within its group: stand it off from an uninformed 0.5.
        return np.asarray(placement - 0.5, dtype=np.float64)
    return np.asarray((placement - placement.mean()) * np.sqrt(count / (count - 1)), dtype=np.float64)
