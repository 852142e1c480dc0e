"""TransMIL: a transformer over the tiles with linear attention. Shao et al., NeurIPS 2021, arXiv:2106.00908.

Tiles (Linear, ReLU) fill a square row by row, the first ones again until it is full, with a class token in front; then
x + Nystrom(LN(x)), position encoding (PPEG), x + Nystrom(LN(x)), LN, a linear head on the class token.
Nystrom attention (Xiong et al., AAAI 2021, arXiv:2102.03902): softmax(q k~^T) pinv(softmax(q~ k~^T)) softmax(q~ k^T) v,
where q~ and k~ are means of runs of neighbouring tokens (landmarks), plus a depthwise convolution of v along the
tokens. PPEG: the square plus its depthwise convolutions of 7, 5 and 3. The order of tiles therefore matters.
Reference code: szc19990412/TransMIL@9d6aee5 with lucidrains/nystrom-attention@fbe9eba.

As published: six iterations for the pseudoinverse, which does not reach it; zero rows in front of the tokens up to a
multiple of the landmarks, which are not masked and take part in attention.
Differs on purpose:
- Bags are answered one by one. The published pseudoinverse divides by a maximum over the whole batch, so that there
  the answer depends on the neighbours; the maximum over the heads of one bag is kept.
- No matrix of tokens by tokens or by landmarks is stored: the product is taken from the right, by fused attention.
  Memory is linear in the number of tiles. Attention and pseudoinverse run in fp32 whatever the autocast. Above 20,000
  tiles the first layer's attention is computed again for the gradient, which costs a sixth more time.
- The second layer answers for the class token only, which is all that the head reads.
- The class token's row of the first layer is not a distribution (entries below 0, sums near 1). `attention` cuts it
  off at 1e-12 and makes each head sum to 1; the row itself is auxiliary["class_attention"]. Padding and the tiles'
  second appearance at the end are left out. The row is made again for the backward pass and not kept.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wsi_mil.bags import BagBatch, full_precision, no_autocast, segment_softmax, split
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import MILModel, MILOutput
from wsi_mil.models._layers import Dropout, FeatureLayer, hidden_width
from wsi_mil.models._official import OfficialWeights
from wsi_mil.models._recompute import LONG, computed_again
from wsi_mil.settings import Count, Rate

PPEG_KERNELS = (7, 5, 3)
LEAST_SIDE = 7
"""Of the square that the position encoding alone sees."""
LEAST_ATTENTION = 1e-12


class TransMil(MILModel):
    """Two layers of Nystrom attention over the tiles in their order, with position encoding between them.

    in_dim: width of the features.  n_outputs: width of the head.  hidden: width of the tokens, a multiple of `heads`;
    None takes the published one for `in_dim`.  heads: number of heads.  landmarks: number of landmarks; None takes half
    of `hidden`.  iterations: of the pseudoinverse.  dropout: after each attention.  square: what fills the square: the
    tokens of both layers, or those of the position encoding alone, which is cut back afterwards (the form inside
    MHIM-MIL, where zeros fill a square below 7 x 7).
    """

    summary = "transformer over the tiles with Nystrom attention (TransMIL)"
    family = "transformer"
    paper = "Shao et al., NeurIPS 2021, arXiv:2106.00908"
    score_kinds = ("attention",)
    order_matters = True
    loops_over_bags = True

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        hidden: Count | None = None,
        heads: Count = 8,
        landmarks: Count | None = None,
        iterations: Count = 6,
        dropout: Rate = 0.1,
        square: Literal["tokens", "positions"] = "tokens",
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.hidden = hidden or hidden_width(in_dim)
        self.heads = heads
        self.landmarks = landmarks or max(self.hidden // 2, 1)
        self.iterations = iterations
        self.dropout = dropout
        self.square = square
        if self.hidden % heads:
            raise ConfigError(f"transmil: hidden={self.hidden} does not split into {heads} heads; give a multiple")
        if square not in ("tokens", "positions"):
            raise ConfigError(f"transmil: square is tokens or positions, not {square!r}")
        self.random_in_training = dropout > 0
        self.attention_parts = tuple(f"head{i}" for i in range(heads))
        self.features = FeatureLayer(in_dim, self.hidden, bias=True)
        self.class_token = nn.Parameter(torch.randn(self.hidden))
        self.layers = nn.ModuleList(
            NystromLayer(self.hidden, heads, landmarks=self.landmarks, iterations=iterations, dropout=dropout)
            for _ in range(2)
        )
        self.position = PositionEncoding(self.hidden)
        self.norm = nn.LayerNorm(self.hidden)
        self.head = nn.Linear(self.hidden, n_outputs)

    def forward(
        self, batch: BagBatch, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> MILOutput:
        """Answer for each bag.

        forced_mask: (2, tokens, hidden) bool, the units that dropout zeroes in each layer; a bag of n tiles has
        1 + ceil(sqrt(n))^2 tokens (1 + n with square="positions"), and the bags' tokens follow each other. Of the
        second layer the first token's count.
        """
        bags = split(self.features(batch.features), batch.offsets)
        counts = [1 + self._n_tokens(len(rows)) for rows in bags]
        masks = [None] * len(bags) if forced_mask is None else list(torch.split(forced_mask, counts, dim=1))
        answers = [self._of_bag(rows, generator, mask) for rows, mask in zip(bags, masks, strict=True)]
        embedding = torch.stack([token for token, _ in answers])
        rows = torch.cat([row for _, row in answers])
        attention_logits = rows.clamp(min=LEAST_ATTENTION).log()
        return MILOutput(
            logits=self.head(embedding),
            offsets=batch.offsets,
            attention_logits=attention_logits,
            attention=segment_softmax(attention_logits, batch.offsets),
            bag_embedding=embedding[:, None],
            auxiliary={"class_attention": rows},
        )

    def _of_bag(self, rows: Tensor, generator: torch.Generator | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """rows: (n, h). Returns the class token (h,) and its attention in the first layer, (n, heads)."""
        n = len(rows)
        tokens = torch.cat([self.class_token[None].to(rows), rows, rows[: self._n_tokens(n) - n]])
        masks = (None, None) if mask is None else (mask[0], mask[1])
        first, second = self.layers
        tokens, seen = first(tokens, generator=generator, forced_mask=masks[0], again=n > LONG)
        tokens, _ = second(self._positioned(tokens), generator=generator, forced_mask=masks[1], alone=True)
        return self.norm(tokens[0]), seen[:, 1 : n + 1].T

    def _n_tokens(self, n: int) -> int:
        """How many tokens n tiles are in both layers, without the class token."""
        return square_side(n) ** 2 if self.square == "tokens" else n

    def _positioned(self, tokens: Tensor) -> Tensor:
        """tokens: (1 + t, h), the class token first. The same shape, with the position encoding added."""
        t, side = len(tokens) - 1, square_side(len(tokens) - 1)
        if self.square == "tokens":
            encoded: Tensor = self.position(tokens, side)
            return encoded
        wider = max(side, LEAST_SIDE)
        filled = torch.cat([tokens, tokens[1 : 1 + side**2 - t]])
        return torch.as_tensor(self.position(F.pad(filled, (0, 0, 0, wider**2 - side**2)), wider))[: 1 + t]

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights of `TransMIL`. Landmarks (half of the width as published) and iterations are not in the weights."""
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        tensors = {"class_token": weights.take("cls_token").flatten()}
        tensors |= weights.linear("features.linear", "_fc1.0")
        for i in range(2):
            theirs = f"layer{i + 1}"
            tensors |= weights.linear(f"layers.{i}.norm", f"{theirs}.norm")
            tensors |= weights.linear(f"layers.{i}.attention.to_qkv", f"{theirs}.attn.to_qkv", bias=False)
            tensors |= weights.linear(f"layers.{i}.attention.out", f"{theirs}.attn.to_out.0")
            tensors |= weights.linear(f"layers.{i}.attention.residual", f"{theirs}.attn.res_conv", bias=False)
        for i, theirs in enumerate(("proj", "proj1", "proj2")):
            tensors |= weights.linear(f"position.convolutions.{i}", f"pos_layer.{theirs}")
        tensors |= weights.linear("norm", "norm") | weights.linear("head", "_fc2")
        hidden, in_dim = tensors["features.linear.weight"].shape
        model = cls(
            in_dim=in_dim,
            n_outputs=len(tensors["head.weight"]),
            hidden=hidden,
            heads=len(tensors["layers.0.attention.residual.weight"]),
            **what_the_shapes_do_not_tell,
        )
        weights.load(model, tensors)
        return model


