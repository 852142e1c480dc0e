"""Which tiles are neighbours or nearest on the grid, and smoothing over them. Positions are hashed; nothing is n by n.

The Sm operator: Castro-Macias et al., NeurIPS 2024, arXiv:2410.03276. With the normalised adjacency A of the tiles,
Sm(U) minimises |G - U|^2 plus gamma times the Dirichlet energy of G. Exact: ((1 + gamma) I - gamma A) G = U.
Iterative: G = alpha A G + (1 - alpha) U, from G = U, alpha = gamma / (1 + gamma).
Reference code: Franblueee/torchmil@a49f95d.

Where published code and paper differ: the iterative form of the code mixes with 1 / (1 + gamma), so that a wish of
alpha = 0.9 gets 0.1. Here alpha is the paper's; legacy_torchmil_alpha=True gives the code's.
Differs on purpose:
- gamma enters as its absolute value; the code leaves it unbounded, and a negative one blows values up.
- A tile without neighbours is its own neighbour and stays as it is; the code shrinks it by 1 - alpha.
- The exact form is solved by conjugate gradients in fp64, with the implicit gradient; the code inverts n by n.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from wsi_mil.bags import BagBatch, full_precision, no_autocast
from wsi_mil.errors import ConfigError
from wsi_mil.settings import Count, Range, Rate

Radius = Annotated[float, Range(1)]
"""How many grid steps neighbours lie apart at most; below 1 there are none."""
_TOLERANCE = 1e-12
_MAX_ITERATIONS = 1000
_HELD = 2**22
"""Comparisons of tiles, or cells of a map, that are held at once."""
_SMOOTHED = 2**24
"""Values that are smoothed at once; with fewer, the sparse product takes up to three times as long."""


def bag_index(batch: BagBatch) -> Tensor:
    """(total,) which bag of the batch a tile is in."""
    return torch.arange(len(batch), device=batch.offsets.device).repeat_interleave(batch.offsets.diff())


def slide_key(batch: BagBatch) -> Tensor:
    """(total,) a number for each slide of each bag; tiles of different slides are never neighbours."""
    return bag_index(batch) * (batch.slide_index.max() + 1) + batch.slide_index


def raster_order(batch: BagBatch) -> Tensor:
    """(total,) rows sorted by slide, then row and column of the grid; equal places keep their order."""
    order = batch.grid_xy[:, 0].argsort(stable=True)
    order = order[batch.grid_xy[order, 1].argsort(stable=True)]
    return order[slide_key(batch)[order].argsort(stable=True)]


def tile_edges(batch: BagBatch, radius: float) -> Tensor:
    """(2, e) ordered pairs of different tiles of one slide that lie at most `radius` grid steps apart.

    Both directions are there. Tiles at the same place are not neighbours of each other.
    """
    reach = int(radius)
    xy = (batch.grid_xy - batch.grid_xy.amin(dim=0)).to(torch.int64) + reach
    width, height = (xy.amax(dim=0) + reach + 1).tolist()
    keys = (slide_key(batch) * height + xy[:, 1]) * width + xy[:, 0]
    ordered, rows = keys.sort(stable=True)
    steps = range(-reach, reach + 1)
    found = []
    for dx, dy in ((dx, dy) for dx in steps for dy in steps if 0 < dx * dx + dy * dy <= radius * radius):
        wanted = keys + dy * width + dx
        first = torch.searchsorted(ordered, wanted)
        count = torch.searchsorted(ordered, wanted, right=True) - first
        sources = torch.arange(len(keys), device=keys.device).repeat_interleave(count)
        within = torch.arange(len(sources), device=keys.device) - (count.cumsum(0) - count)[sources]
        found.append(torch.stack([sources, rows[first[sources] + within]]))
    return torch.cat(found, dim=1) if found else keys.new_zeros((2, 0))


def adjacency(batch: BagBatch, radius: float, *, normalise: Literal["symmetric", "row"] = "symmetric") -> Tensor:
    """Sparse (total, total), fp32: weights of neighbours, 1 / sqrt(d_i d_j) or 1 / d_i. Lone tiles have a loop.

    Raises ConfigError when the grid steps of a batch are no whole numbers.
    """
    if batch.grid_xy.is_floating_point():
        raise ConfigError("neighbours are sought on the integer grid of tiles; grid_xy holds fractions")
    total = len(batch.features)
    sources, targets = tile_edges(batch, radius)
    degree = torch.bincount(sources, minlength=total)
    lone = (degree == 0).nonzero()[:, 0]
    edges = torch.cat([torch.stack([sources, targets]), lone.repeat(2, 1)], dim=1)
    degree = degree.clamp(min=1).to(torch.float32)
    sources, targets = degree[edges]
    weights = (sources * targets).rsqrt() if normalise == "symmetric" else 1 / sources
    return torch.sparse_coo_tensor(edges, weights, (total, total), check_invariants=False).coalesce()


class Smoothing(nn.Module):
    """The Sm operator.

    alpha: strength from 0 (nothing) to below 1; None learns it, from 0.5.  mode: iterate or solve exactly.  steps: T of
    the iteration; its error falls as alpha^T.  legacy_torchmil_alpha: the iteration mixes with 1 - alpha.
    """

    def __init__(
        self,
        *,
        alpha: Rate | None = None,
        mode: Literal["iterative", "exact"] = "iterative",
        steps: Count = 10,
        legacy_torchmil_alpha: bool = False,
    ) -> None:
        super().__init__()
        if mode not in ("iterative", "exact"):
            raise ConfigError(f"smoothing: mode={mode!r}; it is iterative or exact")
        self.alpha = alpha
        self.mode = mode
        self.steps = steps
        self.legacy_torchmil_alpha = legacy_torchmil_alpha
        self.coefficient = nn.Parameter(torch.ones(())) if alpha is None else None

    @property
    def gamma(self) -> Tensor:
        """Weight of the Dirichlet energy, at least 0."""
        if self.coefficient is not None:
            return self.coefficient.abs()
        assert self.alpha is not None
        return torch.tensor(self.alpha / (1 - self.alpha), dtype=torch.float64)

    @property
    def effective_alpha(self) -> Tensor:
        """What the values of neighbours are mixed in with."""
        if self.legacy_torchmil_alpha and self.mode == "iterative":
            return 1 / (1 + self.gamma)
        return self.gamma / (1 + self.gamma)

    def forward(self, values: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        """values: (total, w).  weights: (total, total) normalised adjacency, coalesced or dense. Returns (total, w).

        Neither bags nor columns meet: bags are smoothed one after the other, which keeps a short one in the processor's
        cache, and long ones some columns at a time. No step of them is kept.
        """
        values = full_precision(values)
        with no_autocast(values):
            if self.mode == "exact":
                smooth: Tensor = _Solve.apply(values, self.gamma.to(values), weights.to(torch.float64), offsets)
            else:
                alpha = self.effective_alpha.to(values)
                smooth = _Iterate.apply(values, alpha, weights.to(values.dtype), offsets, self.steps)
            return smooth


class _Iterate(torch.autograd.Function):
    """G_T = (1 - alpha)(1 + alpha A + ... + (alpha A)^(T - 1)) U + (alpha A)^T U, a polynomial in alpha and in A."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, alpha: Tensor, weights: Tensor, offsets: Tensor, steps: int) -> Tensor:
        ctx.save_for_backward(values, alpha, weights, offsets)
        ctx.steps = steps
        found = torch.empty_like(values)
        for rows, own in _blocks(weights, offsets):
            smooth = partial(_iterate, alpha=float(alpha), weights=own, steps=steps)
            _by_columns(smooth, values[rows], found[rows])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (values, alpha, weights, offsets), steps, found = ctx.saved_tensors, ctx.steps, gradients[0]
        rate, of_values, of_alpha = float(alpha), None, None
        if ctx.needs_input_grad[0]:
            of_values = torch.empty_like(found)
            for rows, own in _blocks(weights, offsets):
                smooth = partial(_iterate, alpha=rate, weights=own.t(), steps=steps)
                _by_columns(smooth, found[rows], of_values[rows])
        if ctx.needs_input_grad[1]:
            # derivatives of the coefficients by alpha: A^t has (1 - alpha) alpha^t for t < T, A^T has alpha^T
            slopes = [t * rate ** max(t - 1, 0) - (t + 1) * rate**t for t in range(steps)]
            slopes.append(steps * rate ** (steps - 1))
            total = torch.zeros((), dtype=torch.float64, device=alpha.device)
            for rows, own in _blocks(weights, offsets):
                for some in _columns(values[rows]):
                    power, wanted = values[rows, some].contiguous(), found[rows, some]
                    for t, slope in enumerate(slopes):
                        power = own @ power if t else power
                        total += slope * (power * wanted).sum(dtype=torch.float64)
            of_alpha = total.to(alpha.dtype)
        return of_values, of_alpha, None, None, None


