"""MHIM-MIL: masked hard instance mining. Tang et al., ICCV 2023, arXiv:2307.15254 (v1), and IJCV 2025 (v2).

A teacher, the moving average of the student, looks at the whole bag. What it finds easiest (high attention), least
(low) and random tiles are hidden from the student, which learns the bag's label from the rest, and the teacher's
feature of the bag: loss = CE + alpha * -sum softmax(F_t / tau) log softmax(F_s). Used alone and unmasked afterwards.
Of N tiles the masks hide ceil(N random), ceil(N low), and of the ceil(N high / r) of highest attention a share r at
random; they may overlap. v2 ranks tiles by the class they speak for, masks the high ones only, and pools a random part
of the rest into a few tokens by attention of global queries, which follow what they pool (`merge_tokens`).
Reference code: DearCaat/MHIM-MIL@5377eb6 (v1) and @9d0c91a (v2), `MHIM`.

Where published code and paper differ, and what is taken here: eqs. 8 and 9 lack a minus and a log; as the code.
Differs on purpose:
- One tile at least stays visible, and not one of the highest where there is a choice; the code lets an empty bag
  through (its logits are the bias), and fails where exactly one tile was masked before.
- `random` is uniform however small; the code turns to the lowest attention at 0.001 and below. The class default r = 0
  of the code divides by zero.
- The published recipe trains the plain baseline first, gives it to the teacher, and its first layer to the student
  (`init_from`). Without it the first `warmup` share of training is plain and the
  teacher equals the student; afterwards both go on. warmup=0 is the published step. v2 merges from the beginning.
- The teacher has no dropout unless teacher_dropout=True (the code, which forgets to switch it off).
- v2's tile score is the logarithm of the published one, in fp64: the softmax of logits near 0 is full of ties in fp32.
- Schedules run over the steps of training after the warm-up. The queries follow the mean over the bags of a step.
- DSMIL: the mean of both streams' losses and probabilities, as v1; v2 has the loss of the mean of both logits.
- TransMIL: the code ranks by the class token's attention in v2, in v1 by that of whatever comes first, which is padding
  unless the tokens are a multiple of the landmarks. Here it is the class token's. As published, tiles fill up a square
  for the position encoding alone (square="positions" of `transmil`), and that square is of the tiles that stay.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wsi_mil.bags import (
    BagBatch,
    full_precision,
    no_autocast,
    segment_softmax,
    segment_sum,
    segment_weighted_sum,
    split,
)
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import Criterion, MILModel, MILOutput, Objective, Progress, ScoreKind, refuse_numbers
from wsi_mil.models._layers import Dropout, hidden_width, uniform
from wsi_mil.models._official import OfficialWeights
from wsi_mil.models.dsmil import Dsmil
from wsi_mil.models.transmil import NystromLayer, TransMil, scaled_softmax
from wsi_mil.settings import Amount, Count, Positive, Range, Rate, Share, Weight

Baseline = Literal["abmil", "dsmil", "transmil"]
_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}
MERGE_HEADS, MERGE_HEAD_DIM = 8, 64
MERGE_DROPOUT = 0.1
"""Dropout on the attention of the merge and on its tokens, whenever there is any dropout."""


class Mhim(MILModel):
    """The student of MHIM-MIL: a baseline behind one layer, trained with tiles hidden by its teacher.

    in_dim: width of the features.  n_outputs: width of the head.  baseline: what pools.  hidden: width of the first
    layer; None takes the published one for `in_dim`.  act: behind it.  dropout: behind that; if it is above 0, the
    merge has dropout of 0.1.  attention_dim, attention_act: of the attention ("abmil").  merge_tokens: tokens that a
    part of the tiles is merged into in training (v2); 0 for none.
    """

    summary = "momentum teacher hides easy tiles from the student (MHIM-MIL)"
    family = "attention"
    paper = "Tang et al., ICCV 2023, arXiv:2307.15254"
    score_kinds: tuple[ScoreKind, ...] = ("attention", "contribution")

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        baseline: Baseline = "abmil",
        hidden: Count | None = None,
        act: Literal["relu", "gelu"] = "relu",
        dropout: Rate = 0.25,
        attention_dim: Count = 128,
        attention_act: Literal["relu", "gelu", "tanh"] = "relu",
        merge_tokens: Amount = 0,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.baseline = baseline
        self.hidden = hidden or hidden_width(in_dim)
        self.act = act
        self.dropout = dropout
        self.attention_dim = attention_dim
        self.attention_act = attention_act
        self.merge_tokens = merge_tokens
        if baseline not in ("abmil", "dsmil", "transmil") or act not in ("relu", "gelu"):
            raise ConfigError(
                f"mhim: baseline={baseline!r}, act={act!r}; the first is abmil, dsmil or transmil, act is relu or gelu"
            )
        self.features = nn.Linear(in_dim, self.hidden)
        self.activation = _ACTIVATIONS[act]()
        self.drop = Dropout(dropout)
        self.encoder: _Attention | Dsmil | TransMil
        if baseline == "abmil":
            self.encoder = _Attention(self.hidden, n_outputs, attention_dim=attention_dim, act=attention_act)
        elif baseline == "dsmil":
            self.encoder = Dsmil(in_dim=self.hidden, n_outputs=n_outputs, value_layer=True, prediction="mean")
        else:
            self.encoder = TransMil(in_dim=self.hidden, n_outputs=n_outputs, hidden=self.hidden, square="positions")
            self.encoder.add_module("features", nn.Identity())  # its first layer is the common one
        self.random_in_training = dropout > 0 or getattr(self.encoder, "random_in_training", False)
        if isinstance(self.encoder, MILModel):
            self.score_kinds = self.encoder.score_kinds
            self.attention_parts = self.encoder.attention_parts
            self.attention_of_classes = self.encoder.attention_of_classes
            self.order_matters = self.encoder.order_matters
            self.loops_over_bags = self.encoder.loops_over_bags
        merge_dropout = MERGE_DROPOUT if dropout > 0 else 0.0
        self.merge = _Merge(self.hidden, merge_tokens, dropout=merge_dropout) if merge_tokens else None
        _start(self)

    def forward(
        self,
        batch: BagBatch,
        *,
        generator: torch.Generator | None = None,
        forced_dropout: Tensor | None = None,
        merge_noise: Tensor | None = None,
        merge_keep: float | None = None,
    ) -> MILOutput:
        """Answer for each bag.

        forced_dropout: (total, hidden) bool, the units that dropout zeroes.  merge_noise: (total,) numbers; of each bag
        the int(n merge_keep) tiles of smallest noise stay, in the order of their noise, and the others become
        `merge_tokens` tokens behind them. Then the output, and its offsets, are of what the student sees.
        """
        hidden = self.activation(self.features(batch.features))
        hidden = self.drop(hidden, generator=generator, forced_mask=forced_dropout)
        merged = None
        if self.merge is not None and merge_noise is not None and merge_keep is not None:
            batch, hidden, merged = self.merge.shorten(batch, hidden, merge_noise, merge_keep, generator)
        output: MILOutput = self.encoder(replace(batch, features=hidden), generator=generator)
        if self.baseline == "transmil":
            output = replace(output, auxiliary=output.auxiliary | {"tiles": hidden})
        if merged is None:
            return output
        return replace(output, auxiliary=output.auxiliary | {"merged": merged})

    def difficulty(self, output: MILOutput, kind: Literal["attention", "class"]) -> Tensor:
        """What tiles are ranked by for masking, (total, m), m heads. output: of the teacher on whole bags.

        attention: attention logits; with DSMIL the greatest class score, with TransMIL the class token's row in the
        first layer.  class: the logarithm of the greatest class probability of a tile's share of the bag's feature,
        with TransMIL of what the first layer hands the class token.
        """
        if kind == "class":
            if isinstance(self.encoder, TransMil):
                shares = _shares_of_token(self.encoder, output)
            else:
                shares = output.auxiliary["class_shares"]
            return shares.double().log_softmax(dim=1).max(dim=1, keepdim=True).values
        if self.baseline == "dsmil" and output.instance_logits is not None:
            return full_precision(output.instance_logits).max(dim=1, keepdim=True).values
        if self.baseline == "transmil":
            return output.auxiliary["class_attention"]
        if output.attention_logits is None:
            raise ValueError("mhim ranks tiles by attention, and this output has none")
        return full_precision(output.attention_logits)

    def objective(
        self,
        criterion: Criterion,
        *,
        random: Share = 0.5,
        low: Share = 0.0,
        high: Share = 0.01,
        high_random: Annotated[float, Range(0, 1, without_low=True)] = 0.5,
        high_decay: bool = True,
        inverse: bool = False,
        score: Literal["attention", "class"] = "attention",
        alpha: Weight = 0.1,
        temperature: Positive = 0.1,
        momentum: Share = 0.9999,
        momentum_schedule: Literal["constant", "cosine"] = "constant",
        teacher_dropout: bool = False,
        warmup: Share = 0.2,
        merge_keep: Share = 0.9,
        merge_momentum: Share = 0.9999,
        init_from: str | None = None,
    ) -> "MhimObjective":
        """The student's two losses, and the teacher. Defaults are those of CAMELYON16 with ABMIL, v1.

        random, low, high: shares of the tiles that are hidden.  high_random: r, the share of the candidates for `high`
        that is.  high_decay: `high` falls along a cosine to 0.  inverse: hide all but those.  score: what ranks tiles,
        attention (v1) or the class (v2, not with "dsmil", which ranks by class in either).  alpha, temperature: of the
        second loss.  momentum: of the teacher, constant or rising along a cosine to 1.  warmup: share of training
        without teacher.  merge_keep: share of the visible tiles that is not merged.  merge_momentum: of the queries.
        init_from: label of the method of the same run whose trained model is the first teacher, a mhim that is plain
        throughout (warmup 1); then nothing warms up here.
        """
        masking = Masking(random=random, low=low, high=high, high_random=high_random, inverse=inverse)
        return MhimObjective(
            criterion,
            model=self,
            masking=masking,
            high_decay=high_decay,
            score=score,
            alpha=alpha,
            temperature=temperature,
            momentum=momentum,
            momentum_schedule=momentum_schedule,
            teacher_dropout=teacher_dropout,
            warmup=warmup,
            merge_keep=merge_keep,
            merge_momentum=merge_momentum,
            init_from=init_from,
        )

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights of `MHIM`, v1 or v2, student or teacher, with any of the three baselines.

        Activations, dropout and the shares of masks are not in the weights (v2's published act is "gelu").
        """
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        tensors = weights.linear("features", "feature.0" if "feature.0.*" in weights else "patch_to_emb.0")
        hidden, in_dim = tensors["features.weight"].shape
        shapes: dict[str, Any] = {"baseline": "abmil"}
        if "online_encoder.b_classifier.*" in weights:
            shapes["baseline"] = "dsmil"
            tensors |= _dsmil_tensors(weights)
            n_outputs = len(tensors["encoder.instance_head.weight"])
        else:
            if "online_encoder.norm.*" in weights:
                shapes["baseline"] = "transmil"
                tensors |= _transmil_tensors(weights, tensors["features.weight"])
            else:
                tensors |= weights.linear("encoder.inner", "online_encoder.attention.attention.0", bias=False)
                tensors |= weights.linear("encoder.weights", "online_encoder.attention.attention.2", bias=False)
                tensors |= weights.linear("encoder.head", "predictor")
                shapes["attention_dim"] = len(tensors["encoder.inner.weight"])
            n_outputs = len(tensors["encoder.head.weight"])
        if "merge.*" in weights:
            tensors |= _merge_tensors(weights)
            shapes["merge_tokens"] = len(tensors["merge.queries"])
        model = cls(in_dim=in_dim, n_outputs=n_outputs, hidden=hidden, **shapes, **what_the_shapes_do_not_tell)
        weights.load(model, tensors)
        return model


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Which tiles are hidden from the student."""

    random: float = 0.0
    low: float = 0.0
    high: float = 0.0
    high_random: float = 1.0
    inverse: bool = False

    def hidden(self, scores: Tensor, permutation: Callable[[int], Tensor]) -> Tensor:
        """(n,) bool: the tiles that are hidden; never all of them.

        scores: (n, m), one column a head; the m heads vote.  permutation: gives a random order of so many things. It is
        asked for the random mask (n), then for the high mask if high_random < 1 (its candidates).
        """
        n = len(scores)
        chosen, highest = torch.zeros(n, dtype=torch.bool, device=scores.device), None
        if self.random > 0:
            order = _voted(scores, n, largest=False)
            chosen[order[permutation(n)[: math.ceil(n * self.random)].to(order.device)]] = True
        if self.low > 0:
            chosen[_voted(scores, math.ceil(n * self.low), largest=False)] = True
        if self.high > 0:
            share, of_them = self.high / self.high_random, self.high_random
            if share > 1:
                share, of_them = 1.0, self.high
            highest = _voted(scores, math.ceil(n * share), largest=True)
            if of_them < 1:
                kept = math.ceil(len(highest) * of_them)
                highest = highest[permutation(len(highest))[:kept].to(highest.device)]
            chosen[highest] = True
        if self.inverse and chosen.any():
            return ~chosen
        if chosen.all():
            chosen[_spared(scores, highest)] = False
        return chosen


class MhimObjective(Objective):
    """The student's losses; the teacher is its state.

    teacher: a Mhim, the moving average of the model.
    """

    def __init__(
        self,
        criterion: Criterion,
        *,
        model: Mhim,
        masking: Masking,
        high_decay: bool,
        score: Literal["attention", "class"],
        alpha: float,
        temperature: float,
        momentum: float,
        momentum_schedule: Literal["constant", "cosine"],
        teacher_dropout: bool,
        warmup: float,
        merge_keep: float,
        merge_momentum: float,
        init_from: str | None,
    ) -> None:
        super().__init__()
        if score not in ("attention", "class") or momentum_schedule not in ("constant", "cosine"):
            raise ConfigError(
                f"mhim: score={score!r}, momentum_schedule={momentum_schedule!r}; the first is attention or class, the "
                f"second constant or cosine"
            )
        if score == "class" and model.baseline == "dsmil":
            raise ConfigError("mhim: score 'class' is for the baselines abmil and transmil; dsmil takes 'attention'")
        self.criterion = criterion
        self.masking = masking
        self.high_decay = high_decay
        self.score = score
        self.baseline = model.baseline
        self.alpha = alpha
        self.temperature = temperature
        self.momentum = momentum
        self.momentum_schedule = momentum_schedule
        self.teacher_dropout = teacher_dropout
        self.init_from = init_from
        self.warmup = warmup if init_from is None else 0.0
        self.merge_keep = merge_keep
        self.merge_momentum = merge_momentum
        self.teacher = copy.deepcopy(model).requires_grad_(False)
        self._momentum_now = 0.0

    def loss(
        self,
        model: MILModel,
        batch: BagBatch,
        target: Tensor,
        progress: Progress,
        *,
        forced_hidden: Tensor | None = None,
        merge_noise: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The terms bag and consistency, weighted; the first alone while warming up.

        forced_hidden: (total,) bool, the tiles that the student does not see.  merge_noise: (visible tiles,) numbers
        that choose what is merged. Both are drawn when not given, in this order, bag by bag.
        """
        if self.score == "class" or self.baseline == "dsmil":
            refuse_numbers(target, what=f"mhim: baseline {self.baseline}, score {self.score}")
        warms_up = progress.fraction < self.warmup
        self._momentum_now = 0.0 if warms_up else self.momentum_at(progress)
        seen, taught = batch, None
        if not warms_up:
            taught = self._teach(batch, progress)
            if forced_hidden is None:
                forced_hidden = self.hidden_tiles(taught, progress)
            seen = visible(batch, ~forced_hidden)
        output = self._student(model, seen, progress, merge_noise)
        terms = {"bag": self._bag_loss(output, target)}
        if taught is not None and self.alpha > 0:
            pairs = output.bag_embedding, taught.bag_embedding
            terms["consistency"] = self.alpha * consistency(*pairs, temperature=self.temperature)
        return terms

    def momentum_at(self, progress: Progress) -> float:
        """The teacher's momentum at this step."""
        if self.momentum_schedule == "constant":
            return self.momentum
        return cosine(self.momentum, 1.0, self._share(progress))

    def high_at(self, progress: Progress) -> float:
        """Share of tiles of high attention that is hidden at this step."""
        return cosine(self.masking.high, 0.0, self._share(progress)) if self.high_decay else self.masking.high

    def hidden_tiles(self, taught: MILOutput, progress: Progress) -> Tensor:
        """(total,) bool: what the student does not see, bag by bag. taught: the teacher's answer for the whole bags."""
        masking = replace(self.masking, high=self.high_at(progress))
        scores = self.teacher.difficulty(taught, self.score)

        def permutation(n: int) -> Tensor:
            return uniform((n,), progress.generator, scores).argsort()

        return torch.cat([masking.hidden(rows, permutation) for rows in split(scores, taught.offsets)])

    def start_from(self, model: MILModel, baseline: MILModel) -> None:
        """The published start: the teacher takes a trained baseline, the student its first layer.

        Raises ConfigError when the baseline is of another form.
        """
        features = {name: value for name, value in baseline.state_dict().items() if name.startswith("features.")}
        try:
            self.teacher.load_state_dict(baseline.state_dict())
            model.load_state_dict(model.state_dict() | features)
        except RuntimeError as error:
            raise ConfigError(
                f"mhim: init_from names a model that does not fit. It must be a mhim with the same params, trained "
                f"without masks (objective: {{warmup: 1}}). {error}"
            ) from error

    @torch.no_grad()
    def after_optimizer_step(self, model: MILModel, batch: BagBatch, lr: float) -> None:
        """The teacher follows: theta_t <- m theta_t + (1 - m) theta_s; while warming up it equals the student."""
        m = self._momentum_now
        teacher, student = ((*side.parameters(), *side.buffers()) for side in (self.teacher, model))
        for theirs, ours in zip(teacher, student, strict=True):  # the only buffers are the queries of the merge
            theirs.mul_(m).add_(ours, alpha=1 - m)

    def _share(self, progress: Progress) -> float:
        """Share that is done of the training after the warm-up."""
        return max(progress.fraction - self.warmup, 0.0) / max(1 - self.warmup, 1e-12)

    @torch.no_grad()
    def _teach(self, batch: BagBatch, progress: Progress) -> MILOutput:
        self.teacher.train(self.teacher_dropout)
        output: MILOutput = self.teacher(batch, generator=progress.generator if self.teacher_dropout else None)
        return output

    def _student(self, model: MILModel, batch: BagBatch, progress: Progress, merge_noise: Tensor | None) -> MILOutput:
        merge = getattr(model, "merge", None)
        if not isinstance(merge, _Merge):
            return _asked(model, batch, generator=progress.generator)
        if merge_noise is None:
            merge_noise = uniform((len(batch.features),), progress.generator, batch.features)
        output = _asked(model, batch, generator=progress.generator, merge_noise=merge_noise, merge_keep=self.merge_keep)
        merge.follow(output.auxiliary["merged"], self.merge_momentum)
        return output

    def _bag_loss(self, output: MILOutput, target: Tensor) -> Tensor:
        if "max_logits" not in output.auxiliary:
            loss: Tensor = self.criterion(output.logits, target)
            return loss
        streams = [self.criterion(output.auxiliary[name], target) for name in ("bag_logits", "max_logits")]
        return torch.stack(streams).mean()


