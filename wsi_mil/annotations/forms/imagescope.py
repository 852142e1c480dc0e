"""Aperio ImageScope's XML: layers (Annotation) of regions, each a list of vertices. HALO writes the same in its words.

Coordinates are level-0 pixels from the slide's top left; MicronsPerPixel and the stored areas are not used. A region
with NegativeROA is a hole in its own layer. Other programs write outlines under any type, so the type decides only
where the vertices do not: a rectangle of two vertices is the box between them, and an ellipse of two to four vertices
is the one inscribed in their bounding box. Arrows, rulers and counted points cover no ground.
"""

import numpy as np
from numpy.typing import NDArray

from wsi_mil.annotations.forms.xml_tree import Element, Layer, point_of, ring_of

ROOT = "Annotations"
_RECTANGLE, _ELLIPSE = frozenset({"1", "rectangle"}), frozenset({"2", "ellipse"})
_NO_GROUND = frozenset({"3", "arrow", "4", "ruler", "5", "pin"})
_ELLIPSE_POINTS = 256


def layers_of(root: Element) -> list[Layer]:
    """The layers of an ImageScope file. Raises ValueError, naming the line, for a vertex without two numbers."""
    layers = []
    for annotation in root.below("Annotation"):
        outlines: list[NDArray[np.float64]] = []
        holes: list[NDArray[np.float64]] = []
        for region in annotation.below("Region"):
            ring = _ring(region)
            if ring is not None:
                (holes if region.attributes.get("NegativeROA", "0").lower() in ("1", "true") else outlines).append(ring)
        layers.append(Layer(outlines=tuple(outlines), holes=tuple(holes)))
    return layers


def _ring(region: Element) -> NDArray[np.float64] | None:
    kind = region.attributes.get("Type", "0").lower()
    points = [point_of(vertex) for tag in ("Vertex", "V") for vertex in region.below(tag)]
    if kind in _NO_GROUND or len(points) < 2:
        return None
    low, high = np.min(points, axis=0), np.max(points, axis=0)
    if kind in _ELLIPSE and len(points) <= 4:
        angle = np.arange(_ELLIPSE_POINTS) * (2 * np.pi / _ELLIPSE_POINTS)
        unit = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        return ring_of([(x, y) for x, y in (low + high) / 2 + unit * (high - low) / 2])
    if kind in _RECTANGLE and len(points) == 2:
        return np.array([low, (high[0], low[1]), high, (low[0], high[1])], dtype=np.float64)
    return ring_of(points)
