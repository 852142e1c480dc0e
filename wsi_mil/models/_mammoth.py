"""MAMMOTH: a soft mixture of low-rank experts in place of a first linear layer. Shao et al., ICLR 2026,
arXiv:2603.22198. Written from the equations.

u = Norm(W_q x), split into H heads. Slot s of expert e holds, for each head, the mean of the tiles' u weighted by
softmax over tiles of <u, prototype> (no scale). An expert is a low-rank map: (v Phi_h + b_h) W_eh + c_eh, Phi shared by
the experts; heads are joined, RMS-normalised with a gain per expert, then ReLU and dropout. The layer gives E x S slots
a bag, or, when the slots are dealt back by a softmax over slots, one row a tile.

Reference behaviour: mammoth-moe 0.1.2 (vectors). Where it and the paper differ:
- 10 slots an expert (its default), the paper 9. Normalisation stands before ReLU, as it does.
Differs on purpose:
- The weights over tiles are never held: softmax and sum run in blocks, and again for the gradient. 100,000 tiles would
  need 1.9 GB a copy. No neighbouring bag, no padding enters them.
- First weights: scaled normal for every matrix, zero for every bias.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from wsi_mil.bags import full_precision, no_autocast, split
from wsi_mil.errors import ConfigError
from wsi_mil.models._layers import Dropout
from wsi_mil.models._official import OfficialWeights
from wsi_mil.settings import Count, Rate

_BLOCK = 4096
"""Tiles whose routing is held at once."""
_SMALL_BLOCK = 512
"""The same where nothing is kept for the gradient: it fits into the cache."""


def low_rank(in_dim: int, out_dim: int, slot_dim: int, experts: int) -> int:
    """The rank at which the layer has about as many weights as Linear(in_dim, out_dim). At least 1.

    Raises ConfigError when the output is not wider than the slots, which leaves no rank.
    """
    if out_dim <= slot_dim:
        raise ConfigError(
            f"mammoth: the layer it replaces is {out_dim} wide, which must be above slot_dim={slot_dim}; "
            f"give a smaller slot_dim or a rank"
        )
    return max(1, round((in_dim * out_dim - in_dim * slot_dim) / (slot_dim + experts * out_dim)))


class MammothLayer(nn.Module):
    """Tiles in, slots (or tiles) out.

    in_dim, out_dim: D and L.  experts, slots, heads: E, S, H.  slot_dim: P; it and L are multiples of H.  rank: None
    takes that of `low_rank`.  dropout: on the output.  layer_norm: of u and the prototypes, else RMS.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        experts: Count,
        slots: Count,
        heads: Count,
        slot_dim: Count,
        rank: Count | None = None,
        dropout: Rate = 0.1,
        layer_norm: bool = True,
    ) -> None:
        super().__init__()
        if slot_dim % heads or out_dim % heads:
            raise ConfigError(
                f"mammoth: heads={heads}, slot_dim={slot_dim} for a layer {out_dim} wide; slot_dim and the width are "
                f"multiples of the heads"
            )
        self.out_dim, self.experts, self.slots, self.heads = out_dim, experts, slots, heads
        self.layer_norm = layer_norm
        self.rank = low_rank(in_dim, out_dim, slot_dim, experts) if rank is None else rank
        part, out_part = slot_dim // heads, out_dim // heads
        self.query = nn.Linear(in_dim, slot_dim)
        self.gain = nn.Parameter(torch.ones(slot_dim))
        self.prototypes = _normal(experts, heads, slots, part, fan_in=1)
        self.prototype_gain = nn.Parameter(torch.ones(part))
        self.shared_weight = _normal(heads, part, self.rank, fan_in=part)
        self.shared_bias = nn.Parameter(torch.zeros(heads, self.rank))
        self.expert_weight = _normal(experts, heads, self.rank, out_part, fan_in=self.rank)
        self.expert_bias = nn.Parameter(torch.zeros(experts, heads, out_part))
        self.expert_gain = nn.Parameter(torch.ones(experts, out_dim))
        self.drop = Dropout(dropout)

    def forward(
        self,
        features: Tensor,
        offsets: Tensor,
        *,
        generator: torch.Generator | None = None,
        forced_mask: Tensor | None = None,
    ) -> Tensor:
        """The slots of each bag. features: (total, d).  forced_mask: (b, E * S, L) bool. Returns (b, E * S, L).

        Row e * S + s is slot s of expert e.
        """
        queries = self._queries(features)
        with no_autocast(features):
            prototypes = self._normalised_prototypes()
            read = [
                F.scaled_dot_product_attention(prototypes[None], rows[None], rows[None], scale=1.0)[0]
                for rows in (rows.transpose(0, 1) for rows in split(queries, offsets))
            ]
            held = torch.stack(read).unflatten(2, (self.experts, self.slots))  # type: ignore[no-untyped-call]
            low = torch.einsum("bhesp,hpr->bhesr", held, self.shared_weight) + self.shared_bias[:, None, None]
            wide = torch.einsum("bhesr,ehro->besho", low, self.expert_weight) + self.expert_bias[:, None]
            answers = _rms(wide.flatten(3)) * self.expert_gain[:, None]
            slots = answers.relu().flatten(1, 2)
            kept: Tensor = self.drop(slots, generator=generator, forced_mask=forced_mask)
            return kept

    def to_tiles(self, features: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
        """Deal the slots back by a softmax over slots. slots: (b, E * S, L). Returns (total, L)."""
        queries = self._queries(features)
        with no_autocast(features):
            prototypes, found = self._normalised_prototypes(), []
            values = slots.reshape(len(slots), -1, self.heads, self.out_dim // self.heads)
            run: Callable[..., Tensor] = _deal
            if len(queries) > _BLOCK:
                run = partial(checkpoint, _deal, use_reentrant=False, preserve_rng_state=False)
            for rows, own in zip(split(queries, offsets), values, strict=True):
                found += [run(block, prototypes, own) for block in torch.split(rows, _BLOCK)]
            return torch.cat(found)

    @torch.no_grad()
    def scores_of_tiles(self, features: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        """From weights of slots to weights of tiles: sum over slots of weight times mean over heads of the routing.

        weights: (b, E * S, m), columns that sum to 1. Returns (total, m), columns that sum to 1 in each bag.
        """
        queries, found = self._queries(features), []
        with no_autocast(features):
            prototypes = self._normalised_prototypes()
            for rows, own in zip(split(queries, offsets), full_precision(weights).to(queries), strict=True):
                blocks = [block.permute(1, 2, 0).contiguous() for block in torch.split(rows, _SMALL_BLOCK)]
                total = _log_sum_exp(prototypes, blocks)
                found += [(own.T @ (prototypes @ block).sub_(total).exp_()).mean(dim=0).T for block in blocks]
        return torch.cat(found)

    def routing_logits(self, features: Tensor) -> Tensor:
        """(total, E, H, S) how well a tile fits a slot; for looking at few tiles, since it is large."""
        logits = torch.einsum("nhp,hsp->nhs", self._queries(features), self._normalised_prototypes())
        return logits.reshape(len(features), self.heads, self.experts, self.slots).transpose(1, 2)

    def _queries(self, features: Tensor) -> Tensor:
        """(total, H, P / H) u, at least in fp32."""
        queries = full_precision(self.query(features))
        with no_autocast(queries):
            return self._normed(queries, self.gain).reshape(len(features), self.heads, -1)

    def _normalised_prototypes(self) -> Tensor:
        """(H, E * S, P / H) the prototypes, normalised as the queries are."""
        return self._normed(self.prototypes, self.prototype_gain).transpose(0, 1).flatten(1, 2)

    def _normed(self, values: Tensor, gain: Tensor) -> Tensor:
        return F.layer_norm(values, gain.shape, gain) if self.layer_norm else _rms(values) * gain

    @classmethod
    def from_official(cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), dropout: float = 0.1) -> Self:
        """Weights of `mammoth.Mammoth`, in eval mode. What it gives back, slots or tiles, is not in the weights."""
        weights = OfficialWeights("mammoth", state_dict, ignore=ignore)
        layer_norm = "norm.beta" in weights
        for name in ("norm.beta", "slot_norm.beta") if layer_norm else ():
            weights.take(name)  # a buffer of zeros
        experts = "expert_heads.lora_layers"
        tensors = weights.linear("query", "wq") | {
            "gain": weights.take("norm.gamma"),
            "prototypes": weights.take("slot_embeds"),
            "prototype_gain": weights.take("slot_norm.gamma"),
            "shared_weight": weights.take(f"{experts}.shared_weight"),
            "shared_bias": weights.take(f"{experts}.shared_bias"),
            "expert_weight": weights.take(f"{experts}.expert_weights"),
            "expert_bias": weights.take(f"{experts}.bias"),
            "expert_gain": weights.take("expert_heads.norm.gamma"),
        }
        slot_dim, in_dim = tensors["query.weight"].shape
        n_experts, heads, slots, _ = tensors["prototypes"].shape
        layer = cls(
            in_dim,
            tensors["expert_gain"].shape[1],
            experts=n_experts,
            slots=slots,
            heads=heads,
            slot_dim=slot_dim,
            rank=tensors["shared_bias"].shape[1],
            dropout=dropout,
            layer_norm=layer_norm,
        )
        weights.load(layer, tensors)
        return layer


def _normal(*shape: int, fan_in: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / math.sqrt(fan_in))


def _rms(values: Tensor) -> Tensor:
    return F.normalize(values, dim=-1) * math.sqrt(values.shape[-1])


def _log_sum_exp(prototypes: Tensor, blocks: Sequence[Tensor]) -> Tensor:
    """log sum exp of prototypes @ block over the columns of all blocks. (H, s, p), (H, p, n) each -> (H, s, 1)."""
    highest = prototypes.new_full((*prototypes.shape[:2], 1), torch.finfo(prototypes.dtype).min)
    total = torch.zeros_like(highest)
    for block in blocks:
        logits = prototypes @ block
        before, highest = highest, torch.maximum(highest, logits.amax(dim=-1, keepdim=True))
        total = total * (before - highest).exp() + logits.sub_(highest).exp_().sum(dim=-1, keepdim=True)
    return highest + total.log()


def _deal(queries: Tensor, prototypes: Tensor, values: Tensor) -> Tensor:
    """queries: (n, H, p).  prototypes: (H, s, p).  values: (s, H, o). Returns (n, H * o)."""
    shares = torch.einsum("nhp,hsp->nhs", queries, prototypes).softmax(dim=-1)
    return torch.einsum("nhs,sho->nho", shares, values).flatten(1)
