"""PSA-MIL: self-attention with a learned spatial decay. Peled et al., WACV 2026, arXiv:2503.16284.

Tile i attends to its K_h nearest tiles j with logits -|q_i - k_j|^2 / (2 sqrt(d)) + log(f_h(distance) + 1e-6). The
prior f_h of a head is Gaussian exp(-r^2 / 2 t^2), exponential exp(-t r) or inverse quadratic 1 / (1 + (r / t)^2); its
radius, where f_h is 1e-3, lies between 1 and 25 grid steps, starts near 7 and is learned: t = t_min +
clip(lambda, 0, 1)(t_max - t_min), K_h = round(pi radius^2), no gradient through K_h. Then attention pooling. Loss: CE
minus 0.001 times the base-2 entropy of the heads' lambda over H soft bins, so that heads look at different ranges.
Reference code: SharonPeled/PSA-MIL@a8f22f0, `SpatialMultiHeadAttentionMIL`.

Differs on purpose:
- Neighbours are found by hashing the grid (n times K); the code sorts a full n by n matrix of distances.
- Tiles equally far away are taken in raster order of the grid (`ties="grid"`), so that the order of the file does not
  matter; ties="file" takes the file's, as a stable sort in the published code does.
- Neighbours are tiles of the same slide only, also when a bag holds a patient's slides.
- lambda has a learning rate of its own (`decay_lr`, 0.01; the paper multiplies its rate by 100).
- The pooling is by attention; the code's mean and class-token poolings are left out.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from wsi_mil.bags import BagBatch, full_precision, no_autocast, segment_softmax, segment_weighted_sum
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import BagObjective, Criterion, MILModel, MILOutput, Progress
from wsi_mil.models._official import OfficialWeights
from wsi_mil.models._recompute import row_by_row
from wsi_mil.models._spatial import nearest_tiles
from wsi_mil.settings import Count, Range, Weight

Decay = Literal["gaussian", "exponential", "inverse_quadratic"]
_CLIP, _MIN_RADIUS, _MAX_RADIUS = 1e-3, 1.0, 25.0
_FIRST_RADII = 6.0, 8.0
"""Heads start evenly spaced over the middle half of the rates that belong to these."""
_BIN_WIDTH = 0.1
_HELD_VALUES = 2**22
"""Numbers of gathered neighbours that are held at once."""


class Psa(MILModel):
    """Transformer blocks that look at near tiles, as far as each head has learned, then attention pooling.

    in_dim: width of the features.  n_outputs: width of the head.  heads, head_dim: the width is their product.
    depth: number of blocks.  adapter_layers: the first layer and residual blocks behind it.  decay: shape of the prior.
    ties: which of equally far tiles come first.
    """

    summary = "heads learn how far tiles look at each other; its scores are of mixed tiles (PSA-MIL)"
    family = "transformer, spatial"
    paper = "Peled et al., WACV 2026, arXiv:2503.16284"
    score_kinds = ("attention", "contribution")
    uses_positions = True
    loops_over_bags = True

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        heads: Count = 3,
        head_dim: Count = 96,
        depth: Count = 1,
        adapter_layers: Count = 1,
        decay: Decay = "gaussian",
        ties: Literal["grid", "file"] = "grid",
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        if decay not in ("gaussian", "exponential", "inverse_quadratic") or ties not in ("grid", "file"):
            raise ConfigError(
                f"psa: decay={decay!r}, ties={ties!r}; decay is gaussian, exponential or inverse_quadratic, ties are "
                f"broken by grid or file"
            )
        self.heads, self.head_dim, self.depth, self.adapter_layers = heads, head_dim, depth, adapter_layers
        self.decay, self.ties = decay, ties
        hidden = heads * head_dim
        self.features = nn.Linear(in_dim, hidden, bias=False)
        self.adapter = nn.ModuleList(_residual(hidden) for _ in range(adapter_layers - 1))
        self.blocks = nn.ModuleList(_Block(hidden, heads, decay) for _ in range(depth))
        self.norm = nn.LayerNorm(hidden, eps=1e-6)
        self.weights = nn.Linear(hidden, 1)
        self.head = nn.Linear(hidden, n_outputs)

    def forward(
        self,
        batch: BagBatch,
        *,
        generator: torch.Generator | None = None,
        forced_neighbours: Tensor | None = None,
    ) -> MILOutput:
        """Answer for each bag.

        forced_neighbours: (total, m) rows of the packed batch in order of distance, -1 for none, m at least the number
        of neighbours of every head or that of the longest slide.
        """
        tiles = self.features(batch.features).relu()
        for layer in self.adapter:
            tiles = tiles + layer(tiles)
        neighbours = forced_neighbours
        if neighbours is None:
            most = max(max(decay.counts()) for decay in self._decays())
            neighbours = nearest_tiles(batch, min(most, max(batch.lengths)), ties=self.ties)
        for block in self.blocks:
            tiles = block(tiles, neighbours, batch.grid_xy)
        tiles = self.norm(tiles)
        attention_logits = self.weights(tiles)
        attention = segment_softmax(attention_logits, batch.offsets)
        bag = segment_weighted_sum(attention, tiles, batch.offsets)
        return MILOutput(
            logits=self.head(bag[:, 0]),
            offsets=batch.offsets,
            attention_logits=attention_logits,
            attention=attention,
            instance_logits=self.head(tiles),
            bag_embedding=bag,
            auxiliary={"diversity": torch.stack([decay.diversity() for decay in self._decays()]).mean()},
        )

    def radii(self) -> Tensor:
        """(depth, heads) how far each head looks, in grid steps."""
        return torch.stack([decay.radii() for decay in self._decays()]).detach()

    def _decays(self) -> list["_Decay"]:
        return [block.decay for block in cast(list[_Block], list(self.blocks))]

    def objective(
        self, criterion: Criterion, *, diversity_weight: Weight = 0.001, decay_lr: Annotated[float, Range(0)] = 0.01
    ) -> "PsaObjective":
        """CE minus the heads' diversity. decay_lr: learning rate of the radii."""
        return PsaObjective(criterion, diversity_weight=diversity_weight, decay_lr=decay_lr)

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights of `SpatialMultiHeadAttentionMIL` with attention pooling.

        The shape of the decay is not in them. Ties are broken as they were in training, by the order of the file.
        """
        settings: dict[str, Any] = {"ties": "file"} | what_the_shapes_do_not_tell
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        tensors = weights.linear("features", "adapter.fc1", bias=False) | weights.linear("norm", "layer_norm")
        tensors |= weights.linear("weights", "attention_pool") | weights.linear("head", "head")
        depth = residual = 0
        while f"adapter.resBlocks.{residual}.*" in weights:
            for layer in (0, 2):
                official = f"adapter.resBlocks.{residual}.block.{layer}"
                tensors |= weights.linear(f"adapter.{residual}.{layer}", official, bias=False)
            residual += 1
        while depth == 0 or f"blocks.{depth}.*" in weights:
            at = f"blocks.{depth}"
            names = {"norm1": "norm1", "norm2": "norm2", "qkv": "attn.qkv", "proj": "attn.proj"}
            for ours, official in (names | {"mlp.0": "mlp.fc1", "mlp.2": "mlp.fc2"}).items():
                tensors |= weights.linear(f"{at}.{ours}", f"{at}.{official}")
            tensors[f"{at}.decay.lambdas"] = weights.take(f"{at}.attn.decay_nn.lambda_p")
            depth += 1
        hidden, in_dim = tensors["features.weight"].shape
        heads = len(tensors["blocks.0.decay.lambdas"])
        model = cls(
            in_dim=in_dim,
            n_outputs=len(tensors["head.weight"]),
            heads=heads,
            head_dim=hidden // heads,
            depth=depth,
            adapter_layers=residual + 1,
            **settings,
        )
        weights.load(model, tensors)
        return model


class PsaObjective(BagObjective):
    """The bag loss minus the weighted diversity of the heads' ranges."""

    def __init__(self, criterion: Criterion, *, diversity_weight: float, decay_lr: float) -> None:
        super().__init__(criterion)
        self.diversity_weight = diversity_weight
        self.decay_lr = decay_lr

    def loss(self, model: MILModel, batch: BagBatch, target: Tensor, progress: Progress) -> dict[str, Tensor]:
        """The terms bag and diversity; the second is negative."""
        output = model(batch, generator=progress.generator)
        diversity = -self.diversity_weight * output.auxiliary["diversity"]
        return {"bag": self.criterion(output.logits, target), "diversity": diversity}

    def parameter_groups(self, model: MILModel) -> Iterable[dict[str, Any]]:
        """The radii by themselves, at their own learning rate."""
        ranges: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                (ranges if name.endswith("decay.lambdas") else others).append(parameter)
        return [{"params": others}, {"params": ranges, "lr": self.decay_lr, "weight_decay": 0.0}]


