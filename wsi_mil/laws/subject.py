"""What a law is tried on: a method, its made-up bags and one step of its training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wsi_mil.bags import Bag, BagBatch, pack
from wsi_mil.models._base import MILModel, Objective, Progress, Regulariser
from wsi_mil.tasks import class_task

IN_DIM = 32
"""Width of the features that methods are tried on."""


class LawError(Exception):
    """Says what a method did that the law forbids."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The method under test: its class, parameters, and what wraps its objective."""

    cls: type[MILModel]
    params: Mapping[str, Any] = field(default_factory=dict)
    wrap: Callable[[Objective], Objective] | None = None

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the head that are tried: two classes, three, and one number unless classes are all it knows."""
        return tuple(sorted({self.cls.binary_outputs, 3} | (set() if self.cls.classes_only else {1})))

    @property
    def classes(self) -> tuple[int, ...]:
        """Widths of the head for two classes and for three."""
        return self.cls.binary_outputs, 3

    def model(self, n_outputs: int = 3, *, seed: int = 0, training: bool = False) -> MILModel:
        """A fresh model whose parameters are moved a little, so that no initial zero hides a fault."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.cls(in_dim=IN_DIM, n_outputs=n_outputs, **self.params)
            if self.wrap is not None:
                model = _changed(model, self.wrap)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model.train(training)

    def objective(self, model: MILModel) -> Objective:
        """The objective of a model on classes, in training mode, with what wraps it."""
        task = class_task("law", ("a", "b", "c")[: max(model.n_outputs, 2)])
        objective = model.objective(task.criterion(model.n_outputs))
        return (self.wrap(objective) if self.wrap else objective).train()

    def loss(self, model: MILModel, batch: BagBatch, *, seed: int = 0, target: Tensor | None = None) -> Tensor:
        """The sum of all terms of one training step.  target: (b,) classes; they go round when not given."""
        if target is None:
            target = torch.arange(len(batch)) % max(model.n_outputs, 2)
        progress = Progress(step=0, total_steps=10, generator=seeded(seed))
        terms = self.objective(model).loss(model, batch, target, progress)
        return torch.stack(list(terms.values())).sum()

    def batch(self, *lengths: int) -> BagBatch:
        """Bags of these lengths, or of a few unequal ones, none below the method's least."""
        return pack([make_bag(max(n, self.cls.min_tiles), seed=i) for i, n in enumerate(lengths or (17, 5, 12))])


def _changed(model: MILModel, wrap: Callable[[Objective], Objective]) -> MILModel:
    """The model as the plug-in that `wrap` makes wants it."""
    task = class_task("law", ("a", "b", "c")[: max(model.n_outputs, 2)])
    plug_in = wrap(model.objective(task.criterion(model.n_outputs)))
    return plug_in.change(model) if isinstance(plug_in, Regulariser) else model


def seeded(seed: int) -> torch.Generator:
    """A generator on the CPU."""
    return torch.Generator().manual_seed(seed)


def make_bag(n: int, *, seed: int) -> Bag:
    """A bag of n random tiles on a compact grid."""
    rows = torch.arange(n)
    grid_xy = torch.stack([rows % 4, rows // 4], dim=1)
    return Bag(
        features=torch.randn(n, IN_DIM, generator=seeded(seed)),
        coords_l0=grid_xy * 448,
        grid_xy=grid_xy,
        slide_index=torch.zeros(n, dtype=torch.int64),
        slide_ids=(f"slide{seed}",),
        id=f"bag{seed}",
    )
