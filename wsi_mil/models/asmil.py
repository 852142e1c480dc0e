"""ASMIL: several attention tokens, anchored and dropped at random. Ye et al., ICLR 2026, arXiv:2603.06658.

M learned tokens read the tiles by eight-head attention each, a learned class vector reads the tokens. In training some
tokens are left out of what the class vector reads; their attention still counts in the anchor's term (`_anchor`), which
pulls attention towards that of a slowly moving copy. Loss: CE + weight * KL(anchor || attention).
Reference code: Linfeng-Ye/ASMIL@5d06227, `ACMIL_MYMHA` and `ACMIL_MYMHA_EMA`.

Where published code and paper differ, and what is taken here:
- The anchor of the code never moves; ours is the paper's moving average. See `_anchor` for the rest of that.
- The paper drops each token with a probability near 0.5, the code a fixed count: token_dropping="fixed" (the code's) is
  the default, "bernoulli" drops each with probability n_drop / n_tokens. At least one token always stays; the code
  fails when all are dropped.
Differs on purpose:
- Keys and values are never made for each tile; the algebra is exact (see `_layers`).
- The values of a token that no bag of a step reads have a gradient of zero, so that momentum and weight decay move them
  all the same; in the code they have none, and the optimiser passes them over.
- A head for each token is published and never trained: kept, frozen. An unused LayerNorm is dropped.
- Tile scores are the attention of the tokens weighted by what the class vector reads of them; the published figures
  show one head of one token.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wsi_mil.bags import BagBatch, full_precision, segment_softmax, segment_weighted_sum, spread
from wsi_mil.errors import ConfigError
from wsi_mil.models._anchor import Anchor, Kind, Scaling
from wsi_mil.models._base import BagObjective, Criterion, MILModel, MILOutput, Progress
from wsi_mil.models._layers import FeatureLayer, HeadQueries, HeadValues, hidden_width, uniform
from wsi_mil.models._official import OfficialWeights
from wsi_mil.settings import Amount, Count, Positive, Rate, Share, Weight

HEADS = 8
"""Heads of each token, as published."""


class Asmil(MILModel):
    """Attention by several tokens and a class vector that reads them.

    in_dim: width of the features.  n_outputs: width of the head.  n_tokens: M.  n_drop: how many tokens are left out in
    training, below M; None takes half of them.  token_dropping: exactly so many, or each with probability n_drop / M.
    hidden: width of the first layer, a multiple of 8; None takes the published one for `in_dim`.  dropout: before each
    LayerNorm.
    """

    summary = "several attention tokens with an anchor (ASMIL)"
    family = "attention"
    paper = "Ye et al., ICLR 2026, arXiv:2603.06658"
    score_kinds = ("attention",)

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        n_tokens: Count = 8,
        n_drop: Amount | None = None,
        token_dropping: Literal["fixed", "bernoulli"] = "fixed",
        hidden: Count | None = None,
        dropout: Rate = 0.1,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.n_tokens = n_tokens
        self.n_drop = n_tokens // 2 if n_drop is None else n_drop
        self.token_dropping = token_dropping
        self.hidden = hidden or hidden_width(in_dim)
        self.dropout = dropout
        if self.n_drop >= n_tokens or token_dropping not in ("fixed", "bernoulli"):
            raise ConfigError(
                f"asmil: n_tokens={n_tokens}, n_drop={n_drop}, token_dropping={token_dropping!r}; at least one token "
                f"stays, and dropping is fixed or bernoulli"
            )
        if self.hidden % HEADS:
            raise ConfigError(f"asmil: hidden={self.hidden} does not split into {HEADS} heads; give a multiple")
        self.random_in_training = dropout > 0 or self.n_drop > 0
        self.attention_parts = tuple(f"token{m}" for m in range(n_tokens))
        self.features = FeatureLayer(in_dim, self.hidden)
        self.queries = nn.Parameter(torch.empty(n_tokens, self.hidden))
        nn.init.normal_(self.queries, std=1e-6)
        self.attention = nn.ModuleList(HeadQueries(self.hidden, HEADS) for _ in range(n_tokens))
        self.values = nn.ModuleList(HeadValues(self.hidden, HEADS, dropout=dropout) for _ in range(n_tokens))
        self.class_query = nn.Parameter(torch.zeros(self.hidden))
        self.class_attention = HeadQueries(self.hidden, HEADS)
        self.class_values = HeadValues(self.hidden, HEADS, dropout=dropout)
        self.token_heads = nn.ModuleList(nn.Linear(self.hidden, n_outputs) for _ in range(n_tokens))
        self.token_heads.requires_grad_(False)
        self.head = nn.Linear(self.hidden, n_outputs)

    def forward(
        self,
        batch: BagBatch,
        *,
        generator: torch.Generator | None = None,
        forced_drop: Tensor | None = None,
        forced_dropout: Tensor | None = None,
    ) -> MILOutput:
        """Answer for each bag.

        forced_drop: (b, M) bool, the tokens that the class vector does not read.  forced_dropout: (b, M + 1, h) bool,
        the units that dropout zeroes, the class vector's last. What is forced is used in either mode.
        """
        hidden = self.features(batch.features)
        queries = cast(list[HeadQueries], list(self.attention))
        parts = [module.projections(query) for module, query in zip(queries, self.queries, strict=True)]
        logits = F.linear(hidden, torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))
        attention = segment_softmax(logits, batch.offsets)
        means = segment_weighted_sum(attention, hidden, batch.offsets)
        means = means.reshape(len(means), self.n_tokens, HEADS, -1)
        read = []
        for m, values in enumerate(self.values):
            forced = None if forced_dropout is None else forced_dropout[:, m]
            read.append(values(means[:, m], generator=generator, forced_mask=forced))
        tokens = torch.stack(read, dim=1)
        dropped = self._drop(len(batch), tokens, generator) if forced_drop is None else forced_drop
        of_tokens = full_precision(F.linear(tokens, *self.class_attention.projections(self.class_query)))
        of_tokens = of_tokens.masked_fill(dropped[..., None], torch.finfo(of_tokens.dtype).min).softmax(dim=1)
        forced = None if forced_dropout is None else forced_dropout[:, -1]
        mixed = torch.einsum("bme,bmh->beh", of_tokens, full_precision(tokens))
        bag = self.class_values(mixed, generator=generator, forced_mask=forced)
        return MILOutput(
            logits=self.head(bag),
            offsets=batch.offsets,
            attention_logits=logits,
            attention=attention,
            bag_embedding=bag[:, None],
            auxiliary={
                "token_logits": torch.stack([head(tokens[:, m]) for m, head in enumerate(self.token_heads)], dim=1),
                "token_weights": of_tokens.mean(dim=2),
                "dropped_tokens": dropped,
            },
        )

    def objective(
        self,
        criterion: Criterion,
        *,
        weight: Weight = 0.1,
        momentum: Share = 0.999,
        temperature: Positive = 0.5,
        kind: Kind = "ema",
        scaling: Scaling = "sum",
        warm_up: Amount = 0,
    ) -> "AsmilObjective":
        """CE and the anchor's term. See `wsi_mil.regularisers.anchor` for the settings."""
        anchor = Anchor(
            weight=weight,
            momentum=momentum,
            temperature=temperature,
            kind=kind,
            scaling=scaling,
            warm_up=warm_up,
        )
        return AsmilObjective(criterion, anchor)

    @torch.no_grad()
    def _drop(self, bags: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
        """(b, M) bool: the tokens that are left out."""
        nothing = torch.zeros((bags, self.n_tokens), dtype=torch.bool, device=like.device)
        if not self.training or generator is None or self.n_drop == 0:
            return nothing
        draw = uniform((bags, self.n_tokens), generator, like)
        if self.token_dropping == "fixed":
            return draw.argsort(dim=1).argsort(dim=1) < self.n_drop
        dropped = draw < self.n_drop / self.n_tokens
        return dropped & (draw < draw.amax(dim=1, keepdim=True))

    def _attention_scores(self, output: MILOutput, index: int | None) -> Tensor:
        """(total,) attention of the tokens, weighted by what the class vector reads of them, or that of one token."""
        if index is not None or output.attention is None:
            return super()._attention_scores(output, index)
        of_tokens = output.attention.reshape(-1, self.n_tokens, HEADS).mean(dim=2)
        weights = spread(output.auxiliary["token_weights"], output.offsets)
        return (of_tokens * weights).sum(dim=1)

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights of `ACMIL_MYMHA` or `ACMIL_MYMHA_EMA`. n_drop, token_dropping and dropout are not in the weights."""
        weights = OfficialWeights(cls.__name__, state_dict, ignore=(*ignore, "dimreduction.bn.*"))
        tensors = {"queries": weights.take("q")[0], "class_query": weights.take("cls").flatten()}
        tensors |= weights.linear("features.linear", "dimreduction.fc1", bias=False)
        n_tokens = len(tensors["queries"])
        places = [(f"attention.{m}", f"values.{m}", f"sub_attention.{m}") for m in range(n_tokens)]
        for queries, values, official in [*places, ("class_attention", "class_values", "bag_attention")]:
            ours = {f"{queries}.query": "q_proj", f"{queries}.key": "k_proj", f"{values}.value": "v_proj"}
            for name, key in (ours | {f"{values}.out": "out_proj", f"{values}.norm": "layer_norm"}).items():
                tensors |= weights.linear(name, f"{official}.{key}")
        for m in range(n_tokens):
            tensors |= weights.linear(f"token_heads.{m}", f"classifier.{m}.fc")
        tensors |= weights.linear("head", "Slide_classifier.fc")
        hidden, in_dim = tensors["features.linear.weight"].shape
        model = cls(
            in_dim=in_dim,
            n_outputs=len(tensors["head.weight"]),
            n_tokens=n_tokens,
            hidden=hidden,
            **what_the_shapes_do_not_tell,
        )
        weights.load(model, tensors)
        return model


class AsmilObjective(BagObjective):
    """The bag loss and the anchor's term."""

    def __init__(self, criterion: Criterion, anchor: Anchor) -> None:
        super().__init__(criterion)
        self.anchor = anchor

    def loss(self, model: MILModel, batch: BagBatch, target: Tensor, progress: Progress) -> dict[str, Tensor]:
        """The terms bag and anchor."""
        slow = self.anchor.attention_logits(model, batch)
        output = model(batch, generator=progress.generator)
        return {"bag": self.criterion(output.logits, target), "anchor": self.anchor.term(output, slow)}

    def parameter_groups(self, model: MILModel) -> Iterable[dict[str, Any]]:
        """All trainable parameters; the anchor is made here, before the first step."""
        self.anchor.start(model)
        return super().parameter_groups(model)

    def after_optimizer_step(self, model: MILModel, batch: BagBatch, lr: float) -> None:
        """Move the anchor."""
        self.anchor.update(model)
