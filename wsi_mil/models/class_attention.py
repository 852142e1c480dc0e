"""Class attention, the aggregation of PatchConvNet: one learned token looks at all tiles. Touvron et al. 2021,
arXiv:2112.13692 (after CaiT, arXiv:2103.17239).

u = LN([c; X]); c <- c + gamma_1 * W_o attention(q = W_q u_c, keys and values of all rows of u); c <- c + gamma_2 *
MLP(LN(c)) with GELU; LN; head. per_class=True (`S60_multi`): a token for each class, keys and values of the tiles
alone, one row of the head for each class.
Reference code: facebookresearch/deit@7e160fe, `Layer_scale_init_Block_only_token` with `Learned_Aggregation_Layer`
or `Learned_Aggregation_Layer_multi`; scale 1 / sqrt(width of a head).

Differs on purpose:
- Linear and LayerNorm to 512 in front (hidden=None for none).
- layer_scale (gamma) starts at 0.1; the published 1e-4 and 1e-6 hardly let the token see the tiles for many steps when
  nothing else is trained.
- `attention` is that over the tiles; where the token is a key too, its share is in auxiliary["own_share"].
- Keys and values are never made for each tile; the algebra is exact.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from wsi_mil.bags import BagBatch, no_autocast
from wsi_mil.errors import ConfigError
from wsi_mil.models._attention import (
    Looked,
    Projection,
    check_heads,
    head_tensors,
    head_values,
    in_heads,
    look,
    segment_log_sum_exp,
)
from wsi_mil.models._base import MILModel, MILOutput
from wsi_mil.models._official import OfficialWeights
from wsi_mil.settings import Count, Finite, Positive, Rate


class ClassAttention(MILModel):
    """One learned token, or one a class, looks at all tiles.

    in_dim: width of the features.  n_outputs: width of the head.  hidden: width of the layer in front; None for none.
    heads: of the attention.  mlp_ratio: width of the MLP in multiples of `hidden`.  per_class: a token for each class.
    layer_scale: what gamma starts at.  qkv_bias: biases of query, key and value.  final_norm: LayerNorm before the
    head.  norm_eps: what the LayerNorms of the block and before the head add to the variance.  dropout: on the output
    of the layer in front.
    """

    summary = "a learned token, or one a class, attends to all tiles (PatchConvNet, CaiT)"
    family = "transformer"
    paper = "Touvron et al. 2021, arXiv:2112.13692"
    score_kinds = ("attention",)

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        hidden: Count | None = 512,
        heads: Count = 1,
        mlp_ratio: Positive = 3.0,
        per_class: bool = False,
        layer_scale: Finite = 0.1,
        qkv_bias: bool = True,
        final_norm: bool = True,
        norm_eps: Positive = 1e-5,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        width = hidden or in_dim
        check_heads("class_attention", width, heads)
        inner = int(width * mlp_ratio)
        if inner < 1:
            raise ConfigError(f"class_attention: mlp_ratio={mlp_ratio} leaves no unit of {width}; give more")
        self.hidden = hidden
        self.heads = heads
        self.mlp_ratio = mlp_ratio
        self.per_class = per_class
        self.layer_scale = layer_scale
        self.qkv_bias = qkv_bias
        self.final_norm = final_norm
        self.norm_eps = norm_eps
        self.dropout = dropout
        self.random_in_training = dropout > 0
        tokens = n_outputs if per_class else 1
        parts, word = (tokens, "class") if tokens > 1 else (heads, "head")
        self.attention_parts = tuple(f"{word}{i}" for i in range(parts))
        self.attention_of_classes = tokens > 1
        self.features = Projection(in_dim, hidden, dropout=dropout)
        self.tokens = nn.Parameter(nn.init.trunc_normal_(torch.empty(tokens, width), std=0.02))
        self.norm1 = nn.LayerNorm(width, eps=norm_eps)
        self.query = nn.Linear(width, width, bias=qkv_bias)
        self.key = nn.Linear(width, width, bias=qkv_bias)
        self.value = nn.Linear(width, width, bias=qkv_bias)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=norm_eps)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        self.gamma1 = nn.Parameter(torch.full((width,), layer_scale))
        self.gamma2 = nn.Parameter(torch.full((width,), layer_scale))
        self.norm = nn.LayerNorm(width, eps=norm_eps) if final_norm else nn.Identity()
        self.head = nn.Linear(width, n_outputs)

    def forward(
        self, batch: BagBatch, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> MILOutput:
        """Answer for each bag. forced_mask: (total, hidden) bool, the units that dropout zeroes."""
        tiles = self.norm1(self.features(batch.features, generator=generator, forced_mask=forced_mask))
        tokens = self.norm1(self.tokens)
        queries = self.query(tokens)
        scale = (queries.shape[1] // self.heads) ** -0.5
        seen = look(queries, tiles, batch.offsets, key=self.key, heads=self.heads, scale=scale)
        means, auxiliary = seen.means, {}
        if not self.per_class:
            means, auxiliary["own_share"] = self._with_itself(tokens, queries * scale, seen, batch.offsets)
        looked = self.out(head_values(means, self.value, heads=self.heads))
        answer = self.tokens + self.gamma1 * looked
        answer = answer + self.gamma2 * self.mlp(self.norm2(answer))
        auxiliary["tokens"] = answer
        embedding = self.norm(answer)
        if self.per_class:
            logits = torch.einsum("bkh,kh->bk", embedding.to(self.head.weight), self.head.weight) + self.head.bias
        else:
            logits = self.head(embedding[:, 0])
        return MILOutput(
            logits=logits,
            offsets=batch.offsets,
            attention_logits=seen.logits,
            attention=seen.attention,
            bag_embedding=embedding,
            auxiliary=auxiliary,
        )

    def _with_itself(self, token: Tensor, scaled: Tensor, seen: Looked, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Means (b, heads, h) over the tiles and the token itself, which is one more key; and its share (b, heads)."""
        with no_autocast(seen.means):
            token, scaled = token.to(seen.means), scaled.to(seen.means)
            own = in_heads(scaled * self.key(token), self.heads).sum(dim=2)
            share = (own - segment_log_sum_exp(seen.logits, offsets)).sigmoid()
            return seen.means + share[:, :, None] * (token - seen.means), share

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights of the published block, bare or as `blocks_token_only.0.*` of the whole network, and `cls_token`.

        cls_token (1, k, d), in the weights or as keyword: the block alone does not hold it.  per_class, heads (1) and
        norm_eps are not in the weights; several tokens, or a head in parts (head.0 ...), mean per_class. norm_eps is
        1e-5, as in the published classes; the published networks (S60 to L120) are made with 1e-6. norm.* and head.* of
        the whole network are taken; without them there is no last LayerNorm, and `bag_embedding` and the logits
        (flattened tokens; of per_class without a head: the sum of each) are what the block gives. n_outputs asks for a
        head of zeros instead. Name what stands before the block in `ignore`.
        """
        given = what_the_shapes_do_not_tell
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        token = torch.as_tensor(given.pop("cls_token")) if "cls_token" in given else weights.take("cls_token")
        tensors = _block(weights) | {"tokens": _one_for_all_bags(token)}
        n_tokens, width = tensors["tokens"].shape
        per_class = given.pop("per_class", n_tokens > 1 or "head.0.*" in weights)
        final_norm = "norm.*" in weights
        tensors |= weights.linear("norm", "norm") if final_norm else {}
        tensors |= _head(weights, n_tokens, width, per_class, given.pop("n_outputs", None))
        settings: dict[str, Any] = {"hidden": None, "per_class": per_class, "final_norm": final_norm}
        settings |= {"mlp_ratio": len(tensors["mlp.0.weight"]) / width, "qkv_bias": "query.bias" in tensors}
        model = cls(in_dim=width, n_outputs=len(tensors["head.weight"]), **(settings | given))
        weights.load(model, tensors)
        return model


def _one_for_all_bags(token: Tensor) -> Tensor:
    """(k, d) of (k, d), or of (b, k, d) with the same tokens for each bag. Raises ConfigError when they differ."""
    if token.ndim == 3:
        if (token != token[:1]).any():
            raise ConfigError("class_attention: cls_token differs between bags; give that of one, (1, k, d)")
        token = token[0]
    return token


def _block(weights: OfficialWeights) -> dict[str, Tensor]:
    prefix = "blocks_token_only.0." if "blocks_token_only.0.*" in weights else ""
    biases = f"{prefix}attn.[qkv].bias" in weights
    tensors = {"gamma1": weights.take(f"{prefix}gamma_1"), "gamma2": weights.take(f"{prefix}gamma_2")}
    for ours, official in {"query": "q", "key": "k", "value": "v"}.items():
        tensors |= weights.linear(ours, f"{prefix}attn.{official}", bias=biases)
    others = {"out": "attn.proj", "norm1": "norm1", "norm2": "norm2", "mlp.0": "mlp.fc1", "mlp.2": "mlp.fc2"}
    for ours, official in others.items():
        tensors |= weights.linear(ours, prefix + official)
    return tensors


def _head(
    weights: OfficialWeights, n_tokens: int, width: int, per_class: bool, n_outputs: int | None
) -> dict[str, Tensor]:
    if not per_class:
        return head_tensors(weights, width, n_outputs)
    names = [f"head.{c}" for c in range(n_tokens)]
    if "head.*" not in weights:
        weight = torch.ones(n_tokens, width) if n_outputs is None else torch.zeros(n_tokens, width)
        return {"head.weight": weight, "head.bias": torch.zeros(n_tokens)}
    for name in names:
        if (shape := tuple(weights.take(f"{name}.weight").shape)) != (1, width):
            raise ConfigError(f"class_attention: {name}.weight has the shape {shape}; the tokens ask for (1, {width})")
    rows = {part: torch.cat([weights.take(f"{name}.{part}") for name in names]) for part in ("weight", "bias")}
    return {f"head.{part}": values for part, values in rows.items()}