class NystromLayer(nn.Module):
    """x + dropout(Nystrom(LN(x)))."""

    def __init__(self, hidden: int, heads: int, *, landmarks: int, iterations: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.attention = NystromAttention(hidden, heads, landmarks=landmarks, iterations=iterations)
        self.drop = Dropout(dropout)

    def forward(
        self,
        tokens: Tensor,
        *,
        generator: torch.Generator | None = None,
        forced_mask: Tensor | None = None,
        alone: bool = False,
        again: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """tokens, forced_mask: (t, h). Returns tokens (t, h) and the first one's attention to all, (heads, t).

        alone: the first token only, (1, h), and no attention, (heads, 0).  again: compute again for the gradient.
        """
        mixed, seen = computed_again(self._mix, tokens, alone) if again else self._mix(tokens, alone)
        if alone:
            tokens, forced_mask = tokens[:1], None if forced_mask is None else forced_mask[:1]
        return tokens + self.drop(mixed, generator=generator, forced_mask=forced_mask), seen

    def _mix(self, tokens: Tensor, alone: bool) -> tuple[Tensor, Tensor]:
        mixed: tuple[Tensor, Tensor] = self.attention(self.norm(tokens), alone=alone)
        return mixed


class NystromAttention(nn.Module):
    """Linear attention of one sequence, with landmarks and a convolution of the values along the tokens."""

    def __init__(self, hidden: int, heads: int, *, landmarks: int, iterations: int = 6, kernel: int = 33) -> None:
        super().__init__()
        self.heads = heads
        self.landmarks = landmarks
        self.iterations = iterations
        self.to_qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden)
        self.residual = nn.Conv2d(
            heads, heads, kernel_size=(kernel, 1), padding=(kernel // 2, 0), groups=heads, bias=False
        )

    def forward(self, tokens: Tensor, *, alone: bool = False) -> tuple[Tensor, Tensor]:
        """tokens: (t, h). Returns (t, h) and the first one's attention, (heads, t); for it alone (1, h), (heads, 0)."""
        t = len(tokens)
        run = math.ceil(t / self.landmarks)
        padding = run * self.landmarks - t if t % self.landmarks else 0
        qkv = self.to_qkv(F.pad(tokens, (0, 0, padding, 0)))
        with no_autocast(tokens):
            q, k, v = full_precision(qkv).reshape(len(qkv), 3, self.heads, -1).permute(1, 2, 0, 3)
            scale = q.shape[2] ** -0.5
            q_means, k_means = (x.reshape(self.heads, self.landmarks, run, -1).mean(dim=2) for x in (q, k))
            between = iterative_pinv(scaled_softmax(q_means, k_means, scale), self.iterations)
            of_landmarks = F.scaled_dot_product_attention(q_means[None], k[None], v[None], scale=scale)[0]
            asked = slice(padding, padding + 1 if alone else len(qkv))
            mixed = F.scaled_dot_product_attention(
                q[None, :, asked], k_means[None], (between @ of_landmarks)[None], scale=scale
            )
            around = v[
                :, padding : asked.stop + self.residual.kernel_size[0] // 2
            ]  # in front of the tokens stand zeros
            mixed = mixed[0] + self.residual(around[None])[0, :, : asked.stop - padding]
            seen = q.new_empty(self.heads, 0)
            if not alone:
                first = scaled_softmax(q[:, padding : padding + 1], k_means, scale) @ between
                parts = zip(first, q_means, k, strict=True)
                seen = torch.stack([computed_again(_row_of_head, *part, scale) for part in parts])[:, padding:]
        return self.out(mixed.transpose(0, 1).flatten(1)), seen


class PositionEncoding(nn.Module):
    """PPEG: the tokens' square plus its depthwise convolutions; the class token stays."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(hidden, hidden, kernel_size=size, padding=size // 2, groups=hidden) for size in PPEG_KERNELS
        )

    def forward(self, tokens: Tensor, side: int) -> Tensor:
        """tokens: (1 + side^2, h). The same shape. The three kernels, filled up with zeros, are one convolution."""
        widest = max(PPEG_KERNELS)
        fillers = [(widest - size) // 2 for size in PPEG_KERNELS]
        parts = [dict(conv.named_parameters()) for conv in self.convolutions]
        kernels = [F.pad(part["weight"], [filler] * 4) for part, filler in zip(parts, fillers, strict=True)]
        kernel, bias = torch.stack(kernels).sum(dim=0), torch.stack([part["bias"] for part in parts]).sum(dim=0)
        square = tokens[1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
        moved = F.conv2d(square, kernel, bias, padding=widest // 2, groups=tokens.shape[1])
        return torch.cat([tokens[:1], tokens[1:] + moved[0].permute(1, 2, 0).flatten(0, 1)])


def square_side(n: int) -> int:
    """Side of the smallest square that holds n tiles."""
    return math.isqrt(n - 1) + 1


def scaled_softmax(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """softmax(q k^T scale) over the keys. (..., i, d) and (..., j, d). Returns (..., i, j)."""
    return (queries @ keys.transpose(-1, -2) * scale).softmax(dim=-1)


def iterative_pinv(matrices: Tensor, iterations: int) -> Tensor:
    """Iterative Moore-Penrose pseudoinverse, Xiong et al. matrices: (heads, m, m), entries of softmax."""
    sizes = matrices.abs()
    guess = matrices.transpose(-1, -2) / (sizes.sum(dim=-1).max() * sizes.sum(dim=-2).max())
    one = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    for _ in range(iterations):
        product = matrices @ guess
        guess = 0.25 * guess @ (13 * one - product @ (15 * one - product @ (7 * one - product)))
    return guess


def _row_of_head(first: Tensor, q_means: Tensor, keys: Tensor, scale: float) -> Tensor:
    """(t,) the first token's attention in one head. first: (1, m), its attention to landmarks times the inverse."""
    return (first @ scaled_softmax(q_means, keys, scale))[0]
