"""Bags of tiles, batches of bags packed one after the other, and the few operations on such segments. No files.

Notation: `b` bags, `total` instances of all bags, `n` instances of one, `d` features, `k` outputs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 1024


@dataclass(frozen=True, kw_only=True)
class Bag:
    """The tiles of one slide, or of all slides of one patient. Never empty.

    features: (n, d).  coords_l0: (n, 2) level-0 top-left (x, y).  grid_xy: (n, 2) column and row of the slide's grid.
    slide_index: (n,) which of `slide_ids` a tile comes from.
    Raises ValueError when it is empty, its features are no (n, d), or its columns differ in length.
    """

    features: Tensor
    coords_l0: Tensor
    grid_xy: Tensor
    slide_index: Tensor
    slide_ids: tuple[str, ...]
    id: str

    @classmethod
    def of(cls, features: Tensor, *, grid_xy: Tensor | None = None, id: str = "bag") -> "Bag":
        """A bag of one slide from plain features.

        features: (n, d).  grid_xy: (n, 2) column and row of each tile; made up when not given: row by row on a square,
        in the order of the tiles. Methods without `uses_positions` do not look at places; the others then answer for
        an arrangement that no slide had. `coords_l0` is `grid_xy` too: such a bag is fit for answers, not for heatmaps.
        """
        if grid_xy is None:
            row = torch.arange(len(features))
            side = max(1, math.ceil(math.sqrt(len(features))))
            grid_xy = torch.stack([row % side, row // side], dim=1)
        nothing = torch.zeros(len(features), dtype=torch.int64)
        return cls(features=features, coords_l0=grid_xy, grid_xy=grid_xy, slide_index=nothing, slide_ids=(id,), id=id)

    def __post_init__(self) -> None:
        if self.features.ndim != 2:
            raise ValueError(f"bag {self.id!r}: features are (n, d), one row a tile, not {tuple(self.features.shape)}")
        n = len(self.features)
        if n == 0:
            raise ValueError(f"bag {self.id!r} has no instance")
        lengths = [len(self.coords_l0), len(self.grid_xy), len(self.slide_index)]
        if lengths != [n, n, n]:
            raise ValueError(f"bag {self.id!r}: {n} features, but coords, grid and slide_index have {lengths} rows")

    def __len__(self) -> int:
        return len(self.features)

    def take(self, rows: Tensor) -> "Bag":
        """The bag with these rows only, in this order. rows: (m,) indices."""
        return Bag(
            features=self.features[rows],
            coords_l0=self.coords_l0[rows],
            grid_xy=self.grid_xy[rows],
            slide_index=self.slide_index[rows],
            slide_ids=self.slide_ids,
            id=self.id,
        )


@dataclass(frozen=True, kw_only=True)
class BagBatch:
    """Bags packed one after the other: bag i owns rows offsets[i]:offsets[i + 1]. No padding exists.

    features: (total, d).  offsets: (b + 1,) int64.  coords_l0, grid_xy: (total, 2).  slide_index: (total,), counted
    within each bag.  ids: b names.  slide_ids: b tuples.
    """

    features: Tensor
    offsets: Tensor
    coords_l0: Tensor
    grid_xy: Tensor
    slide_index: Tensor
    ids: tuple[str, ...]
    slide_ids: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> list[int]:
        """Number of instances of each bag."""
        return [int(n) for n in self.offsets.diff()]

    def to(self, device: torch.device | str) -> "BagBatch":
        """The same batch with every tensor on `device`."""
        return BagBatch(
            features=self.features.to(device),
            offsets=self.offsets.to(device),
            coords_l0=self.coords_l0.to(device),
            grid_xy=self.grid_xy.to(device),
            slide_index=self.slide_index.to(device),
            ids=self.ids,
            slide_ids=self.slide_ids,
        )

    def bags(self) -> Iterator[Bag]:
        """Take the batch apart again."""
        for i, (start, end) in enumerate(zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True)):
            yield Bag(
                features=self.features[start:end],
                coords_l0=self.coords_l0[start:end],
                grid_xy=self.grid_xy[start:end],
                slide_index=self.slide_index[start:end],
                slide_ids=self.slide_ids[i],
                id=self.ids[i],
            )


def pack(bags: Sequence[Bag]) -> BagBatch:
    """Put bags one after the other.

    Raises ValueError when there is none, or their widths differ; TypeError for anything that is no list of bags.
    """
    if isinstance(bags, Bag | Tensor) or not all(isinstance(bag, Bag) for bag in bags):
        raise TypeError("pack takes a list of bags, as in pack([bag]); Bag.of(features) makes a bag of plain features")
    if not bags:
        raise ValueError("cannot pack a batch of no bags")
    widths = {bag.features.shape[1] for bag in bags}
    if len(widths) > 1:
        raise ValueError(f"bags have features of different widths {sorted(widths)}; they come from different encoders")
    lengths = torch.tensor([len(bag) for bag in bags])
    return BagBatch(
        features=torch.cat([bag.features for bag in bags]),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        coords_l0=torch.cat([bag.coords_l0 for bag in bags]),
        grid_xy=torch.cat([bag.grid_xy for bag in bags]),
        slide_index=torch.cat([bag.slide_index for bag in bags]),
        ids=tuple(bag.id for bag in bags),
        slide_ids=tuple(bag.slide_ids for bag in bags),
    )


def split(values: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    """Views on the rows of each bag. values: (total, ...).  offsets: (b + 1,)."""
    return torch.split(values, offsets.diff().tolist())


def full_precision(values: Tensor) -> Tensor:
    """`values` in fp32 when they are of half precision, else as they are. Sums of probabilities need it."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def no_autocast(values: Tensor) -> torch.autocast:
    """A block on the device of `values` in which no operation is lowered to half precision."""
    return torch.autocast(values.device.type, enabled=False)


