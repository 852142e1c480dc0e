"""Differential attention pooling: a = softmax(s1) - lambda softmax(s2). After Ye et al., ICLR 2025, arXiv:2410.05258.

What both attentions look at cancels; weights may be negative and sum to 1 - lambda. Own reduction to one query: two
gated attentions on the same tiles, lambda the sigmoid of one learned number; there is no published code for bags.
Since weights have a sign, the scores of tiles are contributions, which sum to the logit; the two attentions are in
`auxiliary`.
"""

import math
from typing import Annotated

import torch
from torch import Tensor, nn

from wsi_mil.bags import BagBatch, segment_softmax, segment_weighted_sum
from wsi_mil.models._base import MILModel, MILOutput
from wsi_mil.models._layers import Dropout, FeatureLayer, GatedAttention, hidden_width
from wsi_mil.settings import Count, Range, Rate


class DifferentialAttention(MILModel):
    """The difference of two attentions, so that what is common to all tiles cancels.

    in_dim: width of the features.  n_outputs: width of the head.  first_lambda: share of the second attention at the
    start, above 0 and below 1.  hidden: width of the first layer; None takes the usual one for `in_dim`.
    attention_dim: width of the attention.  dropout: on the output of the first layer.
    """

    summary = "difference of two attentions, signed weights (DIFF)"
    family = "attention"
    paper = "after Ye et al., ICLR 2025, arXiv:2410.05258"
    score_kinds = ("contribution",)

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        first_lambda: Annotated[float, Range(0, 1, without_low=True, without_high=True)] = 0.5,
        hidden: Count | None = None,
        attention_dim: Count = 128,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.first_lambda = first_lambda
        self.hidden = hidden or hidden_width(in_dim)
        self.attention_dim = attention_dim
        self.dropout = dropout
        self.random_in_training = dropout > 0
        self.features = FeatureLayer(in_dim, self.hidden)
        self.drop = Dropout(dropout)
        self.attention = GatedAttention(self.hidden, attention_dim, columns=2)
        self.balance = nn.Parameter(torch.tensor(math.log(first_lambda / (1 - first_lambda))))
        self.head = nn.Linear(self.hidden, n_outputs)

    def forward(
        self, batch: BagBatch, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> MILOutput:
        """Answer for each bag. forced_mask: (total, hidden) bool, the units that dropout zeroes."""
        hidden = self.drop(self.features(batch.features), generator=generator, forced_mask=forced_mask)
        both = segment_softmax(self.attention(hidden), batch.offsets)
        weights = both[:, :1] - self.balance.sigmoid() * both[:, 1:]
        embedding = segment_weighted_sum(weights, hidden, batch.offsets)
        return MILOutput(
            logits=self.head(embedding[:, 0]),
            offsets=batch.offsets,
            instance_logits=self.head(hidden),
            bag_embedding=embedding,
            auxiliary={"weights": weights, "both_attentions": both},
        )

    def _instance_contributions(self, output: MILOutput) -> Tensor:
        """(total, k) w_n W h_n, and the bias by the mean of the two attentions; they sum to the logits."""
        assert output.instance_logits is not None
        evidence = output.instance_logits - self.head.bias
        shares = output.auxiliary["both_attentions"].mean(dim=1, keepdim=True)
        return output.auxiliary["weights"] * evidence + shares * self.head.bias
