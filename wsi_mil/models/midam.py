"""MIDAM: multi-instance deep AUC maximisation. Zhu et al., ICML 2023, arXiv:2305.08040.

With h the score of a bag, c a margin and means over the bags of either class,
  min over w, a, b  max over alpha >= 0 of  E+[(h - a)^2] + E-[(h - b)^2] + alpha (c + E-[h] - E+[h]) - alpha^2 / 2.
h is pooled from the tiles' scores: tau log mean exp(sigmoid(z) / tau) (mode "softmax"), or sigmoid(sum w z / sum w)
with w = exp(attention) (mode "attention"). A step sees a few tiles of each bag; a moving average a bag of what was
pooled (rate gamma), kept by the bag's id, stands for the tiles that were not drawn.
Reference code: Optimization-AI/LibAUC@812f98f (2.0.1), `MIDAMLoss`, the optimiser `MIDAM`, `FFNN`, `FFNN_stoc_att`.
That optimiser is optimizer="sgd": SGD with momentum = dampening, then one ascent step of alpha.

Differs on purpose:
- a, b and alpha have a rate of their own (`scalar_lr`; None gives them the run's, as in the code), and a and b follow
  the class means through a short warm-up by cross-entropy (`warmup`; LibAUC advises 1 to 3 epochs). From 0 and at the
  network's rate they are slower than the scores, which sink to 0 with them: there the sigmoid has no gradient and
  nothing is learned any more. So it was on features of tiles with AdamW at 1e-3.
- The network follows training's AdamW unless optimizer="sgd", so that it learns at the learning rates of other methods.
- The state of mode "softmax" is kept as a logarithm: exp(z / tau) overflows in fp32 already at z = 10, tau = 0.1.
- State starts at 0 (softmax) or 1 (attention) as in the code, which biases the first visits; start="first_visit" starts
  at what the first visit sees.
- a and b are not decayed (decay_scalars=True is the code). Tiles are drawn by training (`tiles_per_bag`).
- The printed docstring of LibAUC has 2 alpha (..) - alpha^2; its gradient has not, nor has this.
- A step that lacks a class skips that class's terms (the code gives NaN). With three or more classes everything is
  one against the rest, averaged over classes; such scores rank well within a class and are not calibrated.
- In mode "softmax" the logit of a bag is logit(h), so that its probability is h; the attention of mode "attention" is
  clamped to [-20, 20] before exp. LibAUC's evaluator leaves out the last sigmoid of that mode.
- The loss is a surrogate: its gradient is the objective's, its value says little. Means within classes leave no place
  for the task's class weights, which count while warming up only.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Annotated, Any, Literal, Self

import torch
from torch import Tensor, nn

from wsi_mil.bags import BagBatch, full_precision, no_autocast, segment_map, segment_mean, segment_softmax
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import Criterion, MILModel, MILOutput, Objective, Progress, ScoreKind
from wsi_mil.models._layers import hidden_width
from wsi_mil.models._official import OfficialWeights
from wsi_mil.settings import Count, Positive, Range, Rate, Share

ATTENTION_LIMIT = 20.0
_LEAST_WEIGHT = 1e-8


class Midam(MILModel):
    """A score a tile, pooled by a smoothed maximum or by attention, trained for the AUC.

    in_dim: width of the features.  n_outputs: width of the head, 1 for two classes.  mode: the pooling.  tau: its
    temperature (softmax): towards 0 the maximum, large the mean.  hidden: widths of the layers, tanh after the first
    and ReLU after the others; None takes one layer of the usual width for `in_dim`.
    """

    summary = "deep AUC maximisation with stochastic smoothed-max or attention pooling (MIDAM)"
    family = "AUC maximisation"
    paper = "Zhu et al., ICML 2023, arXiv:2305.08040"
    score_kinds: tuple[ScoreKind, ...] = ("probability", "attention")
    binary_outputs = 1
    classes_only = True
    first_layer = "first"

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        mode: Literal["softmax", "attention"] = "softmax",
        tau: Positive = 0.1,
        hidden: tuple[Count, ...] | None = None,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        if mode not in ("softmax", "attention") or hidden == ():
            raise ConfigError(
                f"midam: mode={mode!r}, hidden={hidden}; mode is softmax or attention, and there is at least one layer"
            )
        self.mode = mode
        self.tau = tau
        self.hidden = tuple(hidden) if hidden else (hidden_width(in_dim),)
        self.first = nn.Linear(in_dim, self.hidden[0])
        pairs = zip(self.hidden[:-1], self.hidden[1:], strict=True)
        self.layers = nn.Sequential(*[part for a, b in pairs for part in (nn.Linear(a, b), nn.ReLU())])
        width = self.hidden[-1]
        self.head = nn.Linear(width, n_outputs)
        self.attention = None
        if mode == "attention":
            self.attention = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
            self.score_kinds = ("attention", "contribution")
        elif n_outputs > 1:
            self.attention_parts = tuple(f"class{c}" for c in range(n_outputs))
            self.attention_of_classes = True
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight)

    def forward(self, batch: BagBatch, *, generator: torch.Generator | None = None) -> MILOutput:
        """Answer for each bag. auxiliary: the pooled sums that the objective keeps a moving average of."""
        hidden = self.layers(self.first(batch.features).tanh())
        scores = full_precision(self.head(hidden))
        with no_autocast(scores):
            if self.attention is None:
                return self._smoothed_max(scores, batch.offsets)
        return self._attended(scores, self.attention(hidden), batch.offsets)

    def _smoothed_max(self, scores: Tensor, offsets: Tensor) -> MILOutput:
        """scores: (total, k) before the sigmoid."""
        sharpened = scores.sigmoid() / self.tau
        log_mean = segment_map(lambda rows: rows.logsumexp(dim=0) - math.log(len(rows)), sharpened, offsets)
        return MILOutput(
            logits=(self.tau * log_mean).logit(eps=torch.finfo(log_mean.dtype).eps),
            offsets=offsets,
            attention_logits=sharpened,
            attention=segment_softmax(sharpened, offsets),
            instance_logits=scores,
            auxiliary={"log_mean": log_mean},
        )

    def _attended(self, scores: Tensor, weight_logits: Tensor, offsets: Tensor) -> MILOutput:
        """scores: (total, k).  weight_logits: (total, 1)."""
        weight_logits = full_precision(weight_logits).clamp(-ATTENTION_LIMIT, ATTENTION_LIMIT)
        with no_autocast(scores):
            weights = weight_logits.exp()
            numerator, denominator = segment_mean(weights * scores, offsets), segment_mean(weights, offsets)
            return MILOutput(
                logits=numerator / denominator,
                offsets=offsets,
                attention_logits=weight_logits,
                attention=segment_softmax(weight_logits, offsets),
                instance_logits=scores,
                auxiliary={"numerator": numerator, "denominator": denominator},
            )

    def _instance_probabilities(self, output: MILOutput) -> Tensor:
        """(total, k) sigmoid of each score: classes are told apart one against the rest."""
        if output.instance_logits is None:
            raise ValueError("midam scores tiles, but this output has no instance_logits")
        return output.instance_logits.sigmoid()

    def objective(
        self,
        criterion: Criterion,
        *,
        margin: Positive = 1.0,
        gamma: Annotated[float, Range(0, 1, without_low=True)] = 0.9,
        gamma_milestones: tuple[Share, ...] = (),
        tiles_per_bag: Count | None = 128,
        start: Literal["published", "first_visit"] = "published",
        warmup: Share = 0.02,
        optimizer: Literal["adamw", "sgd"] = "adamw",
        momentum: Rate = 0.1,
        decay_scalars: bool = False,
        scalar_lr: Positive | None = 0.05,
    ) -> "MidamObjective":
        """The AUC objective and its state.

        margin: c, published between 0.1 and 1.  gamma: share of the new value in a bag's moving average; halved at each
        of `gamma_milestones` (shares of training; published at 0.5 and 0.75).  tiles_per_bag: tiles drawn a visit.
        start: of the moving average.  warmup: share of training that minimises the task's cross-entropy first.
        optimizer: training's, or the published SGD.  momentum: share of the old buffer in the latter.  decay_scalars:
        let weight decay pull at a and b.  scalar_lr: learning rate of a, b and alpha; None takes the run's.
        """
        return MidamObjective(
            criterion,
            model=self,
            margin=margin,
            gamma=gamma,
            gamma_milestones=gamma_milestones,
            tiles_per_bag=tiles_per_bag,
            start=start,
            warmup=warmup,
            optimizer=optimizer,
            momentum=momentum,
            decay_scalars=decay_scalars,
            scalar_lr=scalar_lr,
        )

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights of LibAUC's `FFNN` or `FFNN_stoc_att`, told apart by their keys. tau is not in the weights."""
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        tensors = weights.linear("first", "inputs") | weights.linear("head", "classifer")
        n_layers = next(n for n in count() if f"layers.{2 * n}.*" not in weights)
        for n in range(n_layers):
            tensors |= weights.linear(f"layers.{2 * n}", f"layers.{2 * n}")
        attends = "attention.*" in weights
        if attends:
            tensors |= weights.linear("attention.0", "attention.0") | weights.linear("attention.2", "attention.2")
        widths = [len(tensors[f"{name}.weight"]) for name in ("first", *(f"layers.{2 * n}" for n in range(n_layers)))]
        model = cls(
            in_dim=tensors["first.weight"].shape[1],
            n_outputs=len(tensors["head.weight"]),
            mode="attention" if attends else "softmax",
            hidden=tuple(widths),
            **what_the_shapes_do_not_tell,
        )
        weights.load(model, tensors)
        return model


