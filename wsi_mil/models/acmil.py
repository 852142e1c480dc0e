"""ACMIL: attention-challenging MIL. Zhang et al., ECCV 2024, arXiv:2311.07125.

Multiple branch attention (MBA), stochastic top-k instance masking (STKIM) and a term against equal branches:
loss = CE(bag) + mean over branches of CE(branch) + mean over pairs of branches of cos(A_i, A_j).
Reference code: dazhangyu123/ACMIL@e53d19c, `ACMIL_GA` (variant "gated") and `ACMIL_MHA` (variant "multi_head").

Where published code and paper differ, and what is taken here:
- The paper masks each top-K tile with probability p; the code masks exactly int(min(K, n) p) of them. Both exist,
  masking="fixed" (the code) is the default.
- The paper draws branches with attention of their own; the code shares V and U between branches. As the code.
Differs on purpose:
- Masked logits are finfo.min, the code has -1e9 (which fp16 cannot hold). Bags in which every tile is masked
  (K >= n, p = 1) get uniform attention, as in the code.
- The multi-head variant never makes keys and values for each tile; the algebra is exact (see `_layers`).
- With one branch the loss has the bag term only, as in the code; its unused branch head is kept but frozen.
- `dropout` acts on the output of the first layer (gated; 0 by default) or before the LayerNorm (multi-head; the
  published rate is 0.1).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wsi_mil.bags import BagBatch, full_precision, no_autocast, segment_softmax, segment_weighted_sum, split
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import Criterion, MILModel, MILOutput, Objective, Progress, ScoreKind
from wsi_mil.models._layers import (
    Dropout,
    FeatureLayer,
    GatedAttention,
    HeadQueries,
    HeadValues,
    hidden_width,
    uniform,
)
from wsi_mil.models._official import OfficialWeights
from wsi_mil.settings import Amount, Count, Rate, Share, Weight

HEADS = 8
"""Heads of each branch in the multi-head variant, as published."""


class Acmil(MILModel):
    """Several attention branches that are kept apart, with their favourite tiles masked at random in training.

    in_dim: width of the features.  n_outputs: width of the heads.  variant: how a branch attends.  n_branches: M.
    top_k: K, how many tiles of greatest attention may be masked; 0 for none.  mask_drop: p, the share of them that is.
    masking: exactly int(K p) of them, or each with probability p.  hidden: width of the first layer; None takes the
    published one for `in_dim`.  attention_dim: width of the gated attention.  dropout: None takes the published rate,
    0 (gated) or 0.1 (multi-head).
    """

    summary = "several attention branches, stochastic top-k masking (ACMIL)"
    family = "attention"
    paper = "Zhang et al., ECCV 2024, arXiv:2311.07125"
    score_kinds: tuple[ScoreKind, ...] = ("attention", "contribution")

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        variant: Literal["gated", "multi_head"] = "gated",
        n_branches: Count = 5,
        top_k: Amount = 10,
        mask_drop: Share = 0.6,
        masking: Literal["fixed", "bernoulli"] = "fixed",
        hidden: Count | None = None,
        attention_dim: Count = 128,
        dropout: Rate | None = None,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.variant = variant
        self.n_branches = n_branches
        self.top_k = top_k
        self.mask_drop = mask_drop
        self.masking = masking
        self.hidden = hidden or hidden_width(in_dim)
        self.attention_dim = attention_dim
        self.dropout = (0.1 if variant == "multi_head" else 0.0) if dropout is None else dropout
        _check(self)
        chosen = top_k * mask_drop if masking == "bernoulli" else int(top_k * mask_drop)
        self.random_in_training = self.dropout > 0 or (chosen > 0 and mask_drop < 1)
        self.attention_parts = tuple(f"branch{m}" for m in range(n_branches))
        self.features = FeatureLayer(in_dim, self.hidden)
        self.branches: _GatedBranches | _HeadBranches
        if variant == "gated":
            self.branches = _GatedBranches(self.hidden, n_branches, attention_dim=attention_dim, dropout=self.dropout)
        else:
            self.branches = _HeadBranches(self.hidden, n_branches, dropout=self.dropout)
            self.score_kinds = ("attention",)
        self.branch_heads = nn.ModuleList(nn.Linear(self.hidden, n_outputs) for _ in range(n_branches))
        self.head = nn.Linear(self.hidden, n_outputs)
        if n_branches == 1:
            self.branch_heads.requires_grad_(False)

    def forward(
        self,
        batch: BagBatch,
        *,
        generator: torch.Generator | None = None,
        forced_mask: Tensor | None = None,
        forced_dropout: Tensor | None = None,
    ) -> MILOutput:
        """Answer for each bag.

        forced_mask: (total, m) bool, the tiles that STKIM hides from each column of attention; m = M, or M x 8 with
        column = branch * 8 + head.  forced_dropout: bool, what dropout zeroes: (total, h), or (b, M + 1, h) with the
        bag last.  What is forced is used in either mode.
        """
        hidden = self.features(batch.features)
        if isinstance(self.branches, _GatedBranches):
            hidden = self.branches.drop(hidden, generator=generator, forced_mask=forced_dropout)
        unmasked = self.branches.attention_logits(hidden)
        masked = self._mask(unmasked, batch.offsets, generator) if forced_mask is None else forced_mask
        attention_logits = unmasked.masked_fill(masked, torch.finfo(unmasked.dtype).min)
        attention = segment_softmax(attention_logits, batch.offsets)
        if isinstance(self.branches, _GatedBranches):
            embedding = segment_weighted_sum(attention, hidden, batch.offsets)
            bag = embedding.mean(dim=1)
        else:
            everything = self.branches.embed(attention, hidden, batch.offsets, generator, forced_dropout)
            embedding, bag = everything[:, :-1], everything[:, -1]
        return MILOutput(
            logits=self.head(bag),
            offsets=batch.offsets,
            attention_logits=attention_logits,
            attention=attention,
            instance_logits=self.head(hidden) if self.variant == "gated" else None,
            bag_embedding=embedding,
            auxiliary={
                "branch_logits": torch.stack([head(embedding[:, m]) for m, head in enumerate(self.branch_heads)], 1),
                "bag_feature": bag,
                "stkim_mask": masked,
                "unmasked_attention_logits": unmasked,
            },
        )

    def objective(
        self, criterion: Criterion, *, branch_weight: Weight = 1.0, diversity_weight: Weight = 1.0
    ) -> "AcmilObjective":
        """The three terms. branch_weight: of the branches' own loss.  diversity_weight: of the term between them."""
        return AcmilObjective(criterion, branch_weight=branch_weight, diversity_weight=diversity_weight)

    @torch.no_grad()
    def _mask(self, logits: Tensor, offsets: Tensor, generator: torch.Generator | None) -> Tensor:
        """(total, m) bool: the tiles that STKIM hides, drawn for each column and bag."""
        masked = torch.zeros_like(logits, dtype=torch.bool)
        if not self.training or generator is None or self.top_k == 0 or self.mask_drop == 0:
            return masked
        for rows, rows_masked in zip(split(logits, offsets), split(masked, offsets), strict=True):
            k = min(self.top_k, len(rows))
            top = rows.topk(k, dim=0).indices
            draw = uniform((k, rows.shape[1]), generator, rows)
            if self.masking == "fixed":
                chosen = draw.argsort(dim=0).argsort(dim=0) < int(k * self.mask_drop)
            else:
                chosen = draw < self.mask_drop
            rows_masked.scatter_(0, top, chosen)
        return masked

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights of `ACMIL_GA` or `ACMIL_MHA`, told apart by their keys. K, p and masking are not in the weights."""
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        gated = "attention.*" in weights
        tensors = weights.linear("features.linear", "dimreduction.fc1", bias=False)
        tensors |= _gated_tensors(weights) if gated else _head_tensors(weights)
        tensors |= weights.linear("head", "Slide_classifier.fc")
        n_branches = len(tensors["branches.attention.weights.weight"]) if gated else len(tensors["branches.queries"])
        for m in range(n_branches):
            tensors |= weights.linear(f"branch_heads.{m}", f"classifier.{m}.fc")
        hidden, in_dim = tensors["features.linear.weight"].shape
        shapes: dict[str, Any] = {"variant": "gated" if gated else "multi_head", "n_branches": n_branches}
        if gated:
            shapes["attention_dim"] = len(tensors["branches.attention.tanh.weight"])
        model = cls(
            in_dim=in_dim,
            n_outputs=len(tensors["head.weight"]),
            hidden=hidden,
            **shapes,
            **what_the_shapes_do_not_tell,
        )
        weights.load(model, tensors)
        return model


class AcmilObjective(Objective):
    """CE of the bag, mean CE of the branches, mean cosine between branches. With one branch the first alone."""

    def __init__(self, criterion: Criterion, *, branch_weight: float, diversity_weight: float) -> None:
        super().__init__()
        self.criterion = criterion
        self.branch_weight = branch_weight
        self.diversity_weight = diversity_weight

    def loss(self, model: MILModel, batch: BagBatch, target: Tensor, progress: Progress) -> dict[str, Tensor]:
        """The terms bag, branches, diversity, each weighted."""
        output = model(batch, generator=progress.generator)
        terms = {"bag": self.criterion(output.logits, target)}
        branch_logits = output.auxiliary["branch_logits"]
        n_branches = branch_logits.shape[1]
        if n_branches > 1:
            each = [self.criterion(logits, target) for logits in branch_logits.unbind(dim=1)]
            terms["branches"] = self.branch_weight * torch.stack(each).mean()
            terms["diversity"] = self.diversity_weight * branch_similarity(output.attention, output.offsets, n_branches)
        return terms


def branch_similarity(attention: Tensor, offsets: Tensor, n_branches: int) -> Tensor:
    """Mean over bags, heads and pairs of branches of cos(A_i, A_j), in (0, 1]; 1 when branches are equal.

    attention: (total, n_branches * heads), column = branch * heads + head.
    """
    i, j = torch.triu_indices(n_branches, n_branches, offset=1, device=attention.device)
    with no_autocast(attention):
        similarities = []
        for rows in split(full_precision(attention), offsets):
            unit = F.normalize(rows.reshape(len(rows), n_branches, -1), dim=0)
            similarities.append(torch.einsum("nie,nje->eij", unit, unit)[:, i, j].mean())
        return torch.stack(similarities).mean()


class _GatedBranches(nn.Module):
    """Branches that share V and U and differ in w."""

    def __init__(self, hidden: int, n_branches: int, *, attention_dim: int, dropout: float) -> None:
        super().__init__()
        self.attention = GatedAttention(hidden, attention_dim, columns=n_branches)
        self.drop = Dropout(dropout)

    def attention_logits(self, hidden: Tensor) -> Tensor:
        """hidden: (total, h). Returns (total, M)."""
        logits: Tensor = self.attention(hidden)
        return logits


class _HeadBranches(nn.Module):
    """Branches with a learned query and eight heads each."""

    def __init__(self, hidden: int, n_branches: int, *, dropout: float) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.empty(n_branches, hidden))
        nn.init.normal_(self.queries, std=1e-6)
        self.attention = nn.ModuleList(HeadQueries(hidden, HEADS) for _ in range(n_branches))
        self.values = nn.ModuleList(HeadValues(hidden, HEADS, dropout=dropout) for _ in range(n_branches))
        self.bag_values = HeadValues(hidden, HEADS, dropout=dropout)
        if n_branches == 1:
            self.values.requires_grad_(False)

    def attention_logits(self, hidden: Tensor) -> Tensor:
        """hidden: (total, h). Returns (total, M * heads)."""
        modules = cast(list[HeadQueries], list(self.attention))
        parts = [module.projections(query) for module, query in zip(modules, self.queries, strict=True)]
        return F.linear(hidden, torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))

    def embed(
        self,
        attention: Tensor,
        hidden: Tensor,
        offsets: Tensor,
        generator: torch.Generator | None,
        forced_dropout: Tensor | None,
    ) -> Tensor:
        """Returns (b, M + 1, h): the branches' vectors and the bag's."""
        means = segment_weighted_sum(attention, hidden, offsets)
        means = means.reshape(len(means), len(self.values), HEADS, -1)
        means = torch.cat([means, means.mean(dim=1, keepdim=True)], dim=1)
        embedded = []
        for m, values in enumerate([*self.values, self.bag_values]):
            forced = None if forced_dropout is None else forced_dropout[:, m]
            embedded.append(values(means[:, m], generator=generator, forced_mask=forced))
        return torch.stack(embedded, dim=1)


def _check(model: Acmil) -> None:
    if model.variant not in ("gated", "multi_head") or model.masking not in ("fixed", "bernoulli"):
        raise ConfigError(
            f"acmil: variant {model.variant!r} with masking {model.masking!r}; "
            f"variants are gated and multi_head, masking is fixed or bernoulli"
        )
    if model.variant == "multi_head" and model.hidden % HEADS:
        raise ConfigError(f"acmil: hidden={model.hidden} does not split into {HEADS} heads; give a multiple of {HEADS}")


def _gated_tensors(weights: OfficialWeights) -> dict[str, Tensor]:
    return (
        weights.linear("branches.attention.tanh", "attention.attention_V.0")
        | weights.linear("branches.attention.gate", "attention.attention_U.0")
        | weights.linear("branches.attention.weights", "attention.attention_weights")
    )


def _head_tensors(weights: OfficialWeights) -> dict[str, Tensor]:
    tensors = {"branches.queries": weights.take("q").squeeze(0)}
    for m in range(len(tensors["branches.queries"])):
        tensors |= weights.linear(f"branches.attention.{m}.query", f"sub_attention.{m}.q_proj")
        tensors |= weights.linear(f"branches.attention.{m}.key", f"sub_attention.{m}.k_proj")
        tensors |= _value_tensors(weights, f"branches.values.{m}", f"sub_attention.{m}")
    return tensors | _value_tensors(weights, "branches.bag_values", "bag_attention")


def _value_tensors(weights: OfficialWeights, ours: str, official: str) -> dict[str, Tensor]:
    return (
        weights.linear(f"{ours}.value", f"{official}.v_proj")
        | weights.linear(f"{ours}.out", f"{official}.out_proj")
        | weights.linear(f"{ours}.norm", f"{official}.layer_norm")
    )