def segment_map(function: Callable[[Tensor], Tensor], values: Tensor, offsets: Tensor) -> Tensor:
    """Apply `function` (n, ...) -> (...) to each bag's rows and stack the b results."""
    return torch.stack([function(rows) for rows in split(values, offsets)])


def segment_softmax(scores: Tensor, offsets: Tensor) -> Tensor:
    """Softmax over the rows of each bag, at least in fp32 whatever the autocast. scores: (total, m). Same shape."""
    return torch.cat([rows.softmax(dim=0) for rows in split(full_precision(scores), offsets)])


def segment_log_softmax(scores: Tensor, offsets: Tensor) -> Tensor:
    """Log-softmax over the rows of each bag, at least in fp32. scores: (total, m). Same shape."""
    return torch.cat([rows.log_softmax(dim=0) for rows in split(full_precision(scores), offsets)])


def segment_weighted_sum(weights: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
    """Weighted sums of each bag, at least in fp32. weights: (total, m).  values: (total, h). Returns (b, m, h).

    Weights of 1/n lose digits in half precision, so neither they nor the sum ever are; and long bags are summed in
    blocks, because rounding adds up: one product over 20,000 tiles of equal weight is off by 1e-4.
    """
    blocks = [[min(_BLOCK, n - start) for start in range(0, n, _BLOCK)] for n in offsets.diff().tolist()]
    sizes = [size for of_bag in blocks for size in of_bag]
    with no_autocast(values):
        pairs = zip(torch.split(weights, sizes), torch.split(values, sizes), strict=True)
        products = torch.stack([full_precision(some).T @ full_precision(rows) for some, rows in pairs])
        return torch.stack([parts.sum(dim=0) for parts in torch.split(products, [len(of_bag) for of_bag in blocks])])


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum of each bag's rows, at least in fp32. values: (total, ...). Returns (b, ...)."""
    return segment_map(lambda rows: full_precision(rows).sum(dim=0), values, offsets)


def segment_mean(values: Tensor, offsets: Tensor) -> Tensor:
    """Mean of each bag's rows, at least in fp32. values: (total, ...). Returns (b, ...)."""
    return segment_map(lambda rows: full_precision(rows).mean(dim=0), values, offsets)


def segment_max(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Greatest value of each bag and column, and its row in the packed batch. values: (total, k). Returns (b, k) twice.

    The gradient reaches exactly one row a column; of equal ones an arbitrary one.
    """
    found = [rows.max(dim=0) for rows in split(values, offsets)]
    rows = torch.stack([one.indices for one in found]) + offsets[:-1, None]
    return torch.stack([one.values for one in found]), rows


def spread(values: Tensor, offsets: Tensor) -> Tensor:
    """Repeat each bag's row for all of its instances. values: (b, ...). Returns (total, ...)."""
    return values.repeat_interleave(offsets.diff(), dim=0)
