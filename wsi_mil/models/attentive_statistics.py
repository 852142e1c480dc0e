"""Attentive statistics: the attention-weighted mean and standard deviation of the tiles. Okabe, Koshinaka and Shinoda,
Interspeech 2018, arXiv:1803.10963; channel-wise attention and context after ECAPA-TDNN, Desplanques et al.
2020, arXiv:2005.07143.

a = softmax(v . tanh(W h + b)); mu = sum a h; sigma = sqrt(sum a (h - mu)^2 + eps); a linear head on [mu; sigma].
Reference: the closed form (vector `instance_pooling`, asp_*); no code is loaded.

Differs on purpose: eps = 1e-6 stands under the root; the usual clamp of the variance at 1e-12 has a slope of half a
million just above it (clamp=1e-12 asks for it), and the usual sum a h^2 - mu^2 cancels in long bags.
"""

import torch
from torch import Tensor, nn

from wsi_mil.bags import (
    BagBatch,
    full_precision,
    no_autocast,
    segment_mean,
    segment_softmax,
    segment_weighted_sum,
    split,
    spread,
)
from wsi_mil.models._base import MILModel, MILOutput
from wsi_mil.models._layers import Dropout, FeatureLayer, GatedAttention, hidden_width
from wsi_mil.settings import Count, Positive, Rate

EPS = 1e-6


class AttentiveStatistics(MILModel):
    """Attention-weighted mean and standard deviation: what is there, and how different the tiles are.

    in_dim: width of the features.  n_outputs: width of the head.  hidden: width of the first layer; None takes the
    published one for `in_dim`.  feature_layer: False drops the first layer.  attention_dim: width of the attention.
    channel_wise: attention for each channel of its own.  context: attention also sees the bag's mean and standard
    deviation.  clamp: least variance; None adds 1e-6 to it instead.  dropout: on the output of the first layer.
    """

    summary = "attention-weighted mean and standard deviation of the tiles"
    family = "attention"
    paper = "Okabe et al., Interspeech 2018, arXiv:1803.10963"
    score_kinds = ("attention",)

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        hidden: Count | None = None,
        feature_layer: bool = True,
        attention_dim: Count = 128,
        channel_wise: bool = False,
        context: bool = False,
        clamp: Positive | None = None,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.hidden = (hidden or hidden_width(in_dim)) if feature_layer else in_dim
        self.feature_layer = feature_layer
        self.attention_dim = attention_dim
        self.channel_wise = channel_wise
        self.context = context
        self.clamp = clamp
        self.dropout = dropout
        self.random_in_training = dropout > 0
        self.features = FeatureLayer(in_dim, self.hidden) if feature_layer else nn.Identity()
        self.drop = Dropout(dropout)
        columns = self.hidden if channel_wise else 1
        seen = 3 * self.hidden if context else self.hidden
        self.attention = GatedAttention(seen, attention_dim, columns=columns, gated=False)
        self.head = nn.Linear(2 * self.hidden, n_outputs)

    def forward(
        self,
        batch: BagBatch,
        *,
        generator: torch.Generator | None = None,
        forced_mask: Tensor | None = None,
        forced_logits: Tensor | None = None,
    ) -> MILOutput:
        """Answer for each bag.

        forced_mask: (total, hidden) bool, the units that dropout zeroes.  forced_logits: (total, 1), or (total, hidden)
        for attention of each channel, in place of the attention's own.
        """
        hidden = self.drop(self.features(batch.features), generator=generator, forced_mask=forced_mask)
        seen = hidden
        if self.context:
            mean = segment_mean(hidden, batch.offsets)
            variance = segment_mean((hidden - spread(mean, batch.offsets)).square(), batch.offsets)
            deviation = _root(variance, self.clamp)
            around = torch.cat([mean, deviation], dim=1).to(hidden)
            seen = torch.cat([hidden, spread(around, batch.offsets)], dim=1)
        attention_logits = self.attention(seen) if forced_logits is None else forced_logits
        attention = segment_softmax(attention_logits, batch.offsets)
        embedding = weighted_moments(attention, hidden, batch.offsets, clamp=self.clamp)
        return MILOutput(
            logits=self.head(embedding),
            offsets=batch.offsets,
            attention_logits=attention_logits,
            attention=attention,
            bag_embedding=embedding[:, None],
        )


def weighted_moments(attention: Tensor, hidden: Tensor, offsets: Tensor, *, clamp: float | None = None) -> Tensor:
    """[mean; standard deviation] of each bag, (b, 2h), in fp32 at least.

    attention: (total, 1), or (total, h) for weights of each channel.  hidden: (total, h).  clamp: least variance; None
    adds 1e-6 to it instead.
    """

    with no_autocast(hidden):
        bags = zip(split(attention, offsets), split(hidden, offsets), strict=True)
        return torch.stack([_moments(weights, full_precision(rows), clamp) for weights, rows in bags])


def _moments(attention: Tensor, rows: Tensor, clamp: float | None) -> Tensor:
    """(2h,) of one bag; bag by bag, so that the centred tiles stay near the processor."""
    bounds = torch.tensor([0, len(rows)])

    def weighted(values: Tensor) -> Tensor:
        if attention.shape[1] == 1:
            return segment_weighted_sum(attention, values, bounds)[0, 0]
        return (attention * values).sum(dim=0)

    mean = weighted(rows)
    return torch.cat([mean, _root(weighted((rows - mean).square()), clamp)])


def _root(variance: Tensor, clamp: float | None) -> Tensor:
    return (variance + EPS if clamp is None else variance.clamp_min(clamp)).sqrt()
