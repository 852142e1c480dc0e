"""GeoJSON annotations (level-0 pixels) -> polygons, and how much of each tile they cover."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray

from wsi_mil.errors import UserError

_COLLECTIONS = {"FeatureCollection": "features", "GeometryCollection": "geometries"}


class AnnotationError(UserError):
    """An annotation file cannot be read as polygons."""


def read_polygons(path: Path) -> tuple[shapely.Polygon, ...]:
    """Polygons of a GeoJSON file in level-0 pixels, holes kept, a third coordinate dropped.

    Takes a FeatureCollection, a Feature, a list of features (QuPath writes those) or a bare geometry; points and lines
    cover no ground and are left out; rings that cross themselves are mended. Raises AnnotationError otherwise.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise AnnotationError(f"{path}: the annotation cannot be read ({error.strerror}). Mend the path.") from error
    except ValueError as error:
        raise AnnotationError(f"{path}: not JSON ({error}). Export the annotation as GeoJSON.") from error
    try:
        return polygons_of(document)
    except (AnnotationError, KeyError, TypeError, ValueError, IndexError, shapely.errors.ShapelyError) as error:
        raise AnnotationError(
            f"{path}: not a GeoJSON annotation ({error}). Polygon and MultiPolygon in level-0 pixels are read, alone, "
            f"in a Feature or in a FeatureCollection. Export it so."
        ) from error


def polygons_of(document: Any) -> tuple[shapely.Polygon, ...]:
    """Polygons of a parsed GeoJSON document; see `read_polygons`."""
    polygons: list[shapely.Polygon] = []
    for geometry in _geometries(document):
        if geometry["type"] not in ("Polygon", "MultiPolygon"):
            continue
        parts = [geometry["coordinates"]] if geometry["type"] == "Polygon" else geometry["coordinates"]
        polygons.extend(polygon for rings in parts if rings for polygon in _valid(rings))
    return tuple(polygons)


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


def _geometries(document: Any) -> Iterator[dict[str, Any]]:
    if isinstance(document, list):
        for item in document:
            yield from _geometries(item)
        return
    if not isinstance(document, dict) or "type" not in document:
        raise AnnotationError("no 'type' in it")
    kind = document["type"]
    if kind in _COLLECTIONS:
        yield from _geometries(document[_COLLECTIONS[kind]])
    elif kind == "Feature":
        if document.get("geometry") is not None:
            yield from _geometries(document["geometry"])
    elif "coordinates" in document:
        yield document
    else:
        raise AnnotationError(f"unknown type {kind!r}")


def _valid(rings: list[list[list[float]]]) -> list[shapely.Polygon]:
    shell, *holes = [[point[:2] for point in ring] for ring in rings]
    polygon = shapely.Polygon(shell, holes)
    if polygon.is_valid:
        return [polygon]
    parts = shapely.get_parts(shapely.make_valid(polygon))
    return [part for part in parts if part.geom_type == "Polygon"]