def _blocks(weights: Tensor, offsets: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The rows of each bag, and the part of (total, total) weights, sparse or dense, that lies between them."""
    bounds = offsets.tolist()
    if len(bounds) == 2:
        yield slice(0, bounds[1]), weights
        return
    if not weights.is_sparse:
        for start, end in pairwise(bounds):
            yield slice(start, end), weights[start:end, start:end]
        return
    edges, values = weights.indices(), weights.values()  # sorted by row, so a bag's lie together
    places = torch.searchsorted(edges[0].contiguous(), offsets).tolist()
    for (start, end), (first, last) in zip(pairwise(bounds), pairwise(places), strict=True):
        own, size = edges[:, first:last] - start, (end - start, end - start)
        yield (
            slice(start, end),
            torch.sparse_coo_tensor(own, values[first:last], size, is_coalesced=True, check_invariants=False),
        )


def _iterate(values: Tensor, *, alpha: float, weights: Tensor, steps: int) -> Tensor:
    smooth = values
    for _ in range(steps):
        smooth = torch.addmm(values, weights, smooth, beta=1 - alpha, alpha=alpha)
    return smooth


def _columns(values: Tensor) -> list[slice]:
    """Columns of (n, w) values that are smoothed at once."""
    width = max(1, _SMOOTHED // len(values))
    return [slice(start, start + width) for start in range(0, values.shape[1], width)]


def _by_columns(function: Callable[[Tensor], Tensor], values: Tensor, found: Tensor) -> Tensor:
    """`function` of some columns at a time, written to `found`: pieces that stay keep memory from being used again."""
    for some in _columns(values):
        found[:, some] = function(values[:, some].contiguous())
    return found


class _Solve(torch.autograd.Function):
    """((1 + gamma) I - gamma A) G = U, for each bag and column by itself. A is symmetric."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, gamma: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        solved = _conjugate_gradients(values.double(), gamma.double(), weights, offsets)
        ctx.save_for_backward(solved, gamma, weights, offsets)
        return solved.to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        solved, gamma, weights, offsets = ctx.saved_tensors
        back = _conjugate_gradients(gradients[0].double(), gamma.double(), weights, offsets)
        of_gamma = -(back * (solved - weights @ solved)).sum()
        return back.to(gradients[0].dtype), of_gamma.to(gamma.dtype), None, None


def _conjugate_gradients(values: Tensor, gamma: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    return _by_columns(
        lambda some: _conjugate_gradient(some, gamma, weights, offsets), values, torch.empty_like(values)
    )


def _conjugate_gradient(values: Tensor, gamma: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    lengths = offsets.diff()
    bags = torch.arange(len(lengths), device=values.device).repeat_interleave(lengths)

    def dot(one: Tensor, other: Tensor) -> Tensor:
        sums = torch.zeros((len(lengths), values.shape[1]), dtype=values.dtype, device=values.device)
        return sums.index_add_(0, bags, one * other)

    solved = torch.zeros_like(values)
    residual, direction = values, values
    square = first = dot(values, values)
    for _ in range(_MAX_ITERATIONS):
        open_ = square > _TOLERANCE**2 * first
        if not open_.any():
            break
        applied = (1 + gamma) * direction - gamma * (weights @ direction)
        length = torch.where(open_, square / dot(direction, applied).clamp(min=1e-300), 0)[bags]
        solved = solved + length * direction
        residual = residual - length * applied
        before, square = square, torch.where(open_, dot(residual, residual), square)
        direction = residual + torch.where(open_, square / before.clamp(min=1e-300), 0)[bags] * direction
    return solved


def nearest_tiles(batch: BagBatch, k: int, *, ties: Literal["grid", "file"] = "grid") -> Tensor:
    """(total, k) rows of the nearest tiles of the same slide, itself first, by distance; -1 where there are too few.

    ties: tiles equally far away come in raster order of the grid, whatever the order of the file, or in that of the
    file. Slides on a whole grid cost n times k; others, and tiles far from k others, n comparisons each.
    """
    keys = slide_key(batch)
    order = keys.argsort(stable=True) if ties == "file" else raster_order(batch)
    found = keys.new_full((len(keys), k), -1)
    sizes = torch.unique_consecutive(keys[order], return_counts=True)[1].tolist()
    for rows in torch.split(order, sizes):
        nearest = _nearest(batch.grid_xy[rows], min(k, len(rows)), on_grid=ties == "grid")
        found[rows, : nearest.shape[1]] = rows[nearest]
    return found


def _nearest(xy: Tensor, k: int, *, on_grid: bool) -> Tensor:
    """(n, k) indices into `xy`, by distance, then by index. on_grid: `xy` is in raster order, so cells may be used."""
    left = torch.arange(len(xy), device=xy.device)
    found = left.new_empty((len(xy), k))
    if on_grid and not xy.is_floating_point():
        done = _nearest_on_grid(xy - xy.amin(dim=0), k, found)
        left = (~done).nonzero()[:, 0]
    for some in torch.split(left, max(1, _HELD // len(xy))):
        squares = (xy[some, None] - xy).square().sum(dim=-1)
        if squares.is_floating_point():
            found[some] = squares.sort(dim=1, stable=True).indices[:, :k]
        else:
            ranked = squares.to(torch.int64) * len(xy) + torch.arange(len(xy), device=xy.device)
            found[some] = ranked.topk(k, dim=1, largest=False).indices
    return found


def _nearest_on_grid(xy: Tensor, k: int, found: Tensor) -> Tensor:
    """Fill the rows of `found` whose k nearest lie within about twice the least radius. Returns (n,) which they are."""
    reach = math.ceil(2 * math.sqrt(k / math.pi)) + 1
    width, height = (xy.amax(dim=0) + 2 * reach + 1).tolist()
    done = torch.zeros(len(xy), dtype=torch.bool, device=xy.device)
    if width * height > _HELD + 64 * len(xy):
        return done
    cells = (xy[:, 1] + reach) * width + xy[:, 0] + reach
    tile_of = torch.full((width * height,), -1, device=xy.device)
    tile_of[cells] = torch.arange(len(xy), device=xy.device)
    if int((tile_of >= 0).sum()) < len(xy):  # two tiles at one place
        return done
    dy, dx = torch.meshgrid(*[torch.arange(-reach, reach + 1, device=xy.device)] * 2, indexing="ij")
    squares = (dx * dx + dy * dy).flatten()
    by_distance = squares.argsort(stable=True)[: int((squares <= reach * reach).sum())]
    steps = (dy * width + dx).flatten()[by_distance]
    for some in torch.split(torch.arange(len(xy), device=xy.device), max(1, _HELD // len(steps))):
        tiles = tile_of[cells[some, None] + steps]
        there = tiles >= 0
        position = there.cumsum(dim=1)
        full = position[:, -1] >= k
        chosen = tiles[full][(there & (position <= k))[full]]
        found[some[full]] = chosen.reshape(-1, k)
        done[some[full]] = True
    return done
