"""Max pooling of instances: a linear head on each tile, then the greatest logit of each class.

Paper: the instance-space maximum of Ilse et al. 2018, arXiv:1802.04712, section 2. Reference: the closed form (vector
`pooling_max_mean`, `inst_max`).

Four baselines are called "max pooling". This is the first: (1) per class, the maximum of the instance logits, as in
the MHIM-MIL code; (2) the maximum of each embedding unit, then the head (`emb_max_logits` of the vector: another
number); (3) CLAM `MIL_fc`: all logits of the tile with the greatest softmax probability of class 1; (4) CLAM
`MIL_fc_mc`: all logits of the tile that holds the greatest probability of any class.

Differs on purpose: the MHIM-MIL code puts a hidden layer in front; here that is `hidden`, off by default.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from wsi_mil.bags import BagBatch, segment_max
from wsi_mil.models._base import MILModel, MILOutput
from wsi_mil.models._layers import Dropout, FeatureLayer
from wsi_mil.models._official import OfficialWeights, linear_head
from wsi_mil.settings import Count, Rate


class MaxPool(MILModel):
    """A linear head on each tile and the greatest logit of each class.

    in_dim: width of the features.  n_outputs: width of the head.  hidden: width of a first layer with ReLU; None for
    none.  dropout: on the output of that layer, or on the features.
    """

    summary = "maximum over tiles of each class's logit"
    family = "max-pooling"
    paper = "Ilse et al., ICML 2018, arXiv:1802.04712, section 2"
    score_kinds = ("probability",)
    binary_outputs = 1

    def __init__(self, *, in_dim: int, n_outputs: int, hidden: Count | None = None, dropout: Rate = 0.0) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.hidden = hidden
        self.dropout = dropout
        self.random_in_training = dropout > 0
        self.features = FeatureLayer(in_dim, hidden) if hidden else nn.Identity()
        self.drop = Dropout(dropout)
        self.head = nn.Linear(hidden or in_dim, n_outputs)

    def forward(
        self, batch: BagBatch, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> MILOutput:
        """Answer for each bag. forced_mask: (total, h) bool, the units that dropout zeroes."""
        hidden = self.drop(self.features(batch.features), generator=generator, forced_mask=forced_mask)
        instance_logits = self.head(hidden)
        logits, rows = segment_max(instance_logits, batch.offsets)
        return MILOutput(
            logits=logits, offsets=batch.offsets, instance_logits=instance_logits, auxiliary={"witness": rows}
        )

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """A linear head by the names of the closed-form vectors, W and b; there is no published code."""
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        return linear_head(cls, weights, **what_the_shapes_do_not_tell)
