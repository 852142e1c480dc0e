"""Attention-based MIL, gated or plain. Ilse, Tomczak and Welling, ICML 2018, arXiv:1802.04712, eqs. 8 and 9.

Reference code: AMLab-Amsterdam/AttentionDeepMIL@eb0434b (pooling and head on 500-wide embeddings, one sigmoid output),
and the form for stored tile features, dazhangyu123/AEM@4a928a8 `ABMIL`: a Linear layer without bias and ReLU in front,
softmax head. `from_official` reads both.

Differs on purpose:
- The loss is the task's cross-entropy on logits; the AMLab code clamps probabilities to [1e-5, 1 - 1e-5] first.
- `dropout` (0 by default) acts on the output of the first layer; the published code has its dropout, also 0, in the
  attention and before the classifier.
- Softmax and weighted sum run in fp32 whatever the autocast.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from wsi_mil.bags import BagBatch, segment_softmax, segment_weighted_sum
from wsi_mil.models._base import MILModel, MILOutput
from wsi_mil.models._layers import Dropout, FeatureLayer, GatedAttention, hidden_width
from wsi_mil.models._official import OfficialWeights
from wsi_mil.settings import Count, Rate


class Abmil(MILModel):
    """Attention-based MIL: a learned weight for each tile, one weighted mean, one linear head.

    in_dim: width of the features.  n_outputs: width of the head.  gated: multiply tanh by a sigmoid gate.
    hidden: width of the first layer; None takes the published one for `in_dim`.  attention_dim: width of the attention.
    feature_layer: False drops the first layer (the AMLab form).  dropout: on the output of the first layer.
    """

    summary = "attention pooling, gated or plain (ABMIL)"
    family = "attention"
    paper = "Ilse et al., ICML 2018, arXiv:1802.04712"
    score_kinds = ("attention", "contribution")

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        gated: bool = True,
        hidden: Count | None = None,
        attention_dim: Count = 128,
        feature_layer: bool = True,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.gated = gated
        self.hidden = (hidden or hidden_width(in_dim)) if feature_layer else in_dim
        self.attention_dim = attention_dim
        self.feature_layer = feature_layer
        self.dropout = dropout
        self.random_in_training = dropout > 0
        self.features = FeatureLayer(in_dim, self.hidden) if feature_layer else nn.Identity()
        self.drop = Dropout(dropout)
        self.attention = GatedAttention(self.hidden, attention_dim, gated=gated)
        self.head = nn.Linear(self.hidden, n_outputs)

    def forward(
        self, batch: BagBatch, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> MILOutput:
        """Answer for each bag. forced_mask: (total, hidden) bool, the units that dropout zeroes."""
        hidden = self.drop(self.features(batch.features), generator=generator, forced_mask=forced_mask)
        attention_logits = self.attention(hidden)
        attention = segment_softmax(attention_logits, batch.offsets)
        embedding = segment_weighted_sum(attention, hidden, batch.offsets)
        return MILOutput(
            logits=self.head(embedding[:, 0]),
            offsets=batch.offsets,
            attention_logits=attention_logits,
            attention=attention,
            instance_logits=self.head(hidden),
            bag_embedding=embedding,
        )

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights of AMLab's `GatedAttention` or `Attention` (pooling and head), or of the feature version `ABMIL`.

        The AMLab checkpoints also hold a digit CNN: ignore=("feature_extractor_part*",) leaves it out.
        """
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        tensors: dict[str, Tensor] = {}
        feature_layer = "classifier.fc.*" in weights
        if feature_layer:
            tensors |= weights.linear("features.linear", "dimreduction.fc1", bias=False)
            v, u, w, head = (
                "attention.attention_V.0",
                "attention.attention_U.0",
                "attention.attention_weights",
                "classifier.fc",
            )
        elif "attention.2.*" in weights:
            v, u, w, head = "attention.0", "", "attention.2", "classifier.0"
        else:
            v, u, w, head = "attention_V.0", "attention_U.0", "attention_w", "classifier.0"
        tensors |= weights.linear("attention.tanh", v) | weights.linear("attention.weights", w)
        if u:
            tensors |= weights.linear("attention.gate", u)
        tensors |= weights.linear("head", head)
        first = tensors["features.linear.weight"] if feature_layer else tensors["attention.tanh.weight"]
        model = cls(
            in_dim=first.shape[1],
            n_outputs=tensors["head.weight"].shape[0],
            gated=bool(u),
            hidden=first.shape[0] if feature_layer else None,
            attention_dim=tensors["attention.tanh.weight"].shape[0],
            feature_layer=feature_layer,
            **what_the_shapes_do_not_tell,
        )
        weights.load(model, tensors)
        return model
