"""Where to look, in three records: TileSpec (the wish), ReadPlan (one slide's answer), TileGrid (the result)."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tiling.errors import WrongUse
from tiling.readers.header import SlideInfo

_ALGORITHM = 1
"""Part of every digest. Raise it when the same spec gives other tiles than before, so that no old grid is reused."""


def _require(true: bool, name: str, value: object, allowed: str) -> None:
    if not true:
        raise WrongUse(f"tiles: {name} is {value!r}; it must be {allowed}.")


@dataclass(frozen=True, kw_only=True)
class TissueSpec:
    """How tissue is told from glass on the thumbnail; every length is physical, so one spec fits all scanners."""

    mpp: float = 8.0
    """Microns per pixel of the thumbnail the mask is made on."""
    min_area_um2: float = 10_000.0
    """Smaller pieces of tissue are dropped."""
    max_hole_um2: float = 10_000.0
    """Smaller holes in tissue are filled, such as fat cells and ducts."""
    exclude_pen: bool = True
    """Leave out pen marks."""

    def __post_init__(self) -> None:
        _require(1.0 <= self.mpp <= 64.0, "tissue.mpp", self.mpp, "between 1 and 64 µm/px")
        _require(self.min_area_um2 >= 0, "tissue.min_area_um2", self.min_area_um2, "0 or more")
        _require(self.max_hole_um2 >= 0, "tissue.max_hole_um2", self.max_hole_um2, "0 or more")


@dataclass(frozen=True, kw_only=True)
class TileSpec:
    """What the user wishes, before any slide is opened."""

    mpp: float = 0.5
    """Microns per pixel of a tile."""
    tile_px: int = 224
    """Side of a tile in pixels at `mpp`."""
    stride_px: int | None = None
    """Step between tiles in pixels at `mpp`; the tile's side when not given."""
    min_tissue: float = 0.25
    """Least fraction of a tile that is tissue; 0 keeps every tile, glass too."""
    edge: Literal["drop", "pad"] = "drop"
    """What happens to a tile that reaches over the scanned area's edge: left out, or filled with white."""
    mpp_tolerance: float = 0.05
    """A level within this fraction of the wish is read; a wish finer than the slide beyond it is refused."""
    allow_upsampling: bool = False
    """Allow a wish finer than the slide; the tiles are then interpolated from level 0."""
    tissue: TissueSpec = field(default_factory=TissueSpec)
    """How tissue is found."""

    def __post_init__(self) -> None:
        _require(math.isfinite(self.mpp) and self.mpp > 0, "mpp", self.mpp, "more than 0 µm/px")
        _require(self.tile_px >= 1, "tile_px", self.tile_px, "1 or more")
        _require(self.step_px >= 1, "stride_px", self.stride_px, "1 or more")
        _require(0 <= self.min_tissue <= 1, "min_tissue", self.min_tissue, "a fraction from 0 to 1")
        _require(self.edge in ("drop", "pad"), "edge", self.edge, "'drop' or 'pad'")
        _require(0 <= self.mpp_tolerance < 0.5, "mpp_tolerance", self.mpp_tolerance, "a fraction from 0 to 0.5")

    @property
    def step_px(self) -> int:
        """The stride in pixels at `mpp`, resolved."""
        return self.tile_px if self.stride_px is None else self.stride_px

    def digest(self) -> str:
        """Eight hex digits over every field, so no folder can forget a changed setting."""
        fields = asdict(self) | {"stride_px": self.step_px, "algorithm": _ALGORITHM}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True, kw_only=True)
class ReadPlan:
    """How one slide answers a TileSpec. All pairs are (x, y)."""

    level: int
    level_downsample: tuple[float, float]
    """Level-0 pixels per pixel of the level: true values, never rounded."""
    tile_size_l0: tuple[int, int]
    stride_l0: tuple[int, int]
    origin_l0: tuple[int, int]
    grid_size: tuple[int, int]
    """Columns and rows of the full grid, tissue or not."""
    tile_px: int
    mpp_effective: tuple[float, float]
    """tile_size_l0 * slide mpp / tile_px: what a saved pixel really spans."""


@dataclass(frozen=True, kw_only=True)
class TileGrid:
    """The tiles of one slide that hold tissue, in row-major order."""

    slide: SlideInfo
    spec: TileSpec
    plan: ReadPlan
    grid_xy: NDArray[np.int64]
    """(n, 2) column and row of each tile in the full grid."""
    tissue_fraction: NDArray[np.float32]
    """(n,) fraction of the tile's area that is tissue."""
    tissue_mm2: float = 0.0
    """Tissue on the whole slide, in tiles or not."""
    mask_digest: str = ""
    """SHA-256 of the user's mask file; empty where the mask is our own."""

    @property
    def coords_l0(self) -> NDArray[np.int64]:
        """(n, 2) level-0 top-left corners: origin + grid_xy * stride."""
        return np.asarray(self.plan.origin_l0, np.int64) + self.grid_xy * np.asarray(self.plan.stride_l0, np.int64)

    def __len__(self) -> int:
        return len(self.grid_xy)
