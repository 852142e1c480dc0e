"""Harrell's C-index over pairs within groups (test folds), with the part that each patient has in it.

A pair can be compared when the earlier of its two times is an event; an event at the time of a censoring is the
earlier, two events at one time are not compared (Harrell, Lee and Mark 1996). As for AUCs, only patients whom one
model scored are compared, and with a single group everything here is the ordinary (pooled) C-index. Two slides of a
patient share time and event, so they are never a pair.
"""

from collections.abc import Iterator

import numpy as np

from wsi_mil.statistics.concordance import Concordance
from wsi_mil.statistics.ranking import Bools, Floats, Ints
from wsi_mil.statistics.survival import checked_times

_EVENTS_AT_ONCE = 512
SOURCE = "jackknife of pairs"


def survival_concordance(
    times: Floats, events: Bools, risks: Floats, *, groups: Ints, patients: Ints, n_patients: int
) -> Concordance:
    """Share of comparable pairs whose earlier event has the higher risk, ties of risk counted a half.

    times, events, risks, groups, patients: (n,) one row a scored item, as for `concordance`.
    With w_i concordant and m_i comparable pairs of patient i, and N pairs in all, the influence of a patient in a group
    of n is (w_i - C m_i, less its mean over the group) / N * sqrt(n (n - 1)) / (n - 2): the jackknife of a ratio of
    two U-statistics (Sen 1960; Arvesen 1969), so that the number of comparable pairs may vary as well.
    `n_positive` counts patients who are the earlier of a pair, `n_negative` those who are the later.
    """
    times, events = checked_times(times, events)
    risks = np.asarray(risks, dtype=np.float64)
    earlier, later, disjoint, seen = np.zeros(n_patients), np.zeros(n_patients), 0, 0
    tallies: list[tuple[Ints, Floats, Floats]] = []
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        won, first, second = _tally(times[rows], events[rows], risks[rows])
        own, place = np.unique(patients[rows], return_inverse=True)
        np.add.at(earlier, patients[rows], first)
        np.add.at(later, patients[rows], second)
        tallies.append((own, _summed(won, place), _summed(first + second, place)))
        one = rows[np.unique(patients[rows], return_index=True)[1]]
        disjoint, seen = disjoint + _disjoint_pairs(times[one], events[one]), seen + len(own)
    pairs = sum(float(met.sum()) for _, _, met in tallies) / 2
    index = sum(float(won.sum()) for _, won, _ in tallies) / 2 / pairs if pairs else float("nan")
    influence = np.zeros(n_patients)
    for own, won, met in tallies:
        if pairs:
            np.add.at(influence, own, _centred(won, met, index) / pairs)
    times_seen = seen / max(len(np.unique(patients)), 1)
    return Concordance(
        auc=index,
        influence=influence,
        n_positive=int((earlier > 0).sum()),
        n_negative=int((later > 0).sum()),
        disjoint_pairs=int(disjoint / times_seen) if seen else 0,
        source=SOURCE,
    )


def bootstrap_c_index(times: Floats, events: Bools, risks: Floats, *, groups: Ints, weights: Floats) -> Floats:
    """Within-group C-index of each bootstrap sample (draws,); NaN where no pair was drawn.

    weights: (draws, n) of the rows: a patient's weight stands at each of its rows.
    """
    times, events = checked_times(times, events)
    concordant, pairs = np.zeros(len(weights)), np.zeros(len(weights))
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        own = weights[:, rows]
        for first, comparable, right in _pairs(times[rows], events[rows], np.asarray(risks)[rows]):
            concordant += np.einsum("bi,bi->b", own[:, first], own @ right.T)
            pairs += np.einsum("bi,bi->b", own[:, first], own @ comparable.T)
    undefined: Floats = np.full(len(weights), np.nan)
    return np.divide(concordant, pairs, out=undefined, where=pairs > 0)


def _pairs(times: Floats, events: Bools, risks: Floats) -> Iterator[tuple[Ints, Floats, Floats]]:
    """Blocks of events i against everybody j: rows of i, whether (i, j) compares, and its concordance (0, 0.5, 1)."""
    with_event = np.flatnonzero(events)
    for start in range(0, len(with_event), _EVENTS_AT_ONCE):
        first = with_event[start : start + _EVENTS_AT_ONCE]
        own = times[first, None]
        comparable = ((times > own) | ((times == own) & ~events)).astype(np.float64)
        higher = (risks[first, None] > risks) + 0.5 * (risks[first, None] == risks)
        yield first, comparable, comparable * higher


def _tally(times: Floats, events: Bools, risks: Floats) -> tuple[Floats, Floats, Floats]:
    """Of each row: concordant pairs it is in, pairs whose earlier it is, pairs whose later it is."""
    won, first, second = np.zeros(len(times)), np.zeros(len(times)), np.zeros(len(times))
    for rows, comparable, right in _pairs(times, events, risks):
        won[rows] += right.sum(axis=1)
        first[rows] += comparable.sum(axis=1)
        won += right.sum(axis=0)
        second += comparable.sum(axis=0)
    return won, first, second


def _summed(values: Floats, place: Ints) -> Floats:
    return np.asarray(np.bincount(place, weights=values), dtype=np.float64)


def _centred(won: Floats, met: Floats, index: float) -> Floats:
    count = len(won)
    if count < 3:
        # Two patients tell nothing about spread: stand their pair off from an uninformed 0.5, half of it to each.
        return np.asarray((won - met / 2) / np.sqrt(2), dtype=np.float64)
    terms = won - index * met
    return np.asarray((terms - terms.mean()) * np.sqrt(count * (count - 1)) / (count - 2), dtype=np.float64)


def _disjoint_pairs(times: Floats, events: Bools) -> int:
    """Most comparable pairs that share no patient: from the latest on, each event takes any free later patient."""
    found = free = waiting = 0
    order = np.lexsort((events, -times))  # latest first; of one time the censored first, since they are the later
    for place, patient in enumerate(order):
        new_time = place == 0 or times[patient] != times[order[place - 1]]
        if new_time:
            free, waiting = free + waiting, 0
        if events[patient] and free:
            found, free = found + 1, free - 1
        elif events[patient]:
            waiting += 1  # events of one time do not compare with each other
        else:
            free += 1
    return found
