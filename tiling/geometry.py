"""Pure arithmetic between frames: level choice, grid positions, tissue under a tile. Pairs are (x, y).

The grid covers the scanned bounds of the slide (the whole slide where the file does not say) and starts at their
corner. Tile size and stride are rounded to level-0 pixels once; every position is origin + grid_xy * stride, so no
rounding adds up towards the lower right.
"""

import math

import numpy as np
from numpy.typing import NDArray

from tiling.errors import SlideError, SlideTooSmall
from tiling.grid import ReadPlan, TileSpec
from tiling.readers.header import SlideInfo

_LEAST_TOLERANCE = 0.05
"""A tile may be off by so much for the sake of whole pixels, however strict the tolerance for levels is."""
_EPSILON = 1e-9
"""Relative slack for comparisons of decimal numbers that came through binary ones, such as 0.525 <= 0.5 * 1.05."""


def plan_read(info: SlideInfo, spec: TileSpec) -> ReadPlan:
    """Say which level is read, and where the tiles lie on level 0.

    Raises SlideError when the wish is finer than the slide, or whole level-0 pixels cannot make it, and SlideTooSmall
    when no tile fits.
    """
    level = choose_level(info, spec)
    tile_size_l0 = _pair_l0_from_px(spec.tile_px, spec, info)
    _refuse_rounded_away(tile_size_l0, spec, info)
    stride_l0 = _pair_l0_from_px(spec.step_px, spec, info)
    x_l0, y_l0, width_l0, height_l0 = clipped_bounds(info)
    grid_size = (
        n_steps(width_l0, tile_size_l0[0], stride_l0[0], edge=spec.edge),
        n_steps(height_l0, tile_size_l0[1], stride_l0[1], edge=spec.edge),
    )
    if 0 in grid_size:
        raise SlideTooSmall(
            f"{info.slide_id}: the scanned area is {width_l0} x {height_l0} px, a tile of {spec.tile_px} px at "
            f"{spec.mpp:g} µm/px needs {tile_size_l0[0]} x {tile_size_l0[1]}. Use smaller tiles (tile_px), or "
            "edge=pad to fill up with white."
        )
    return ReadPlan(
        level=level,
        level_downsample=info.level_downsamples[level],
        tile_size_l0=tile_size_l0,
        stride_l0=stride_l0,
        origin_l0=(x_l0, y_l0),
        grid_size=grid_size,
        tile_px=spec.tile_px,
        mpp_effective=(
            tile_size_l0[0] * info.mpp[0] / spec.tile_px,
            tile_size_l0[1] * info.mpp[1] / spec.tile_px,
        ),
    )


def choose_level(info: SlideInfo, spec: TileSpec) -> int:
    """Return the coarsest level that is not coarser than the wish by more than the tolerance, on either axis.

    Raises SlideError when even level 0 is coarser, unless upsampling is allowed; then it is level 0.
    """
    coarsest_mpp = spec.mpp * (1 + spec.mpp_tolerance) * (1 + _EPSILON)
    mpps = [max(info.mpp[0] * fx, info.mpp[1] * fy) for fx, fy in info.level_downsamples]
    usable = [level for level, mpp in enumerate(mpps) if mpp <= coarsest_mpp]
    if usable:
        return max(usable, key=lambda level: (mpps[level], -level))
    if spec.allow_upsampling:
        return 0
    raise SlideError(
        f"{info.slide_id}: the slide has {info.mpp[0]:g} x {info.mpp[1]:g} µm/px ({info.mpp_source}), tiles at "
        f"{spec.mpp:g} µm/px are finer than it can give (tolerance {spec.mpp_tolerance:.0%}). Ask for "
        f"{max(info.mpp):g} µm/px or more, correct the slide's pixel size in the cohort's column 'slide_mpp' if it is "
        "wrong, or set allow_upsampling."
    )


def _refuse_rounded_away(tile_size_l0: tuple[int, int], spec: TileSpec, info: SlideInfo) -> None:
    """A tile of a few level-0 pixels cannot have the wished size; one that is far from it would be another wish."""
    wish_um = spec.tile_px * spec.mpp
    spans_um = [size * mpp for size, mpp in zip(tile_size_l0, info.mpp, strict=True)]
    if max(abs(span / wish_um - 1) for span in spans_um) > max(spec.mpp_tolerance, _LEAST_TOLERANCE):
        raise SlideError(
            f"{info.slide_id}: a tile of {spec.tile_px} px at {spec.mpp:g} µm/px is {wish_um:g} µm wide, but whole "
            f"pixels of the slide make {spans_um[0]:g} x {spans_um[1]:g} µm of it. Use larger tiles (tile_px), or "
            f"another mpp."
        )


