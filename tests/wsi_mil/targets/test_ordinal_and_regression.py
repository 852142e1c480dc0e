import math

import numpy as np
import pytest
import torch

from wsi_mil.errors import CohortError, ConfigError
from wsi_mil.targets import OrdinalTarget, RegressionTarget

GRADE = OrdinalTarget(name="grade", classes=("low", "middle", "high"))


def test_ordered_classes_follow_the_chain_of_steps():
    """Steps 0.6 and 0.25: low 0.4, middle 0.6 * 0.75, high 0.6 * 0.25."""
    logits = torch.tensor([[math.log(0.6 / 0.4), math.log(0.25 / 0.75)]])
    shares = GRADE.class_logits(logits).softmax(dim=1)
    torch.testing.assert_close(shares, torch.tensor([[0.4, 0.45, 0.15]]))


def test_the_loss_is_minus_the_log_of_the_classs_probability():
    logits = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    for place in range(3):
        wanted = -GRADE.class_logits(logits)[:, place].mean()
        torch.testing.assert_close(GRADE.criterion(2)(logits, torch.full((5,), place)), wanted)


def test_extreme_steps_stay_finite():
    logits = torch.tensor([[1e4, -1e4], [-1e4, 1e4]])
    assert GRADE.class_logits(logits).softmax(dim=1).isfinite().all()
    assert GRADE.criterion(2)(logits, torch.tensor([0, 2])).isfinite()


def test_a_head_of_another_width_is_refused():
    with pytest.raises(ConfigError, match="3 outputs for 3 ordered classes; it needs 2"):
        GRADE.criterion(3)


def test_a_number_is_learnt_on_the_scale_of_the_training_part_and_answered_in_its_units():
    target = RegressionTarget(name="ki67").fitted(np.array([[10.0], [20.0], [30.0], [np.nan]]))
    assert (target.mean, target.deviation) == (20.0, pytest.approx(math.sqrt(200 / 3)))
    told = target.answers(torch.tensor([[0.0], [1.0]]))["prediction"]
    assert told.tolist() == pytest.approx([20.0, 20.0 + math.sqrt(200 / 3)])
    perfect = torch.tensor([[(30.0 - target.mean) / target.deviation]])
    assert float(target.criterion(1)(perfect, torch.tensor([[30.0]]))) == pytest.approx(0.0, abs=1e-9)
    assert float(target.criterion(1)(torch.zeros(1, 1), torch.tensor([[30.0]]))) == pytest.approx(1.5)


def test_a_constant_column_keeps_its_units():
    assert RegressionTarget(name="x").fitted(np.full((4, 1), 7.0)).deviation == 1.0


def test_what_is_no_number_is_refused():
    with pytest.raises(CohortError, match="'12%' is no number"):
        RegressionTarget(name="ki67").encode({"ki67": "12%"})
    assert math.isnan(RegressionTarget(name="ki67").encode({"ki67": None})[0])


def test_a_large_offset_costs_no_digits():
    """A column of time stamps: its numbers differ in the last digits only."""
    numbers = np.array([[1.7e9 + i] for i in range(11)])
    target = RegressionTarget(name="x").fitted(numbers)
    logits = torch.from_numpy((numbers - target.mean) / target.deviation).float()
    loss = target.criterion(1)(logits, torch.from_numpy(numbers))
    assert float(loss) < 1e-10


def test_numbers_too_small_to_compute_with_are_refused():
    with pytest.raises(CohortError, match="use a larger unit"):
        RegressionTarget(name="x").fitted(np.array([[1e-299], [3e-299]]))
