"""Strata of numbers and of survival: even, ties together, defined for every row that has a number."""

import itertools
import math
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from wsi_mil.folding.strata import strata_of_numbers, strata_of_survival
from wsi_mil.splits import make_folds

FEW = settings(derandomize=True, max_examples=60, deadline=None)


def test_distinct_numbers_fall_into_even_quarters_that_say_their_span():
    found = strata_of_numbers(np.arange(20.0, 0.0, -1.0))
    assert found[::-1] == [
        *["1 of 4: up to 5"] * 5,
        *["2 of 4: 5 to 10"] * 5,
        *["3 of 4: 10 to 15"] * 5,
        *["4 of 4: above 15"] * 5,
    ]


def test_many_zeros_stay_together_and_the_rest_is_still_told_apart():
    found = strata_of_numbers(np.array([0.0] * 12 + list(range(12, 20))))
    assert Counter(found) == {"1 of 3: up to 0": 12, "2 of 3: 0 to 14": 3, "3 of 3: above 14": 5}


@FEW
@given(st.lists(st.integers(-3, 6), min_size=1, max_size=60), st.integers(1, 6))
def test_equal_numbers_share_a_stratum_and_strata_are_in_the_order_of_the_numbers(numbers, n_strata):
    by_stratum: dict[str, set[int]] = {}
    for number, name in zip(numbers, strata_of_numbers(np.array(numbers, float), n_strata=n_strata), strict=True):
        by_stratum.setdefault(name, set()).add(number)
    assert len(by_stratum) <= n_strata
    spans = [by_stratum[name] for name in sorted(by_stratum)]
    assert all(max(low) < min(high) for low, high in itertools.pairwise(spans))


def test_few_numbers_or_one_value_make_one_stratum_and_nan_makes_none():
    assert set(strata_of_numbers(np.arange(9.0))) == {"any"}
    assert set(strata_of_numbers(np.full(50, 3.0))) == {"any"}
    assert len(set(strata_of_numbers(np.arange(10.0)))) == 2
    assert strata_of_numbers(np.array([])) == []
    assert strata_of_numbers(np.array([math.nan, 1.0, math.nan])) == ["", "any", ""]


def test_survival_is_told_apart_by_event_and_by_time_among_the_like():
    times = np.concatenate([np.arange(10.0), 100 + np.arange(10.0), [math.nan, 5.0]])
    events = np.array([1.0] * 10 + [0.0] * 10 + [1.0, math.nan])
    assert strata_of_survival(times, events) == [
        *["event, 1 of 2: up to 4"] * 5,
        *["event, 2 of 2: above 4"] * 5,
        *["censored, 1 of 2: up to 104"] * 5,
        *["censored, 2 of 2: above 104"] * 5,
        "",
        "",
    ]


@FEW
@given(st.lists(st.lists(st.floats(0, 9), min_size=1, max_size=3), min_size=6, max_size=40), st.integers(0, 3))
def test_folds_by_the_strata_of_numbers_hold_every_patient_also_one_whose_slides_differ(slides, seed):
    patients = [f"p{i:02d}" for i, numbers in enumerate(slides) for _ in numbers]
    strata: dict[str, set[str]] = {}
    for patient, name in zip(patients, strata_of_numbers(np.concatenate(slides)), strict=True):
        strata.setdefault(patient, set()).add(name)
    folds = make_folds(strata, n_folds=3, seed=seed, essential=())
    for label in {name for names in strata.values() for name in names}:
        counts = [sum(label in strata[p] for p in fold.test) for fold in folds]
        assert max(counts) - min(counts) <= 2
    sizes = [len(fold.test) for fold in folds]
    assert (sum(sizes), max(sizes) - min(sizes) <= 2) == (len(strata), True)
