"""What the scores of single tiles mean: which class, which sign, which column comes first."""

import pytest
import torch
from torch import nn

from wsi_mil.bags import Bag, pack
from wsi_mil.lookup import find_model
from wsi_mil.models._base import MILModel, MILOutput
from wsi_mil.models._layers import Dropout


class Fixed(MILModel):
    """Answers what it was told."""

    summary = family = paper = "a toy"
    score_kinds = ("probability", "attention", "contribution")
    attention_parts = ("left", "right")

    def forward(self, batch, *, generator=None):
        raise AssertionError("not asked")


def output(logits, instance_logits):
    """Two bags of two tiles, four columns of attention."""
    attention = torch.tensor([[0.1, 0.3, 0.5, 0.7], [0.9, 0.7, 0.5, 0.3]] * 2)
    return MILOutput(
        logits=torch.tensor(logits),
        offsets=torch.tensor([0, 2, 4]),
        attention=attention,
        attention_logits=attention.log(),
        instance_logits=torch.tensor(instance_logits),
    )


ONE = output([[2.0], [-2.0]], [[0.0], [1.0], [2.0], [3.0]])
THREE = output([[0.0, 5.0, 1.0], [7.0, 5.0, 1.0]], [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] * 2)


def test_one_output_speaks_of_both_classes():
    model = Fixed(in_dim=1, n_outputs=1)
    positive = ONE.instance_logits[:, 0].sigmoid()
    torch.testing.assert_close(model.instance_scores(ONE, "probability", 1), positive)
    torch.testing.assert_close(model.instance_scores(ONE, "probability", 0), 1 - positive)
    share = ONE.attention.mean(dim=1) * ONE.instance_logits[:, 0]
    torch.testing.assert_close(model.instance_scores(ONE, "contribution", 1), share)
    torch.testing.assert_close(model.instance_scores(ONE, "contribution", 0), -share)


def test_without_an_index_scores_speak_of_the_predicted_class():
    one, three = Fixed(in_dim=1, n_outputs=1), Fixed(in_dim=1, n_outputs=3)
    positive = ONE.instance_logits[:, 0].sigmoid()
    wanted = torch.cat([positive[:2], 1 - positive[2:]])
    torch.testing.assert_close(one.instance_scores(ONE, "probability"), wanted)
    share = THREE.instance_logits.softmax(dim=1)
    wanted = torch.cat([share[:2, 1], share[2:, 0]])
    torch.testing.assert_close(three.instance_scores(THREE, "probability"), wanted)


def test_attention_is_the_mean_of_all_columns_or_of_one_part():
    model = Fixed(in_dim=1, n_outputs=3)
    torch.testing.assert_close(model.instance_scores(THREE, "attention"), torch.tensor([0.4, 0.6] * 2))
    torch.testing.assert_close(model.instance_scores(THREE, "attention", 0), torch.tensor([0.2, 0.8] * 2))
    torch.testing.assert_close(model.instance_scores(THREE, "attention", 1), torch.tensor([0.6, 0.4] * 2))


@pytest.mark.parametrize(("kind", "index"), [("attention", 2), ("probability", 3), ("contribution", -1)])
def test_an_index_that_is_not_there_is_refused(kind, index):
    with pytest.raises(ValueError, match=str(index)):
        Fixed(in_dim=1, n_outputs=3).instance_scores(THREE, kind, index)


def test_columns_to_keep_start_with_the_methods_own_and_the_positive_class():
    def names(method, classes, **params):
        cls = find_model(method)
        k = cls.binary_outputs if len(classes) == 2 else len(classes)
        return [(c.name, c.label, c.index) for c in cls(in_dim=8, n_outputs=k, **params).score_columns(classes)]

    two = ("normal", "tumour")
    assert names("focusmil", two) == [("probability:tumour", "tumour", 1)]
    assert names("abmil", two) == [
        ("attention", None, None),
        ("contribution:tumour", "tumour", 1),
        ("contribution:normal", "normal", 0),
    ]
    branches = [("attention", None, None), ("attention:branch0", None, 0), ("attention:branch1", None, 1)]
    assert names("acmil", two, n_branches=2)[:3] == branches
    assert names("acmil", two, n_branches=2, variant="multi_head") == branches
    assert names("max_pool", ("a", "b", "c")) == [
        ("probability", None, None),
        ("probability:a", "a", 0),
        ("probability:b", "b", 1),
        ("probability:c", "c", 2),
    ]


def test_dropout_keeps_the_mean():
    drop = Dropout(0.25)
    values = torch.ones(200, 200)
    dropped = drop(values, generator=torch.Generator().manual_seed(0))
    assert dropped.mean().item() == pytest.approx(1, abs=0.02)
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert torch.equal(drop.eval()(values, generator=torch.Generator()), values)


def test_heads_of_zero_mean_no_evidence():
    model = find_model("abmil")(in_dim=8, n_outputs=2).eval()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    zero = torch.zeros(3, 2, dtype=torch.int64)
    bag = Bag(
        features=torch.randn(3, 8), coords_l0=zero, grid_xy=zero, slide_index=zero[:, 0], slide_ids=("a",), id="a"
    )
    answer = model(pack([bag]))
    assert model.instance_scores(answer, "contribution", 1).tolist() == [0, 0, 0]
