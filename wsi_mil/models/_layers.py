"""Bricks that two methods or more are made of."""

import torch
from torch import Tensor, nn

from wsi_mil.bags import no_autocast

PUBLISHED_WIDTHS = {384: 128, 512: 256, 768: 384, 1024: 512, 1536: 768}
"""Width of the first layer by encoder dimension, in the code of ACMIL, AEM and DTFD."""


def hidden_width(in_dim: int) -> int:
    """Width of the first layer: the published one, else half of the encoder's, within 16 and 512, a multiple of 8."""
    return PUBLISHED_WIDTHS.get(in_dim, min(512, max(16, in_dim // 16 * 8)))


class FeatureLayer(nn.Module):
    """Linear, without bias unless asked for, then ReLU: (total, d) -> (total, h)."""

    def __init__(self, in_dim: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(in_dim, hidden, bias=bias)

    def forward(self, features: Tensor) -> Tensor:
        """features: (total, d). Returns (total, h)."""
        hidden: Tensor = self.linear(features).relu_()  # in place: the largest tensor of a method is made once
        return hidden


def uniform(shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), drawn where the generator lives and moved to where `like` is."""
    return torch.rand(shape, generator=generator, device=generator.device).to(like.device)


def normal(shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
    """Standard normal numbers, drawn where the generator lives and moved to where `like` is."""
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32).to(like)


class Dropout(nn.Module):
    """Dropout whose randomness is handed in: without a forced mask it acts in training mode with a generator only."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(
        self, values: Tensor, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> Tensor:
        """Zero where the mask is True and scale the rest by 1/(1 - rate). forced_mask: like `values`, bool."""
        if forced_mask is None:
            if not self.training or self.rate == 0 or generator is None:
                return values
            forced_mask = uniform(tuple(values.shape), generator, values) < self.rate
        return values.masked_fill(forced_mask, 0) / (1 - self.rate)


class GatedAttention(nn.Module):
    """w . (tanh(V h) * sigmoid(U h)) with `columns` rows w; with gated=False w . tanh(V h). Returns logits.

    dropout: on tanh and on the gate, each with a mask of its own.
    """

    def __init__(
        self, hidden: int, attention_dim: int, *, columns: int = 1, gated: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tanh = nn.Linear(hidden, attention_dim)
        self.gate = nn.Linear(hidden, attention_dim) if gated else None
        self.weights = nn.Linear(attention_dim, columns)
        self.drop = Dropout(dropout)

    def forward(
        self, hidden: Tensor, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> Tensor:
        """hidden: (total, h).  forced_mask: (total, 2 * attention_dim) bool, what dropout zeroes of tanh and then of
        the gate; half as wide without a gate. Returns (total, columns).
        """
        width = self.tanh.out_features
        of_tanh, of_gate = (None, None) if forced_mask is None else (forced_mask[:, :width], forced_mask[:, width:])
        mixed = self.drop(self.tanh(hidden).tanh(), generator=generator, forced_mask=of_tanh)
        if self.gate is not None:
            mixed = mixed * self.drop(self.gate(hidden).sigmoid(), generator=generator, forced_mask=of_gate)
        logits: Tensor = self.weights(mixed)
        return logits


class HeadQueries(nn.Module):
    """Scaled dot-product logits of learned queries, split into heads; keys are never made for each tile.

    q . (K h_n + c) = (K^T q) . h_n + q . c, so one small matrix stands for the query and key projections.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)

    def projections(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """query: (h,). Returns directions (heads, h) and offsets (heads,): logits are directions . h_n + offsets."""
        with no_autocast(query):
            q = self.query(query).reshape(self.heads, -1) / (len(query) // self.heads) ** 0.5
            directions = torch.einsum("ed,edh->eh", q, self.key.weight.reshape(self.heads, -1, len(query)))
            return directions, (q * self.key.bias.reshape(self.heads, -1)).sum(dim=1)


class HeadValues(nn.Module):
    """From each head's weighted mean of tiles to one vector: values, output projection, dropout, LayerNorm.

    Values are linear and weights sum to 1, so the values of the mean are the mean of the values.
    """

    def __init__(self, hidden: int, heads: int, *, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.value = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)
        self.drop = Dropout(dropout)
        self.norm = nn.LayerNorm(hidden, eps=1e-6)

    def forward(
        self, means: Tensor, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> Tensor:
        """means: (b, heads, h).  forced_mask: (b, h) bool, what dropout zeroes. Returns (b, h)."""
        weight = self.value.weight.reshape(self.heads, -1, means.shape[-1])
        values = torch.einsum("beh,edh->bed", means, weight.to(means)).flatten(1) + self.value.bias
        dropped = self.drop(self.out(values), generator=generator, forced_mask=forced_mask)
        normed: Tensor = self.norm(dropped)
        return normed
