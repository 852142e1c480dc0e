"""Queries that look at packed tiles. Keys and values are never made for each tile.

q . (K x_n + c) = (K^T q) . x_n + q . c, so a query and the key projection are one direction for each head; and values
are linear while weights sum to 1, so the values of the mean are the mean of the values. Columns of logits and weights
are ordered query * heads + head.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wsi_mil.bags import full_precision, no_autocast, segment_softmax, segment_weighted_sum, split
from wsi_mil.errors import ConfigError
from wsi_mil.models._layers import Dropout
from wsi_mil.models._official import OfficialWeights

InputNorm = Literal["none", "layer", "l2"]
"""What is done to each tile's features first: nothing, LayerNorm without parameters, or length sqrt(d)."""


class Looked(NamedTuple):
    """What queries saw: logits and weights (total, m * heads), weighted means of tiles (b, m * heads, d)."""

    logits: Tensor
    attention: Tensor
    means: Tensor


def look(
    queries: Tensor, tiles: Tensor, offsets: Tensor, *, key: nn.Linear | None, heads: int = 1, scale: float
) -> Looked:
    """Attention of queries over the tiles of each bag.

    queries: (m, h), the same for all bags, or (b, m, h), already projected.  tiles: (total, d).  key: d to h, or None
    where keys are the tiles themselves, split into heads.  scale: multiplies the logits.
    """
    directions, shifts = _directions(queries, key, heads=heads, scale=scale)
    if queries.ndim == 2:
        logits = F.linear(tiles, directions, shifts)
    else:
        parts = zip(split(tiles, offsets), directions, shifts, strict=True)
        logits = torch.cat([F.linear(rows, direction, shift) for rows, direction, shift in parts])
    attention = segment_softmax(logits, offsets)
    return Looked(logits, attention, segment_weighted_sum(attention, tiles, offsets))


def head_values(means: Tensor, value: nn.Linear, *, heads: int) -> Tensor:
    """Each head's part of the values of its mean. means: (b, m * heads, d).  value: d to h. Returns (b, m, h)."""
    with no_autocast(means):
        weight = in_heads(value.weight, heads, axis=0)
        values = torch.einsum("bmed,ecd->bmec", _by_query(means, heads), weight).flatten(2)
        return values if value.bias is None else values + value.bias


def own_channels(means: Tensor, *, heads: int) -> Tensor:
    """The same where values are the tiles themselves: head e keeps the e-th part of the channels. Returns (b, m, d)."""
    return torch.einsum("bmeec->bmec", in_heads(_by_query(means, heads), heads)).flatten(2)


def in_heads(values: Tensor, heads: int, *, axis: int = -1) -> Tensor:
    """Split one axis into two, (heads, width of a head)."""
    axis %= values.ndim
    return values.reshape(*values.shape[:axis], heads, -1, *values.shape[axis + 1 :])


def segment_log_sum_exp(logits: Tensor, offsets: Tensor) -> Tensor:
    """Log-sum-exp over the rows of each bag, at least in fp32. logits: (total, m). Returns (b, m)."""
    return torch.stack([full_precision(rows).logsumexp(dim=0) for rows in split(logits, offsets)])


def normalised(features: Tensor, kind: InputNorm) -> Tensor:
    """features: (total, d). The same shape, each tile normalised on its own."""
    if kind == "none":
        return features
    width = features.shape[1]
    if kind == "layer":
        return F.layer_norm(features, (width,))
    unit: Tensor = F.normalize(features, dim=1) * width**0.5
    return unit


def check_norm(method: str, kind: str) -> None:
    """Raises ConfigError for a kind of normalisation that is none."""
    if kind not in ("none", "layer", "l2"):
        raise ConfigError(f"{method}: norm is {kind!r}; it is none, layer or l2")


def check_heads(method: str, width: int, heads: int) -> None:
    """Raises ConfigError when a width does not split into heads."""
    if width % heads:
        raise ConfigError(f"{method}: a width of {width} does not split into {heads} heads; give a multiple")


class Projection(nn.Module):
    """Linear, LayerNorm, dropout: (total, d) -> (total, h); with hidden None the features and dropout alone."""

    def __init__(self, in_dim: int, hidden: int | None, *, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(in_dim, hidden), nn.LayerNorm(hidden)) if hidden else nn.Identity()
        self.drop = Dropout(dropout)

    def forward(
        self, features: Tensor, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> Tensor:
        """features: (total, d).  forced_mask: (total, h) bool, the units that dropout zeroes. Returns (total, h)."""
        projected: Tensor = self.drop(self.layers(features), generator=generator, forced_mask=forced_mask)
        return projected


def head_tensors(
    weights: OfficialWeights, width: int, n_outputs: int | None, *, name: str = "head"
) -> dict[str, Tensor]:
    """The published linear head. A pooling that was published without one gets the identity, so that the logits are
    what it gives, or, when `n_outputs` is asked for, zeros to start from.
    """
    if f"{name}.*" in weights:
        return weights.linear("head", name)
    weight = torch.eye(width) if n_outputs is None else torch.zeros(n_outputs, width)
    return {"head.weight": weight, "head.bias": torch.zeros(len(weight))}


def _by_query(means: Tensor, heads: int) -> Tensor:
    """(b, m * heads, d) to (b, m, heads, d)."""
    return means.reshape(len(means), -1, heads, means.shape[-1])


def _directions(queries: Tensor, key: nn.Linear | None, *, heads: int, scale: float) -> tuple[Tensor, Tensor]:
    """(..., m * heads, d) and (..., m * heads): logits are directions . x_n + shifts."""
    with no_autocast(queries):
        parts = in_heads(full_precision(queries), heads) * scale
        if key is None:
            own = torch.eye(heads, dtype=parts.dtype, device=parts.device)
            directions = torch.einsum("...mec,ef->...mefc", parts, own).flatten(-2).flatten(-3, -2)
        else:
            weight = in_heads(key.weight, heads, axis=0)
            directions = torch.einsum("...mec,ecd->...med", parts, weight).flatten(-3, -2)
        if key is None or key.bias is None:
            return directions, directions.new_zeros(directions.shape[:-1])
        return directions, torch.einsum("...mec,ec->...me", parts, in_heads(key.bias, heads)).flatten(-2)
