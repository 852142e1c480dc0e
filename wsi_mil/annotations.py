"""GeoJSON annotations (level-0 pixels) -> polygons, and how much of each tile they cover."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import shapely
from numpy.typing import NDArray

from tiling.geojson import Rings, polygons_of
from wsi_mil.errors import UserError


class AnnotationError(UserError):
    """An annotation file cannot be read as polygons."""


def read_polygons(path: Path, *, bounds_l0: tuple[int, int, int, int]) -> tuple[shapely.Polygon, ...]:
    """Polygons of a GeoJSON file in level-0 pixels, holes kept; rings that cross themselves are mended.

    bounds_l0: x, y, width, height of the slide's scanned area, from whose corner QuPath counts; what is read and in
    which frame is told in `tiling.geojson`. Raises AnnotationError for a file that is none.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise AnnotationError(f"{path}: the annotation cannot be read ({error.strerror}). Mend the path.") from error
    except ValueError as error:
        raise AnnotationError(f"{path}: not JSON ({error}). Export the annotation as GeoJSON.") from error
    try:
        found = polygons_of(document, bounds_l0=bounds_l0)
        return tuple(polygon for rings in found for polygon in _valid(rings))
    except (ValueError, shapely.errors.ShapelyError) as error:
        raise AnnotationError(
            f"{path}: not a GeoJSON annotation ({error}). Polygon and MultiPolygon in level-0 pixels are read, alone, "
            f"in a Feature or in a FeatureCollection. Export it so."
        ) from error


def lesion_fraction(
    coords_l0: NDArray[np.int64], tile_size_l0: tuple[int, int], polygons: Sequence[shapely.Polygon]
) -> NDArray[np.float64]:
    """Share of each tile's area that the polygons cover; where polygons overlap, ground counts once.

    coords_l0: (n, 2) top-left.   tile_size_l0: (width, height).   Returns (n,) in 0 .. 1.
    """
    covered = np.zeros(len(coords_l0), dtype=np.float64)
    if not len(coords_l0) or not len(polygons):
        return covered
    left, top = np.asarray(coords_l0, dtype=np.float64).T
    tiles = shapely.box(left, top, left + tile_size_l0[0], top + tile_size_l0[1])
    parts = shapely.get_parts(shapely.union_all(list(polygons)))
    parts = parts[shapely.get_dimensions(parts) == 2]
    shapely.prepare(parts)
    tree = shapely.STRtree(tiles)
    for part in parts:
        covered[tree.query(part, predicate="contains")] = 1.0
        touched = tree.query(part, predicate="intersects")
        rim = touched[covered[touched] < 1.0]
        covered[rim] += shapely.area(shapely.intersection(tiles[rim], part)) / (tile_size_l0[0] * tile_size_l0[1])
    return np.clip(covered, 0.0, 1.0)


def _valid(rings: Rings) -> list[shapely.Polygon]:
    shell, *holes = rings
    polygon = shapely.Polygon(shell, holes)
    if polygon.is_valid:
        return [polygon]
    parts = shapely.get_parts(shapely.make_valid(polygon))
    return [part for part in parts if part.geom_type == "Polygon"]
