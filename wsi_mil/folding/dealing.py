"""Patients to folds and to a validation part, so that every label is even. Pure; used by wsi_mil.splits alone.

Label by label, from the rarest on, each patient goes to the fold that has fewest of it. Where patients have one label
each this is as even as can be. Where they have several (multi-label, several targets, slides of different labels), the
common labels pay for the rare ones, as they do in iterative stratification (Sechidis et al. 2011, ECML PKDD, 145-158),
which deals likewise; then patients are moved and swapped while the squared distance of all counts, and of the sizes,
to their shares falls.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Groups = Mapping[str, Sequence[str]]

_TOLERANCE = 1e-9
_SWAPPED_AT_MOST = 2000
"""With more patients only moves are tried: pairs would take gigabytes, and one patient more matters less."""


def deal(groups: Groups, n_folds: int, generator: np.random.Generator) -> dict[str, int]:
    """Test fold of each patient. groups: label -> its patients, from large to small; a patient may be in several."""
    fold_of: dict[str, int] = {}
    totals = [0] * n_folds
    for patients in reversed(list(groups.values())):
        of_class = [sum(fold_of.get(p) == fold for p in patients) for fold in range(n_folds)]
        for patient in _shuffled([p for p in patients if p not in fold_of], generator):
            fold = min(range(n_folds), key=lambda f: (of_class[f], totals[f]))
            fold_of[patient] = fold
            of_class[fold] += 1
            totals[fold] += 1
    return _evened(fold_of, groups, np.full(n_folds, 1 / n_folds))


def hold_out(groups: Groups, fraction: float, generator: np.random.Generator) -> set[str]:
    """About `fraction` of the patients, and of each label; what is left keeps one of each. groups: as in `deal`."""
    shares = dict(zip(groups, _shares([len(p) for p in groups.values()], fraction), strict=True))
    labels_of = _labels_of(groups)
    chosen: set[str] = set()
    taken: Counter[str] = Counter()
    for label in reversed(list(groups)):
        for patient in _shuffled([p for p in groups[label] if p not in chosen], generator):
            spared = all(len(groups[other]) - taken[other] > 1 for other in labels_of[patient])
            if taken[label] < shares[label] and spared:
                chosen.add(patient)
                taken.update(labels_of[patient])
    parts = _evened({p: int(p in chosen) for p in labels_of}, groups, np.array([1 - fraction, fraction]))
    return {patient for patient, part in parts.items() if part}


def _labels_of(groups: Groups) -> dict[str, list[str]]:
    labels_of: dict[str, list[str]] = {}
    for label, patients in groups.items():
        for patient in patients:
            labels_of.setdefault(patient, []).append(label)
    return labels_of


def _shuffled(patients: Sequence[str], generator: np.random.Generator) -> list[str]:
    return [patients[i] for i in generator.permutation(len(patients))]


def _shares(sizes: Sequence[int], fraction: float) -> list[int]:
    """Patients of each class that validate: the fraction by largest remainders, one at least where two are there."""
    total = round(fraction * sum(sizes))
    exact = [fraction * size for size in sizes]
    shares = [int(x) for x in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: max(0, total - sum(shares))]:
        shares[i] += 1
    return [min(max(share, 1), size - 1) if size > 1 else 0 for share, size in zip(shares, sizes, strict=True)]


def _evened(part_of: dict[str, int], groups: Groups, shares: Array) -> dict[str, int]:
    """The parts with patients moved and swapped, where some have several labels. No part comes to lack one that it had.

    part_of: patient -> part.  shares (k): wished fraction of each part.
    """
    labels_of = _labels_of(groups)
    if all(len(labels) == 1 for labels in labels_of.values()):
        return part_of
    patients = sorted(labels_of)
    column = {label: i for i, label in enumerate(groups)}
    table = np.zeros((len(patients), len(groups) + 1))
    table[:, -1] = 1  # the size of a part counts like a label
    for row, patient in enumerate(patients):
        table[row, [column[label] for label in labels_of[patient]]] = 1
    before = np.array([part_of[patient] for patient in patients], dtype=np.int64)
    after = _even_out(before, table, np.outer(shares, table.sum(axis=0)))
    return {patient: int(part) for patient, part in zip(patients, after, strict=True)}


def _even_out(part_of: NDArray[np.int64], table: Array, wished: Array) -> NDArray[np.int64]:
    """Move patients, and swap them where no move helps, while the sum of (count - wished)^2 of parts and labels falls.

    part_of (n), table (n, c): 1 where the patient has the label, wished (k, c): counts of the parts.
    """
    part_of = part_of.copy()
    counts = np.zeros_like(wished)
    np.add.at(counts, part_of, table)
    gram = table @ table.T if len(table) <= _SWAPPED_AT_MOST else None
    while True:
        change, one, to, other = _best_step(part_of, table, counts, wished, gram)
        if change >= -_TOLERANCE:
            return part_of
        step = table[one] if other is None else table[one] - table[other]
        counts[part_of[one]] -= step
        counts[to] += step
        if other is not None:
            part_of[other] = part_of[one]
        part_of[one] = to


def _best_step(
    part_of: NDArray[np.int64], table: Array, counts: Array, wished: Array, gram: Array | None
) -> tuple[float, int, int, int | None]:
    """The change of the sum, the patient, the part it goes to, and who comes from there in exchange or None.

    With the surplus s of a part, moving row t from f to g changes the sum by 2 t (s_g - s_f) + 2 t t; exchanging t and
    u changes it by both moves less 4 t u. Nobody leaves who is the last of a label in the part, unless for another.
    """
    everyone = np.arange(len(table))
    squares = (table**2).sum(axis=1)
    last = table * (counts == 1)[part_of]
    pull = (2 * table @ (counts - wished).T).round(9)  # so that ties are ties on every machine
    pull -= pull[everyone, part_of][:, None]
    move = pull + 2 * squares[:, None]
    move[last.any(axis=1)] = 0
    move[everyone, part_of] = 0
    one, to = divmod(int(move.argmin()), move.shape[1])
    if gram is None or move[one, to] < -_TOLERANCE:  # pairs are many, so they wait until no move helps
        return float(move[one, to]), one, to, None
    swap = pull[:, part_of]
    swap = swap + swap.T + 2 * (squares[:, None] + squares - 2 * gram)
    bereft = last @ (1 - table).T > 0
    swap[bereft | bereft.T | (part_of[:, None] == part_of)] = 0
    one, other = divmod(int(swap.argmin()), len(table))
    return float(swap[one, other]), one, int(part_of[other]), other
