"""Annotation files -> polygons in level-0 pixels, and how much of each tile they cover.

Read are GeoJSON (QuPath and others), ASAP's XML and Aperio ImageScope's XML, told apart by what stands in the file.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import shapely
from numpy.typing import NDArray

from tiling.geojson import Rings, polygons_of
from wsi_mil.annotations.forms import asap, imagescope, xml_tree
from wsi_mil.errors import UserError

_XML_FORMS = {form.ROOT: form.layers_of for form in (asap, imagescope)}
_XML_STARTS = (b"<", b"\xff\xfe", b"\xfe\xff")
"""An element, or the mark of UTF-16, in which GeoJSON is never written."""
_FORMS = (
    "Read are GeoJSON (Polygon and MultiPolygon, alone, in a Feature or in a FeatureCollection), ASAP XML and Aperio "
    "ImageScope XML, all in level-0 pixels. Export the annotation as one of these"
)


class AnnotationError(UserError):
    """An annotation file cannot be read as polygons."""


def read_polygons(path: Path, *, bounds_l0: tuple[int, int, int, int]) -> tuple[shapely.Polygon, ...]:
    """Polygons of an annotation file in level-0 pixels, holes cut out; rings that cross themselves are mended.

    bounds_l0: x, y, width, height of the slide's scanned area, from whose corner QuPath counts; what is read and in
    which frame is told in `tiling.geojson` and in each of `annotation_forms`. Raises AnnotationError, with the line
    where there is one, for a file of another form or a damaged one.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise AnnotationError(f"{path}: the annotation cannot be read ({error.strerror}). Mend the path.") from error
    try:
        if text.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(_XML_STARTS):
            return _of_xml(text)
        document = json.loads(text.decode("utf-8-sig"))
        return tuple(part for rings in polygons_of(document, bounds_l0=bounds_l0) for part in _valid(rings))
    except (ValueError, shapely.errors.ShapelyError) as error:
        raise AnnotationError(f"{path}: no annotation ({error}). {_FORMS}.") from error


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


def _of_xml(text: bytes) -> tuple[shapely.Polygon, ...]:
    root = xml_tree.parse(text)
    if root.tag not in _XML_FORMS:
        raise ValueError(f"line {root.line}: <{root.tag}>, expected <{'> or <'.join(_XML_FORMS)}>")
    found: list[shapely.Polygon] = []
    for layer in _XML_FORMS[root.tag](root):
        holes = shapely.union_all([part for ring in layer.holes for part in _valid([ring])])
        outlines = [part for ring in layer.outlines for part in _valid([ring])]
        found.extend(part for polygon in outlines for part in _polygons_in(shapely.difference(polygon, holes)))
    return tuple(found)


def _valid(rings: Rings) -> list[shapely.Polygon]:
    shell, *holes = rings
    polygon = shapely.Polygon(shell, holes)
    if polygon.is_valid:
        return [polygon]
    return _polygons_in(shapely.make_valid(polygon))


def _polygons_in(ground: shapely.Geometry) -> list[shapely.Polygon]:
    """What of a geometry covers ground, also where it is a collection of collections."""
    parts = shapely.get_parts(shapely.get_parts(ground))
    return [part for part in parts if part.geom_type == "Polygon" and not part.is_empty]
