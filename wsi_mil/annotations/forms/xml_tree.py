"""XML text -> elements that know their line. Entities cannot be declared, so no file can grow in memory."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Element:
    """One element; its text does not matter in any form that is read here."""

    tag: str
    attributes: dict[str, str]
    line: int
    children: list["Element"] = field(default_factory=list)

    def below(self, tag: str) -> Iterator["Element"]:
        """Every element of this name at any depth, in the file's order."""
        for child in self.children:
            if child.tag == tag:
                yield child
            yield from child.below(tag)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Outlines that belong together: the ground of a layer is its outlines less its holes.

    Each ring is (k, 2) level-0 pixels, k > 2.
    """

    outlines: tuple[NDArray[np.float64], ...]
    holes: tuple[NDArray[np.float64], ...]


def parse(text: bytes) -> Element:
    """The root element. Raises ValueError, naming the line, for text that is no XML or that declares entities."""
    top = Element(tag="", attributes={}, line=0)
    open_elements = [top]
    parser = expat.ParserCreate()

    def start(tag: str, attributes: dict[str, str]) -> None:
        element = Element(tag=tag, attributes=attributes, line=parser.CurrentLineNumber)
        open_elements[-1].children.append(element)
        open_elements.append(element)
        if len(open_elements) > _DEEPEST:
            raise ValueError(f"line {parser.CurrentLineNumber}: elements are nested more than {_DEEPEST} deep")

    def end(_tag: str) -> None:
        open_elements.pop()

    def refuse(name: str, *_: object) -> None:
        raise ValueError(f"line {parser.CurrentLineNumber}: it declares the entity {name!r}, which no annotation needs")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        raise ValueError(f"line {error.lineno}: {expat.ErrorString(error.code)}") from error
    return top.children[0]


def point_of(element: Element) -> tuple[float, float]:
    """The attributes X and Y. Raises ValueError, naming the line, where they are no numbers."""
    try:
        x, y = float(element.attributes["X"]), float(element.attributes["Y"])
    except (KeyError, ValueError) as error:
        raise ValueError(f"line {element.line}: X and Y of <{element.tag}> are not two numbers") from error
    if not np.isfinite([x, y]).all():
        raise ValueError(f"line {element.line}: X and Y of <{element.tag}> are not finite")
    return x, y


def ring_of(points: list[tuple[float, float]]) -> NDArray[np.float64] | None:
    """(k, 2) the ring through these points; None below three, which a stray click leaves and which cover no ground."""
    ring = np.array(points, dtype=np.float64).reshape(-1, 2)
    return ring if len(np.unique(ring, axis=0)) > 2 else None


_DEEPEST = 100
