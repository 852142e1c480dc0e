"""No training step of any method holds every tile against every other."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from wsi_mil.bags import pack
from wsi_mil.lookup import model_names, regulariser_names
from wsi_mil.measuring.costs import made_up_bag
from wsi_mil.methods import MethodSpec, build
from wsi_mil.models._base import Progress
from wsi_mil.tasks import class_task

TILES, WIDTH = 5000, 16
PLUG_INS = [f"abmil+{name}" for name in regulariser_names() if name != "attention_diversity"]


class Largest(TorchDispatchMode):
    """Notes the greatest number of elements of a tensor that any operation gives, backward too."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **keywords or {})
        sizes = [part.numel() for part in tree_flatten(result)[0] if isinstance(part, torch.Tensor) and holds(part)]
        self.numbers = max([self.numbers, *sizes])
        return result


def holds(tensor):
    """Whether there is a number in memory for each element: not in what is expanded or sparse."""
    return tensor.layout == torch.strided and tensor.untyped_storage().nbytes() >= tensor.nbytes


def largest(name):
    """Elements of the largest tensor in a training step on one bag of TILES tiles."""
    model_name, *plug_ins = name.split("+")
    spec = MethodSpec(name=model_name, regularisers={plug_in: {} for plug_in in plug_ins})
    model, objective = build(spec, in_dim=WIDTH, task=class_task("y", ("a", "b")), seed=0)
    batch = pack([made_up_bag(TILES, WIDTH, seed=0)])
    progress = Progress(step=1, total_steps=2, generator=torch.Generator().manual_seed(0))
    with Largest() as seen:
        terms = objective.train().loss(model.train(), batch, torch.tensor([1]), progress)
        torch.stack(list(terms.values())).sum().backward()
    return seen.numbers


@pytest.mark.parametrize("name", [*model_names(), *PLUG_INS])
def test_memory_does_not_grow_with_the_square_of_the_tiles(name):
    assert TILES <= largest(name) < TILES**2 / 2
