"""Slides in, the places to look at out. Knows pixels and microns; never imports torch.

Names are loaded when they are first used, so that a message about wrong use does not wait for image libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiling.grid import ReadPlan as ReadPlan
    from tiling.grid import TileGrid as TileGrid
    from tiling.grid import TileSpec as TileSpec
    from tiling.grid import TissueSpec as TissueSpec
    from tiling.pipeline import tile_slide as tile_slide
    from tiling.slide import Slide as Slide
    from tiling.slide import SlideInfo as SlideInfo

_HOMES = {
    "ReadPlan": "grid",
    "TileGrid": "grid",
    "TileSpec": "grid",
    "TissueSpec": "grid",
    "tile_slide": "pipeline",
    "Slide": "slide",
    "SlideInfo": "slide",
}

__all__ = ["ReadPlan", "Slide", "SlideInfo", "TileGrid", "TileSpec", "TissueSpec", "tile_slide"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tiling' has no attribute {name!r}")
    return getattr(import_module(f"tiling.{_HOMES[name]}"), name)
