"""Mean pooling: the mean of the tiles, then a linear head.

Paper: the instance-space and embedding-space mean of Ilse et al. 2018, arXiv:1802.04712, section 2. With a linear head
the two are one: mean_n (W h_n + b) = W mean_n(h_n) + b. So this is global average pooling as MIL too: the mean of the
patches' logits, whose map of patch logits is the class activation map. Reference: the closed form (vector
`pooling_max_mean`).

Differs on purpose: the baseline of the MHIM-MIL code puts a hidden layer in front; here that is `hidden`, off unless
asked for.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from wsi_mil.bags import BagBatch, full_precision, segment_mean, spread
from wsi_mil.models._base import MILModel, MILOutput, instance_logits_of
from wsi_mil.models._layers import Dropout, FeatureLayer
from wsi_mil.models._official import OfficialWeights, linear_head
from wsi_mil.settings import Count, Rate


class MeanPool(MILModel):
    """The mean of the tiles and a linear head.

    in_dim: width of the features.  n_outputs: width of the head.  hidden: width of a first layer with ReLU; None for
    none.  dropout: on the output of that layer, or on the features.
    """

    summary = "mean of the tiles, linear head"
    family = "pooling"
    paper = "Ilse et al., ICML 2018, arXiv:1802.04712, section 2"
    score_kinds = ("probability", "contribution")

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
        embedding = segment_mean(hidden, batch.offsets)
        return MILOutput(
            logits=self.head(embedding),
            offsets=batch.offsets,
            instance_logits=self.head(hidden),
            bag_embedding=embedding[:, None],
        )

    def _instance_contributions(self, output: MILOutput) -> Tensor:
        """(total, k) the n-th part of what the head says of each tile; they sum to the bag's logits."""
        lengths = spread(output.offsets.diff(), output.offsets)
        return full_precision(instance_logits_of(self, output)) / lengths[:, None]

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """A linear head by the names of the closed-form vectors, W and b; there is no published code."""
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        return linear_head(cls, weights, **what_the_shapes_do_not_tell)
