"""LSE pooling: the log-mean-exp of the tiles' logits, with a learned sharpness. Pinheiro and Collobert, CVPR 2015,
arXiv:1411.6228.

z_c = log(mean of exp(r z_nc)) / r: the mean as r goes to 0, the maximum as r grows. Reference: the closed form (vector
`instance_pooling`, lse_*). Differs on purpose: r = softplus(rho) is learned, one a class, 1 at the start. The 1/n in
the mean is kept; without it bags of different lengths cannot be compared.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wsi_mil.bags import BagBatch, full_precision, no_autocast, segment_map
from wsi_mil.models._base import MILModel, MILOutput
from wsi_mil.models._channels import inverse_softplus, log_mean_exp
from wsi_mil.models._layers import Dropout, FeatureLayer
from wsi_mil.models._official import OfficialWeights
from wsi_mil.settings import Count, Positive, Rate


class LsePool(MILModel):
    """A linear head on each tile and the log-mean-exp of each class's logits.

    in_dim: width of the features.  n_outputs: width of the head, 1 for two classes.  r: the sharpness at the start,
    above 0.  hidden: width of a first layer with ReLU; None for none.  dropout: on the output of that layer, or on the
    features.
    """

    summary = "log-mean-exp of the tiles' logits, between mean and maximum (LSE)"
    family = "pooling"
    paper = "Pinheiro and Collobert, CVPR 2015, arXiv:1411.6228"
    score_kinds = ("probability",)
    binary_outputs = 1

    def __init__(
        self, *, in_dim: int, n_outputs: int, r: Positive = 1.0, hidden: Count | None = None, dropout: Rate = 0.0
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.r = r
        self.hidden = hidden
        self.dropout = dropout
        self.random_in_training = dropout > 0
        self.features = FeatureLayer(in_dim, hidden) if hidden else nn.Identity()
        self.drop = Dropout(dropout)
        self.head = nn.Linear(hidden or in_dim, n_outputs)
        self.rho = nn.Parameter(inverse_softplus(r).repeat(n_outputs))

    def forward(
        self, batch: BagBatch, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> MILOutput:
        """Answer for each bag. forced_mask: (total, h) bool, the units that dropout zeroes."""
        hidden = self.drop(self.features(batch.features), generator=generator, forced_mask=forced_mask)
        instance_logits = full_precision(self.head(hidden))
        with no_autocast(instance_logits):
            sharpness = F.softplus(self.rho)
            logits = segment_map(lambda rows: log_mean_exp(rows, sharpness), instance_logits, batch.offsets)
        return MILOutput(logits=logits, offsets=batch.offsets, instance_logits=instance_logits)

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """A linear head on each tile, by the names W and b; r is that of the constructor."""
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        head = {"head.weight": weights.take("W"), "head.bias": weights.take("b")}
        n_outputs, in_dim = head["head.weight"].shape
        model = cls(in_dim=in_dim, n_outputs=n_outputs, **what_the_shapes_do_not_tell)
        weights.load(model, model.state_dict() | head)
        return model
