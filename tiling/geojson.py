"""A parsed GeoJSON document -> rings of polygons in level-0 pixels. Pure; the one reading of masks and annotations.

Coordinates are level-0 pixels from the slide's top left, except in features that QuPath wrote (it says so by
`objectType`): those are from the corner of the scanned bounds, as QuPath counts.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rings = list[NDArray[np.float64]]
"""One polygon: its outline first, then its holes; each (k, 2) level-0 pixels."""

_COLLECTIONS = {"FeatureCollection": "features", "GeometryCollection": "geometries"}


def polygons_of(document: Any, *, bounds_l0: tuple[int, int, int, int]) -> list[Rings]:
    """Every polygon of a FeatureCollection, a Feature, a list of features or a bare geometry.

    A third coordinate (QuPath's plane) is dropped; points, lines and features without a geometry cover no ground and
    are left out.   bounds_l0: x, y, width, height of the scanned area.   Raises ValueError for anything else.
    """
    try:
        return list(_polygons(document, (0, 0), bounds_l0[:2]))
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _polygons(node: Any, offset: tuple[int, int], corner_l0: tuple[int, int]) -> Iterator[Rings]:
    if isinstance(node, list):
        for item in node:
            yield from _polygons(item, offset, corner_l0)
        return
    if not isinstance(node, dict) or "type" not in node:
        raise ValueError("no 'type' in it")
    kind = node["type"]
    if kind in _COLLECTIONS:
        yield from _polygons(node[_COLLECTIONS[kind]], offset, corner_l0)
    elif kind == "Feature":
        from_qupath = "objectType" in (node.get("properties") or {})
        if node.get("geometry") is not None:
            yield from _polygons(node["geometry"], corner_l0 if from_qupath else offset, corner_l0)
    elif "coordinates" not in node:
        raise ValueError(f"unknown type {kind!r}")
    elif kind in ("Polygon", "MultiPolygon"):
        for rings in [node["coordinates"]] if kind == "Polygon" else node["coordinates"]:
            if rings and rings[0]:
                yield [_ring(ring, offset) for ring in rings if ring]


def _ring(points: Any, offset: tuple[int, int]) -> NDArray[np.float64]:
    ring = np.array([[point[0] + offset[0], point[1] + offset[1]] for point in points], dtype=np.float64)
    if not np.isfinite(ring).all():
        raise ValueError("a coordinate is not a number")
    return ring
