"""ASAP's XML, the form of CAMELYON16 and CAMELYON17.

Coordinates are level-0 pixels from the slide's top left. Polygons, rectangles and splines are closed outlines; a spline
is taken along its points, as ASAP's own masks do. Dots, point sets and measurements cover no ground.
Groups named in HOLES, and the groups inside them, are cut out of the rest: `_2` and `Exclusion` of CAMELYON16, `normal`
of CAMELYON17. Every other group is ground, whatever its name.
"""

import numpy as np
from numpy.typing import NDArray

from wsi_mil.annotations.forms.xml_tree import Element, Layer, point_of, ring_of

ROOT = "ASAP_Annotations"
HOLES = frozenset({"_2", "exclusion", "normal"})
"""In lower case."""
_OUTLINES = frozenset({"polygon", "rectangle", "spline"})
_NO_GROUND = frozenset({"dot", "pointset", "measurement", "none"})


def layers_of(root: Element) -> list[Layer]:
    """The one layer of an ASAP file. Raises ValueError, naming the line, for what ASAP does not write."""
    parents = {
        group.attributes.get("Name", ""): group.attributes.get("PartOfGroup", "None") for group in root.below("Group")
    }
    outlines: list[NDArray[np.float64]] = []
    holes: list[NDArray[np.float64]] = []
    for annotation in root.below("Annotation"):
        kind = annotation.attributes.get("Type", "").lower()
        if kind not in _OUTLINES | _NO_GROUND:
            raise ValueError(
                f"line {annotation.line}: an annotation of type {annotation.attributes.get('Type')!r}; "
                f"known are {', '.join(sorted(_OUTLINES | _NO_GROUND))}"
            )
        points = [point_of(coordinate) for coordinate in sorted(annotation.below("Coordinate"), key=_order)]
        ring = ring_of(points) if kind in _OUTLINES else None
        if ring is not None:
            hole = _is_hole(annotation.attributes.get("PartOfGroup", "None"), parents)
            (holes if hole else outlines).append(ring)
    return [Layer(outlines=tuple(outlines), holes=tuple(holes))]


def _order(coordinate: Element) -> float:
    try:
        return float(coordinate.attributes.get("Order", "0"))
    except ValueError as error:
        raise ValueError(f"line {coordinate.line}: Order of <Coordinate> is not a number") from error


def _is_hole(group: str, parents: dict[str, str]) -> bool:
    """Whether a group, or one that it lies in, is cut out."""
    seen: set[str] = set()
    while group not in seen:
        if group.lower() in HOLES:
            return True
        seen.add(group)
        group = parents.get(group, group)
    return False
