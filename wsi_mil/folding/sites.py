"""Whole sites to folds, so that classes and sizes are even. Pure; used by wsi_mil.splits alone.

Notation: `s` sites, `k` folds, `c` classes. A site is a row of counts of its patients a class. Moves and swaps
improve a greedy start and some random ones; no solver.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_STARTS = 30
_EXHAUSTIVE_SITES = 12
_EMPTY, _ABSENT = 1e6, 1e3
_TOLERANCE = 1e-9


def assign_sites(
    groups: Mapping[str, Sequence[str]], sites: Mapping[str, str], *, n_folds: int, generator: np.random.Generator
) -> dict[str, int]:
    """Test fold of each patient. groups: class -> patients.  sites: patient -> site; at least `n_folds` of them.

    First no fold is empty, then as few folds as possible lack a class, then counts of classes and sizes are even.
    """
    names, table = _table(groups, sites)
    best: NDArray[np.int64] | None = None
    best_cost = np.inf
    for start in range(_STARTS):
        order = generator.permutation(len(table))
        first = order % n_folds if start else _greedy(table, n_folds, order)
        fold_of = _improve(first, table, n_folds)
        cost = float(_cost(_fold_table(fold_of, table, n_folds), table, n_folds).sum())
        if best is None or cost < best_cost - _TOLERANCE:
            best, best_cost = fold_of, cost
    assert best is not None, "at least one start is made"
    of_site = {name: int(fold) for name, fold in zip(names, best, strict=True)}
    return {p: of_site[sites[p]] for patients in groups.values() for p in patients}


def choose_validation_sites(
    groups: Mapping[str, Sequence[str]],
    sites: Mapping[str, str],
    *,
    fraction: float,
    essential: Collection[str] | None = None,
    generator: np.random.Generator,
) -> set[str] | None:
    """Sites that validate, together about `fraction` of the patients; None when too few sites remain.

    What is left keeps every class (of `essential`, where it is given) and at least half of the patients. A choice that
    holds every class is preferred.
    """
    names, table = _table(groups, sites)
    order = generator.permutation(len(names))
    names, table = [names[i] for i in order], table[order]
    total = table.sum(axis=0)
    subsets = _subsets(len(names)) if len(names) <= _EXHAUSTIVE_SITES else _nested_subsets(table, fraction)
    counts = subsets @ table
    kept = np.array([essential is None or label in essential for label in groups]) & (total > 0)
    trainable = ((total - counts) > 0)[:, kept].all(axis=1) & (counts.sum(axis=1) <= total.sum() / 2)
    usable = trainable & (counts.sum(axis=1) > 0)
    if not usable.any():
        return None
    wished = fraction * total
    cost = _ABSENT * (counts == 0)[:, total > 0].sum(axis=1)
    cost = cost + (((counts - wished) / np.maximum(wished, 1.0)) ** 2).sum(axis=1)
    cost = cost + ((counts.sum(axis=1) - wished.sum()) / wished.sum()) ** 2
    row = int(np.argmin(np.where(usable, cost, np.inf)))
    return {name for name, chosen in zip(names, subsets[row], strict=True) if chosen}


def _table(groups: Mapping[str, Sequence[str]], sites: Mapping[str, str]) -> tuple[list[str], Array]:
    """Names of the sites (s) and patients of each class in them (s, c)."""
    names = sorted({sites[p] for patients in groups.values() for p in patients})
    row = {name: i for i, name in enumerate(names)}
    table = np.zeros((len(names), len(groups)))
    for column, patients in enumerate(groups.values()):
        for patient in patients:
            table[row[sites[patient]], column] += 1
    return names, table


def _cost(folds: Array, table: Array, n_folds: int) -> Array:
    """How far folds (..., c) are from an equal share of every class and of all patients. Returns (...)."""
    share = table.sum(axis=0) / n_folds
    size = folds.sum(axis=-1)
    uneven = (((folds - share) / share) ** 2).sum(axis=-1) + (size / share.sum() - 1) ** 2
    return np.asarray(uneven + _ABSENT * (folds <= 0).sum(axis=-1) + _EMPTY * (size <= 0))


def _greedy(table: Array, n_folds: int, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Fold of each site: from the largest to the smallest, each to where it helps most. order: how ties are broken."""
    fold_of = np.zeros(len(table), dtype=np.int64)
    folds = np.zeros((n_folds, table.shape[1]))
    for site in sorted(order.tolist(), key=lambda i: -table[i].sum()):
        gain = _cost(folds + table[site], table, n_folds) - _cost(folds, table, n_folds)
        fold_of[site] = int(np.argmin(gain))
        folds[fold_of[site]] += table[site]
    return fold_of


def _improve(fold_of: NDArray[np.int64], table: Array, n_folds: int) -> NDArray[np.int64]:
    """Move or swap sites while the total cost falls; each step takes the best one."""
    fold_of = fold_of.copy()
    while True:
        folds = _fold_table(fold_of, table, n_folds)
        now = _cost(folds, table, n_folds)
        without = folds[fold_of] - table
        move = _cost(without, table, n_folds)[:, None] + _cost(folds[None] + table[:, None], table, n_folds)
        move = move - now[fold_of][:, None] - now[None]
        move[np.arange(len(table)), fold_of] = 0.0
        swapped = _cost(without[:, None] + table[None], table, n_folds)
        swap = swapped + swapped.T - now[fold_of][:, None] - now[fold_of][None]
        swap[fold_of[:, None] == fold_of[None]] = 0.0
        if min(move.min(), swap.min()) >= -_TOLERANCE:
            return fold_of
        if move.min() <= swap.min():
            site, fold = np.unravel_index(int(move.argmin()), move.shape)
            fold_of[site] = fold
        else:
            a, b = np.unravel_index(int(swap.argmin()), swap.shape)
            fold_of[a], fold_of[b] = fold_of[b], fold_of[a]


def _fold_table(fold_of: NDArray[np.int64], table: Array, n_folds: int) -> Array:
    folds = np.zeros((n_folds, table.shape[1]))
    np.add.at(folds, fold_of, table)
    return folds


def _subsets(n: int) -> Array:
    """All subsets of n things (2**n, n) as rows of 0 and 1."""
    return np.asarray((np.arange(2**n)[:, None] >> np.arange(n)) & 1, dtype=np.float64)


def _nested_subsets(table: Array, fraction: float) -> Array:
    """Growing subsets of the sites (s, s): each adds the site that brings the counts closest to the wished ones."""
    wished = fraction * table.sum(axis=0)
    chosen = np.zeros(len(table))
    rows = []
    for _ in range(len(table)):
        distance = (((chosen @ table + table - wished) / np.maximum(wished, 1.0)) ** 2).sum(axis=1)
        chosen[int(np.argmin(np.where(chosen > 0, np.inf, distance)))] = 1.0
        rows.append(chosen.copy())
    return np.array(rows)
