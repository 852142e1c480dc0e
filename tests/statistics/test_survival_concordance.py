"""The C-index pair by pair, its jackknife, and paired tests on it."""

import numpy as np
import pytest

from wsi_mil.statistics.comparison import compare_aucs
from wsi_mil.statistics.concordance import concordance, mean_concordance
from wsi_mil.statistics.intervals import auc_interval, patient_weights
from wsi_mil.statistics.survival_concordance import _disjoint_pairs, bootstrap_c_index, survival_concordance


def _part(times, events, risks, groups=None, patients=None):
    times, events, risks = np.asarray(times, float), np.asarray(events, bool), np.asarray(risks, float)
    groups = np.zeros(len(times), int) if groups is None else np.asarray(groups)
    patients = np.arange(len(times)) if patients is None else np.asarray(patients)
    return survival_concordance(
        times, events, risks, groups=groups, patients=patients, n_patients=int(patients.max()) + 1
    )


def _comparable(times, events, i, j):
    """Whether i is known to have had the event before j."""
    return bool(events[i] and (times[i] < times[j] or (times[i] == times[j] and not events[j])))


def _brute(times, events, risks, groups):
    won = pairs = 0.0
    for i in range(len(times)):
        for j in range(len(times)):
            if groups[i] == groups[j] and _comparable(times, events, i, j):
                pairs += 1
                won += 1.0 if risks[i] > risks[j] else 0.5 if risks[i] == risks[j] else 0.0
    return won / pairs if pairs else float("nan")


def _random(seed, n=60, folds=4):
    generator = np.random.default_rng(seed)
    times = np.ceil(generator.exponential(9, n))
    return times, generator.random(n) < 0.6, np.round(generator.normal(size=n) - times / 9, 1), np.arange(n) % folds


def test_a_c_index_worked_by_hand():
    # events at 1 and 3, censored at 2 and 4: pairs (1,2) (1,3) (1,4) (3,4); risks 5, 7, 1, 1: right no, yes, yes, half
    part = _part([1, 2, 3, 4], [1, 0, 1, 0], [5, 7, 1, 1])
    assert part.auc == 2.5 / 4
    assert (part.n_positive, part.n_negative, part.disjoint_pairs) == (2, 3, 2)


def test_two_events_at_one_time_do_not_compare_and_a_censoring_at_it_is_later():
    assert np.isnan(_part([1, 1], [1, 1], [0, 1]).auc)
    assert _part([1, 1], [1, 0], [2, 1]).auc == 1.0
    assert _part([1, 1], [1, 0], [1, 2]).auc == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_every_pair_counted_by_a_second_hand(seed):
    times, events, risks, groups = _random(seed)
    assert _part(times, events, risks, groups).auc == pytest.approx(_brute(times, events, risks, groups))
    assert _part(times, events, risks).auc == pytest.approx(_brute(times, events, risks, np.zeros(60)))


def test_blocks_of_events_change_nothing(monkeypatch):
    times, events, risks, groups = _random(5)
    whole = _part(times, events, risks, groups)
    monkeypatch.setattr("wsi_mil.statistics.survival_concordance._EVENTS_AT_ONCE", 4)
    parts = _part(times, events, risks, groups)
    assert parts.auc == whole.auc
    np.testing.assert_allclose(parts.influence, whole.influence)


def test_with_one_event_time_before_all_others_it_is_the_auc():
    generator = np.random.default_rng(0)
    early, risks = np.arange(40) < 15, generator.normal(size=40)
    part = _part(np.where(early, 1.0, 9.0), early, risks)
    assert part.auc == concordance(
        early, risks, groups=np.zeros(40, int), patients=np.arange(40), n_patients=40
    ).auc  # fmt: skip


def test_a_shift_of_one_folds_scale_changes_nothing_and_turning_the_risk_mirrors_it():
    times, events, risks, groups = _random(6)
    plain = _part(times, events, risks, groups)
    moved = _part(times, events, risks + 50 * groups, groups)
    assert moved.auc == plain.auc
    np.testing.assert_allclose(moved.influence, plain.influence)
    assert _part(times, events, -risks, groups).auc == pytest.approx(1 - plain.auc)


def test_the_variance_is_that_of_leaving_out_each_patient_in_turn():
    times, events, risks, _ = _random(8, n=120)
    others = [np.delete(np.arange(120), i) for i in range(120)]
    left = np.array([_brute(times[o], events[o], risks[o], np.zeros(119)) for o in others])
    jackknife = 119 / 120 * ((left - left.mean()) ** 2).sum()
    assert _part(times, events, risks).variance == pytest.approx(jackknife, rel=0.05)


