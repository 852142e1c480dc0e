"""Deep-zoom arithmetic and pixels: which part of level 0 a tile shows, and the tile itself. No web, no state."""

import io
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tiling.slide import Slide

TILE_PX = 510
OVERLAP_PX = 1
"""Without it the browser's canvas stretches every tile by one pixel."""
BASE_PX = 2048
"""The coarse levels are cut from one picture of the whole slide, at most this long."""
_READ_PX = 2048
_JPEG_QUALITY = 80

Box = tuple[float, float, float, float]
"""left, top, right, bottom"""


@dataclass(frozen=True, kw_only=True)
class Pyramid:
    """The deep-zoom levels of a slide: each halves the one above, and level `top` is the slide itself."""

    size_l0: tuple[int, int]

    @property
    def top(self) -> int:
        """Number of the full-size level."""
        return (max(self.size_l0) - 1).bit_length()

    @property
    def base(self) -> int:
        """The finest level that is no longer than BASE_PX."""
        return next(level for level in range(self.top, -1, -1) if max(self.size_px(level)) <= BASE_PX)

    def size_px(self, level: int) -> tuple[int, int]:
        """Width and height of a level, rounded up: no row or column of the slide is lost."""
        scale = 1 << (self.top - level)
        return -(-self.size_l0[0] // scale), -(-self.size_l0[1] // scale)

    def tile_px(self, level: int, column: int, row: int) -> tuple[int, int, int, int] | None:
        """left, top, right, bottom of a tile in its level, overlap included; None where there is no such tile."""
        if not 0 <= level <= self.top or column < 0 or row < 0:
            return None
        width, height = self.size_px(level)
        if column * TILE_PX >= width or row * TILE_PX >= height:
            return None
        left, top = max(0, column * TILE_PX - OVERLAP_PX), max(0, row * TILE_PX - OVERLAP_PX)
        right = min(width, (column + 1) * TILE_PX + OVERLAP_PX)
        return left, top, right, min(height, (row + 1) * TILE_PX + OVERLAP_PX)

    def box(self, level: int, tile_px: tuple[int, int, int, int], *, onto: tuple[int, int]) -> Box:
        """A tile's extent on a picture of the whole slide of `onto` pixels, cut at the slide's edge."""
        scale = 1 << (self.top - level)
        width, height = self.size_l0
        left, top, right, bottom = (edge * scale for edge in tile_px)
        x, y = onto[0] / width, onto[1] / height
        return left * x, top * y, min(right, width) * x, min(bottom, height) * y


def render_tile(
    slide: Slide, level: int, column: int, row: int, *, base: Callable[[], NDArray[np.uint8]]
) -> NDArray[np.uint8] | None:
    """The pixels (h, w, 3) of a deep-zoom tile; None where there is no such tile. `base` returns render_base(slide)."""
    pyramid = Pyramid(size_l0=slide.size_l0)
    place = pyramid.tile_px(level, column, row)
    if place is None:
        return None
    size = (place[2] - place[0], place[3] - place[1])
    if level > pyramid.base:
        return render_region(slide, pyramid.box(level, place, onto=slide.size_l0), size_px=size)
    picture = base()
    return _reduced(picture, pyramid.box(level, place, onto=(picture.shape[1], picture.shape[0])), size)


def render_base(slide: Slide) -> NDArray[np.uint8]:
    """The whole slide at the pyramid's base level."""
    pyramid = Pyramid(size_l0=slide.size_l0)
    return render_region(slide, (0, 0, *slide.size_l0), size_px=pyramid.size_px(pyramid.base))


def render_region(slide: Slide, box_l0: Box, *, size_px: tuple[int, int]) -> NDArray[np.uint8]:
    """A part of level 0 at `size_px` (width, height). Memory is bounded whatever the part's size."""
    left, top, right, bottom = box_l0
    width, height = size_px
    level = _level_for(slide, (right - left) / width, (bottom - top) / height)
    downsample = slide.level_downsamples[level]
    step_x, step_y = (right - left) / width, (bottom - top) / height
    block_x = max(1, math.floor(_READ_PX * downsample[0] / step_x))
    block_y = max(1, math.floor(_READ_PX * downsample[1] / step_y))
    picture = np.empty((height, width, 3), dtype=np.uint8)
    for y in range(0, height, block_y):
        for x in range(0, width, block_x):
            x_end, y_end = min(width, x + block_x), min(height, y + block_y)
            part = (left + x * step_x, top + y * step_y, left + x_end * step_x, top + y_end * step_y)
            picture[y:y_end, x:x_end] = _read(slide, part, level=level, size_px=(x_end - x, y_end - y))
    return picture


def jpeg(rgb: NDArray[np.uint8]) -> bytes:
    """Encode for the browser."""
    stream = io.BytesIO()
    Image.fromarray(rgb).save(stream, format="JPEG", quality=_JPEG_QUALITY)
    return stream.getvalue()


def _level_for(slide: Slide, step_x: float, step_y: float) -> int:
    fits = [i for i, (x, y) in enumerate(slide.level_downsamples) if x <= step_x * 1.01 and y <= step_y * 1.01]
    return max(fits, default=0)


def _read(slide: Slide, box_l0: Box, *, level: int, size_px: tuple[int, int]) -> NDArray[np.uint8]:
    """One block from one level: whole pixels around the box are read, the box itself is resampled."""
    x, y = slide.level_downsamples[level]
    left, top, right, bottom = box_l0[0] / x, box_l0[1] / y, box_l0[2] / x, box_l0[3] / y
    first = (math.floor(left + 1e-6), math.floor(top + 1e-6))
    last = (math.ceil(right - 1e-6), math.ceil(bottom - 1e-6))
    size_lv = (max(1, last[0] - first[0]), max(1, last[1] - first[1]))
    pixels = slide.read_rgb(round(first[0] * x), round(first[1] * y), level=level, size_lv=size_lv)
    box = (left - first[0], top - first[1], right - first[0], bottom - first[1])
    return _reduced(pixels, box, size_px)


def _reduced(rgb: NDArray[np.uint8], box: Box, size_px: tuple[int, int]) -> NDArray[np.uint8]:
    height, width = rgb.shape[:2]
    if size_px == (width, height) and np.allclose(box, (0, 0, width, height), atol=1e-6):
        return rgb
    inside = (max(0.0, box[0]), max(0.0, box[1]), min(width, box[2]), min(height, box[3]))
    # HAMMING weighs pixels by their distance: BOX takes whole ones, which moves edges by up to half a pixel
    return np.asarray(Image.fromarray(rgb).resize(size_px, Image.Resampling.HAMMING, box=inside))
