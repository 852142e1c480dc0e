"""RRT-MIL (R2T): tiles are embedded anew by attention within and across regions, then pooled. Tang et al., CVPR 2024,
arXiv:2402.17228.

The n tiles stand row by row on a square, zero rows fill it up, and it is cut into R x R windows. R-MSA: multi-head
attention within each window, with EPEG, a convolution over the logits along the queries. CR-MSA: K representatives of
each window attend to those of all windows, and tiles take their share of the answer. x + Att(LN(x)) each; then a final
LayerNorm and attention pooling.
Reference code: DearCaat/RRT-MIL@7ecbdfb, `RRTMIL`.

Where published code and paper differ, and what is taken here:
- The paper speaks of regions of the slide; the code never reads coordinates, a "region" is a block of the file's
  order. order="file" is the code (and ours on files that stand in raster order); order="coords" takes each slide by
  itself and sorts its tiles by row and column first, so that shuffled files give the same answer.
- The windows of CR-MSA are always 8 x 8 in the code, whatever R is (`cross_regions`).
Differs on purpose:
- strict_mask=True hides the filling rows; the published code attends to them (the default here, for its weights).
- Windows are worked off in groups whose logits stay small in memory, and a window above `max_window` tiles is refused:
  more regions make smaller windows.
- The width of the first layer is free; the code fixes it to 512. No feed-forward layers, as in its published settings.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wsi_mil.bags import BagBatch, full_precision, no_autocast, segment_softmax, segment_weighted_sum, split
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import MILModel, MILOutput
from wsi_mil.models._layers import Dropout
from wsi_mil.models._official import OfficialWeights
from wsi_mil.models._recompute import in_pieces
from wsi_mil.models._spatial import raster_order, slide_key
from wsi_mil.settings import Amount, Count, Rate

_HELD_LOGITS = 2**25
"""Attention logits of windows that are held at once; with more, windows are computed again for the gradient."""


class Rrt(MILModel):
    """Regional re-embedding before attention pooling.

    in_dim: width of the features.  n_outputs: width of the head.  hidden: width, a multiple of `heads`, `cross_heads`.
    regions: windows along each side.  epeg: length of the convolution, odd; 0 for none.  layers: regional blocks and
    the cross-regional one.  cross_regions, cross_heads, representatives, cross_mlp: of CR-MSA.  shortcut: add the first
    embedding to the last.  pool_activation: within the pooling.  dropout: on the first embedding.  attention_dropout:
    on what attention of either kind answers.  order, strict_mask, max_window: see above.
    """

    summary = "tiles mixed within regions, then attention pooling; its scores are of mixed tiles (RRT-MIL)"
    family = "transformer, regional"
    paper = "Tang et al., CVPR 2024, arXiv:2402.17228"
    score_kinds = ("attention", "contribution")
    order_matters = True
    loops_over_bags = True

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        hidden: Count = 512,
        heads: Count = 8,
        regions: Count = 8,
        epeg: Amount = 15,
        layers: Count = 2,
        cross_regions: Count = 8,
        cross_heads: Count = 8,
        representatives: Count = 3,
        cross_mlp: bool = False,
        shortcut: bool = False,
        activation: Literal["relu", "gelu"] = "relu",
        pool_activation: Literal["tanh", "relu"] = "tanh",
        attention_dim: Count = 128,
        dropout: Rate = 0.25,
        attention_dropout: Rate = 0.1,
        order: Literal["file", "coords"] = "file",
        strict_mask: bool = False,
        max_window: Count = 4096,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.hidden, self.heads, self.regions, self.epeg, self.layers = hidden, heads, regions, epeg, layers
        self.cross_regions, self.cross_heads, self.representatives = cross_regions, cross_heads, representatives
        self.cross_mlp, self.shortcut = cross_mlp, shortcut
        self.activation, self.pool_activation = activation, pool_activation
        self.attention_dim, self.dropout, self.attention_dropout = attention_dim, dropout, attention_dropout
        self.order, self.strict_mask, self.max_window = order, strict_mask, max_window
        _check(self)
        self.random_in_training = dropout > 0 or attention_dropout > 0
        self.order_matters = order == "file"
        self.uses_positions = order == "coords"
        self.features = nn.Linear(in_dim, hidden)
        self.drop = Dropout(dropout)
        self.regional = nn.ModuleList(
            _Regional(hidden, heads, regions, epeg, max_window, strict_mask, attention_dropout)
            for _ in range(layers - 1)
        )
        self.across = _CrossRegional(
            hidden, cross_heads, cross_regions, representatives, cross_mlp, strict_mask, attention_dropout
        )
        self.norm = nn.LayerNorm(hidden)
        self.score = nn.Linear(hidden, attention_dim, bias=False)
        self.weights = nn.Linear(attention_dim, 1, bias=False)
        self.head = nn.Linear(hidden, n_outputs)
        _start(self)

    def forward(
        self,
        batch: BagBatch,
        *,
        generator: torch.Generator | None = None,
        forced_mask: Tensor | None = None,
        forced_regional_mask: Tensor | None = None,
        forced_cross_mask: Tensor | None = None,
    ) -> MILOutput:
        """Answer for each bag.

        What dropout zeroes, bool: forced_mask (total, hidden) of the first embedding, forced_regional_mask
        (layers - 1, total, hidden) of R-MSA, forced_cross_mask (b, K, windows, hidden) of CR-MSA's representatives,
        with order="coords" (slides, ...). Raises ConfigError for a bag whose windows are above `max_window` tiles.
        """
        embedded = self.features(batch.features)
        embedded = F.relu(embedded) if self.activation == "relu" else F.gelu(embedded)
        embedded = self.drop(embedded, generator=generator, forced_mask=forced_mask)
        if self.order == "coords":
            order = raster_order(batch)
            lengths = torch.unique_consecutive(slide_key(batch)[order], return_counts=True)[1]
            regional = None if forced_regional_mask is None else forced_regional_mask[:, order]
            offsets = F.pad(lengths.cumsum(0), (1, 0))
            tiles = self._embed_again(embedded[order], offsets, generator, regional, forced_cross_mask)
            tiles = torch.empty_like(tiles).index_copy(0, order, tiles)
        else:
            tiles = self._embed_again(embedded, batch.offsets, generator, forced_regional_mask, forced_cross_mask)
        mixed = self.score(tiles)
        attention_logits = self.weights(mixed.tanh() if self.pool_activation == "tanh" else mixed.relu())
        attention = segment_softmax(attention_logits, batch.offsets)
        bag = segment_weighted_sum(attention, tiles, batch.offsets)
        return MILOutput(
            logits=self.head(bag[:, 0]),
            offsets=batch.offsets,
            attention_logits=attention_logits,
            attention=attention,
            instance_logits=self.head(tiles),
            bag_embedding=bag,
            auxiliary={"embedded": embedded, "reembedded": tiles},
        )

    def _embed_again(
        self,
        embedded: Tensor,
        offsets: Tensor,
        generator: torch.Generator | None,
        regional_mask: Tensor | None,
        cross_mask: Tensor | None,
    ) -> Tensor:
        bags = []
        starts = offsets.tolist()
        for i, rows in enumerate(split(embedded, offsets)):
            tiles = rows
            for layer, block in enumerate(self.regional):
                mask = None if regional_mask is None else regional_mask[layer, starts[i] : starts[i + 1]]
                tiles = tiles + block(tiles, generator=generator, forced_mask=mask)
            mask = None if cross_mask is None else cross_mask[i]
            tiles = tiles + self.across(tiles, generator=generator, forced_mask=mask)
            bags.append(tiles + rows if self.shortcut else tiles)
        normed: Tensor = self.norm(torch.cat(bags))
        return normed

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights of `RRTMIL` with attention pooling.

        Not in the weights: regions, cross_regions, cross_heads, heads without EPEG, shortcut, activations, dropouts.
        """
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        tensors = weights.linear("features", "patch_to_emb.0") | weights.linear("norm", "online_encoder.norm")
        shapes: dict[str, Any] = {"layers": 1, "epeg": 0}
        while f"online_encoder.layers.{shapes['layers'] - 1}.*" in weights:
            i = shapes["layers"] - 1
            official, ours = f"online_encoder.layers.{i}", f"regional.{i}"
            tensors |= weights.linear(f"{ours}.norm", f"{official}.norm")
            for name in ("qkv", "proj"):
                tensors |= weights.linear(f"{ours}.attention.{name}", f"{official}.attn.attn.{name}")
            if f"{official}.attn.attn.pe.*" in weights:
                tensors |= weights.linear(f"{ours}.attention.epeg", f"{official}.attn.attn.pe")
                shapes["heads"], _, shapes["epeg"], _ = tensors[f"{ours}.attention.epeg.weight"].shape
            shapes["layers"] += 1
        tensors |= weights.linear("across.norm", "online_encoder.cr_msa.norm")
        for name in ("qkv", "proj"):
            tensors |= weights.linear(f"across.attention.{name}", f"online_encoder.cr_msa.attn.attn.{name}")
        phi = "online_encoder.cr_msa.attn.phi"
        shapes["cross_mlp"] = f"{phi}.*" in weights
        if shapes["cross_mlp"]:
            tensors |= weights.linear("across.phi.0", f"{phi}.0", bias=False)
            tensors |= weights.linear("across.phi.2", f"{phi}.2", bias=False)
            shapes["representatives"] = len(tensors["across.phi.2.weight"])
        else:
            tensors["across.phi.0.weight"] = weights.take(phi).T
            shapes["representatives"] = len(tensors["across.phi.0.weight"])
        tensors |= weights.linear("score", "pool_fn.attention.attention.0", bias=False)
        tensors |= weights.linear("weights", "pool_fn.attention.attention.2", bias=False)
        tensors |= weights.linear("head", "predictor")
        hidden, in_dim = tensors["features.weight"].shape
        n_outputs, attention_dim = len(tensors["head.weight"]), len(tensors["score.weight"])
        given = shapes | {"attention_dim": attention_dim, "hidden": hidden} | what_the_shapes_do_not_tell
        model = cls(in_dim=in_dim, n_outputs=n_outputs, **given)
        weights.load(model, tensors)
        return model


