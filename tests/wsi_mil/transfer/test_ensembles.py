"""Models that answer together: means of probabilities, of calibrated ones and of thresholds, as stated."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from wsi_mil.bags import Bag
from wsi_mil.methods import MethodSpec, build, parse_method
from wsi_mil.models._base import MILModel
from wsi_mil.runs import Selection
from wsi_mil.tasks import class_task
from wsi_mil.transfer.ensembles import Ensemble, mean_selection

CPU = torch.device("cpu")
TASK = class_task("grade", ("low", "high"))


def chosen(threshold: float, temperature: float | None, *, epoch: int = 3, source: str = "validation") -> Selection:
    calibration = {"kind": "none", "reason": "few"}
    if temperature:
        calibration = {"kind": "temperature", "reason": "many", "temperature": temperature}
    return Selection(
        epoch=epoch,
        chosen_by="loss",
        metric="loss",
        value=0.5,
        epochs_run=9,
        thresholds={"grade": {"value": threshold, "source": source}},
        calibration={"grade": calibration},
    )


def ensemble(*selections: Selection) -> Ensemble:
    models = [build(parse_method("abmil"), in_dim=4, task=TASK, seed=seed)[0].eval() for seed in range(len(selections))]
    return Ensemble(
        label="abmil",
        models=tuple(models),
        digests=(),
        tasks=(TASK,) * len(models),
        selections=selections,
    )


@pytest.fixture
def bag() -> Bag:
    features = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
    grid_xy = torch.tensor([[i, 0] for i in range(5)])
    index = torch.zeros(5, dtype=torch.int64)
    return Bag(features=features, coords_l0=grid_xy, grid_xy=grid_xy, slide_index=index, slide_ids=("a",), id="a")


def test_calibrated_probabilities_are_the_mean_of_each_models_own(bag):
    one = ensemble(chosen(0.5, 4.0), chosen(0.5, None), chosen(0.5, 0.25))
    told = one.say(bag, CPU).told["grade"]
    alone = [replace(one, models=(m,), tasks=(TASK,), selections=one.selections[:1]) for m in one.models]
    heads = [each.say(bag, CPU).told["grade"] for each in alone]
    gaps = [float(head["logit_high"][0] - head["logit_low"][0]) for head in heads]
    plain = [1 / (1 + np.exp(-gap)) for gap in gaps]
    calibrated = [1 / (1 + np.exp(-gap / t)) for gap, t in zip(gaps, (4.0, 1.0, 0.25), strict=True)]
    assert told["prob_high"][0] == pytest.approx(np.mean(plain))
    assert told["calibrated_high"][0] == pytest.approx(np.mean(calibrated))
    assert told["calibrated_high"][0] + told["calibrated_low"][0] == pytest.approx(1)


def test_of_models_with_other_numbers_of_heads_the_scores_of_all_are_kept(bag):
    def of_heads(heads: int) -> MILModel:
        spec = MethodSpec(name="abmil_mha", params={"heads": heads, "hidden": 8})
        return build(spec, in_dim=4, task=TASK, seed=heads)[0].eval()

    both = replace(ensemble(chosen(0.5, None), chosen(0.5, None)), models=(of_heads(4), of_heads(2)))
    each = [replace(both, models=(model,), tasks=(TASK,), selections=both.selections[:1]) for model in both.models]
    assert [column.name for column in both.columns] == ["attention", "attention:head0", "attention:head1"]
    alone = [one.say(bag, CPU).tile_scores[:, :3] for one in each]
    np.testing.assert_allclose(both.say(bag, CPU).tile_scores, np.mean(alone, axis=0), rtol=1e-6)


def test_the_mean_probability_is_held_against_the_mean_threshold(bag):
    share = float(ensemble(chosen(0.5, None), chosen(0.5, None)).say(bag, CPU).told["grade"]["prob_high"][0])
    above = ensemble(chosen(share - 0.2, None), chosen(share + 0.1, None))
    below = ensemble(chosen(share - 0.1, None), chosen(share + 0.2, None))
    assert above.say(bag, CPU).decisions == {"grade": "high"}
    assert below.say(bag, CPU).decisions == {"grade": "low"}


def test_what_stands_for_several_models_says_so():
    both = mean_selection([chosen(0.2, 2.0, epoch=4), chosen(0.5, None, epoch=9)])
    assert both.thresholds == {"grade": {"value": pytest.approx(0.35), "source": "validation"}}
    assert (both.epoch, both.chosen_by) == (9, "each of 2 models by loss")
    assert both.calibration["grade"]["kind"] == "none"
    assert "none; temperature" in both.calibration["grade"]["reason"]
    alone = chosen(0.2, 2.0)
    assert mean_selection([alone]) is alone
    mixed = mean_selection([chosen(0.2, None), chosen(0.5, None, source="0.5, since few")])
    assert mixed.thresholds["grade"]["source"] == "0.5, since few; validation"
