"""DTFD-MIL: double-tier feature distillation. Zhang et al., CVPR 2022, arXiv:2203.12081.

A bag is dealt into G pseudo-bags. Tier 1: h = ReLU(W x), gated attention within each pseudo-bag, and a linear head that
learns the bag's label. Distilled features of a pseudo-bag: its pooled vector (AFS), the tiles of greatest (MaxS), or of
greatest and least (MaxMinS), class probability softmax_c(a_n w_c . h_n). Tier 2: gated attention over the distilled
features of the bag and a linear head. Loss = mean over pseudo-bags of tier 1's + tier 2's.
Reference code: hrzhang1123/DTFD-MIL@10964f4.

Where published code and paper differ, and what is taken here:
- In the paper both losses train tier 1; in the code the gradient of tier 2's loss into tier 1 is zeroed before any
  step sees it (and its order of backward and step fails on present torch). detach=True (the default) is what the code
  does, in one backward pass; detach=False is the paper's joint objective. Either tier is a parameter group of its own.
Differs on purpose:
- The published code deals tiles at random in evaluation too, so scores change from run to run. Here training deals by
  its generator; evaluation ranks the tiles by the sum of their features and deals them in turn, whatever their order.
- Bags with fewer than G tiles make as many pseudo-bags as there are tiles; the published code fails.
- MaxS and MaxMinS rank by the last class as published with two classes; with more by the class that tier 1 gives the
  pseudo-bag. rank_by="last" is the published rule for any number, and what `from_official` sets.
- `attention` is tier 1's attention over the whole bag: it does not depend on how tiles were dealt.
- The published training clips the gradients of each module at 5; here the trainer clips all of them at its own bound.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from wsi_mil.bags import BagBatch, full_precision, segment_softmax, segment_weighted_sum, split
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import Criterion, MILModel, MILOutput, Objective, Progress, refuse_numbers
from wsi_mil.models._layers import FeatureLayer, GatedAttention, hidden_width
from wsi_mil.models._official import OfficialWeights
from wsi_mil.settings import Amount, Count, Weight

Distillation = Literal["AFS", "MaxS", "MaxMinS"]


class Dtfd(MILModel):
    """Attention within random parts of a bag, then attention over what the parts hand up.

    in_dim: width of the features.  n_outputs: width of the heads.  n_groups: G.  distillation: what a pseudo-bag hands
    up.  n_distilled: tiles that it hands up by MaxS, and twice as many by MaxMinS (published: total_instance over G).
    detach: tier 2's loss stops at the distilled features.  rank_by: the class that ranks tiles, the last one or the one
    that tier 1 gives; None takes the last of two, else the given one.  hidden: width of the first layer; None takes the
    published one for `in_dim`.  attention_dim: width of the attentions.  residual_layers: residual blocks after the
    first layer, 0 as published.
    """

    summary = "attention in pseudo-bags, then over their distilled features (DTFD-MIL)"
    family = "attention"
    paper = "Zhang et al., CVPR 2022, arXiv:2203.12081"
    score_kinds = ("attention", "probability")
    random_in_training = True

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        n_groups: Count = 4,
        distillation: Distillation = "AFS",
        n_distilled: Count = 1,
        detach: bool = True,
        rank_by: Literal["last", "given"] | None = None,
        hidden: Count | None = None,
        attention_dim: Count = 128,
        residual_layers: Amount = 0,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        if distillation not in ("AFS", "MaxS", "MaxMinS") or rank_by not in (None, "last", "given"):
            raise ConfigError(
                f"dtfd: distillation={distillation!r}, rank_by={rank_by!r}; "
                f"the first is AFS, MaxS or MaxMinS, the second last or given"
            )
        self.n_groups = n_groups
        self.distillation = distillation
        self.n_distilled = n_distilled
        self.detach = detach
        self.rank_by = rank_by
        self.hidden = hidden or hidden_width(in_dim)
        self.attention_dim = attention_dim
        self.residual_layers = residual_layers
        self.features = FeatureLayer(in_dim, self.hidden)
        self.residual = nn.Sequential(*(_ResidualBlock(self.hidden) for _ in range(residual_layers)))
        self.attention = GatedAttention(self.hidden, attention_dim)
        self.head = nn.Linear(self.hidden, n_outputs)
        self.tier2 = nn.ModuleDict(
            {
                "attention": GatedAttention(self.hidden, attention_dim),
                "head": nn.Linear(self.hidden, n_outputs),
            }
        )

    def forward(
        self, batch: BagBatch, *, generator: torch.Generator | None = None, permutation: Tensor | None = None
    ) -> MILOutput:
        """Answer for each bag.

        permutation: (total,) int64, within each bag's rows an order of 0 .. n - 1; it is cut into G runs whose lengths
        differ by one at most, longer ones first. If given it is used in either mode.
        `auxiliary`: order (total,) rows by pseudo-bag; group_offsets (g + 1,) into it and groups_per_bag (b,);
        group_attention (total,), cam (total, k) of each tile, tile by tile; distilled (t, h); group_logits (g, k).
        """
        hidden = self.residual(self.features(batch.features))
        order, sizes = self._deal(batch, generator, permutation)
        attention_logits = self.attention(hidden)
        group_offsets = _offsets([size for of_bag in sizes for size in of_bag], like=batch.offsets)
        ordered = hidden[order]
        weights = segment_softmax(attention_logits[order], group_offsets)
        pooled = segment_weighted_sum(weights, ordered, group_offsets)[:, 0]
        group_logits = self.head(pooled)
        cam = _class_activation(weights, ordered, self.head.weight)
        distilled, counts = self._distil(pooled, ordered, cam, group_logits, group_offsets)
        per_bag = [int(part.sum()) for part in torch.split(torch.tensor(counts), [len(of_bag) for of_bag in sizes])]
        logits, embedding = self._second_tier(distilled, _offsets(per_bag, like=batch.offsets))
        back = order.argsort()
        return MILOutput(
            logits=logits,
            offsets=batch.offsets,
            attention_logits=attention_logits,
            attention=segment_softmax(attention_logits, batch.offsets),
            instance_logits=self.head(hidden),
            bag_embedding=embedding,
            auxiliary={
                "order": order,
                "group_offsets": group_offsets,
                "groups_per_bag": torch.tensor([len(of_bag) for of_bag in sizes], device=order.device),
                "group_attention": weights[back, 0],
                "cam": cam[back],
                "distilled": distilled,
                "group_logits": group_logits,
            },
        )

    def objective(self, criterion: Criterion, *, first_weight: Weight = 1.0) -> "DtfdObjective":
        """Both tiers' losses. first_weight: of tier 1's."""
        return DtfdObjective(criterion, first_weight=first_weight, distillation=self.distillation)

    def _deal(
        self, batch: BagBatch, generator: torch.Generator | None, permutation: Tensor | None
    ) -> tuple[Tensor, list[list[int]]]:
        """Rows of the packed batch by pseudo-bag, (total,), and the sizes of each bag's pseudo-bags."""
        lengths = batch.lengths
        sizes = [_group_sizes(n, self.n_groups) for n in lengths]
        if permutation is not None:
            orders = list(split(permutation.to(batch.features.device), batch.offsets))
        elif self.training and generator is not None:
            orders = [torch.randperm(n, generator=generator, device=generator.device) for n in lengths]
        else:
            sums = batch.features.detach().sum(dim=1, dtype=torch.float64)
            parts = zip(split(sums, batch.offsets), sizes, strict=True)
            orders = [_in_turn(rows.argsort(stable=True), len(of_bag)) for rows, of_bag in parts]
        starts = batch.offsets[:-1]
        return torch.cat([o.to(starts.device) + s for o, s in zip(orders, starts, strict=True)]), sizes

    def _distil(
        self, pooled: Tensor, ordered: Tensor, cam: Tensor, group_logits: Tensor, group_offsets: Tensor
    ) -> tuple[Tensor, list[int]]:
        """What all pseudo-bags hand up, one after the other, (t, h), and how many rows each of them."""
        if self.distillation == "AFS":
            return (pooled.detach() if self.detach else pooled), [1] * len(pooled)
        ends = group_offsets.tolist()
        given = full_precision(group_logits.detach()).argmax(dim=1)
        rows, counts = [], []
        for g, scores in enumerate(split(cam.softmax(dim=1) if self.n_outputs > 1 else cam, group_offsets)):
            column = given[g] if self._ranks_by_given() else -1
            ranked = scores[:, column].argsort(descending=True, stable=True) + ends[g]
            best, worst = ranked[: self.n_distilled], ranked[-self.n_distilled :]
            chosen = best if self.distillation == "MaxS" else torch.cat([best, worst])
            rows.append(chosen)
            counts.append(len(chosen))
        distilled = ordered[torch.cat(rows)]
        return (distilled.detach() if self.detach else distilled), counts

    def _ranks_by_given(self) -> bool:
        return self.rank_by == "given" or (self.rank_by is None and self.n_outputs > 2)

    def _second_tier(self, distilled: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """distilled: (t, h).  offsets: (b + 1,). Returns logits (b, k) and the embedding (b, 1, h)."""
        weights = segment_softmax(self.tier2["attention"](distilled), offsets)
        embedding = segment_weighted_sum(weights, distilled, offsets)
        return self.tier2["head"](embedding[:, 0]), embedding

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights of a published checkpoint: state dicts under dim_reduction, attention, classifier, att_classifier.

        Groups, distillation and its number are not in the weights. rank_by is "last", as published, unless given.
        """
        weights = OfficialWeights(cls.__name__, _flat(state_dict), ignore=ignore)
        tensors = weights.linear("features.linear", "dim_reduction.fc1", bias=False)
        residual_layers = 0
        while (theirs := f"dim_reduction.resBlocks.{residual_layers}.block") and f"{theirs}.*" in weights:
            for i in (0, 2):
                tensors |= weights.linear(f"residual.{residual_layers}.block.{i}", f"{theirs}.{i}", bias=False)
            residual_layers += 1
        for ours, official in (("attention", "attention"), ("tier2.attention", "att_classifier.attention")):
            tensors |= weights.linear(f"{ours}.tanh", f"{official}.attention_V.0")
            tensors |= weights.linear(f"{ours}.gate", f"{official}.attention_U.0")
            tensors |= weights.linear(f"{ours}.weights", f"{official}.attention_weights")
        tensors |= weights.linear("head", "classifier.fc")
        tensors |= weights.linear("tier2.head", "att_classifier.classifier.fc")
        hidden, in_dim = tensors["features.linear.weight"].shape
        model = cls(
            in_dim=in_dim,
            n_outputs=len(tensors["head.weight"]),
            hidden=hidden,
            attention_dim=len(tensors["attention.tanh.weight"]),
            residual_layers=residual_layers,
            **({"rank_by": "last"} | what_the_shapes_do_not_tell),
        )
        weights.load(model, tensors)
        return model


class DtfdObjective(Objective):
    """The losses of both tiers, each tier a parameter group of its own."""

    def __init__(self, criterion: Criterion, *, first_weight: float, distillation: Distillation) -> None:
        super().__init__()
        self.criterion = criterion
        self.first_weight = first_weight
        self.distillation = distillation

    def loss(self, model: MILModel, batch: BagBatch, target: Tensor, progress: Progress) -> dict[str, Tensor]:
        """The terms bag (tier 2) and pseudo_bags (tier 1, the mean within each bag, then over bags)."""
        if self.distillation != "AFS":
            refuse_numbers(target, what=f"dtfd: distillation {self.distillation}")
        output = model(batch, generator=progress.generator)
        rounds = in_rounds(output.auxiliary["group_logits"], output.auxiliary["groups_per_bag"])
        each = [self.criterion(logits, target) for logits in rounds.unbind(dim=1)]
        return {
            "bag": self.criterion(output.logits, target),
            "pseudo_bags": self.first_weight * torch.stack(each).mean(),
        }

    def parameter_groups(self, model: MILModel) -> Iterable[dict[str, Any]]:
        """Tier 1 and tier 2, which the published code gives to two optimisers of the same settings."""
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        second = {name for name in trained if ".tier2." in f".{name}"}
        mine = [p for p in self.parameters() if p.requires_grad]
        return [
            {"params": [*(p for name, p in trained.items() if name not in second), *mine]},
            {"params": [p for name, p in trained.items() if name in second]},
        ]


class _ResidualBlock(nn.Module):
    """h + ReLU(W2 ReLU(W1 h)), without biases."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Linear(hidden, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, hidden, bias=False), nn.ReLU()
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: (total, h). The same shape."""
        return hidden + torch.as_tensor(self.block(hidden))


def in_rounds(group_logits: Tensor, groups_per_bag: Tensor) -> Tensor:
    """(b, r, k): in each round one pseudo-bag of every bag, all of a bag's equally often. So a criterion that compares
    bags (survival) never compares a bag with itself. group_logits: (g, k).  groups_per_bag: (b,).
    """
    turn = torch.arange(math.lcm(*groups_per_bag.tolist()), device=group_logits.device)
    starts = groups_per_bag.cumsum(0) - groups_per_bag
    return group_logits[starts[:, None] + turn % groups_per_bag[:, None]]


@torch.no_grad()
def _class_activation(weights: Tensor, hidden: Tensor, head: Tensor) -> Tensor:
    """(total, k) a_n w_c . h_n, without bias: what each tile adds to its pseudo-bag's logits."""
    return weights * full_precision(nn.functional.linear(hidden, head))


def _group_sizes(n: int, n_groups: int) -> list[int]:
    """Sizes of the parts of n tiles: at most n_groups, none empty, longer ones first."""
    n_groups = min(n_groups, n)
    return [n // n_groups + (g < n % n_groups) for g in range(n_groups)]


def _in_turn(ranked: Tensor, n_groups: int) -> Tensor:
    """Deal rows in turn into groups: those of the first group, then those of the second ..."""
    return torch.cat([ranked[g::n_groups] for g in range(n_groups)])


def _offsets(sizes: Sequence[int], *, like: Tensor) -> Tensor:
    """(len(sizes) + 1,) where segments of these sizes begin and end."""
    return torch.tensor([0, *sizes], dtype=like.dtype, device=like.device).cumsum(0)


def _flat(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint of several state dicts as one, each name with its module's in front."""
    for container in ("model", "state_dict"):
        if isinstance(state_dict.get(container), Mapping):
            return _flat(state_dict[container])
    flat: dict[str, Any] = {}
    for part, value in state_dict.items():
        if isinstance(value, Mapping):
            flat |= {f"{part}.{name.removeprefix('module.')}": tensor for name, tensor in value.items()}
        else:
            flat[part] = value
    return flat
