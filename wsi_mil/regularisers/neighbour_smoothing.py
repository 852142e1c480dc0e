"""Neighbour smoothing: attention scores mixed with the mean of their neighbours' before the softmax.

s <- s + g (mean over the eight neighbours of s - s), g = tanh of one learned number that starts at 0, so that training
begins with the method as it is; a negative g sharpens. The idea of attention over several tokens at once (multi-token
attention), on the grid of tiles and linear in them. Own equation; there is no published code for bags.
"""

import torch
from torch import Tensor, nn

from wsi_mil.bags import BagBatch, full_precision, no_autocast
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import MILModel, MILOutput, Objective, Progress, Regulariser
from wsi_mil.models._scores import ScoreChange
from wsi_mil.models._spatial import Radius, adjacency


class NeighbourSmoothing(Regulariser):
    """Mixes a tile's attention score with its neighbours', by a learned amount that starts at none.

    inner: the method's objective.  radius: how many grid steps neighbours lie apart at most (1.5: all eight).
    """

    summary = "attention scores mixed with those of neighbouring tiles, by a learned amount"
    paper = "after multi-token attention, Golovneva et al. 2025, arXiv:2504.00927"

    def __init__(self, inner: Objective, *, radius: Radius = 1.5) -> None:
        super().__init__(inner)
        self.radius = radius

    def change(self, model: MILModel) -> MILModel:
        """The same model with the mixing inside. Raises ConfigError when it has no gated attention."""
        _Mix(self.radius).install(model)
        model.uses_positions = True
        return model

    def check(self, model: MILModel) -> None:
        """Raises ConfigError for a model that `change` did not make."""
        if not any(isinstance(part, _Mix) for part in model.modules()):
            raise ConfigError("neighbour_smoothing: build model and objective together (wsi_mil.methods)")

    def terms(self, output: MILOutput, progress: Progress) -> dict[str, Tensor]:
        """None of its own."""
        return {}


class _Mix(ScoreChange):
    name = "neighbour_smoothing"

    def __init__(self, radius: float) -> None:
        super().__init__()
        self.radius = radius
        self.amount = nn.Parameter(torch.zeros(()))

    def forward(self, logits: Tensor, batch: BagBatch) -> Tensor:
        logits = full_precision(logits)
        with no_autocast(logits):
            means = adjacency(batch, self.radius, normalise="row").to(logits.dtype) @ logits
            return logits + self.amount.tanh() * (means - logits)
