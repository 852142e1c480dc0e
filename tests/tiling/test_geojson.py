"""GeoJSON in every wrapping becomes the same rings, in one frame."""

from typing import Any

import numpy as np
import pytest

from tiling.geojson import polygons_of

SQUARE = [[400, 200], [500, 200], [500, 300], [400, 300], [400, 200]]
BOUNDS = (200, 100, 1400, 1100)


def feature(geometry: Any, **properties: Any) -> dict[str, Any]:
    return {"type": "Feature", "properties": properties, "geometry": geometry}


def polygon(*rings: Any) -> dict[str, Any]:
    return {"type": "Polygon", "coordinates": list(rings)}


def test_each_feature_is_read_in_its_own_frame() -> None:
    from_qupath = feature(polygon([[x - 200, y - 100, 0] for x, y in SQUARE]), objectType="annotation")
    document = {"type": "FeatureCollection", "features": [from_qupath, feature(polygon(SQUARE))]}
    first, second = polygons_of(document, bounds_l0=BOUNDS)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first[0], SQUARE)


def test_a_collection_of_geometries_within_a_feature_keeps_its_frame() -> None:
    inner = {"type": "GeometryCollection", "geometries": [{"type": "MultiPolygon", "coordinates": [[SQUARE]]}]}
    ((ring,),) = polygons_of([feature(inner, objectType="annotation")], bounds_l0=BOUNDS)
    np.testing.assert_array_equal(ring, np.add(SQUARE, (200, 100)))


def test_what_covers_no_ground_is_left_out() -> None:
    nothing = [
        {"type": "Feature"},
        feature(None),
        feature({"type": "Point", "coordinates": [1, 2]}),
        polygon(),
        polygon([]),
    ]
    assert polygons_of(nothing, bounds_l0=BOUNDS) == []


@pytest.mark.parametrize(
    "document",
    [3, {}, {"type": "Topology"}, polygon([[0, 0], [1]]), polygon([[0, "1"]]), polygon([[0, np.nan]])],
)
def test_anything_else_is_a_value_error(document: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        polygons_of(document, bounds_l0=BOUNDS)
