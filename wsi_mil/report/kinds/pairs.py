"""What numbers and times to an event share: rows of patients, resampling weights, paired tests of methods."""

from collections.abc import Callable, Sequence

import numpy as np

from wsi_mil.report.findings import Comparison
from wsi_mil.report.kinds.records import Answers
from wsi_mil.report.resampling import patient_weights, places_of
from wsi_mil.statistics.comparison import PairedTest, holm
from wsi_mil.statistics.ranking import Floats, Ints


def patient_means(rows: Answers, ids: Sequence[str], values: Floats) -> Floats:
    """(len(ids),) mean of the rows' `values` of each patient."""
    places = places_of(rows.patients, ids)
    return np.bincount(places, weights=values, minlength=len(ids)) / np.bincount(places, minlength=len(ids))


def first_places(rows: Answers, ids: Sequence[str]) -> list[int]:
    """The first row of each patient: what is the same in all of them is read there."""
    found: dict[str, int] = {}
    for place, patient in enumerate(rows.patients):
        found.setdefault(patient, place)
    return [found[patient] for patient in ids]


def weights_of(rows: Answers, groups: Ints) -> Floats:
    """(draws, patients in sorted order) bootstrap weights, drawn within `groups` (patients,) and fold."""
    return patient_weights(rows.bare(), groups)


def compare_methods(
    methods: Sequence[tuple[str, Answers]], test: Callable[[Answers, Answers], PairedTest]
) -> tuple[Comparison, ...]:
    """Every pair of methods on the patients and models that both judged, Holm-corrected together.

    methods: (label, rows of patients, sorted).   test: of two sets of rows of the same patients in the same order.
    """
    found: list[tuple[str, str, int, PairedTest]] = []
    for place, (first, left) in enumerate(methods):
        for second, right in methods[place + 1 :]:
            mine, theirs = (list(zip(rows.keys, rows.patients, strict=True)) for rows in (left, right))
            shared = set(mine) & set(theirs)
            if not shared:
                continue
            here = left.take(i for i, item in enumerate(mine) if item in shared)
            there = right.take(i for i, item in enumerate(theirs) if item in shared)
            found.append((first, second, len(set(here.patients)), test(here, there)))
    corrected = holm([one.p for *_, one in found])
    return tuple(
        Comparison(first=first, second=second, patients=n, test=one, p_corrected=p)
        for (first, second, n, one), p in zip(found, corrected, strict=True)
    )
