"""MAMMOTH in front of any method: a soft mixture of low-rank experts in place of its first linear layer. Shao et al.,
ICLR 2026, arXiv:2603.22198. The layer, its equations and differences: see `wsi_mil/models/_mammoth.py`.

With keep_slots=True (the paper's) the method sees E x S slots in place of tiles; its objective and other plug-ins work
on slots. A method that declares no first linear layer (mean_pool without `hidden`, dsmil) gets the layer in front and
is built for its width. For heatmaps the attention of slots is dealt back to tiles: sum over slots of attention times
the mean over heads of the routing. That map says which tiles are read, it is no contribution. With keep_slots=False
there is one row a tile and everything stays as the method has it.
"""

import inspect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from wsi_mil.bags import BagBatch
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import Criterion, MILModel, MILOutput, Objective, Progress, Regulariser, ScoreKind
from wsi_mil.models._layers import hidden_width
from wsi_mil.models._mammoth import MammothLayer
from wsi_mil.settings import Count, Rate

_SLOT_DIM, _HEADS = 256, 16


class Mammoth(Regulariser):
    """Low-rank experts in place of a method's first linear layer.

    inner: the method's objective.  experts, slots: E and S.  heads: H; None takes 16, or the most that divide both
    widths.  slot_dim: P; None takes half the width of the layer, at most 256.  rank: None takes the one that keeps the
    number of weights.  keep_slots: give the method slots, or one row a tile.  dropout: on the layer's output.
    layer_norm: of queries and prototypes, else RMS.
    """

    summary = "mixture of low-rank experts as the first layer (MAMMOTH), for every method"
    paper = "Shao et al., ICLR 2026, arXiv:2603.22198"

    def __init__(
        self,
        inner: Objective,
        *,
        experts: Count = 30,
        slots: Count = 10,
        heads: Count | None = None,
        slot_dim: Count | None = None,
        rank: Count | None = None,
        keep_slots: bool = True,
        dropout: Rate = 0.1,
        layer_norm: bool = True,
    ) -> None:
        super().__init__(inner)
        self.experts, self.slots, self.heads, self.slot_dim = experts, slots, heads, slot_dim
        self.rank, self.keep_slots, self.dropout, self.layer_norm = rank, keep_slots, dropout, layer_norm

    def change(self, model: MILModel) -> MILModel:
        """The model behind the layer. Raises ConfigError when it reads places and would be given slots."""
        if model.core is not model or (self.keep_slots and model.uses_positions):
            raise ConfigError(
                f"mammoth: {type(model).__name__} needs to know where tiles lie, and slots lie nowhere; "
                f"use keep_slots=False, and mammoth once"
            )
        behind, width = _make_room(model)
        slot_dim = self.slot_dim or max(1, min(_SLOT_DIM, width // 2))
        heads = self.heads or max(h for h in range(1, _HEADS + 1) if slot_dim % h == width % h == 0)
        layer = MammothLayer(
            model.in_dim,
            width,
            experts=self.experts,
            slots=self.slots,
            heads=heads,
            slot_dim=slot_dim,
            rank=self.rank,
            dropout=self.dropout,
            layer_norm=self.layer_norm,
        )
        return _WithExperts(behind, layer, in_dim=model.in_dim, keep_slots=self.keep_slots)

    def check(self, model: MILModel) -> None:
        """Raises ConfigError for a model that `change` did not make."""
        _with_experts(model)

    def terms(self, output: MILOutput, progress: Progress) -> dict[str, Tensor]:
        """None of its own."""
        return {}

    def loss(self, model: MILModel, batch: BagBatch, target: Tensor, progress: Progress) -> dict[str, Tensor]:
        """The inner objective's terms on what the layer gives."""
        wrapped = _with_experts(model)
        given = wrapped.given(batch, generator=progress.generator)
        return self.inner.loss(wrapped.behind, given, target, progress)

    def parameter_groups(self, model: MILModel) -> Iterable[dict[str, Any]]:
        """The inner objective's, and the layer's."""
        wrapped = _with_experts(model)
        return [*self.inner.parameter_groups(wrapped.behind), {"params": list(wrapped.layer.parameters())}]

    def optimizer(self, model: MILModel, *, lr: float, weight_decay: float) -> torch.optim.Optimizer | None:
        """The inner objective's, with the layer's parameters as one more group."""
        wrapped = _with_experts(model)
        found = self.inner.optimizer(wrapped.behind, lr=lr, weight_decay=weight_decay)
        if found is not None:
            found.add_param_group({"params": list(wrapped.layer.parameters())})
        return found

    def start_from(self, model: MILModel, baseline: MILModel) -> None:
        """The layer is the baseline's, the rest is up to the inner objective. Raises ConfigError if they do not fit."""
        wrapped, trained = _with_experts(model), _with_experts(baseline)
        self.inner.start_from(wrapped.behind, trained.behind)
        wrapped.layer.load_state_dict(trained.layer.state_dict())

    def after_optimizer_step(self, model: MILModel, batch: BagBatch, lr: float) -> None:
        """The inner objective's, of the model behind the layer."""
        self.inner.after_optimizer_step(_with_experts(model).behind, batch, lr)


def first_linear(model: MILModel) -> str | None:
    """Name of the linear layer that a method declares as its first; None when it has none with these settings."""
    declared = dict(model.named_children()).get(model.first_layer)
    for name, module in declared.named_modules() if declared is not None else ():
        if isinstance(module, nn.Linear):
            return ".".join(filter(None, (model.first_layer, name))) if module.in_features == model.in_dim else None
    return None


def _make_room(model: MILModel) -> tuple[MILModel, int]:
    """The method without its first linear layer, or built anew for narrower features; and how wide they are."""
    name = first_linear(model)
    if name is not None:
        layer = model.get_submodule(name)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, _Given())
        return model, cast(nn.Linear, layer).out_features
    width = hidden_width(model.in_dim)
    kept = {key: getattr(model, key) for key in inspect.signature(type(model)).parameters}
    built = type(model)(**kept | {"in_dim": width})
    altered = dict(model.named_children()).keys() - dict(built.named_children()).keys()
    if altered:
        raise ConfigError(
            f"mammoth builds {type(model).__name__} anew, without {', '.join(sorted(altered))}; name mammoth first"
        )
    return built, width


class _WithExperts(MILModel):
    """A method behind the layer. Speaks of tiles to the outside; its objective asks the method behind it."""

    summary, family, paper = Mammoth.summary, "wrapped", Mammoth.paper
    score_kinds: tuple[ScoreKind, ...] = ("attention",)

    def __init__(self, behind: MILModel, layer: MammothLayer, *, in_dim: int, keep_slots: bool) -> None:
        super().__init__(in_dim=in_dim, n_outputs=behind.n_outputs)
        self.behind = behind
        self.layer = layer
        self.keep_slots = keep_slots
        self.random_in_training = behind.random_in_training or layer.drop.rate > 0
        self.attention_parts = behind.attention_parts
        self.attention_of_classes = behind.attention_of_classes
        if not keep_slots:
            self.score_kinds = behind.score_kinds
            self.uses_positions = behind.uses_positions

    @property
    def core(self) -> MILModel:
        """The method behind the layer."""
        return self.behind.core

    def objective(self, criterion: Criterion, **settings: Any) -> Objective:
        """That of the method behind, with its settings."""
        return self.behind.objective(criterion, **settings)

    def given(self, batch: BagBatch, *, generator: torch.Generator | None = None) -> BagBatch:
        """What the method sees of these bags: slots without places, or tiles with new features."""
        slots = self.layer(batch.features, batch.offsets, generator=generator)
        if not self.keep_slots:
            return replace(batch, features=self.layer.to_tiles(batch.features, slots, batch.offsets))
        b, n = slots.shape[:2]
        nowhere = batch.grid_xy.new_zeros((b * n, 2))
        return replace(
            batch,
            features=slots.flatten(0, 1),
            offsets=torch.arange(b + 1, device=batch.offsets.device) * n,
            coords_l0=nowhere,
            grid_xy=nowhere,
            slide_index=nowhere[:, 0],
        )

    def forward(self, batch: BagBatch, *, generator: torch.Generator | None = None) -> MILOutput:
        """Answer for each bag; attention is that of tiles."""
        given = self.given(batch, generator=generator)
        output: MILOutput = self.behind(given, generator=generator)
        if not self.keep_slots:
            return output
        n = self.layer.experts * self.layer.slots
        of_slots = output.attention
        if of_slots is None:
            of_slots = given.features.new_full((len(given.features), 1), 1 / n)
        of_slots = of_slots.detach().reshape(len(batch), n, -1)
        attention = self.layer.scores_of_tiles(batch.features, of_slots, batch.offsets)
        return replace(
            output,
            offsets=batch.offsets,
            attention=attention,
            attention_logits=attention.clamp(min=torch.finfo(attention.dtype).tiny).log(),
            instance_logits=None,
        )

    def _attention_scores(self, output: MILOutput, index: int | None) -> Tensor:
        return self.behind._attention_scores(output, index)

    def _instance_probabilities(self, output: MILOutput) -> Tensor:
        return self.behind._instance_probabilities(output)

    def _instance_contributions(self, output: MILOutput) -> Tensor:
        return self.behind._instance_contributions(output)


class _Given(nn.Module):
    """Stands where the first linear layer was. A copy, since methods work in place on what they made."""

    def forward(self, features: Tensor) -> Tensor:
        """features: (total, h), and so returned."""
        return features.clone()


def _with_experts(model: MILModel) -> _WithExperts:
    if isinstance(model, _WithExperts):
        return model
    raise ConfigError("mammoth: the model has no such layer; build model and objective together (wsi_mil.methods)")