class _Attention(nn.Module):
    """Attention w . act(V h) without biases, and a linear head."""

    def __init__(self, hidden: int, n_outputs: int, *, attention_dim: int, act: str) -> None:
        super().__init__()
        if act not in _ACTIVATIONS:
            raise ConfigError(f"mhim: attention_act={act!r}; it is one of {', '.join(_ACTIVATIONS)}")
        self.inner = nn.Linear(hidden, attention_dim, bias=False)
        self.act = _ACTIVATIONS[act]()
        self.weights = nn.Linear(attention_dim, 1, bias=False)
        self.head = nn.Linear(hidden, n_outputs)

    def forward(self, batch: BagBatch, *, generator: torch.Generator | None = None) -> MILOutput:
        """batch: its features are the output of the first layer."""
        attention_logits = self.weights(self.act(self.inner(batch.features)))
        attention = segment_softmax(attention_logits, batch.offsets)
        embedding = segment_weighted_sum(attention, batch.features, batch.offsets)
        class_logits = F.linear(batch.features, self.head.weight)
        return MILOutput(
            logits=self.head(embedding[:, 0]),
            offsets=batch.offsets,
            attention_logits=attention_logits,
            attention=attention,
            instance_logits=class_logits + self.head.bias,
            bag_embedding=embedding,
            auxiliary={"class_shares": attention * full_precision(class_logits)},
        )