class MidamObjective(Objective):
    """The AUC objective of one model. Its state: a, b, alpha, and for each bag, by its id, the moving average.

    `memory`: bag id -> (k,) the logarithm of the state (softmax), or (2, k) numerator and denominator (attention).
    """

    needs_both_classes = True
    per_bag_state = True
    alpha: Tensor

    def __init__(
        self,
        criterion: Criterion,
        *,
        model: Midam,
        margin: float,
        gamma: float,
        gamma_milestones: tuple[float, ...],
        tiles_per_bag: int | None,
        start: Literal["published", "first_visit"],
        warmup: float,
        optimizer: Literal["adamw", "sgd"],
        momentum: float,
        decay_scalars: bool,
        scalar_lr: float | None,
    ) -> None:
        super().__init__()
        if start not in ("published", "first_visit") or optimizer not in ("adamw", "sgd"):
            raise ConfigError(
                f"midam: start={start!r}, optimizer={optimizer!r}; the first is published or first_visit, the second "
                f"adamw or sgd"
            )
        self.criterion = criterion
        self.margin = margin
        self.gamma = gamma
        self.gamma_milestones = tuple(gamma_milestones)
        self.tiles_per_bag = tiles_per_bag
        self.start = start
        self.warmup = warmup
        self.uses_sgd = optimizer == "sgd"
        self.momentum = momentum
        self.decay_scalars = decay_scalars
        self.scalar_lr = scalar_lr
        self.tau = model.tau
        zeros = torch.zeros(model.n_outputs, dtype=model.head.weight.dtype)
        self.positive_mean = nn.Parameter(zeros.clone())
        self.negative_mean = nn.Parameter(zeros.clone())
        self.register_buffer("alpha", zeros.clone())
        self.memory: dict[str, Tensor] = {}
        self._ascends = False

    def loss(self, model: MILModel, batch: BagBatch, target: Tensor, progress: Progress) -> dict[str, Tensor]:
        """The terms pooling (trains the model) and spread (trains a and b); while warming up, bag and spread."""
        output = model(batch, generator=progress.generator)
        positive = one_against_rest(target, output.logits.shape[1])
        self._ascends = progress.fraction >= self.warmup
        if not self._ascends:
            score = full_precision(output.logits.detach()).sigmoid()
            return {"bag": self.criterion(output.logits, target), "spread": self._spread(score, positive)}
        with no_autocast(output.logits):
            if "log_mean" in output.auxiliary:
                score, direction = self._smoothed_max(output.auxiliary["log_mean"], batch.ids, progress)
                score, direction = self.tau * score, self.tau * direction
            else:
                sums = torch.stack([output.auxiliary["numerator"], self._wide(output)], dim=1)
                score, direction = self._attended(sums, batch.ids, progress)
            return self._terms(score, direction, positive)

    def _wide(self, output: MILOutput) -> Tensor:
        return output.auxiliary["denominator"].expand_as(output.auxiliary["numerator"])

    def _terms(self, score: Tensor, direction: Tensor, positive: Tensor) -> dict[str, Tensor]:
        """score: (b, k) constants.  direction: (b, k), its gradient is that of the score.  positive: (b, k) bool."""
        a, b = self.positive_mean, self.negative_mean
        has_both = positive.any(dim=0) & (~positive).any(dim=0)
        gap = _mean_of(direction, ~positive) - _mean_of(direction, positive)
        pooling = 2 * _mean_of((score - a.detach()) * direction, positive)
        pooling = pooling + 2 * _mean_of((score - b.detach()) * direction, ~positive) + has_both * self.alpha * gap
        return {"pooling": pooling.mean(), "spread": self._spread(score, positive)}

    def _spread(self, score: Tensor, positive: Tensor) -> Tensor:
        """Its gradient draws a and b to the class means. Both (b, k)."""
        of_positive = _mean_of((score - self.positive_mean).square(), positive)
        return (of_positive + _mean_of((score - self.negative_mean).square(), ~positive)).mean()

    def _smoothed_max(self, log_mean: Tensor, ids: Sequence[str], progress: Progress) -> tuple[Tensor, Tensor]:
        """log_mean: (b, k). Returns the logarithm of the state, and the ratio of the new value to it."""
        seen, gamma = log_mean.detach(), self.gamma_at(progress)
        old = self._recall(ids, seen, torch.full_like(seen[0], -math.inf))
        log_rest = math.log1p(-gamma) if gamma < 1 else -math.inf
        state = self._remember(ids, torch.logaddexp(log_rest + old, math.log(gamma) + seen))
        return state, (log_mean - state).exp()

    def _attended(self, sums: Tensor, ids: Sequence[str], progress: Progress) -> tuple[Tensor, Tensor]:
        """sums: (b, 2, k) mean of weight times score, and of weights. Returns score and its linearisation."""
        seen, gamma = sums.detach(), self.gamma_at(progress)
        old = self._recall(ids, seen, torch.ones_like(seen[0]))
        state = self._remember(ids, (1 - gamma) * old + gamma * seen)
        numerator, denominator = state[:, 0], state[:, 1].clamp(min=_LEAST_WEIGHT)
        score = (numerator / denominator).sigmoid()
        change = sums[:, 0] / denominator - numerator * sums[:, 1] / denominator.square()
        return score, score * (1 - score) * change

    def gamma_at(self, progress: Progress) -> float:
        """Gamma at this step."""
        passed = sum(progress.fraction >= milestone for milestone in self.gamma_milestones)
        return self.gamma * 0.5**passed

    def _recall(self, ids: Sequence[str], seen: Tensor, unseen: Tensor) -> Tensor:
        """The state of each bag; of a bag that is new what `start` says."""
        first = [unseen] * len(ids) if self.start == "published" else list(seen)
        found = [self.memory.get(name, other) for name, other in zip(ids, first, strict=True)]
        return torch.stack([state.to(seen) for state in found])

    def _remember(self, ids: Sequence[str], states: Tensor) -> Tensor:
        """Keep what a step saw, and give back what is kept: of a bag that stands in it twice, both times the last."""
        self.memory.update(zip(ids, states.unbind(), strict=True))
        return torch.stack([self.memory[name] for name in ids])

    @torch.no_grad()
    def after_optimizer_step(self, model: MILModel, batch: BagBatch, lr: float) -> None:
        """One step of alpha uphill, with the new a and b; it never falls below 0."""
        if self._ascends:
            slope = self.margin + self.negative_mean - self.positive_mean - self.alpha
            self.alpha = (self.alpha + (lr if self.scalar_lr is None else self.scalar_lr) * slope).clamp(min=0)

    def parameter_groups(self, model: MILModel) -> Iterable[dict[str, Any]]:
        """The model's parameters; a and b, not decayed unless `decay_scalars`."""
        scalars: dict[str, Any] = {"params": [self.positive_mean, self.negative_mean]}
        if not self.decay_scalars:
            scalars["weight_decay"] = 0.0
        if self.scalar_lr is not None:
            scalars["lr"] = self.scalar_lr
        return [{"params": [p for p in model.parameters() if p.requires_grad]}, scalars]

    def optimizer(self, model: MILModel, *, lr: float, weight_decay: float) -> torch.optim.Optimizer | None:
        """With "sgd" the published one of w, a and b; alpha moves in `after_optimizer_step`."""
        if not self.uses_sgd:
            return None
        return torch.optim.SGD(
            self.parameter_groups(model),
            lr=lr,
            momentum=self.momentum,
            dampening=self.momentum,
            weight_decay=weight_decay,
        )

    def get_extra_state(self) -> dict[str, Any]:
        """The per-bag state, for the checkpoint."""
        values = torch.stack(list(self.memory.values())).cpu() if self.memory else torch.empty(0)
        return {"ids": list(self.memory), "values": values}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take the per-bag state of a checkpoint."""
        self.memory = dict(zip(state["ids"], state["values"].unbind(), strict=True))


def one_against_rest(target: Tensor, n_outputs: int) -> Tensor:
    """(b, n_outputs) bool: whether a bag is a positive of this column. One column stands for class 1."""
    first = 1 if n_outputs == 1 else 0
    return target[:, None] == torch.arange(first, first + n_outputs, device=target.device)


def _mean_of(values: Tensor, chosen: Tensor) -> Tensor:
    """(k,) mean over the chosen bags of each column; 0 where there is none. Both (b, k)."""
    return torch.where(chosen, values, 0).sum(dim=0) / chosen.sum(dim=0).clamp(min=1)
