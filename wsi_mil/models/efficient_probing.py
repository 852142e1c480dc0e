"""Efficient probing: learned queries attend to frozen features, each reads its own group of values. Psomas et al.,
ICLR 2026, arXiv:2506.10178.

A = softmax over tiles of Q X^T / sqrt(d); z_j = W_v^(j) (A_j X), W_v^(j) the j-th group of rows; z = [z_1 ... z_q].
No key, query or output projection. Reference code: billpsomas/efficient-probing@b8f4fb8, `EfficientProbing` with
num_heads=1, the only value that runs there.

Differs on purpose:
- Tiles are averaged first and projected after, which is the same number without a value for each tile.
- norm="layer" first; the published code has none ("none"), and with queries of spread 0.02 attention on features of
  length 1 stays uniform for long.
- LayerNorm without parameters stands before the head where the published probe has BatchNorm, which a step of one bag
  cannot have and which lets a bag see its neighbours. head_norm=False leaves it away.
- queries=None takes 32 (as published), or the next lower number that divides the values.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from wsi_mil.bags import BagBatch, no_autocast
from wsi_mil.errors import ConfigError
from wsi_mil.models._attention import InputNorm, check_norm, head_tensors, in_heads, look, normalised
from wsi_mil.models._base import MILModel, MILOutput
from wsi_mil.models._official import OfficialWeights
from wsi_mil.settings import Count

PUBLISHED_QUERIES = 32


class EfficientProbing(MILModel):
    """Learned queries on frozen features, each with its own part of the value map.

    in_dim: width of the features.  n_outputs: width of the head.  queries: number of queries, a divisor of
    in_dim / d_out.  d_out: the values are in_dim / d_out wide.  value_bias: bias of the value map.  norm: what is done
    to each tile first.  head_norm: LayerNorm without parameters before the head.
    """

    summary = "learned queries on frozen features, each with its own values (efficient probing)"
    family = "attention"
    paper = "Psomas et al., ICLR 2026, arXiv:2506.10178"
    score_kinds = ("attention",)

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        queries: Count | None = None,
        d_out: Count = 1,
        value_bias: bool = False,
        norm: InputNorm = "layer",
        head_norm: bool = True,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        check_norm("efficient_probing", norm)
        if in_dim % d_out:
            raise ConfigError(f"efficient_probing: d_out={d_out} does not divide the {in_dim} features")
        width = in_dim // d_out
        n_queries = queries or next(q for q in range(PUBLISHED_QUERIES, 0, -1) if width % q == 0)
        if width % n_queries:
            raise ConfigError(f"efficient_probing: {n_queries} queries do not divide the {width} values")
        self.queries = queries
        self.d_out = d_out
        self.value_bias = value_bias
        self.norm = norm
        self.head_norm = head_norm
        self.attention_parts = tuple(f"query{i}" for i in range(n_queries))
        self.query = nn.Parameter(0.02 * torch.randn(n_queries, in_dim))
        self.value = nn.Linear(in_dim, width, bias=value_bias)
        self.before_head = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False) if head_norm else nn.Identity()
        self.head = nn.Linear(width, n_outputs)

    def forward(self, batch: BagBatch, *, generator: torch.Generator | None = None) -> MILOutput:
        """Answer for each bag."""
        tiles = normalised(batch.features, self.norm)
        seen = look(self.query, tiles, batch.offsets, key=None, scale=self.in_dim**-0.5)
        with no_autocast(seen.means):
            weight = in_heads(self.value.weight, len(self.query), axis=0)
            values = torch.einsum("bqd,qrd->bqr", seen.means, weight).flatten(1)
            values = values if self.value.bias is None else values + self.value.bias
        return MILOutput(
            logits=self.head(self.before_head(values)),
            offsets=batch.offsets,
            attention_logits=seen.logits,
            attention=seen.attention,
            bag_embedding=values[:, None],
        )

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights of the published module: cls_token (1, q, d), v.weight and, where there is one, v.bias.

        It has no head: `bag_embedding` is what it gives, and so are the logits; n_outputs asks for a head of zeros
        instead. head.weight and head.bias are taken where they are there.
        """
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        value_bias = "v.bias" in weights
        tensors = {"query": weights.take("cls_token")[0]} | weights.linear("value", "v", bias=value_bias)
        width, in_dim = tensors["value.weight"].shape
        if in_dim % width:
            raise ConfigError(f"{cls.__name__}: v.weight is ({width}, {in_dim}); its rows must divide its columns.")
        tensors |= head_tensors(weights, width, what_the_shapes_do_not_tell.pop("n_outputs", None))
        settings: dict[str, Any] = {"queries": len(tensors["query"]), "d_out": in_dim // width}
        settings |= {"value_bias": value_bias, "norm": "none", "head_norm": False}
        model = cls(in_dim=in_dim, n_outputs=len(tensors["head.weight"]), **(settings | what_the_shapes_do_not_tell))
        weights.load(model, tensors)
        return model
