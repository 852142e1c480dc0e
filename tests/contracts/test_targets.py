"""Methods that are not for classes alone train on numbers of any width, which only the criterion understands."""

import pytest
import torch

from wsi_mil.bags import pack
from wsi_mil.contracts import IN_DIM, make_bag, seeded
from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model, model_names
from wsi_mil.models._base import Criterion, Progress

CLASSES_ONLY = {"clam_mb", "clam_sb", "ins", "midam"} | {name for name in model_names() if name.startswith("prob_")}
TARGET = torch.tensor([[0.5, float("nan")], [-1.0, 2.0], [float("nan"), 0.0]])


class Pairwise(Criterion):
    """Output 0 is a number where it is known; of output 1 only differences between bags count, as in a ranking."""

    def forward(self, logits, target):
        assert logits.shape == (len(TARGET), 3)
        assert torch.equal(target.nan_to_num(nan=7), TARGET.nan_to_num(nan=7)), "bags in their order, whole rows"
        known = ~target[:, 0].isnan()
        level = (logits[known, 0] - target[known, 0]).square().mean()
        gaps = logits[:, None, 1] - logits[None, :, 1]
        return level + gaps[1, 2].exp() + logits[:, 2].square().mean()


def step(name, params=None, objective=None):
    """Terms of one training step of a fresh model with three outputs, and the model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = find_model(name)(in_dim=IN_DIM, n_outputs=3, **params or {}).train()
        own = model.objective(Pairwise(), **objective or {}).train()
    batch = pack([make_bag(max(n, model.min_tiles), seed=n) for n in (17, 3, 12)])
    return model, own.loss(model, batch, TARGET, Progress(step=9, total_steps=10, generator=seeded(0)))


@pytest.mark.parametrize("name", sorted(set(model_names()) - CLASSES_ONLY))
def test_a_step_on_numbers_trains_the_whole_head(name):
    model, terms = step(name)
    assert not model.classes_only
    torch.stack(list(terms.values())).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)
    heads = [gradient.flatten(1) for gradient in gradients if gradient.ndim > 1 and len(gradient) == 3]
    assert any(head.any(dim=1).all() for head in heads)


@pytest.mark.parametrize("name", sorted(CLASSES_ONLY))
def test_methods_of_classes_alone_say_so(name):
    assert find_model(name).classes_only


@pytest.mark.parametrize(
    ("name", "params", "objective"),
    [
        ("dsmil", {}, {"loss": "bce"}),
        ("dsmil", {"prediction": "mean"}, {}),
        ("mhim", {}, {"score": "class"}),
        ("mhim", {"baseline": "dsmil"}, {}),
        ("dtfd", {"distillation": "MaxS"}, {}),
        ("dtfd", {"distillation": "MaxMinS"}, {}),
    ],
)
def test_settings_that_make_sense_of_classes_alone_are_refused(name, params, objective):
    with pytest.raises(ConfigError, match="classes only"):
        step(name, params, objective)
