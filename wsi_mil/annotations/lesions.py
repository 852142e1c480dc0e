"""Outlines -> the lesions that FROC counts, and a tile map -> the points that it detects. Pure.

Frame: microns from the slide's top left, so that distances mean the same on every slide.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import shapely

from wsi_mil.heatmap import TileScores
from wsi_mil.statistics.froc import OUTSIDE, SlideMarks
from wsi_mil.statistics.ranking import Bools, Floats, Ints

MERGE_UM = 75.0
"""Outlines nearer than this are one lesion: the size of five tumour cells."""
ISOLATED_UM = 275.0
"""A widened lesion with a longest diameter below this (200 µm as drawn) is a group of isolated tumour cells."""
SUPPRESSION_UM = 200.0
"""A detection is the best tile within this distance, about what is usual on the score maps of CAMELYON16."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Lesions:
    """The lesions of one slide, widened by half the gap that merges them."""

    regions_um: tuple[shapely.Polygon, ...]
    isolated: Bools
    """(n,) groups of isolated tumour cells."""


def lesions_of(polygons_l0: Sequence[shapely.Polygon], mpp: tuple[float, float]) -> Lesions:
    """Outlines less than 75 µm apart become one lesion, holes are filled, and small ones are marked.

    mpp: µm per level-0 pixel along x and y.   The diameter is that between the two points farthest apart. The
    challenge's script takes the long axis of the ellipse with the same moments, which is the same for a disc and near
    it for what pathologists draw.
    """
    scaled = shapely.transform(np.array(polygons_l0, dtype=object), lambda points: points * np.asarray(mpp))
    widened = shapely.union_all(shapely.buffer(scaled, MERGE_UM / 2))
    filled = shapely.union_all([shapely.Polygon(part.exterior) for part in shapely.get_parts(widened) if part.area])
    regions = tuple(part for part in shapely.get_parts(filled) if part.area)
    return Lesions(
        regions_um=regions, isolated=np.array([_diameter(region) < ISOLATED_UM for region in regions], dtype=bool)
    )


def mark(scores: TileScores, values: Floats, lesions: Lesions, *, radius_um: float = SUPPRESSION_UM) -> SlideMarks:
    """What a tile map detects: the centres of the tiles that are local maxima, and the lesion that each lies in.

    values: (n,) one score a tile of `scores`, of which only the places are used.
    """
    peaks = local_maxima(scores, values, radius_um=radius_um)
    geometry = scores.geometry
    centres_um = (scores.coords_l0[peaks] + np.asarray(geometry.tile_size_l0) / 2) * np.asarray(geometry.mpp)
    lesion = np.full(len(peaks), OUTSIDE, dtype=np.int64)
    if lesions.regions_um:
        points, regions = shapely.STRtree(list(lesions.regions_um)).query(
            shapely.points(centres_um), predicate="intersects"
        )
        lesion[points] = regions
    return SlideMarks(scores=values[peaks], lesion=lesion, isolated=lesions.isolated)


def local_maxima(scores: TileScores, values: Floats, *, radius_um: float) -> Ints:
    """Tiles that no tile within the radius outscores, the first in reading order of equal ones; highest score first.

    The radius takes in the eight neighbours of a tile at least, so that a coarse grid does not detect at each tile.
    """
    columns, rows = (scores.grid_xy - scores.grid_xy.min(axis=0)).T
    order = np.lexsort((columns, rows, -values))
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[order] = np.arange(len(values), 0, -1)
    step_um = np.asarray(scores.geometry.stride_l0) * np.asarray(scores.geometry.mpp)
    radius_um = max(radius_um, float(np.hypot(*step_um)) * (1 + 1e-9))
    reach_x, reach_y = np.floor(radius_um / step_um).astype(int).tolist()
    grid = np.zeros((rows.max() + 1 + 2 * reach_y, columns.max() + 1 + 2 * reach_x), dtype=np.int64)
    np.maximum.at(grid, (rows + reach_y, columns + reach_x), ranks)
    best = np.zeros(len(values), dtype=np.int64)
    for down in range(-reach_y, reach_y + 1):
        for right in range(-reach_x, reach_x + 1):
            if np.hypot(right * step_um[0], down * step_um[1]) <= radius_um:
                np.maximum(best, grid[rows + reach_y + down, columns + reach_x + right], out=best)
    return np.asarray(order[best[order] == ranks[order]], dtype=np.int64)


def _diameter(region: shapely.Polygon) -> float:
    """Distance of the two points of a region that are farthest apart."""
    corners = shapely.get_coordinates(shapely.convex_hull(region))
    return float(max(np.hypot(*(corners - corner).T).max() for corner in corners))
