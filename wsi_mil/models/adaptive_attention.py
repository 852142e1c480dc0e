"""Adaptive attention pooling: the query is made of the bag itself. Brothers, ICML 2025 ("Robust noise attenuation via
adaptive pooling of transformer outputs", arXiv:2506.09215).

Query x_q: the mean of the tiles, or one of them; z = W_o attention(W_q x_q, W_k X, W_v X), no biases, scale
1 / sqrt(width) whatever the heads; where the query is one tile, z + x_q. Reference code: agbrothers/pooling@b1cf3e6,
`AdaPool`; its branch without flash attention reads masks the other way round and is not followed.

Differs on purpose:
- Linear and LayerNorm to 256 in front (hidden=None for none): dot products of raw features depend on the encoder's
  scale.
- query="max_norm" takes the tile of greatest length. query="index", the published choice of one position, depends on
  the order of the tiles.
- Keys and values are never made for each tile; the algebra is exact.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from wsi_mil.bags import BagBatch, full_precision, segment_map, segment_mean
from wsi_mil.errors import ConfigError
from wsi_mil.models._attention import Projection, check_heads, head_tensors, head_values, look
from wsi_mil.models._base import MILModel, MILOutput
from wsi_mil.models._official import OfficialWeights
from wsi_mil.settings import Amount, Count, Rate


class AdaptiveAttention(MILModel):
    """Attention pooling whose query is the mean of the tiles, or one of them.

    in_dim: width of the features.  n_outputs: width of the head.  hidden: width of the layer in front; None for none.
    heads: of the attention.  query: the mean, the tile of greatest length, or the tile at `query_index` (the last one
    of shorter bags).  dropout: on the output of the layer in front.
    """

    summary = "attention whose query is the bag's mean or its strongest tile (adaptive pooling)"
    family = "attention"
    paper = "Brothers, ICML 2025, arXiv:2506.09215"
    score_kinds = ("attention",)

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        hidden: Count | None = 256,
        heads: Count = 4,
        query: Literal["mean", "max_norm", "index"] = "mean",
        query_index: Amount = 0,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        width = hidden or in_dim
        check_heads("adaptive_attention", width, heads)
        if query not in ("mean", "max_norm", "index"):
            raise ConfigError(f"adaptive_attention: query={query!r}; it is mean, max_norm or index")
        self.hidden = hidden
        self.heads = heads
        self.query = query
        self.query_index = query_index
        self.dropout = dropout
        self.random_in_training = dropout > 0
        self.attention_parts = tuple(f"head{i}" for i in range(heads))
        self.features = Projection(in_dim, hidden, dropout=dropout)
        self.ask = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, n_outputs)

    def forward(
        self, batch: BagBatch, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> MILOutput:
        """Answer for each bag. forced_mask: (total, hidden) bool, the units that dropout zeroes."""
        tiles = self.features(batch.features, generator=generator, forced_mask=forced_mask)
        query = self._query(tiles, batch.offsets)[:, None]
        scale = tiles.shape[1] ** -0.5
        seen = look(self.ask(query), tiles, batch.offsets, key=self.key, heads=self.heads, scale=scale)
        embedding = self.out(head_values(seen.means, self.value, heads=self.heads))
        if self.query != "mean":
            embedding = embedding + query
        return MILOutput(
            logits=self.head(embedding[:, 0]),
            offsets=batch.offsets,
            attention_logits=seen.logits,
            attention=seen.attention,
            bag_embedding=embedding,
        )

    def _query(self, tiles: Tensor, offsets: Tensor) -> Tensor:
        """(b, h) one vector a bag."""
        if self.query == "mean":
            return segment_mean(tiles, offsets)
        if self.query == "max_norm":
            return segment_map(lambda rows: rows[full_precision(rows.detach()).norm(dim=1).argmax()], tiles, offsets)
        return segment_map(lambda rows: rows[min(self.query_index, len(rows) - 1)], tiles, offsets)

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights of the published module: attn.Q, attn.KV (keys above values), attn.out.

        heads (4) and query ("mean"; "index" with query_index for its query_idx) are not in them. It has no head:
        `bag_embedding` is what it gives, and so are the logits; n_outputs asks for a head of zeros instead.
        head.weight and head.bias are taken where they are there.
        """
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        tensors = weights.linear("ask", "attn.Q", bias=False) | weights.linear("out", "attn.out", bias=False)
        tensors["key.weight"], tensors["value.weight"] = weights.take("attn.KV.weight").chunk(2)
        width = len(tensors["out.weight"])
        tensors |= head_tensors(weights, width, what_the_shapes_do_not_tell.pop("n_outputs", None))
        n_outputs = len(tensors["head.weight"])
        model = cls(in_dim=width, n_outputs=n_outputs, hidden=None, **what_the_shapes_do_not_tell)
        weights.load(model, tensors)
        return model
