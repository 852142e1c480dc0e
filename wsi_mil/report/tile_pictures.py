"""The tiles that a model weighed most and least, cut from the slide, and where they lie on the thumbnail."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from tiling.grid import ReadPlan
from tiling.slide import Slide
from wsi_mil.heatmap import ScoreColumn, TileScores

Rgb = NDArray[np.uint8]

EACH = 4
"""Tiles shown from either end."""
TILE_PX = 112
_LEAST_BOX_PX, _MARK_PX = 8, 24
TOP_COLOUR, BOTTOM_COLOUR = (213, 94, 0), (0, 114, 178)


@dataclass(frozen=True, kw_only=True)
class Place:
    """One tile worth a look."""

    row: int
    """Of the tile in the stored scores."""
    mark: str
    """What stands beside it on the thumbnail: 1, 2 ... from the highest down, a, b ... from the lowest up."""
    highest: bool
    score: float


def choose_tiles(scores: TileScores, column: ScoreColumn) -> tuple[Place, ...]:
    """The tiles of the highest and the lowest score; of few tiles, none is both."""
    values = scores.column(column.name).astype(np.float64)
    each = min(EACH, len(values) // 2)
    order = np.argsort(-values, kind="stable").tolist()
    top = [Place(row=row, mark=str(n + 1), highest=True, score=values[row]) for n, row in enumerate(order[:each])]
    low = order[::-1][:each]
    return (
        *top,
        *(Place(row=row, mark="abcdefgh"[n], highest=False, score=values[row]) for n, row in enumerate(low)),
    )


def cut_tiles(slide: Slide, scores: TileScores, places: Sequence[Place]) -> list[Rgb]:
    """The ground of each tile at TILE_PX pixels. Raises SlideError where it cannot be read."""
    plan = _plan(slide, scores)
    corners = [scores.coords_l0[place.row].tolist() for place in places]
    return [slide.read_tile(x_l0, y_l0, plan) for x_l0, y_l0 in corners]


def mark_tiles(picture: Rgb, scores: TileScores, places: Sequence[Place]) -> Rgb:
    """The thumbnail of the whole slide with a box and a mark at each tile; small tiles get a box that can be seen."""
    image = Image.fromarray(picture)
    draw = ImageDraw.Draw(image)
    shrink = np.array([image.width, image.height]) / np.array(scores.geometry.level0_size)
    size = np.maximum(np.array(scores.geometry.tile_size_l0) * shrink, _LEAST_BOX_PX)
    middles = (scores.coords_l0 + np.array(scores.geometry.tile_size_l0) / 2) * shrink
    for place in reversed(places):
        left, top = (middles[place.row] - size / 2).tolist()
        right, bottom = (middles[place.row] + size / 2).tolist()
        colour = TOP_COLOUR if place.highest else BOTTOM_COLOUR
        draw.rectangle((left - 2, top - 2, right + 2, bottom + 2), outline=(255, 255, 255), width=2)
        draw.rectangle((left, top, right, bottom), outline=colour, width=3)
    inside = bool(size.min() >= _MARK_PX + 6)
    beside = np.zeros(2) if inside else np.array([size[0] / 2 + 4, 0.0])
    for place in reversed(places):
        x, y = (middles[place.row] + beside).tolist()
        draw.text(
            (x, y),
            place.mark,
            anchor="mm" if inside else "lm",
            fill=TOP_COLOUR if place.highest else BOTTOM_COLOUR,
            font_size=_MARK_PX,
            stroke_width=4,
            stroke_fill="white",
        )
    return np.asarray(image)


def _plan(slide: Slide, scores: TileScores) -> ReadPlan:
    """How a tile's ground becomes TILE_PX pixels: from the coarsest level that is still fine enough."""
    width, height = scores.geometry.tile_size_l0
    fine = [
        level
        for level, (across, down) in enumerate(slide.level_downsamples)
        if level == 0 or (across <= width / TILE_PX and down <= height / TILE_PX)
    ]
    return ReadPlan(
        level=fine[-1],
        level_downsample=slide.level_downsamples[fine[-1]],
        tile_size_l0=(width, height),
        stride_l0=scores.geometry.stride_l0,
        origin_l0=scores.geometry.origin_l0,
        grid_size=(1, 1),
        tile_px=TILE_PX,
        mpp_effective=(width * scores.geometry.mpp[0] / TILE_PX, height * scores.geometry.mpp[1] / TILE_PX),
    )
