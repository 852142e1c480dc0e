"""Annotations become polygons, and tiles know how much of them is covered."""

import json
from pathlib import Path

import numpy as np
import pytest
import shapely

from wsi_mil.annotations.reading import AnnotationError, lesion_fraction, read_polygons

SQUARE = [[0, 0], [100, 0], [100, 100], [0, 100], [0, 0]]
HOLE = [[25, 25], [75, 25], [75, 75], [25, 75], [25, 25]]
WHOLE = (0, 0, 1000, 800)


def _polygon(*rings):
    return {"type": "Polygon", "coordinates": list(rings)}


def _read(folder: Path, document, bounds_l0=WHOLE):
    (folder / "annotation.geojson").write_text(json.dumps(document))
    return read_polygons(folder / "annotation.geojson", bounds_l0=bounds_l0)


def _feature(geometry):
    return {"type": "Feature", "properties": {"name": "lesion"}, "geometry": geometry}


@pytest.mark.parametrize(
    "document",
    [
        _polygon(SQUARE, HOLE),
        _feature(_polygon(SQUARE, HOLE)),
        {"type": "FeatureCollection", "features": [_feature(_polygon(SQUARE, HOLE))]},
        [_feature(_polygon(SQUARE, HOLE))],
        {"type": "MultiPolygon", "coordinates": [[SQUARE, HOLE]]},
        {"type": "GeometryCollection", "geometries": [_polygon(SQUARE, HOLE)]},
    ],
)
def test_every_wrapping_gives_the_same_ground_with_its_hole(tmp_path: Path, document):
    (polygon,) = _read(tmp_path, document)
    assert polygon.area == 100 * 100 - 50 * 50


def test_a_third_coordinate_is_dropped_and_points_lines_and_empty_features_cover_nothing(tmp_path: Path):
    document = {
        "type": "FeatureCollection",
        "features": [
            _feature(_polygon([[x, y, 7.0] for x, y in SQUARE])),
            _feature({"type": "Point", "coordinates": [5, 5]}),
            _feature({"type": "LineString", "coordinates": [[0, 0], [5, 5]]}),
            _feature(None),
        ],
    }
    (polygon,) = _read(tmp_path, document)
    assert not polygon.has_z
    assert polygon.area == 10_000


def test_a_ring_that_crosses_itself_is_mended(tmp_path: Path):
    bow = [[0, 0], [100, 100], [100, 0], [0, 100], [0, 0]]
    polygons = _read(tmp_path, _polygon(bow))
    assert all(polygon.is_valid for polygon in polygons)
    assert sum(polygon.area for polygon in polygons) == pytest.approx(5000)


@pytest.mark.parametrize(
    "text", ["", "not json", "{}", '{"type": "Topology"}', '{"type": "Polygon", "coordinates": [[[0, 0], [1]]]}', "3"]
)
def test_another_file_is_refused_with_its_name_and_the_cure(tmp_path: Path, text: str):
    path = tmp_path / "slide 7.geojson"
    path.write_text(text)
    with pytest.raises(AnnotationError, match=r"slide 7\.geojson.*GeoJSON"):
        read_polygons(path, bounds_l0=WHOLE)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(AnnotationError, match=r"gone\.geojson"):
        read_polygons(tmp_path / "gone.geojson", bounds_l0=WHOLE)


def test_what_qupath_wrote_is_counted_from_the_corner_of_the_scanned_bounds(tmp_path: Path):
    qupath = _feature(_polygon(SQUARE)) | {"properties": {"objectType": "annotation"}}
    (moved,) = _read(tmp_path, [qupath], bounds_l0=(300, 200, 500, 500))
    assert moved.bounds == (300, 200, 400, 300)
    (plain,) = _read(tmp_path, [_feature(_polygon(SQUARE))], bounds_l0=(300, 200, 500, 500))
    assert plain.bounds == (0, 0, 100, 100)


def test_a_byte_order_mark_is_no_obstacle(tmp_path: Path):
    path = tmp_path / "bom.geojson"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(_polygon(SQUARE)).encode())
    assert len(read_polygons(path, bounds_l0=WHOLE)) == 1


def test_covered_shares_by_hand(tmp_path: Path):
    coords = np.array([[0, 0], [50, 50], [90, 0], [90, 90], [100, 0], [-20, -20], [30, 30]])
    shares = lesion_fraction(coords, (20, 20), _read(tmp_path, _polygon(SQUARE, HOLE)))
    # inside; 50..70 lies in the hole; half over the rim; a quarter; touching only; touching only; all in the hole
    np.testing.assert_allclose(shares, [1, 0, 0.5, 0.25, 0, 0, 0])


def test_tiles_need_not_be_square_and_overlapping_polygons_count_once():
    twice = [shapely.box(0, 0, 100, 100), shapely.box(50, 0, 150, 100)]
    shares = lesion_fraction(np.array([[40, 90], [140, 0]]), (20, 40), twice)
    np.testing.assert_allclose(shares, [0.25, 0.5])


def test_no_polygon_and_no_tile():
    assert lesion_fraction(np.array([[0, 0]]), (10, 10), []).tolist() == [0.0]
    assert lesion_fraction(np.empty((0, 2), np.int64), (10, 10), [shapely.box(0, 0, 1, 1)]).shape == (0,)


def test_shares_add_up_to_the_polygons_area():
    generator = np.random.default_rng(0)
    angle = np.linspace(0, 2 * np.pi, 5001)[:-1]
    radius = 8000 + 1500 * np.sin(9 * angle) + generator.normal(0, 20, 5000)
    outline = shapely.Polygon(np.stack([12_800 + radius * np.cos(angle), 12_800 + radius * np.sin(angle)], axis=1))
    outline = max(shapely.get_parts(shapely.make_valid(outline)), key=lambda part: part.area)
    grid = np.stack(np.meshgrid(np.arange(100), np.arange(100)), axis=-1).reshape(-1, 2) * 256
    shares = lesion_fraction(grid, (256, 256), [outline])
    assert shares.sum() * 256 * 256 == pytest.approx(outline.area, rel=1e-9)
    centres = shapely.contains_xy(outline, grid[:, 0] + 128, grid[:, 1] + 128)
    assert ((shares >= 0.5) == centres).mean() > 0.98
