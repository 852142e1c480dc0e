"""ABMILX: multi-head local attention and a global refinement of its scores (A+). Tang et al., NeurIPS 2025,
arXiv:2506.02408.

Each of H parts of a tile's vector is scored by one small network shared by all parts, A = w . GELU(W h). A+ refines the
scores before the softmax over tiles: A + softmax(Q K^T / sqrt(d)) (alpha A), Q and K from the same parts.
Reference code: DearCaat/E2E-WSI-ABMILX@4ce524e, `DAttentionX`.

Differs on purpose:
- alpha starts at 1; the code draws it from N(0, 1), so that its sign and size change with the seed.
- A+ compares every tile with every other. It is computed in blocks that are never held together, and refused above
  `max_tiles`: attn_plus=False (the local attention alone) is linear in the tiles.
- No batch normalisation: it cannot train on one bag a step.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wsi_mil.bags import BagBatch, full_precision, no_autocast, segment_softmax, segment_weighted_sum, split
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import MILModel, MILOutput, ScoreKind
from wsi_mil.models._layers import Dropout
from wsi_mil.models._official import OfficialWeights
from wsi_mil.settings import Count, Rate


class Abmilx(MILModel):
    """Multi-head attention pooling whose scores look at each other.

    in_dim: width of the features.  n_outputs: width of the head.  hidden: width of the first layer, a multiple of
    `heads`.  attn_plus: refine the scores globally; at most `max_tiles` tiles a bag.  layer_norm: on the features and
    before the head.  ffn: a feed-forward layer before the head.  bias: of the first layer, projection, head and those
    norms.  attention_bias: of the scoring network.  dropout: after the first layer.
    """

    summary = "multi-head attention pooling with globally refined scores (ABMILX)"
    family = "attention"
    paper = "Tang et al., NeurIPS 2025, arXiv:2506.02408"
    score_kinds: tuple[ScoreKind, ...] = ("attention", "contribution")
    loops_over_bags = True

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        hidden: Count = 512,
        heads: Count = 8,
        attn_plus: bool = True,
        max_tiles: Count = 32_768,
        activation: Literal["relu", "gelu"] = "relu",
        dropout: Rate = 0.25,
        layer_norm: bool = False,
        ffn: bool = False,
        bias: bool = False,
        attention_bias: bool = False,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        if hidden % heads or activation not in ("relu", "gelu"):
            raise ConfigError(
                f"abmilx: hidden={hidden} with {heads} heads, activation {activation!r}; hidden is a multiple of the "
                f"heads, the activation is relu or gelu"
            )
        self.hidden = hidden
        self.heads = heads
        self.attn_plus = attn_plus
        self.max_tiles = max_tiles
        self.activation = activation
        self.dropout = dropout
        self.layer_norm = layer_norm
        self.ffn = ffn
        self.bias = bias
        self.attention_bias = attention_bias
        self.random_in_training = dropout > 0
        self.attention_parts = tuple(f"head{i}" for i in range(heads))
        if ffn or layer_norm:
            self.score_kinds = ("attention",)
        width = hidden // heads
        self.norm_in = nn.LayerNorm(in_dim, bias=bias) if layer_norm else nn.Identity()
        self.features = nn.Linear(in_dim, hidden, bias=bias)
        self.drop = Dropout(dropout)
        self.score = nn.Sequential(
            nn.Linear(width, width, bias=attention_bias), nn.GELU(), nn.Linear(width, 1, bias=attention_bias)
        )
        self.plus = _GlobalScores(width) if attn_plus else None
        self.project = nn.Linear(hidden, hidden, bias=bias)
        self.norm_ffn = nn.LayerNorm(hidden) if ffn and not layer_norm else nn.Identity()
        self.feed_forward = _FeedForward(hidden) if ffn else None
        self.norm_out = nn.LayerNorm(hidden, bias=bias) if layer_norm else nn.Identity()
        self.head = nn.Linear(hidden, n_outputs, bias=bias)
        for module in self.modules():  # published first weights
            if isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self, batch: BagBatch, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> MILOutput:
        """Answer for each bag. forced_mask: (total, hidden) bool, the units that dropout zeroes.

        Raises ConfigError for a bag above `max_tiles` when the scores are refined.
        """
        self._check_size(batch)
        hidden = self.features(self.norm_in(batch.features))
        hidden = hidden.relu() if self.activation == "relu" else nn.functional.gelu(hidden)
        hidden = self.drop(hidden, generator=generator, forced_mask=forced_mask)
        parts = hidden.reshape(len(hidden), self.heads, -1)
        local = full_precision(self.score(parts)[..., 0])
        refined = local
        if self.plus is not None:
            pairs = zip(split(parts, batch.offsets), split(local, batch.offsets), strict=True)
            refined = torch.cat([self.plus(rows, scores) for rows, scores in pairs])
        attention = segment_softmax(refined, batch.offsets)
        means = segment_weighted_sum(attention, hidden, batch.offsets).reshape(len(batch), self.heads, self.heads, -1)
        bag = self.project(means.diagonal(dim1=1, dim2=2).transpose(1, 2).flatten(1))
        if self.feed_forward is not None:
            bag = bag + self.feed_forward(self.norm_ffn(bag))
        bag = self.norm_out(bag)
        return MILOutput(
            logits=self.head(bag),
            offsets=batch.offsets,
            attention_logits=refined,
            attention=attention,
            bag_embedding=bag[:, None],
            auxiliary={"local_attention_logits": local, "hidden": hidden},
        )

    def _check_size(self, batch: BagBatch) -> None:
        longest = max(batch.lengths)
        if self.attn_plus and longest > self.max_tiles:
            raise ConfigError(
                f"abmilx compares every tile with every other: a bag of {longest} tiles is above max_tiles="
                f"{self.max_tiles}. Use attn_plus=False, which is linear in the tiles, or a train.tile_cap."
            )

    def _instance_contributions(self, output: MILOutput) -> Tensor:
        """(total, k) shares that sum to the logits: sum_h a_hn W_h h_n, and the bias by the mean attention."""
        assert output.attention is not None
        with torch.no_grad(), no_autocast(output.logits):
            evidence = self.head.weight @ self.project.weight
            hidden = output.auxiliary["hidden"]
            weighted = hidden.reshape(len(hidden), self.heads, -1) * output.attention[..., None]
            shares: Tensor = weighted.flatten(1).to(evidence) @ evidence.T
            if self.bias:
                shares = shares + output.attention.mean(dim=1, keepdim=True) * self.head(self.project.bias)
            return shares

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights of `DAttentionX`. Activation and dropout are not in the weights."""
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        layer_norm, ffn = "norm1.*" in weights or "feature.1.*" in weights, "mlp.*" in weights
        first = "feature.1" if layer_norm else "feature.0"
        bias = any(f"{name}.bias" in weights for name in (first, "proj", "classifier"))
        attention_bias = "attention.*.bias" in weights
        tensors = weights.linear("features", first, bias=bias)
        tensors |= weights.linear("score.0", "attention.fc1", bias=attention_bias)
        tensors |= weights.linear("score.2", "attention.fc2", bias=attention_bias)
        tensors |= weights.linear("project", "proj", bias=bias) | weights.linear("head", "classifier", bias=bias)
        if layer_norm:
            tensors |= weights.linear("norm_in", "feature.0", bias=bias)
            tensors |= weights.linear("norm_out", "norm1", bias=bias)
        if ffn:
            tensors |= weights.linear("feed_forward.0", "mlp.fc1") | weights.linear("feed_forward.2", "mlp.fc2")
            if not layer_norm:
                tensors |= weights.linear("norm_ffn", "norm_ffn")
        attn_plus = "attn_plus_fn.*" in weights
        if attn_plus:
            tensors |= weights.linear("plus.norm", "attn_plus_fn.norm_x")
            tensors["plus.query_key.weight"] = weights.take("attn_plus_fn.qk.weight")
            tensors["plus.alpha"] = weights.take("attn_plus_fn.v.weight")
        hidden, in_dim = tensors["features.weight"].shape
        model = cls(
            in_dim=in_dim,
            n_outputs=len(tensors["head.weight"]),
            hidden=hidden,
            heads=hidden // tensors["score.0.weight"].shape[1],
            attn_plus=attn_plus,
            layer_norm=layer_norm,
            ffn=ffn,
            bias=bias,
            attention_bias=attention_bias,
            **what_the_shapes_do_not_tell,
        )
        weights.load(model, tensors)
        return model


class _GlobalScores(nn.Module):
    """A + softmax(Q K^T / sqrt(d)) (alpha A) for each part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query_key = nn.Linear(width, 2 * width, bias=False)
        self.alpha = nn.Parameter(torch.ones(1, 1))

    def forward(self, parts: Tensor, scores: Tensor) -> Tensor:
        """parts: (n, heads, width).  scores: (n, heads). Returns (n, heads)."""
        query, key = full_precision(self.query_key(self.norm(parts))).chunk(2, dim=-1)
        with no_autocast(scores):
            values = (self.alpha * scores)[..., None].to(query)
            # zeros beside the one value: only values as wide as the keys are never held against all tiles
            values = F.pad(values, (0, query.shape[-1] - 1))
            query, key, values = (rows.transpose(0, 1)[None] for rows in (query, key, values))
            mixed = F.scaled_dot_product_attention(query, key, values)[0, ..., 0]
            return scores + mixed.T


class _FeedForward(nn.Sequential):
    def __init__(self, hidden: int) -> None:
        super().__init__(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