def test_without_censoring_it_is_that_exactly_in_a_small_group_too():
    generator = np.random.default_rng(3)
    times, events, risks = generator.permutation(12).astype(float), np.ones(12, bool), generator.normal(size=12)
    others = [np.delete(np.arange(12), i) for i in range(12)]
    left = np.array([_brute(times[o], events[o], risks[o], np.zeros(11)) for o in others])
    assert _part(times, events, risks).variance == pytest.approx(11 / 12 * ((left - left.mean()) ** 2).sum())


def test_influences_of_a_group_add_up_to_nothing():
    times, events, risks, groups = _random(9)
    influence = _part(times, events, risks, groups).influence
    for group in range(4):
        assert influence[groups == group].sum() == pytest.approx(0, abs=1e-12)


def test_the_same_patients_scored_twice_do_not_shrink_the_variance():
    times, events, risks, _ = _random(10)
    single = _part(times, events, risks)
    double = _part(
        np.tile(times, 2), np.tile(events, 2), np.tile(risks, 2), np.repeat([0, 1], 60), np.tile(np.arange(60), 2)
    )
    assert double.auc == pytest.approx(single.auc)
    assert double.variance == pytest.approx(single.variance)
    assert double.disjoint_pairs == single.disjoint_pairs


def test_two_slides_of_a_patient_are_no_pair():
    part = _part([1, 1, 5, 6], [1, 1, 0, 0], [3, 0, 1, 1], patients=[0, 0, 1, 2])
    assert part.auc == 0.5
    assert (part.n_positive, part.n_negative, part.disjoint_pairs) == (1, 2, 1)


@pytest.mark.parametrize("seed", range(12))
def test_disjoint_pairs_are_the_most_that_can_be_formed(seed):
    generator = np.random.default_rng(seed)
    times, events = generator.integers(1, 5, 7).astype(float), generator.random(7) < 0.6

    def most(left):
        if len(left) < 2:
            return 0
        first, rest = left[0], left[1:]
        paired = [
            1 + most(tuple(k for k in rest if k != j))
            for j in rest
            if _comparable(times, events, first, j) or _comparable(times, events, j, first)
        ]
        return max([most(rest), *paired])

    assert _disjoint_pairs(times, events) == most(tuple(range(7)))


def test_all_censored_and_one_event():
    nothing = _part([1, 2, 3], [0, 0, 0], [1, 2, 3])
    assert np.isnan(nothing.auc)
    assert np.isnan(auc_interval(nothing).low)
    one = _part([1, 2, 3], [1, 0, 0], [1, 2, 0])
    assert one.auc == 0.5
    interval = auc_interval(one)
    assert interval.method == "Wilson score interval, 1 disjoint pairs"
    assert interval.high - interval.low > 0.5


def test_the_interval_and_the_test_name_their_source_and_a_macro_keeps_it():
    times, events, risks, groups = _random(12, n=100)
    part = _part(times, events, risks, groups)
    assert auc_interval(part).method == "jackknife of pairs, logit scale"
    test = compare_aucs(part, _part(times, events, risks[::-1], groups))
    assert test.interval.method == "paired jackknife of pairs"
    assert test.p < 1e-3
    assert compare_aucs(part, part).p == 1.0
    assert mean_concordance([part, part]).source == part.source


def test_a_bootstrap_sample_is_the_index_of_the_repeated_patients():
    times, events, risks, _ = _random(13)
    counts = np.random.default_rng(1).integers(0, 3, 60)
    rows = np.repeat(np.arange(60), counts)
    groups = np.zeros(60, int)
    got = bootstrap_c_index(times, events, risks, groups=groups, weights=np.stack([np.ones(60), counts]))
    assert got[0] == pytest.approx(_brute(times, events, risks, groups))
    assert got[1] == pytest.approx(_brute(times[rows], events[rows], risks[rows], groups[rows]))
    assert np.isnan(bootstrap_c_index(times, events, risks, groups=groups, weights=np.zeros((1, 60))))[0]


def test_bootstrap_and_jackknife_agree_on_a_large_sample():
    times, events, risks, groups = _random(14, n=300)
    samples = bootstrap_c_index(times, events, risks, groups=groups, weights=patient_weights(groups, draws=600))
    assert samples.std() == pytest.approx(np.sqrt(_part(times, events, risks, groups).variance), rel=0.1)


def test_small_groups_keep_a_spread():
    groups = np.repeat(np.arange(6), 2)
    part = _part(np.tile([1, 2], 6), np.ones(12), [1, 0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 1], groups)
    assert part.auc == pytest.approx(4 / 6)
    assert part.variance == pytest.approx(0.25 / 6)  # six trials, none of which tells its own spread