class _Merge(nn.Module):
    """Global queries that pool tiles into a few tokens by attention of eight heads."""

    queries: Tensor

    def __init__(self, hidden: int, tokens: int, *, dropout: float) -> None:
        super().__init__()
        width = MERGE_HEADS * MERGE_HEAD_DIM
        limit = (6 / (3 * 16 * 16 + hidden)) ** 0.5
        self.register_buffer("queries", torch.empty(tokens, hidden).uniform_(-limit, limit))
        self.norm = nn.LayerNorm(hidden)
        self.to_query = nn.Linear(hidden, width, bias=False)
        self.to_key_value = nn.Linear(hidden, 2 * width, bias=False)
        self.out = nn.Linear(width, hidden)
        self.drop = Dropout(dropout)

    def forward(self, rows: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """rows: (n, h). Returns (tokens, h)."""
        queries = self.to_query(self.norm(self.queries.to(self.norm.weight)))
        key, value = self.to_key_value(self.norm(rows)).chunk(2, dim=1)
        query, key, value = (
            full_precision(part).reshape(len(part), MERGE_HEADS, -1).transpose(0, 1) for part in (queries, key, value)
        )
        with no_autocast(rows):
            weights = scaled_softmax(query, key, MERGE_HEAD_DIM**-0.5)
            pooled = self.drop(weights, generator=generator) @ value
        tokens: Tensor = self.drop(self.out(pooled.transpose(0, 1).flatten(1)), generator=generator)
        return tokens

    def shorten(
        self, batch: BagBatch, hidden: Tensor, noise: Tensor, keep: float, generator: torch.Generator | None
    ) -> tuple[BagBatch, Tensor, Tensor]:
        """Merge a part of each bag: the batch (its offsets alone are true), what is seen (.., h), and tokens (b, k, h).

        hidden: (total, h).  noise: (total,).  keep: share that stays; one tile at least is merged.
        """
        seen, merged = [], []
        for rows, order in zip(split(hidden, batch.offsets), split(noise, batch.offsets), strict=True):
            stays = min(int(len(rows) * keep), len(rows) - 1)
            place = order.argsort()
            merged.append(self(rows[place[stays:]], generator=generator))
            seen += [rows[place[:stays]], merged[-1].to(rows.dtype)]
        lengths = torch.tensor([len(a) + len(b) for a, b in zip(seen[::2], seen[1::2], strict=True)])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(batch.offsets.device)
        return replace(batch, offsets=offsets), torch.cat(seen), torch.stack(merged)

    @torch.no_grad()
    def follow(self, merged: Tensor, momentum: float) -> None:
        """Queries move towards the mean of what they pooled. merged: (b, tokens, h)."""
        mean = full_precision(merged).mean(dim=0).to(self.queries)
        self.queries = momentum * self.queries + (1 - momentum) * mean  # a new tensor: the old one is in the graph


def _shares_of_token(encoder: TransMil, output: MILOutput) -> Tensor:
    """(total, k) the head's answer to what each tile gives to the class token in the first layer."""
    layer = cast(NystromLayer, encoder.layers[0])
    values = layer.attention.to_qkv(layer.norm(output.auxiliary["tiles"])).chunk(3, dim=1)[2]
    weighted = output.auxiliary["class_attention"][:, :, None] * values.unflatten(1, (encoder.heads, -1))
    return F.linear(layer.attention.out(weighted.flatten(1)), encoder.head.weight)


def consistency(student: Tensor | None, teacher: Tensor | None, *, temperature: float) -> Tensor:
    """Mean of -sum softmax(F_t / temperature) log softmax(F_s). (b, m, h) both; no gradient reaches the teacher."""
    if student is None or teacher is None:
        raise ValueError("mhim compares the bags' embeddings, and an output has none")
    with no_autocast(student):
        wanted = (full_precision(teacher.detach()) / temperature).softmax(dim=-1)
        return -(wanted * full_precision(student).log_softmax(dim=-1)).sum(dim=-1).mean()


def visible(batch: BagBatch, kept: Tensor) -> BagBatch:
    """The batch with the kept tiles only, in their order. kept: (total,) bool."""
    lengths = segment_sum(kept.float(), batch.offsets).long()
    return BagBatch(
        features=batch.features[kept],
        offsets=torch.cat([batch.offsets[:1], lengths.cumsum(0)]),
        coords_l0=batch.coords_l0[kept],
        grid_xy=batch.grid_xy[kept],
        slide_index=batch.slide_index[kept],
        ids=batch.ids,
        slide_ids=batch.slide_ids,
    )


def cosine(start: float, end: float, share: float) -> float:
    """From start to end along half a cosine."""
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * share))


