"""Probabilities of tiles, pooled to the bag's: what the five prob_* methods share.

Wang, Li and Metze, ICASSP 2019, arXiv:1810.09050. Reference code: MaigoAkisame/cmu-thesis@7578dda (Python 2;
not run; the same expressions). p_nc = sigmoid(z_nc), z = w_c . h_n + b_c; the bag's y_c is a weighted mean of p_nc.

Differs on purpose:
- Nothing is clamped and no sum of probabilities is made: the bag's logit is log y - log(1 - y), with both from
  log-sum-exps, exact at any length of bag and in fp32 whatever the autocast. The published code clamps p to
  [1e-7, 1 - 1e-7].
- Features are frozen: a Linear layer with ReLU stands for the published convolutions and recurrences.
- b starts at the logit of a prior, 0.05: among 100,000 tiles at p = 0.5 nothing is seen.
- Several exclusive classes: each has its own y_c (tile probabilities are one against the rest and need not sum to 1),
  and the task's softmax of the logits is the probability of c given that exactly one class is true,
  proportional to y_c / (1 - y_c). The published loss, a binary cross-entropy for each class, is for several labels.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wsi_mil.bags import BagBatch, full_precision, no_autocast, segment_softmax, split
from wsi_mil.models._base import MILModel, MILOutput, ScoreKind, instance_logits_of
from wsi_mil.models._layers import Dropout, FeatureLayer
from wsi_mil.models._official import OfficialWeights
from wsi_mil.settings import Count, Range, Rate

Prior = Annotated[float, Range(0, 1, without_low=True, without_high=True)]
"""A probability that has a logit."""


class ProbabilityPooling(MILModel):
    """A probability for each tile and class; subclasses say how they become the bag's.

    in_dim: width of the features.  n_outputs: width of the head, 1 for two classes.  hidden: width of a first layer
    with ReLU; None for none.  prior: the tile probability that training starts from.  dropout: on the output of the
    first layer.
    """

    family = "instance probability"
    paper = "Wang, Li and Metze, ICASSP 2019, arXiv:1810.09050"
    score_kinds: tuple[ScoreKind, ...] = ("probability",)
    binary_outputs = 1
    classes_only = True

    def __init__(
        self, *, in_dim: int, n_outputs: int, hidden: Count | None = 256, prior: Prior = 0.05, dropout: Rate = 0.0
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.hidden = hidden
        self.prior = prior
        self.dropout = dropout
        self.random_in_training = dropout > 0
        self.features = FeatureLayer(in_dim, hidden) if hidden else nn.Identity()
        self.drop = Dropout(dropout)
        self.head = nn.Linear(hidden or in_dim, n_outputs)
        nn.init.constant_(self.head.bias, math.log(prior / (1 - prior)))

    @abstractmethod
    def pool(self, instance_logits: Tensor, attention_logits: Tensor | None, offsets: Tensor) -> Tensor:
        """The bags' logits (b, k), from those of the tiles (total, k), in fp32 at least."""

    def attend(self, hidden: Tensor) -> Tensor | None:
        """Learned attention logits (total, k), where the method has them."""
        return None

    def forward(
        self, batch: BagBatch, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> MILOutput:
        """Answer for each bag. forced_mask: (total, h) bool, the units that dropout zeroes."""
        hidden = self.drop(self.features(batch.features), generator=generator, forced_mask=forced_mask)
        instance_logits = full_precision(self.head(hidden))
        attention_logits = self.attend(hidden)
        with no_autocast(instance_logits):
            logits = self.pool(instance_logits, attention_logits, batch.offsets)
        return MILOutput(
            logits=logits,
            offsets=batch.offsets,
            attention_logits=attention_logits,
            attention=None if attention_logits is None else segment_softmax(attention_logits, batch.offsets),
            instance_logits=instance_logits,
        )

    def _instance_probabilities(self, output: MILOutput) -> Tensor:
        """(total, k) the tile's own probability of each class, one against the rest."""
        return full_precision(instance_logits_of(self, output)).sigmoid()

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """The output layers of the published `Net`: fc_prob, and fc_att where the pooling is attention.

        The features are what the published layers in front give; name those in `ignore`.
        """
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        tensors = weights.linear("head", "fc_prob")
        if "fc_att.*" in weights:
            tensors |= weights.linear("attention", "fc_att")
        n_outputs, in_dim = tensors["head.weight"].shape
        model = cls(in_dim=in_dim, n_outputs=n_outputs, hidden=None, **what_the_shapes_do_not_tell)
        weights.load(model, tensors)
        return model


def weighted_log_odds(instance_logits: Tensor, log_weights: Tensor, offsets: Tensor) -> Tensor:
    """log y / (1 - y) with y = sum w p / sum w over each bag. Both (total, k), w = exp(log_weights). Returns (b, k)."""
    odds = []
    for logits, weights in zip(split(instance_logits, offsets), split(log_weights, offsets), strict=True):
        odds.append((weights + F.logsigmoid(logits)).logsumexp(0) - (weights + F.logsigmoid(-logits)).logsumexp(0))
    return torch.stack(odds)