class _Decay(nn.Module):
    """The prior of each head and how far it reaches."""

    def __init__(self, heads: int, shape: Decay) -> None:
        super().__init__()
        self.shape = shape
        least, most = self._rates_of((_MIN_RADIUS, _MAX_RADIUS))
        low, high = self._rates_of(_FIRST_RADII)
        margin = (high - low) / (4 if heads > 1 else 2)
        first = torch.linspace(low + margin, high - margin, heads)
        self.lambdas = nn.Parameter((first - least) / (most - least))

    def rates(self) -> Tensor:
        """(heads,) t."""
        least, most = self._rates_of((_MIN_RADIUS, _MAX_RADIUS))
        return least + self.lambdas.clamp(0, 1) * (most - least)

    def _rates_of(self, radii: tuple[float, float]) -> tuple[float, float]:
        """The t of two radii, the smaller one first."""
        one, other = (self._rate_of(radius) for radius in radii)
        return min(one, other), max(one, other)

    def _rate_of(self, radius: float) -> float:
        """The t at which the prior falls to 1e-3 at `radius`."""
        if self.shape == "gaussian":
            return radius / math.sqrt(-2 * math.log(_CLIP))
        return -math.log(_CLIP) / radius if self.shape == "exponential" else radius / math.sqrt(1 / _CLIP - 1)

    def radii(self) -> Tensor:
        """(heads,) where the prior is 1e-3, in grid steps."""
        rates, unit = self.rates(), self._rate_of(1.0)
        return unit / rates if self.shape == "exponential" else rates / unit

    def counts(self) -> list[int]:
        """K of each head."""
        return [max(1, round(math.pi * radius * radius)) for radius in self.radii().tolist()]

    def log_prior(self, squares: Tensor, rate: Tensor) -> Tensor:
        """log(f + 1e-6) at these squared distances."""
        if self.shape == "gaussian":
            prior = (-squares / (2 * rate * rate)).exp()
        elif self.shape == "exponential":
            prior = (-rate * squares.sqrt()).exp()
        else:
            prior = 1 / (1 + squares / (rate * rate))
        return (prior + 1e-6).log()

    def diversity(self) -> Tensor:
        """Entropy, in bits, of the heads over as many soft bins of lambda."""
        with no_autocast(self.lambdas):
            places = self.lambdas.clamp(0, 1)
            centres = torch.linspace(0, 1, len(places), device=places.device, dtype=places.dtype)
            gaps = -(places[:, None] - centres).square() / (2 * _BIN_WIDTH**2)
            shares = gaps.softmax(dim=1).mean(dim=0)
            entropy: Tensor = torch.special.entr(shares).sum() / math.log(2)
            return entropy


