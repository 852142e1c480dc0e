"""SimPool: the mean of the tiles looks at the tiles. Psomas et al., ICCV 2023, arXiv:2309.06891.

q = W_q mean(X), k = W_k LN(X), v = LN(X); z = sum a v with a = softmax(q . k / sqrt(width of a head)); with gamma
z = (sum a (v - min v + eps)^gamma)^(1/gamma). Reference code: billpsomas/simpool@fac2263, eps 1e-6 in both places.

Where the published code is not followed by default: it takes min v over the whole batch (padding included), so that a
bag's answer depends on its neighbours. Here the minimum is the bag's own; gamma_minimum="batch" is the published one.
Also on purpose: keys are never made for each tile (exact), and the head is a linear layer on z.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from wsi_mil.bags import BagBatch, full_precision, no_autocast, segment_log_softmax, segment_map, segment_mean, spread
from wsi_mil.errors import ConfigError
from wsi_mil.models._attention import check_heads, head_tensors, in_heads, look, own_channels
from wsi_mil.models._base import MILModel, MILOutput
from wsi_mil.models._official import OfficialWeights
from wsi_mil.settings import Count, Positive

EPS = 1e-6


class SimPool(MILModel):
    """Attention pooling whose query is the mean of the tiles.

    in_dim: width of the features.  n_outputs: width of the head.  heads: of the attention.  qkv_bias: biases of query
    and key.  gamma: exponent of the power mean; None for the mean.  gamma_minimum: what is subtracted before the power,
    the minimum of the bag, or of all bags of the batch as in the published code.
    """

    summary = "the mean of the tiles attends to the tiles (SimPool)"
    family = "attention"
    paper = "Psomas et al., ICCV 2023, arXiv:2309.06891"
    score_kinds = ("attention",)

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        heads: Count = 1,
        qkv_bias: bool = False,
        gamma: Positive | None = None,
        gamma_minimum: Literal["bag", "batch"] = "bag",
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        check_heads("simpool", in_dim, heads)
        if gamma_minimum not in ("bag", "batch"):
            raise ConfigError(f"simpool: gamma_minimum={gamma_minimum!r}; it is bag or batch")
        self.heads = heads
        self.qkv_bias = qkv_bias
        self.gamma = gamma
        self.gamma_minimum = gamma_minimum
        self.attention_parts = tuple(f"head{i}" for i in range(heads))
        self.norm = nn.LayerNorm(in_dim, eps=1e-6)
        self.query = nn.Linear(in_dim, in_dim, bias=qkv_bias)
        self.key = nn.Linear(in_dim, in_dim, bias=qkv_bias)
        self.head = nn.Linear(in_dim, n_outputs)

    def forward(self, batch: BagBatch, *, generator: torch.Generator | None = None) -> MILOutput:
        """Answer for each bag."""
        tiles = self.norm(batch.features)
        query = self.query(segment_mean(batch.features, batch.offsets))[:, None]
        scale = (self.in_dim // self.heads) ** -0.5
        seen = look(query, tiles, batch.offsets, key=self.key, heads=self.heads, scale=scale)
        if self.gamma is None:
            embedding = own_channels(seen.means, heads=self.heads)
        else:
            embedding = self._power_means(tiles, seen.logits, batch.offsets, self.gamma)
        return MILOutput(
            logits=self.head(embedding[:, 0]),
            offsets=batch.offsets,
            attention_logits=seen.logits,
            attention=seen.attention,
            bag_embedding=embedding,
        )

    def _power_means(self, tiles: Tensor, logits: Tensor, offsets: Tensor, gamma: float) -> Tensor:
        """(b, 1, d) the power mean of each channel of the shifted tiles, each head's channels with its own weights.

        Made of logarithms: 1e-6, which the lowest value becomes, is 0 in fp32 to a high power.
        """
        with no_autocast(tiles):
            tiles = full_precision(tiles)
            own = self.gamma_minimum == "bag"
            lowest = spread(segment_map(torch.amin, tiles, offsets), offsets)[:, None] if own else tiles.amin()
            powers = in_heads(gamma * (tiles - lowest + EPS).log(), self.heads)
            weighted = powers + segment_log_softmax(logits, offsets)[:, :, None]
            sums = segment_map(lambda rows: rows.logsumexp(dim=0), weighted, offsets)
            return (sums / gamma).exp().flatten(1)[:, None]

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights of the published module: norm_patches.*, wq.*, wk.*. heads (1), gamma and gamma_minimum are not in
        them; gamma_minimum is "bag" here too unless "batch" is asked for.

        It has no head: `bag_embedding` is what it gives, and so are the logits; n_outputs asks for a head of zeros
        instead. head.weight and head.bias are taken where they are there.
        """
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        bias = "w[qk].bias" in weights
        tensors = weights.linear("norm", "norm_patches")
        tensors |= weights.linear("query", "wq", bias=bias) | weights.linear("key", "wk", bias=bias)
        in_dim = len(tensors["norm.weight"])
        tensors |= head_tensors(weights, in_dim, what_the_shapes_do_not_tell.pop("n_outputs", None))
        n_outputs = len(tensors["head.weight"])
        model = cls(in_dim=in_dim, n_outputs=n_outputs, qkv_bias=bias, **what_the_shapes_do_not_tell)
        weights.load(model, tensors)
        return model
