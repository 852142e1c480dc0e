"""Outlines of ASAP and ImageScope cover the ground that those programs show."""

from pathlib import Path

import numpy as np
import pytest
import shapely

from wsi_mil.annotations.reading import AnnotationError, read_polygons

WHOLE = (0, 0, 1000, 800)
SQUARE = [(0, 0), (100, 0), (100, 100), (0, 100)]
INNER = [(25, 25), (75, 25), (75, 75), (25, 75)]
FAR = [(200, 0), (260, 0), (260, 50), (200, 50)]


def _read(folder: Path, text: str | bytes, name: str = "slide 7.xml", bounds_l0=WHOLE):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_polygons(path, bounds_l0=bounds_l0)


def _area(polygons) -> float:
    return shapely.union_all(list(polygons)).area


def _asap(*annotations: tuple[str, str, list[tuple[float, float]]], groups: str = "") -> str:
    parts = []
    for kind, group, points in annotations:
        corners = "".join(f'<Coordinate Order="{i}" X="{x}" Y="{y}" />\n' for i, (x, y) in enumerate(points))
        head = f'<Annotation Name="A" Type="{kind}" PartOfGroup="{group}">\n'
        parts.append(f"{head}<Coordinates>{corners}</Coordinates></Annotation>")
    return (
        f'<?xml version="1.0"?>\n<ASAP_Annotations>\n<Annotations>\n{"".join(parts)}</Annotations>\n'
        f"<AnnotationGroups>{groups}</AnnotationGroups></ASAP_Annotations>"
    )


def _region(points, kind="0", negative="0", vertex="Vertex") -> str:
    vertices = "".join(f'<{vertex} X="{x}" Y="{y}"/>' for x, y in points)
    return f'<Region Id="1" Type="{kind}" NegativeROA="{negative}"><Vertices>{vertices}</Vertices></Region>'


def _imagescope(*layers: list[str]) -> str:
    parts = (f'<Annotation Id="1" Type="4"><Regions>{"".join(layer)}</Regions></Annotation>' for layer in layers)
    return f'<Annotations MicronsPerPixel="0.25">\n{"".join(parts)}\n</Annotations>'


@pytest.mark.parametrize("group", ["_2", "Exclusion", "normal"])
def test_the_groups_of_camelyon_that_mean_no_tumour_are_cut_out(tmp_path: Path, group: str):
    polygons = _read(tmp_path, _asap(("Polygon", "_0", SQUARE), ("Spline", group, INNER), ("Polygon", "_1", FAR)))
    assert _area(polygons) == 100 * 100 - 50 * 50 + 60 * 50
    assert sorted(polygon.area for polygon in polygons) == [3000, 7500]


def test_a_group_inside_an_exclusion_is_cut_out_too_and_every_other_name_is_ground(tmp_path: Path):
    groups = '<Group Name="vessel" PartOfGroup="Exclusion"/><Group Name="Exclusion" PartOfGroup="None"/>'
    text = _asap(("Polygon", "Tumor", SQUARE), ("Rectangle", "vessel", INNER), ("Polygon", "None", FAR), groups=groups)
    assert _area(_read(tmp_path, text)) == 7500 + 3000


def test_groups_that_lie_in_each_other_end(tmp_path: Path):
    groups = '<Group Name="a" PartOfGroup="b"/><Group Name="b" PartOfGroup="a"/>'
    assert _area(_read(tmp_path, _asap(("Polygon", "a", SQUARE), groups=groups))) == 10_000


def test_corners_of_asap_go_by_their_order_and_not_by_their_place_in_the_file(tmp_path: Path):
    text = _asap(("Polygon", "None", SQUARE))
    shuffled = text.splitlines(keepends=True)
    places = [i for i, line in enumerate(shuffled) if "Order=" in line]
    shuffled[places[1]], shuffled[places[2]] = shuffled[places[2]], shuffled[places[1]]
    (polygon,) = _read(tmp_path, "".join(shuffled))
    assert polygon.equals(shapely.Polygon(SQUARE))


def test_dots_point_sets_measurements_and_stray_clicks_cover_no_ground(tmp_path: Path):
    marks = [("Dot", SQUARE[:1]), ("PointSet", SQUARE), ("Measurement", SQUARE[:2]), ("Polygon", SQUARE[:2])]
    assert _read(tmp_path, _asap(*((kind, "None", points) for kind, points in marks))) == ()