class _Block(nn.Module):
    """x + attention(LN x), x + MLP(LN x)."""

    def __init__(self, hidden: int, heads: int, decay: Decay) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.decay = _Decay(heads, decay)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, tiles: Tensor, neighbours: Tensor, grid_xy: Tensor) -> Tensor:
        """tiles: (total, h).  neighbours: (total, m) rows.  grid_xy: (total, 2). Returns (total, h)."""
        query, key, value = self.qkv(self.norm1(tiles)).reshape(len(tiles), 3, self.heads, -1).unbind(dim=1)
        with no_autocast(tiles):
            query, key, value = map(full_precision, (query, key, value))
            pairs = enumerate(zip(self.decay.counts(), self.decay.rates().to(query), strict=True))
            heads = [
                self._head(query[:, h], key[:, h], value[:, h], neighbours[:, :count], grid_xy, rate)
                for h, (count, rate) in pairs
            ]
        tiles = tiles + self.proj(torch.cat(heads, dim=1))
        return row_by_row(self._feed, tiles, learned=[*self.norm2.parameters(), *self.mlp.parameters()])

    def _feed(self, tiles: Tensor) -> Tensor:
        fed: Tensor = tiles + self.mlp(self.norm2(tiles))
        return fed

    def _head(self, query: Tensor, key: Tensor, value: Tensor, neighbours: Tensor, xy: Tensor, rate: Tensor) -> Tensor:
        size = max(1, _HELD_VALUES // (neighbours.shape[1] * key.shape[1]))
        half = key.square().sum(dim=-1) / 2
        read: Tensor = _Read.apply(self._mix, size, neighbours, xy, query, key, half, value, rate)
        return read

    def _mix(
        self,
        query: Tensor,
        keys: Tensor,
        halves: Tensor,
        values: Tensor,
        rate: Tensor,
        there: Tensor,
        squares: Tensor,
    ) -> Tensor:
        """What c tiles read of K neighbours each. query: (c, d).  keys, values: (c, K, d).  halves: (c, K) |k|^2 / 2.
        there: (c, K) whether there is one.  squares: (c, K) of the distances. Returns (c, d).
        """
        near = torch.einsum("cd,ckd->ck", query, keys) - halves
        logits = near / math.sqrt(query.shape[1]) + self.decay.log_prior(squares.to(query.dtype), rate)
        weights = logits.masked_fill(~there, torch.finfo(logits.dtype).min).softmax(dim=1)
        return torch.einsum("ck,ckd->cd", weights, values)


class _Read(torch.autograd.Function):
    """`mix` for all tiles, `size` of them at a time, and once more for the gradient.

    All pieces write into the same few tensors: what they leave lying between their own would keep those of the next
    from their place in memory.
    """

    @staticmethod
    def forward(
        ctx: Any, mix: Callable[..., Tensor], size: int, neighbours: Tensor, xy: Tensor, *given: Tensor
    ) -> Tensor:
        """neighbours: (n, K) rows.  xy: (n, 2).  given: query, key (n, d), half (n,), value (n, d), rate. (n, d)."""
        ctx.mix, ctx.size = mix, size
        ctx.save_for_backward(neighbours, xy, *given)
        query, key, half, value, rate = given
        read = torch.empty_like(query)
        for some, rows, *places in _pieces(neighbours, xy, size):
            read[some] = mix(query[some], key[rows], half[rows], value[rows], rate, *places)
        return read

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        neighbours, xy, query, key, half, value, rate = ctx.saved_tensors
        sums = [torch.zeros_like(part) for part in (query, key, half, value, rate)]
        for some, rows, *places in _pieces(neighbours, xy, ctx.size):
            given = [part.detach().requires_grad_() for part in (query[some], key[rows], half[rows], value[rows], rate)]
            with torch.enable_grad(), no_autocast(query):
                read = ctx.mix(*given, *places)
            found = torch.autograd.grad(read, given, gradients[0][some])
            sums[0][some] = found[0]
            for i in (1, 2, 3):
                sums[i].index_put_((rows,), found[i], accumulate=True)
            sums[4] += found[4]
        return None, None, None, None, *sums


def _pieces(neighbours: Tensor, xy: Tensor, size: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Some tiles: which, the rows of their neighbours (0 for none), whether there is one, and distances squared."""
    for start in range(0, len(neighbours), size):
        some = slice(start, start + size)
        rows = neighbours[some].clamp(min=0)
        squares = (xy[some, None] - xy[rows]).square().sum(dim=-1)
        yield some, rows, neighbours[some] >= 0, squares


def _residual(hidden: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(hidden, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, hidden, bias=False), nn.ReLU()
    )