class _Square:
    """Tiles row by row on a square that is cut into regions x regions windows."""

    def __init__(self, n: int, regions: int) -> None:
        side = math.isqrt(n - 1) + 1
        side += -side % regions
        self.n, self.regions, self.window = n, regions, side // regions
        self.filling = side * side - n

    def cut(self, rows: Tensor) -> Tensor:
        """(n, c) -> (windows, window^2, c), zero rows filled in."""
        r, w = self.regions, self.window
        filled = F.pad(rows, (0, 0, 0, self.filling))
        return filled.reshape(r, w, r, w, -1).transpose(1, 2).reshape(r * r, w * w, -1)

    def join(self, windows: Tensor) -> Tensor:
        """(windows, window^2, c) -> (n, c)."""
        r, w = self.regions, self.window
        return windows.reshape(r, r, w, w, -1).transpose(1, 2).reshape(r * r * w * w, -1)[: self.n]

    def real(self, like: Tensor) -> Tensor:
        """(windows, window^2) bool: which rows are tiles."""
        return self.cut(torch.ones(self.n, 1, device=like.device))[..., 0] > 0


class _Attention(nn.Module):
    """Multi-head attention among the rows of each group, with EPEG when asked."""

    def __init__(self, hidden: int, heads: int, epeg: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.epeg = nn.Conv2d(heads, heads, (epeg, 1), padding=(epeg // 2, 0), groups=heads) if epeg else None

    def forward(self, groups: Tensor, real: Tensor | None = None) -> Tensor:
        """groups: (g, m, c).  real: (g, m) bool, the rows that may be read. Returns (g, m, c)."""
        size = max(1, _HELD_LOGITS // (self.heads * groups.shape[1] ** 2))
        if len(groups) <= size:
            return self._of_some(groups, real)

        def of_some(groups: Tensor, some: slice) -> Tensor:
            return self._of_some(groups, None if real is None else real[some])

        return in_pieces(of_some, groups, size, learned=self.parameters())

    def _of_some(self, groups: Tensor, real: Tensor | None) -> Tensor:
        query, key, value = self.qkv(groups).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        with no_autocast(groups):
            mixed = self._mix(full_precision(query), full_precision(key), full_precision(value), real)
        joined: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return joined

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None) -> Tensor:
        logits = query / query.shape[-1] ** 0.5 @ key.transpose(-2, -1)
        if real is not None:
            logits = logits.masked_fill(~real[:, None, :, None], 0)
        if self.epeg is not None:
            logits = logits + self.epeg(logits)
        if real is not None:
            logits = logits.masked_fill(~real[:, None, None], torch.finfo(logits.dtype).min)
        mixed: Tensor = logits.softmax(dim=-1) @ value
        return mixed


class _Regional(nn.Module):
    """R-MSA."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        regions: int,
        epeg: int,
        max_window: int,
        strict_mask: bool,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.regions, self.max_window, self.strict_mask = regions, max_window, strict_mask
        self.norm = nn.LayerNorm(hidden)
        self.attention = _Attention(hidden, heads, epeg)
        self.drop = Dropout(dropout)

    def forward(
        self, tiles: Tensor, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> Tensor:
        """tiles: (n, h) of one bag.  forced_mask: (n, h) bool, what dropout zeroes. Returns (n, h)."""
        square = _Square(len(tiles), self.regions)
        if square.window**2 > self.max_window:
            enough = math.ceil((math.isqrt(square.n - 1) + 1) / math.isqrt(self.max_window))
            raise ConfigError(
                f"rrt compares all tiles of a window: {square.n} tiles in {self.regions} x {self.regions} windows are "
                f"{square.window**2} a window, above max_window={self.max_window}. Use regions={enough} or more; the "
                f"cost is linear in the tiles when windows keep their size. Or use a train.tile_cap."
            )
        real = square.real(tiles) if self.strict_mask else None
        answers = square.join(self.attention(square.cut(self.norm(tiles)), real))
        dropped: Tensor = self.drop(answers, generator=generator, forced_mask=forced_mask)
        return dropped


class _CrossRegional(nn.Module):
    """CR-MSA."""

    def __init__(
        self, hidden: int, heads: int, regions: int, k: int, mlp: bool, strict_mask: bool, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.regions, self.strict_mask = regions, strict_mask
        self.norm = nn.LayerNorm(hidden)
        self.attention = _Attention(hidden, heads)
        self.drop = Dropout(dropout)
        widths = (hidden, max(hidden // 4, 1)) if mlp else (hidden,)
        layers: list[nn.Module] = [nn.Linear(a, b, bias=False) for a, b in zip(widths, (*widths[1:], k), strict=True)]
        self.phi = nn.Sequential(layers[0], nn.Tanh(), layers[1]) if mlp else nn.Sequential(*layers)

    def forward(
        self, tiles: Tensor, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> Tensor:
        """tiles: (n, h) of one bag.  forced_mask: (K, windows, h) bool, what dropout zeroes. Returns (n, h)."""
        square = _Square(len(tiles), self.regions)
        windows = square.cut(self.norm(tiles))
        logits = self.phi(windows)
        with no_autocast(tiles):
            logits, rows = full_precision(logits), full_precision(windows)
            real = square.real(tiles) if self.strict_mask else torch.ones_like(logits[..., 0], dtype=torch.bool)
            big = torch.finfo(logits.dtype).max
            low = logits.masked_fill(~real[..., None], -big)
            representatives = torch.einsum("wpk,wpc->kwc", low.softmax(dim=1), rows)
            smallest = logits.masked_fill(~real[..., None], big).amin(dim=1, keepdim=True)
            largest = low.amax(dim=1, keepdim=True)
            scaled = (logits - smallest) / (largest - smallest + 1e-8)
            shares = scaled * logits.softmax(dim=2)
        there = real.any(dim=1).expand(len(representatives), -1) if self.strict_mask else None
        answers = self.drop(self.attention(representatives, there), generator=generator, forced_mask=forced_mask)
        back = torch.einsum("kwc,wpk->wpc", answers, shares.to(answers.dtype))
        return square.join(back)


def _start(model: Rrt) -> None:
    """Published first weights: Xavier-normal matrices, zero biases; a phi of one layer spreads with K, not with h."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    if not model.cross_mlp:
        bound = 1 / math.sqrt(model.representatives)
        nn.init.uniform_(cast(nn.Linear, model.across.phi[0]).weight, -bound, bound)


def _check(model: Rrt) -> None:
    if model.hidden % model.heads or model.hidden % model.cross_heads:
        raise ConfigError(f"rrt: hidden={model.hidden} is no multiple of heads={model.heads}, {model.cross_heads}")
    if model.epeg and model.epeg % 2 == 0:
        raise ConfigError(f"rrt: epeg={model.epeg}; the convolution has an odd length, or 0 for none")
    if model.order not in ("file", "coords"):
        raise ConfigError(f"rrt: order={model.order!r}; it is file or coords")