def _voted(scores: Tensor, k: int, *, largest: bool) -> Tensor:
    """(k,) the k greatest or smallest of one column; of several the k that stand most often among a column's k."""
    if scores.shape[1] == 1:
        return scores[:, 0].topk(k, largest=largest).indices
    votes = torch.zeros_like(scores).scatter_(0, scores.topk(k, dim=0, largest=largest).indices, 1)
    return votes.sum(dim=1).topk(k).indices


def _spared(scores: Tensor, highest: Tensor | None) -> Tensor:
    """The tile that stays when all would be hidden: the best one outside of the high mask, or of all."""
    mean = scores.mean(dim=1)
    if highest is not None and len(highest) < len(mean):
        mean = mean.index_fill(0, highest, torch.finfo(mean.dtype).min)
    return mean.argmax()


def _asked(model: MILModel, batch: BagBatch, **how: Any) -> MILOutput:
    output: MILOutput = model(batch, **how)
    return output


def _start(model: Mhim) -> None:
    """Published first weights: Xavier-normal matrices, zero biases, outside of baselines with a start of their own."""
    parts: Iterable[nn.Module | None] = [model.features, model.merge]
    if isinstance(model.encoder, _Attention):
        parts = [*parts, model.encoder]
    for module in _linear_layers(parts):
        nn.init.xavier_normal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _linear_layers(parts: Iterable[nn.Module | None]) -> Iterator[nn.Linear]:
    for part in parts:
        for module in () if part is None else part.modules():
            if isinstance(module, nn.Linear):
                yield module


