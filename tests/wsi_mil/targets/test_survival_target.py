import itertools
import math

import numpy as np
import pytest
import torch

from wsi_mil.errors import CohortError
from wsi_mil.statistics.censoring import survival_at
from wsi_mil.targets import CoxTarget, SurvivalTarget
from wsi_mil.targets.survival import CoxPartialLikelihood, DiscreteHazards


def target(cuts=(1.0, 2.0, 4.0, 8.0)):
    return SurvivalTarget(name="months", event="dead", cuts=cuts)


def test_an_event_pays_for_every_interval_before_it_and_for_its_own():
    """Hazards 0.5, 0.2, 0.25, 0.1: p(event in the third interval) = 0.5 * 0.8 * 0.25."""
    logits = torch.tensor([[0.0, math.log(0.2 / 0.8), math.log(0.25 / 0.75), math.log(0.1 / 0.9)]])
    loss = DiscreteHazards((1.0, 2.0, 4.0, 8.0))(logits, torch.tensor([[3.0, 1.0]]))
    assert float(loss) == pytest.approx(-math.log(0.5 * 0.8 * 0.25))


@pytest.mark.parametrize(
    ("time", "survived"), [(2.9, 0.5 * 0.8), (3.0, 0.5 * 0.8 * 0.75), (99.0, 0.5 * 0.8 * 0.75 * 0.9)]
)
def test_who_is_censored_has_survived_the_intervals_of_which_half_was_seen(time, survived):
    logits = torch.tensor([[0.0, math.log(0.2 / 0.8), math.log(0.25 / 0.75), math.log(0.1 / 0.9)]])
    loss = DiscreteHazards((1.0, 2.0, 4.0, 8.0))(logits, torch.tensor([[time, 0.0]]))
    assert float(loss) == pytest.approx(-math.log(survived))


def test_an_event_after_the_last_cut_has_survived_all_of_them():
    logits = torch.zeros(1, 4)
    loss = DiscreteHazards((1.0, 2.0, 4.0, 8.0))(logits, torch.tensor([[9.0, 1.0]]))
    assert float(loss) == pytest.approx(4 * math.log(2))


def test_the_survival_curve_and_the_risk_follow_from_the_hazards():
    told = target().answers(torch.tensor([[0.0, 0.0, 0.0, 0.0]]))
    survival = [float(told[f"survival_{i}"][0]) for i in (1, 2, 3, 4)]
    assert survival == pytest.approx([0.5, 0.25, 0.125, 0.0625])
    mean_time = 1 * 0.75 + 1 * 0.375 + 2 * 0.1875 + 4 * 0.09375
    assert float(told["risk"][0]) == pytest.approx(-mean_time / 8)
    assert list(told) == target().answer_columns()


def test_cuts_are_quantiles_of_the_event_times_and_the_last_is_the_largest_time():
    values = np.array([[1, 1], [2, 1], [3, 1], [4, 1], [5, 1], [40, 0], [np.nan, np.nan]], dtype=float)
    assert target().fitted(values).cuts == (2.0, 3.0, 4.0, 40.0)


def test_equal_times_still_give_rising_cuts():
    cuts = target().fitted(np.array([[5.0, 1.0]] * 6)).cuts
    assert all(a < b for a, b in itertools.pairwise(cuts))


def test_a_training_part_without_an_event_is_refused():
    with pytest.raises(CohortError, match="holds no event"):
        target().fitted(np.array([[5.0, 0.0]] * 6))


def test_cox_by_hand():
    """Times 1, 2 (events), 3 (censored); risks a, b, c: -(a - log(e^a + e^b + e^c) + b - log(e^b + e^c)) / 2."""
    a, b, c = 0.3, -0.4, 1.1
    loss = CoxPartialLikelihood()(torch.tensor([[a], [b], [c]]), torch.tensor([[1.0, 1], [2, 1], [3, 0]]))
    by_hand = -(a - math.log(sum(map(math.exp, (a, b, c)))) + b - math.log(math.exp(b) + math.exp(c))) / 2
    assert float(loss) == pytest.approx(by_hand)


def test_a_step_without_an_event_moves_nothing():
    risk = torch.tensor([[0.5], [1.0]], requires_grad=True)
    loss = CoxPartialLikelihood()(risk, torch.tensor([[1.0, 0], [2, 0]]))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not risk.grad.any()


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ({"months": "soon", "dead": "1"}, "'soon' is no number"),
        ({"months": "0", "dead": "1"}, "must be above 0"),
        ({"months": "3", "dead": "maybe"}, "neither 1"),
        ({"months": "inf", "dead": "1"}, "no number"),
    ],
)
def test_what_is_no_time_is_refused(cells, says):
    with pytest.raises(CohortError, match=says):
        target().encode(cells)


def test_a_time_without_its_event_is_no_label():
    assert all(map(math.isnan, target().encode({"months": "3", "dead": None})))
    assert target().encode({"months": "3", "dead": "True"}) == (3.0, 1.0)


def test_several_models_are_combined_on_the_first_ones_cuts():
    first = target((1.0, 2.0, 3.0, 4.0)).answers(torch.zeros(1, 4))
    second = target((2.0, 4.0, 6.0, 8.0)).answers(torch.zeros(1, 4))
    told = target().combined([first, second])
    assert [float(told[f"cut_{i}"][0]) for i in (1, 2, 3, 4)] == [1.0, 2.0, 3.0, 4.0]
    # the second model's curve goes from 1 to a half at 2, to a quarter at 4
    assert float(told["survival_1"][0]) == pytest.approx((0.5 + 0.75) / 2)
    assert float(told["survival_4"][0]) == pytest.approx((0.0625 + 0.25) / 2)


def test_a_longer_follow_up_of_a_training_part_gives_its_model_no_louder_voice():
    """Three patients, two models that say the contrary with the same strength, in other units of time: nobody wins."""
    logits = torch.tensor([[2.0] * 4, [0.0] * 4, [-2.0] * 4])
    short = target((1.0, 2.0, 3.0, 4.0)).answers(logits)
    long = target((10.0, 20.0, 30.0, 40.0)).answers(logits)
    np.testing.assert_allclose(short["risk"], long["risk"])
    assert (np.abs(short["risk"]) < 1).all()
    told = target().combined([short, target((10.0, 20.0, 30.0, 40.0)).answers(logits.flip(0))])
    assert told["risk"][0] == pytest.approx(told["risk"][2])


def test_ensembles_read_a_curve_as_the_report_does():
    first, second = (target(cuts).answers(torch.zeros(2, 4)) for cuts in ((1.0, 3.0, 5.0, 7.0), (2.0, 4.0, 6.0, 8.0)))
    told = target().combined([first, second])
    cuts, curves = (np.stack([second[f"{name}_{i}"] for i in (1, 2, 3, 4)], axis=1) for name in ("cut", "survival"))
    for i, at in enumerate((1.0, 3.0, 5.0, 7.0), start=1):
        read = survival_at(cuts[0], curves, at=at)
        np.testing.assert_allclose(told[f"survival_{i}"], (first[f"survival_{i}"] + read) / 2)
    assert survival_at(cuts[0], curves, at=3.0).tolist() == [0.375, 0.375]


def test_higher_risk_means_an_earlier_event():
    cox = CoxTarget(name="months", event="dead")
    values = np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    assert cox.measure(values, torch.tensor([[3.0], [2.0], [1.0]])) == 1.0
    early, late = torch.tensor([[3.0, 3, 3, 3]]), torch.tensor([[-3.0, -3, -3, -3]])
    told = target().answers(torch.cat([early, late]))
    assert told["risk"][0] > told["risk"][1]