def test_a_negative_region_of_imagescope_is_a_hole_in_its_own_layer_only(tmp_path: Path):
    tumour = [_region(SQUARE), _region(INNER, negative="1")]
    assert _area(_read(tmp_path, _imagescope(tumour))) == 7500
    other = [_region([(20, 20), (80, 20), (80, 80), (20, 80)])]
    assert _area(_read(tmp_path, _imagescope(tumour, other))) == 10_000


def test_rectangles_and_ellipses_of_imagescope_may_be_written_by_their_corners(tmp_path: Path):
    corners = [(10, 20), (110, 60)]
    assert _area(_read(tmp_path, _imagescope([_region(corners, kind="1")]))) == 100 * 40
    for points in (corners, [(10, 20), (110, 20), (110, 60), (10, 60)], [(60, 20), (110, 40), (60, 60), (10, 40)]):
        (ellipse,) = _read(tmp_path, _imagescope([_region(points, kind="2")]))
        assert ellipse.area == pytest.approx(np.pi * 50 * 20, rel=1e-3)
        assert ellipse.bounds == pytest.approx((10, 20, 110, 60))


def test_an_outline_of_many_vertices_is_taken_as_it_is_drawn_whatever_its_type(tmp_path: Path):
    star = [(50 + r * np.cos(a), 50 + r * np.sin(a)) for a, r in zip(np.arange(10) * 0.628, [40, 15] * 5, strict=True)]
    for kind in ("0", "1", "2", "9"):
        (polygon,) = _read(tmp_path, _imagescope([_region(star, kind=kind)]))
        assert polygon.equals(shapely.Polygon(star))


def test_arrows_and_rulers_cover_no_ground(tmp_path: Path):
    assert _read(tmp_path, _imagescope([_region(SQUARE, kind=kind) for kind in ("3", "4", "5")])) == ()


def test_the_words_of_halo_mean_the_same(tmp_path: Path):
    regions = [_region([(0, 0), (100, 50)], kind="Ellipse", vertex="V"), _region(FAR, kind="Polygon", vertex="V")]
    assert _area(_read(tmp_path, _imagescope(regions))) == pytest.approx(np.pi * 50 * 25 + 3000, rel=1e-3)


def test_the_form_goes_by_content_and_not_by_suffix_and_scanned_bounds_do_not_move_it(tmp_path: Path):
    text = _asap(("Polygon", "None", SQUARE))
    for name, written in (("a.geojson", text.encode()), ("b", b"\xef\xbb\xbf" + text.encode())):
        (polygon,) = _read(tmp_path, written, name, bounds_l0=(300, 200, 500, 500))
        assert polygon.bounds == (0, 0, 100, 100)
    wide = text.replace('"1.0"?', '"1.0" encoding="UTF-16"?').encode("utf-16")
    assert _area(_read(tmp_path, wide)) == 10_000
    json_text = '{"type": "Polygon", "coordinates": [[[0, 0], [10, 0], [10, 10], [0, 0]]]}'
    assert _area(_read(tmp_path, json_text, "c.xml")) == 50


BOMB = (
    '<?xml version="1.0"?>\n<!DOCTYPE bomb [\n<!ENTITY a "ha">\n<!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">\n]>\n'
    '<ASAP_Annotations Name="&b;"/>'
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "line 3.*entity 'a'"),
        (BOMB.replace('"ha"', 'SYSTEM "file:///etc/hostname"'), "line 3.*entity 'a'"),
        (_asap(("Polygon", "None", SQUARE))[:180], r"line \d+"),
        (_asap(("Polygon", "None", [(0, 0), ("x", 1), (1, 1)])), "line 6.*X and Y of <Coordinate>"),
        (_asap(("Polygon", "None", [(0, 0), ("inf", 1), (1, 1)])), "line 6.*not finite"),
        (_asap(("Blob", "None", SQUARE)), "line 4.*'Blob'.*polygon"),
        (_imagescope([_region([(0, 0), (1, 1)]).replace('Y="1"', "")]), "line 2.*<Vertex>"),
        ("<?xml version='1.0'?>\n<svg/>", "line 2: <svg>, expected <ASAP_Annotations> or <Annotations>"),
        ("<a>" * 101, "nested more than 100"),
        ("<", "line 1"),
    ],
)
def test_damaged_and_hostile_files_are_refused_with_their_line_and_the_cure(tmp_path: Path, text: str, said: str):
    with pytest.raises(AnnotationError, match=rf"(?s)slide 7\.xml.*{said}.*ASAP XML and Aperio ImageScope XML"):
        _read(tmp_path, text)
