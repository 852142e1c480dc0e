"""Multi-head attention pooling with one learned query, the default network of the AEM repository.

Paper: Zhang et al., MICCAI 2025, arXiv:2406.15303 (AEM), multi-head form; attention as Vaswani et al. 2017, eq. 1.
Reference code: dazhangyu123/AEM@4a928a8, class `MHA`: Linear without bias and ReLU, query and keys and values projected
into eight heads, output projection, dropout 0.1, LayerNorm (eps 1e-6), softmax head.

Differs on purpose: keys and values are never made for each tile; the algebra is exact (see `_layers`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wsi_mil.bags import BagBatch, segment_softmax, segment_weighted_sum
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import MILModel, MILOutput
from wsi_mil.models._layers import FeatureLayer, HeadQueries, HeadValues, hidden_width
from wsi_mil.models._official import OfficialWeights
from wsi_mil.settings import Count, Rate


class AbmilMha(MILModel):
    """Attention pooling by one learned query with several heads.

    in_dim: width of the features.  n_outputs: width of the head.  hidden: width of the first layer, a multiple of
    `heads`; None takes the published one for `in_dim`.  heads: number of heads.  dropout: before the LayerNorm.
    """

    summary = "attention pooling by one learned query, several heads (MHA)"
    family = "attention"
    paper = "Zhang et al., MICCAI 2025, arXiv:2406.15303"
    score_kinds = ("attention",)

    def __init__(
        self, *, in_dim: int, n_outputs: int, hidden: Count | None = None, heads: Count = 8, dropout: Rate = 0.1
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.hidden = hidden or hidden_width(in_dim)
        self.heads = heads
        self.dropout = dropout
        if self.hidden % heads:
            raise ConfigError(f"abmil_mha: hidden={self.hidden} does not split into {heads} heads; give a multiple")
        self.random_in_training = dropout > 0
        self.attention_parts = tuple(f"head{i}" for i in range(heads))
        self.features = FeatureLayer(in_dim, self.hidden)
        self.query = nn.Parameter(torch.empty(self.hidden))
        nn.init.normal_(self.query, std=1e-6)
        self.attention = HeadQueries(self.hidden, heads)
        self.values = HeadValues(self.hidden, heads, dropout=dropout)
        self.head = nn.Linear(self.hidden, n_outputs)

    def forward(
        self, batch: BagBatch, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> MILOutput:
        """Answer for each bag. forced_mask: (b, hidden) bool, the units that dropout zeroes."""
        hidden = self.features(batch.features)
        attention_logits = F.linear(hidden, *self.attention.projections(self.query))
        attention = segment_softmax(attention_logits, batch.offsets)
        means = segment_weighted_sum(attention, hidden, batch.offsets)
        embedding = self.values(means, generator=generator, forced_mask=forced_mask)
        return MILOutput(
            logits=self.head(embedding),
            offsets=batch.offsets,
            attention_logits=attention_logits,
            attention=attention,
            bag_embedding=embedding[:, None],
        )

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights of AEM's `MHA`. The number of heads (8 as published) is not in the weights."""
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        tensors = {"query": weights.take("q").flatten()}
        tensors |= weights.linear("features.linear", "dimreduction.fc1", bias=False)
        ours = {"attention.query": "q_proj", "attention.key": "k_proj", "values.value": "v_proj"}
        for name, official in (ours | {"values.out": "out_proj", "values.norm": "layer_norm"}).items():
            tensors |= weights.linear(name, f"attention.{official}")
        tensors |= weights.linear("head", "classifier.fc")
        hidden, in_dim = tensors["features.linear.weight"].shape
        n_outputs = len(tensors["head.weight"])
        model = cls(in_dim=in_dim, n_outputs=n_outputs, hidden=hidden, **what_the_shapes_do_not_tell)
        weights.load(model, tensors)
        return model