def _merge_tensors(weights: OfficialWeights) -> dict[str, Tensor]:
    weights.take("merge.global_q")  # the same numbers once more
    return (
        {"merge.queries": weights.take("merge.global_q_mm").squeeze(0)}
        | weights.linear("merge.norm", "merge.norm")
        | weights.linear("merge.to_query", "merge.attn.to_q", bias=False)
        | weights.linear("merge.to_key_value", "merge.attn.to_kv", bias=False)
        | weights.linear("merge.out", "merge.attn.to_out.0")
    )


def _dsmil_tensors(weights: OfficialWeights) -> dict[str, Tensor]:
    layers = {"query.0": "b_classifier.q.0", "query.2": "b_classifier.q.2", "value.linear": "b_classifier.v.1"}
    layers |= {"instance_head": "i_classifier.0", "head": "b_classifier.fcc"}
    for name in ("predictor.weight", "predictor.bias"):  # made with every baseline, and not asked with this one
        if name in weights:
            weights.take(name)
    tensors: dict[str, Tensor] = {}
    for ours, theirs in layers.items():
        tensors |= weights.linear(f"encoder.{ours}", f"online_encoder.{theirs}")
    return tensors


def _transmil_tensors(weights: OfficialWeights, first: Tensor) -> dict[str, Tensor]:
    """The names of TransMIL, which reads them itself; its first layer is MHIM's and falls away."""
    names = {"cls_token": "cls_token", "norm.weight": "norm.weight", "norm.bias": "norm.bias"}
    for layer in ("layer1", "layer2"):
        for part in ("norm.weight", "norm.bias", "attn.to_qkv.weight", "attn.to_out.0.weight", "attn.to_out.0.bias"):
            names[f"{layer}.{part}"] = f"{layer}.{part}"
        names[f"{layer}.attn.res_conv.weight"] = f"{layer}.attn.res_conv.weight"
    for part in ("proj", "proj1", "proj2"):
        for kind in ("weight", "bias"):
            names[f"pos_layer.{part}.{kind}"] = f"pos_embedding.{part}.{kind}"
    theirs = {name: weights.take(f"online_encoder.{official}") for name, official in names.items()}
    theirs |= {f"_fc2.{kind}": weights.take(f"predictor.{kind}") for kind in ("weight", "bias")}
    theirs |= {"_fc1.0.weight": first, "_fc1.0.bias": first[:, 0]}
    inner = TransMil.from_official(theirs).state_dict()
    return {f"encoder.{name}": value for name, value in inner.items() if not name.startswith("features.")}
