"""INS: an instance classifier from contrast and prototypes. Qu et al., IEEE TCSVT 2024, arXiv:2307.02249.

Tiles of a negative bag (class 0) can only be class 0; a tile of a bag of class c is 0 or c. Each tile has a soft target
s within that set, drawn towards the class of its nearest prototype: s <- phi s + (1 - phi) e. Prototypes are moving
averages of the projections of tiles that the classifier gives to their class; a momentum copy of the network makes the
keys of a queue; loss = -mean s . log p + 0.5 contrast, contrast InfoNCE at first and supervised by pseudo labels later.
Reference code: miccaiif/INS@cd97ba2 (`INS.forward`, `partial_loss`, `SupConLoss`).

This is the form for frozen features. What the paper learns in the pixels (representation, invariance to colour and
geometry) is not there, so its end-to-end figures are no yardstick; the contrast can only re-weigh what the encoder
kept. What stays: soft targets that stand noise, relabelling by prototypes, and a probability for each tile.

Differs on purpose, where the published code is wrong:
- It reads labels of patches in training (CAMELYON16: true-negative tiles of positive slides get the target [1, 0]).
  Here the label of the bag is all there is.
- The two views of its feature form are equal (dropout that is off). Here `view` drops or disturbs features.
- Its queue starts with random rows of random labels; here a row counts once it is written. While the queue is empty the
  other keys of the step are the negatives.
- Its bag loss takes the softmax of a 512-wide mean feature; here it is the cross-entropy of the pooled tile
  probabilities, weight 0.1 (0 is a release without bag loss).
Differs on purpose, otherwise:
- phi falls with the share of training that is done, the code by epoch. The key network has no dropout.
- Targets while warming up are the bag's label; "candidates" are the initial soft targets [1/2, 1/2] (parity).
- Bags are scored by the mean of the top 1% tile probabilities (the code prints mean and maximum). With several classes
  each one but 0 is pooled, 0 is that none is seen, and the sum is made 1.
- Soft targets are kept a tile of a positive bag, by the tile's place in the grid; tiles without a place of their own by
  their number in the bag, so such bags must not be sampled.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wsi_mil.bags import Bag, BagBatch, full_precision, no_autocast, pack, segment_map, split, spread
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import Criterion, MILModel, MILOutput, Objective, Progress, instance_logits_of
from wsi_mil.models._layers import Dropout, hidden_width, normal, uniform
from wsi_mil.models._official import OfficialWeights
from wsi_mil.settings import Count, Positive, Range, Rate, Share, Weight

SomeShare = Annotated[float, Range(0, 1, without_low=True)]
"""A part of a whole that is not nothing."""
Pool = Literal["top_mean", "mean", "max", "noisy_or", "linear_softmax"]
_POOLS = ("top_mean", "mean", "max", "noisy_or", "linear_softmax")
_TRUNKS = ("mlp", "linear", "none")
_NOT_THE_NETWORK = (
    "queue",
    "queue_*",
    "prototypes",
    "encoder_?.prototypes",
    "mlp.*",
    "bag_classifier.*",
    "model_teacherHead*",
)
"""Published keys beside the network of tiles."""


class Ins(MILModel):
    """A classifier of tiles; class 0 is background (nothing found), the bag's score is pooled from its tiles.

    in_dim: width of the features.  n_outputs: classes, the first one background.  trunk: LayerNorm, Linear, GELU and
    dropout; a Linear layer alone; or nothing.  hidden: width behind it; None takes the usual one for `in_dim`.
    projection_dim: width of the projections that are contrasted.  dropout: of the trunk.  pool: from tiles to the bag.
    top_share: share of tiles that "top_mean" averages, at least one tile.
    """

    summary = "tile classifier with prototypes, momentum contrast and soft targets (INS, frozen features)"
    family = "instance"
    paper = "Qu et al., IEEE TCSVT 2024, arXiv:2307.02249"
    score_kinds = ("probability",)
    classes_only = True

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        trunk: Literal["mlp", "linear", "none"] = "mlp",
        hidden: Count | None = None,
        projection_dim: Count = 128,
        dropout: Rate = 0.1,
        pool: Pool = "top_mean",
        top_share: SomeShare = 0.01,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        if trunk not in _TRUNKS or pool not in _POOLS or n_outputs < 2:
            raise ConfigError(
                f"ins: trunk={trunk!r}, pool={pool!r}, n_outputs={n_outputs}; trunk is one of {', '.join(_TRUNKS)}, "
                f"pool one of {', '.join(_POOLS)}, outputs 2 or more"
            )
        self.trunk = trunk
        self.hidden = in_dim if trunk == "none" else hidden or hidden_width(in_dim)
        self.projection_dim = projection_dim
        self.dropout = dropout if trunk == "mlp" else 0.0
        self.pool = pool
        self.top_share = top_share
        self.random_in_training = self.dropout > 0
        self.norm = nn.LayerNorm(in_dim) if trunk == "mlp" else nn.Identity()
        self.linear = nn.Identity() if trunk == "none" else nn.Linear(in_dim, self.hidden)
        self.act = nn.GELU() if trunk == "mlp" else nn.Identity()
        self.drop = Dropout(self.dropout)
        self.classifier = nn.Linear(self.hidden, n_outputs)
        self.projector = nn.Sequential(
            nn.Linear(self.hidden, self.hidden), nn.ReLU(), nn.Linear(self.hidden, projection_dim)
        )

    def forward(
        self, batch: BagBatch, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> MILOutput:
        """Answer for each bag; logits are logarithms of probabilities. forced_mask: (total, hidden) bool, dropout's."""
        hidden = self.drop(self.encode(batch.features), generator=generator, forced_mask=forced_mask)
        instance_logits = full_precision(self.classifier(hidden))
        with no_autocast(instance_logits):
            logits = segment_map(self._pooled, instance_logits.log_softmax(dim=1), batch.offsets)
        return MILOutput(
            logits=logits,
            offsets=batch.offsets,
            instance_logits=instance_logits,
            auxiliary={"projection": self.project(hidden)},
        )

    def encode(self, features: Tensor) -> Tensor:
        """features: (total, d). Returns (total, h), before dropout."""
        hidden: Tensor = self.act(self.linear(self.norm(features)))
        return hidden

    def project(self, hidden: Tensor) -> Tensor:
        """hidden: (total, h). Returns (total, projection_dim) of length 1."""
        return F.normalize(full_precision(self.projector(hidden)), dim=1)

    def _pooled(self, log_p: Tensor) -> Tensor:
        """log_p: (n, k) logarithms of tile probabilities. Returns (k,): of background, then of each other class."""
        yes, no = [], []
        for c in range(1, log_p.shape[1]):
            others = torch.cat([log_p[:, :c], log_p[:, c + 1 :]], dim=1).logsumexp(dim=1)
            is_seen, is_not = self._pool_class(log_p[:, c], others)
            yes.append(is_seen)
            no.append(is_not)
        return torch.stack([torch.stack(no).sum(), *yes])

    def _pool_class(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """log p and log(1 - p) of each tile, (n,) both. Returns the same two of the bag."""
        if self.pool == "noisy_or":
            none = log_q.sum().clamp(max=-torch.finfo(log_q.dtype).tiny)
            return (-none.expm1()).log(), none
        if self.pool == "linear_softmax":
            total = log_p.logsumexp(dim=0)
            return (2 * log_p).logsumexp(dim=0) - total, (log_p + log_q).logsumexp(dim=0) - total
        share = {"mean": 1.0, "max": 0.0}.get(self.pool, self.top_share)
        k = max(1, math.ceil(share * len(log_p)))
        top = log_p.topk(k).indices
        return log_p[top].logsumexp(dim=0) - math.log(k), log_q[top].logsumexp(dim=0) - math.log(k)

    def objective(
        self,
        criterion: Criterion,
        *,
        tiles_per_bag: Count | None = 64,
        queue: Count = 8192,
        key_momentum: Share = 0.999,
        prototype_momentum: Share = 0.9,
        temperature: Positive = 0.07,
        phi: tuple[Share, Share] = (0.95, 0.8),
        contrast_weight: Weight = 0.5,
        bag_weight: Weight = 0.1,
        warmup: Share = 0.04,
        warmup_targets: Literal["bag", "candidates"] = "bag",
        view: Literal["dropout", "noise", "none"] = "dropout",
        view_strength: tuple[Weight, Weight] = (0.1, 0.2),
        background: bool = True,
    ) -> "InsObjective":
        """Soft targets, contrast, and a bound from the bag's label, with their state.

        tiles_per_bag: tiles drawn a visit.  queue: keys that are kept.  key_momentum: of the key network.
        prototype_momentum: of the prototypes.  temperature: of the contrast.  phi: share of the old soft target, at the
        start and at the end.  contrast_weight, bag_weight: of these terms.  warmup: share of training with InfoNCE and
        `warmup_targets`.  view: what makes the two views: dropped features, Gaussian noise in units of each feature's
        spread, or nothing.  view_strength: rate or noise of the weak and the strong view.  background: whether class 0
        has nothing to find; False gives each tile its bag's label, the naive way.
        """
        return InsObjective(
            criterion,
            model=self,
            tiles_per_bag=tiles_per_bag,
            queue=queue,
            key_momentum=key_momentum,
            prototype_momentum=prototype_momentum,
            temperature=temperature,
            phi=phi,
            contrast_weight=contrast_weight,
            bag_weight=bag_weight,
            warmup=warmup,
            warmup_targets=warmup_targets,
            view=view,
            view_strength=view_strength,
            background=background,
        )

    @classmethod
    def from_official(
        cls,
        state_dict: Mapping[str, Any],
        *,
        ignore: Sequence[str] = (),
        branch: Literal["q", "k"] = "q",
        **what_the_shapes_do_not_tell: Any,
    ) -> Self:
        """Weights of one branch of `INS`: q, or the momentum branch k. The encoder is one Linear layer or nothing.

        Left out without asking: the state of training (queue, prototypes), which the objective holds, and heads of
        bags that nothing calls on tiles. Name a convolutional encoder's keys in `ignore`.
        """
        other = "k" if branch == "q" else "q"
        weights = OfficialWeights(cls.__name__, state_dict, ignore=(*ignore, f"encoder_{other}.*", *_NOT_THE_NETWORK))
        prefix = f"encoder_{branch}"
        tensors = weights.linear("classifier", f"{prefix}.fc")
        tensors |= weights.linear("projector.0", f"{prefix}.head.0") | weights.linear("projector.2", f"{prefix}.head.2")
        has_trunk = any(f"{prefix}.encoder.{part}" in weights for part in ("weight", "bias"))
        if has_trunk:
            tensors |= weights.linear("linear", f"{prefix}.encoder")
        hidden = tensors["classifier.weight"].shape[1]
        model = cls(
            in_dim=tensors["linear.weight"].shape[1] if has_trunk else hidden,
            n_outputs=len(tensors["classifier.weight"]),
            trunk="linear" if has_trunk else "none",
            hidden=hidden,
            projection_dim=len(tensors["projector.2.weight"]),
            **what_the_shapes_do_not_tell,
        )
        weights.load(model, tensors)
        return model


class InsObjective(Objective):
    """What INS minimises, for one model, and its state: key network, queue, prototypes and soft targets.

    key: the momentum network.  queue: (q, p) keys.  queue_labels: (q,) their pseudo labels, -1 where nothing was
    written.  pointer: the next row.  prototypes: (k, p).  targets: the soft targets of tiles of positive bags.
    """

    needs_both_classes = True
    per_bag_state = True
    queue: Tensor
    queue_labels: Tensor
    pointer: Tensor
    prototypes: Tensor

    def __init__(
        self,
        criterion: Criterion,
        *,
        model: Ins,
        tiles_per_bag: int | None,
        queue: int,
        key_momentum: float,
        prototype_momentum: float,
        temperature: float,
        phi: tuple[float, float],
        contrast_weight: float,
        bag_weight: float,
        warmup: float,
        warmup_targets: Literal["bag", "candidates"],
        view: Literal["dropout", "noise", "none"],
        view_strength: tuple[float, float],
        background: bool,
    ) -> None:
        super().__init__()
        if warmup_targets not in ("bag", "candidates") or view not in ("dropout", "noise", "none"):
            raise ConfigError(
                f"ins: warmup_targets={warmup_targets!r}, view={view!r}; targets are bag or candidates, the view is "
                f"dropout, noise or none"
            )
        if view == "dropout" and max(view_strength) >= 1:
            raise ConfigError(f"ins: view_strength={view_strength}; with view=dropout the rates are below 1")
        self.criterion = criterion
        self.tiles_per_bag = tiles_per_bag
        self.key_momentum = key_momentum
        self.prototype_momentum = prototype_momentum
        self.temperature = temperature
        self.phi = phi
        self.contrast_weight = contrast_weight
        self.bag_weight = bag_weight
        self.warmup = warmup
        self.warmup_targets = warmup_targets
        self.view = view
        self.view_strength = view_strength
        self.background = background
        self.key = copy.deepcopy(model).requires_grad_(False)
        like = model.classifier.weight
        self.register_buffer("queue", like.new_zeros(queue, model.projection_dim).detach())
        self.register_buffer("queue_labels", torch.full((queue,), -1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))
        self.register_buffer("prototypes", like.new_zeros(model.n_outputs, model.projection_dim).detach())
        self.targets = SoftTargets()

    def loss(
        self,
        model: MILModel,
        batch: BagBatch,
        target: Tensor,
        progress: Progress,
        *,
        views: tuple[Tensor, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """The terms tiles, contrast and bag, weighted. views: (total, d) weak and strong; drawn when not given."""
        if views is None:
            batch = self._sampled(batch, progress.generator)
            views = self._views(batch.features, progress.generator)
        weak, strong = views
        output = model(replace(batch, features=weak), generator=progress.generator)
        logits, query = full_precision(instance_logits_of(model, output)), output.auxiliary["projection"]
        with no_autocast(query):
            candidates = spread(self._candidates(target, logits.shape[1]), batch.offsets)
            labels = logits.detach().masked_fill(candidates == 0, -math.inf).argmax(dim=1)
            nearest = (self.prototype_scores(query.detach()) * candidates).argmax(dim=1)
            self._move_prototypes(query.detach(), labels)
            keys = self._keys(model, replace(batch, features=strong))
            contrast = self._contrast(query, keys, labels, progress)
            self._enqueue(keys, labels)
            soft = self._soft_targets(batch, target, nearest, progress).to(logits)
            terms = {
                "tiles": -(soft * logits.log_softmax(dim=1)).sum(dim=1).mean(),
                "contrast": self.contrast_weight * contrast,
            }
        if self.bag_weight > 0:
            terms["bag"] = self.bag_weight * self.criterion(output.logits, target)
        return terms

    def phi_at(self, progress: Progress) -> float:
        """Share of the old soft target at this step."""
        return self.phi[0] + (self.phi[1] - self.phi[0]) * progress.fraction

    @torch.no_grad()
    def prototype_scores(self, projections: Tensor) -> Tensor:
        """(total, k) softmax of the products with the prototypes. projections: (total, p)."""
        return (projections @ self.prototypes.T.to(projections)).softmax(dim=1)

    def _sampled(self, batch: BagBatch, generator: torch.Generator) -> BagBatch:
        """At most `tiles_per_bag` tiles a bag, in their order. Nothing is drawn when training did it already."""
        cap = self.tiles_per_bag
        if cap is None or max(batch.lengths) <= cap:
            return batch

        def some(bag: Bag) -> Bag:
            order = uniform((len(bag),), generator, batch.offsets).argsort()
            return bag.take(order[:cap].sort().values)

        return pack([some(bag) for bag in batch.bags()]).to(batch.features.device)

    def _views(self, features: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The weak and the strong view, drawn in this order."""
        if self.view == "none":
            return features, features
        shape = tuple(features.shape)
        if self.view == "dropout":
            views = [features * (uniform(shape, generator, features) >= p) / (1 - p) for p in self.view_strength]
        else:
            unit = full_precision(features).std(dim=0, correction=0).to(features)
            views = [features + s * unit * normal(shape, generator, features) for s in self.view_strength]
        return views[0], views[1]

    def _candidates(self, target: Tensor, n_classes: int) -> Tensor:
        """(b, k) the classes that a tile of each bag may have, 1 or 0."""
        candidates = F.one_hot(target, n_classes)
        if self.background:
            candidates[:, 0] = 1
        return candidates

    @torch.no_grad()
    def _move_prototypes(self, query: Tensor, labels: Tensor) -> None:
        """mu_c <- m mu_c + (1 - m) q for one tile after the other, in closed form; then to length 1."""
        m = self.prototype_momentum
        members = F.one_hot(labels, len(self.prototypes)).to(query)
        later = members.sum(dim=0) - members.cumsum(dim=0)
        weights = members * (1 - m) * m**later
        moved = m ** members.sum(dim=0)[:, None] * self.prototypes.to(query) + weights.T @ query
        self.prototypes.copy_(F.normalize(moved, dim=1))

    @torch.no_grad()
    def _keys(self, model: MILModel, batch: BagBatch) -> Tensor:
        """The key network moves towards the model, then projects the tiles. Returns (total, p).

        It is asked as a whole, so that a plug-in that alters what the model sees alters what it sees as well.
        """
        for ours, theirs in zip(self.key.parameters(), model.parameters(), strict=True):
            ours.mul_(self.key_momentum).add_(theirs, alpha=1 - self.key_momentum)
        self.key.eval()
        answer: MILOutput = self.key(replace(batch, features=batch.features.to(self.queue.dtype)))
        return answer.auxiliary["projection"]

    def _contrast(self, query: Tensor, keys: Tensor, labels: Tensor, progress: Progress) -> Tensor:
        written = self.queue_labels >= 0
        queue, queue_labels = self.queue[written].to(query), self.queue_labels[written]
        if progress.fraction < self.warmup:
            return info_nce(query, keys, queue, self.temperature)
        everything, all_labels = torch.cat([query, keys, queue]), torch.cat([labels, labels, queue_labels])
        return supervised_contrast(query, labels, everything, all_labels, self.temperature)

    @torch.no_grad()
    def _enqueue(self, keys: Tensor, labels: Tensor) -> None:
        """Write the last keys that fit, behind those written before, around the end if need be."""
        size = len(self.queue)
        rows = (self.pointer + torch.arange(len(keys), device=keys.device))[-size:] % size
        self.queue[rows] = keys[-size:].to(self.queue)
        self.queue_labels[rows] = labels[-size:]
        self.pointer.add_(len(keys)).remainder_(size)

    @torch.no_grad()
    def _soft_targets(self, batch: BagBatch, target: Tensor, nearest: Tensor, progress: Progress) -> Tensor:
        """(total, k) what each tile should be; rows sum to 1, rows of background bags are [1, 0, ..]."""
        n_classes = len(self.prototypes)
        warming_up = progress.fraction < self.warmup
        naive = F.one_hot(target, n_classes).to(self.prototypes.dtype)
        if not self.background or (warming_up and self.warmup_targets == "bag"):
            return spread(naive, batch.offsets)
        bags = list(zip(batch.bags(), target.tolist(), split(nearest, batch.offsets), strict=True))
        if not warming_up:
            self._move_targets(bags, self.phi_at(progress))
        rows = []
        for bag, label, _ in bags:
            soft = self.prototypes.new_zeros(len(bag), n_classes)
            share = self.targets.of(bag).to(soft) if label else soft[:, 0]
            soft[:, label] += share
            soft[:, 0] += 1 - share
            rows.append(soft)
        return torch.cat(rows)

    def _move_targets(self, bags: Sequence[tuple[Bag, int, Tensor]], phi: float) -> None:
        """Each tile of a positive bag towards its nearest prototype. bags: with their label and, (n,), what is nearest.

        All are read before any is written, so that a bag that stands twice in a step moves once, as published.
        """
        moved = [
            (bag, phi * self.targets.of(bag) + (1 - phi) * (near == label).double().cpu())
            for bag, label, near in bags
            if label
        ]
        for bag, share in moved:
            self.targets.put(bag, share.to(self.prototypes.dtype))

    def get_extra_state(self) -> dict[str, Any]:
        """The soft targets, for the checkpoint."""
        return {"targets": self.targets.state()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take the soft targets of a checkpoint."""
        self.targets = SoftTargets(state["targets"])


class SoftTargets:
    """One number a tile: how much its soft target lies on the bag's class, the rest being background. 1/2 at first.

    Kept on the CPU by the bag's id and the tile's place (slide and grid). Bags in which places repeat are kept by row.
    """

    def __init__(self, state: Mapping[str, Sequence[Tensor]] | None = None) -> None:
        self._known = {name: (places, shares) for name, (places, shares) in (state or {}).items()}

    def of(self, bag: Bag) -> Tensor:
        """(n,) the share of each tile."""
        shares = torch.full((len(bag),), 0.5, dtype=torch.float64)
        if bag.id not in self._known:
            return shares
        places, known = self._known[bag.id]
        wanted = _places(bag)
        at = torch.searchsorted(places, wanted).clamp(max=len(places) - 1)
        return torch.where(places[at] == wanted, known[at].double(), shares)

    def put(self, bag: Bag, shares: Tensor) -> None:
        """Keep new shares. shares: (n,)."""
        new, order = _places(bag).sort()
        values = shares.cpu()[order]
        if bag.id in self._known:
            old, known = self._known[bag.id]
            stay = ~torch.isin(old, new)
            new, order = torch.cat([old[stay], new]).sort()
            values = torch.cat([known[stay], values])[order]
        self._known[bag.id] = (new, values)

    def state(self) -> dict[str, list[Tensor]]:
        """Everything, as tensors."""
        return {name: list(kept) for name, kept in self._known.items()}


def info_nce(query: Tensor, keys: Tensor, queue: Tensor, temperature: float) -> Tensor:
    """Mean of -log softmax of q . k against the queue; against the other keys where the queue is empty. (n, p) all."""
    own = (query * keys).sum(dim=1, keepdim=True)
    if len(queue):
        others = query @ queue.T
    else:
        others = query @ keys.T
        itself = torch.eye(len(query), dtype=torch.bool, device=query.device)
        others = others.masked_fill(itself, torch.finfo(others.dtype).min)
    logits = torch.cat([own, others], dim=1) / temperature
    return (logits.logsumexp(dim=1) - logits[:, 0]).mean()


def supervised_contrast(
    query: Tensor, labels: Tensor, everything: Tensor, all_labels: Tensor, temperature: float
) -> Tensor:
    """Mean over queries of -mean over positives of log softmax. Positives share the label; a query is not its own.

    query: (n, p).  everything: (m, p), its first n rows the queries again.
    """
    logits = query @ everything.T / temperature
    itself = torch.zeros_like(logits, dtype=torch.bool)
    itself.fill_diagonal_(True)
    log_p = logits - logits.masked_fill(itself, torch.finfo(logits.dtype).min).logsumexp(dim=1, keepdim=True)
    positive = (labels[:, None] == all_labels) & ~itself
    return -(torch.where(positive, log_p, 0).sum(dim=1) / positive.sum(dim=1)).mean()


def _places(bag: Bag) -> Tensor:
    """(n,) one number a tile, made of slide and grid; its row when two tiles have the same.

    The number must not depend on which tiles were sampled, so it is not counted from the bag's own extent: 24 bits for
    each axis of the grid (16 million tiles) and the rest for the slide.
    """
    slide, grid = bag.slide_index.cpu().to(torch.int64), bag.grid_xy.cpu().to(torch.int64)
    column, row = (grid & (2**24 - 1)).T  # the mask keeps a negative place out of the other bits
    places = (slide << 48) | (row << 24) | column
    return places if len(torch.unique(places)) == len(places) else torch.arange(len(places))