def upsampling(info: SlideInfo, plan: ReadPlan) -> float:
    """How many saved pixels one pixel of level 0 is stretched over, at most; 1 or less when none is made up."""
    return max(info.mpp[0] / plan.mpp_effective[0], info.mpp[1] / plan.mpp_effective[1])


def clipped_bounds(info: SlideInfo) -> tuple[int, int, int, int]:
    """x, y, width and height of the scanned area on level 0, cut to the slide; the slide where the bounds are void."""
    x, y, width, height = info.bounds_l0
    left, top = max(0, x), max(0, y)
    right, bottom = min(info.size_l0[0], x + width), min(info.size_l0[1], y + height)
    if right <= left or bottom <= top:
        return 0, 0, info.size_l0[0], info.size_l0[1]
    return left, top, right - left, bottom - top


def n_steps(length_l0: int, tile_l0: int, stride_l0: int, *, edge: str) -> int:
    """How many tiles lie along an axis: whole ones (`drop`), or enough to cover it (`pad`)."""
    if edge == "drop":
        return 0 if length_l0 < tile_l0 else (length_l0 - tile_l0) // stride_l0 + 1
    enough = max(0, -(-(length_l0 - tile_l0) // stride_l0)) + 1
    return min(enough, -(-length_l0 // stride_l0))  # with gaps between tiles, the last must still begin inside


def full_grid(plan: ReadPlan) -> NDArray[np.int64]:
    """(columns * rows, 2) every column and row of the grid, row by row."""
    columns, rows = plan.grid_size
    xy = np.empty((rows, columns, 2), np.int64)
    xy[..., 0] = np.arange(columns)[None, :]
    xy[..., 1] = np.arange(rows)[:, None]
    return xy.reshape(-1, 2)


def tissue_fractions(mask: NDArray[np.bool_], info: SlideInfo, plan: ReadPlan) -> NDArray[np.float32]:
    """(columns * rows,) fraction of each tile's area that `mask` holds, in the order of `full_grid`.

    mask: (h, w), its field is the whole of level 0. Exact by area: mask pixels cut by a tile's edge count in part,
    and ground outside the slide is no tissue.
    """
    scale_x, scale_y = mask.shape[1] / info.size_l0[0], mask.shape[0] / info.size_l0[1]
    columns = plan.origin_l0[0] + np.arange(plan.grid_size[0]) * plan.stride_l0[0]
    rows = plan.origin_l0[1] + np.arange(plan.grid_size[1]) * plan.stride_l0[1]
    left, right = columns * scale_x, (columns + plan.tile_size_l0[0]) * scale_x
    top, bottom = rows * scale_y, (rows + plan.tile_size_l0[1]) * scale_y
    # Summing strips first over y, then over x, keeps memory at rows * width instead of an interpolated 2-D table.
    strips = _between(mask.astype(np.float64), top, bottom)
    areas = _between(strips.T, left, right).T
    tile_area = plan.tile_size_l0[0] * scale_x * plan.tile_size_l0[1] * scale_y
    return np.asarray(np.clip(areas / tile_area, 0, 1), np.float32).reshape(-1)


def _between(values: NDArray[np.float64], start: NDArray[np.float64], stop: NDArray[np.float64]) -> NDArray[np.float64]:
    """(k, w) integral of the rows of `values` (h, w), each constant over its unit, from start[i] to stop[i]."""
    total = np.zeros((values.shape[0] + 1, values.shape[1]))
    np.cumsum(values, axis=0, out=total[1:])

    def until(position: NDArray[np.float64]) -> NDArray[np.float64]:
        inside = np.clip(position, 0, values.shape[0])
        whole = np.minimum(inside.astype(np.int64), values.shape[0] - 1)
        return np.asarray(total[whole] + (inside - whole)[:, None] * values[whole])

    return until(stop) - until(start)


def _pair_l0_from_px(length_px: int, spec: TileSpec, info: SlideInfo) -> tuple[int, int]:
    """Length in level-0 pixels, per axis, of `length_px` pixels at the wished mpp; at least 1."""
    return l0_from_px(length_px, mpp=spec.mpp, slide_mpp=info.mpp[0]), l0_from_px(
        length_px, mpp=spec.mpp, slide_mpp=info.mpp[1]
    )


def l0_from_px(length_px: int, *, mpp: float, slide_mpp: float) -> int:
    """Whole level-0 pixels of `length_px` pixels at `mpp` µm/px; halves round up, and the least is 1."""
    return max(1, math.floor(length_px * mpp / slide_mpp + 0.5 + _EPSILON))
