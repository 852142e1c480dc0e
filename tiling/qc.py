"""Pictures by which people judge the tiling: one a slide, one contact sheet a cohort. Pure: arrays in, arrays out."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil, log10, sqrt
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from tiling.geometry import clipped_bounds
from tiling.grid import TileGrid
from tiling.pipeline import Survey, tissue_mm2

Rgb = NDArray[np.uint8]

PICTURE_PX = 1000
"""Longest side of the slide's picture, without its caption."""
CAPTION_PX = 80
"""Height of the strip below a QC picture."""
_CAPTION_WIDTH_PX = 760
"""Least width, so that the caption of a narrow slide can be read."""
_SHEET_PX = 6000
"""Width from which a contact sheet's cells shrink instead."""
_CELL_PX = 320
_TISSUE = (0, 130, 60)
_TILE = (30, 70, 200)
_PEN = (220, 0, 200)
_MISSING = (225, 110, 0)
_INK = (30, 30, 30)
_PAPER = (255, 255, 255)
_GREY = (205, 205, 205)
_NOT_DRAWN = ("Cc", "Cs", "Zl", "Zp")
"""Categories of characters in a name that end a line or cannot be drawn at all."""


def _font_path() -> str | None:
    """matplotlib's DejaVu Sans, which has µ, Greek and Cyrillic. matplotlib itself is not imported for it."""
    found = find_spec("matplotlib")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    paths = [Path(folder, "mpl-data/fonts/ttf/DejaVuSans.ttf") for folder in folders]
    return next((str(path) for path in paths if path.is_file()), None)


_FONT = _font_path()


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One slide of a contact sheet."""

    slide_id: str
    outcome: str
    """The word of the summary; `tiled` where all is well."""
    picture: Rgb | None
    """The slide, as in its QC picture; None where there is none."""
    note: str = ""
    """What else to say, such as the number of tiles."""


def qc_picture(survey: Survey, grid: TileGrid | None, *, base_rgb: Rgb | None = None, outcome: str = "tiled") -> Rgb:
    """Draw the slide with its tissue's outline, its tiles, what was left out, a scale bar and a caption.

    base_rgb: a sharper picture of the whole slide to draw on, where there is one. grid: None for a slide without tiles.
    """
    base = survey.thumbnail_rgb if base_rgb is None else base_rgb
    scale = PICTURE_PX / max(base.shape[:2])
    size = max(1, round(base.shape[1] * scale)), max(1, round(base.shape[0] * scale))
    how = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    picture: Rgb = np.asarray(cv2.resize(base, size, interpolation=how), np.uint8)
    _shade(picture, survey.ground.missing, _MISSING)
    _shade(picture, survey.ground.pen, _PEN)
    if grid is not None:
        _draw_tiles(picture, grid)
    _outline(picture, survey.ground.missing, _MISSING)
    _outline(picture, survey.ground.pen, _PEN)
    _outline(picture, survey.ground.tissue, _TISSUE)
    _draw_bounds(picture, survey)
    return _with_caption(picture, survey, grid, outcome)


def contact_sheet(cells: Sequence[Cell]) -> Rgb:
    """Lay the pictures of a cohort side by side, each with its id and outcome; slides without one are grey cells."""
    columns, side = _n_columns(len(cells)), cell_side(len(cells))
    rows = max(1, ceil(len(cells) / columns))
    label = max(14, side // 7)
    sheet = Image.new("RGB", (columns * side, rows * (side + label)), _PAPER)
    draw = ImageDraw.Draw(sheet)
    font = _font(max(9, label * 2 // 5))
    for index, cell in enumerate(cells):
        left, top = index % columns * side, index // columns * (side + label)
        _paste(sheet, cell, left, top, side)
        colour = _INK if cell.outcome == "tiled" else (190, 0, 0)
        draw.text((left + 4, top + side), _fitted(cell.slide_id, font, side - 8), font=font, fill=_INK)
        text = _fitted(" · ".join(filter(None, (cell.outcome, cell.note))), font, side - 8)
        draw.text((left + 4, top + side + label // 2), text, font=font, fill=colour)
    return np.asarray(sheet, np.uint8)


def cell_side(n_cells: int) -> int:
    """Width of a contact sheet's cell in pixels: smaller for large cohorts."""
    return max(64, min(_CELL_PX, _SHEET_PX // _n_columns(n_cells)))


def _n_columns(n_cells: int) -> int:
    return max(1, min(n_cells, ceil(sqrt(n_cells * 1.4))))


def _paste(sheet: Image.Image, cell: Cell, left: int, top: int, side: int) -> None:
    inner = side - 8
    box = Image.new("RGB", (inner, inner), _GREY)
    if cell.picture is not None:
        small = Image.fromarray(cell.picture)
        small.thumbnail((inner, inner), Image.Resampling.BOX)
        box.paste(_PAPER, (0, 0, inner, inner))
        box.paste(small, ((inner - small.width) // 2, (inner - small.height) // 2))
    else:
        ImageDraw.Draw(box).text((inner // 2, inner // 2), cell.outcome, font=_font(14), fill=_INK, anchor="mm")
    sheet.paste(box, (left + 4, top + 4))


def _draw_tiles(picture: Rgb, grid: TileGrid) -> None:
    """Outline each tile, or tint it where tiles are too small to be outlined."""
    scale = np.array([picture.shape[1] / grid.slide.size_l0[0], picture.shape[0] / grid.slide.size_l0[1]])
    starts = np.round(grid.coords_l0 * scale).astype(int)
    stops = np.round((grid.coords_l0 + np.array(grid.plan.tile_size_l0)) * scale).astype(int)
    if (np.array(grid.plan.tile_size_l0) * scale).min() >= 8:
        for (left, top), (right, bottom) in zip(starts.tolist(), stops.tolist(), strict=True):
            cv2.rectangle(picture, (left, top), (right, bottom), _TILE, 1)
        return
    covered = np.zeros(picture.shape[:2], bool)
    for (left, top), (right, bottom) in zip(starts.tolist(), stops.tolist(), strict=True):
        covered[top : max(bottom, top + 1), left : max(right, left + 1)] = True
    picture[covered] = (picture[covered] * 0.8 + np.array(_TILE) * 0.2).astype(np.uint8)


def _shade(picture: Rgb, mask: NDArray[np.bool_], colour: tuple[int, int, int]) -> None:
    """Hatch what was left out, so that what is below stays visible."""
    if not mask.any():
        return
    large = _resized(mask, picture)
    diagonal = np.add.outer(np.arange(large.shape[0]), np.arange(large.shape[1]))
    picture[large & (diagonal % 10 < 2)] = colour


def _outline(picture: Rgb, mask: NDArray[np.bool_], colour: tuple[int, int, int]) -> None:
    if mask.any():
        contours, _ = cv2.findContours(_resized(mask, picture).astype(np.uint8), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
        cv2.drawContours(picture, contours, -1, colour, 2)


def _resized(mask: NDArray[np.bool_], picture: Rgb) -> NDArray[np.bool_]:
    size = picture.shape[1], picture.shape[0]
    return np.asarray(cv2.resize(mask.astype(np.float32), size, interpolation=cv2.INTER_LINEAR) >= 0.5)


def _draw_bounds(picture: Rgb, survey: Survey) -> None:
    x, y, width, height = clipped_bounds(survey.slide)
    if (width, height) == survey.slide.size_l0:
        return
    scale_x, scale_y = picture.shape[1] / survey.slide.size_l0[0], picture.shape[0] / survey.slide.size_l0[1]
    corner, opposite = (x * scale_x, y * scale_y), ((x + width) * scale_x, (y + height) * scale_y)
    cv2.rectangle(picture, _whole(corner), _whole(opposite), _INK, 1)


def _whole(point: tuple[float, float]) -> tuple[int, int]:
    return round(point[0]), round(point[1])


def _with_caption(picture: Rgb, survey: Survey, grid: TileGrid | None, outcome: str) -> Rgb:
    height, width = picture.shape[:2]
    canvas = Image.new("RGB", (max(width, _CAPTION_WIDTH_PX), height + CAPTION_PX), _PAPER)
    canvas.paste(Image.fromarray(picture), ((canvas.width - width) // 2, 0))
    draw = ImageDraw.Draw(canvas)
    bar_px = _draw_scale_bar(draw, survey, picture_width=width, right=canvas.width - 12, top=height + 14)
    room = canvas.width - bar_px - 36
    draw.text((10, height + 5), _fitted(survey.slide.slide_id, _font(19), room), font=_font(19), fill=_INK)
    colour = _INK if outcome == "tiled" else (190, 0, 0)
    _draw_key(draw, survey, grid, top=height + 32)
    facts = _fitted(_facts(survey, grid, outcome), _font(15), canvas.width - 20)
    draw.text((10, height + 55), facts, font=_font(15), fill=colour)
    return np.asarray(canvas, np.uint8)


def _facts(survey: Survey, grid: TileGrid | None, outcome: str) -> str:
    slide = survey.slide
    mpp = f"{slide.mpp[0]:.4g}"
    if abs(slide.mpp[0] / slide.mpp[1] - 1) > 0.001:
        mpp += f" x {slide.mpp[1]:.4g}"
    tiles = outcome
    if grid is not None:
        tiles = f"{len(grid):,} tiles of {grid.spec.tile_px} px at {grid.spec.mpp:g} µm/px"
    return f"{mpp} µm/px ({slide.mpp_source})  ·  {tiles}  ·  {tissue_mm2(survey):.2f} mm² tissue"


def _draw_key(draw: ImageDraw.ImageDraw, survey: Survey, grid: TileGrid | None, *, top: int) -> None:
    """Name the colours that are in the picture."""
    used = [("tissue", _TISSUE, survey.ground.tissue.any()), ("tiles", _TILE, grid is not None)]
    used += [("pen, left out", _PEN, survey.ground.pen.any())]
    used += [("not scanned", _MISSING, survey.ground.missing.any())]
    left = 10
    for name, colour, present in used:
        if present:
            draw.rectangle((left, top + 3, left + 12, top + 13), outline=colour, width=3)
            draw.text((left + 18, top), name, font=_font(14), fill=_INK)
            left += 40 + round(_font(14).getlength(name))


def _draw_scale_bar(draw: ImageDraw.ImageDraw, survey: Survey, *, picture_width: int, right: int, top: int) -> int:
    """Draw a bar of a round length, about a fifth of the picture; return its width in pixels."""
    um_per_px = survey.slide.size_l0[0] * survey.slide.mpp[0] / picture_width
    wish_um = max(picture_width, 200) / 5 * um_per_px
    power = 10.0 ** int(np.floor(log10(wish_um)))
    length_um = max(step * power for step in (1, 2, 5) if step * power <= wish_um)
    bar_px = round(length_um / um_per_px)
    text = f"{length_um / 1000:g} mm" if length_um >= 1000 else f"{length_um:g} µm"
    draw.rectangle((right - bar_px, top, right, top + 5), fill=_INK)
    draw.text((right - bar_px / 2, top + 10), text, font=_font(15), fill=_INK, anchor="ma")
    return max(bar_px, 60)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size) if _FONT is None else ImageFont.truetype(_FONT, size)


def _fitted(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, room_px: float) -> str:
    """Cut the middle out of a text that is too long: ids differ at both ends. One line: a name may hold others."""
    text = "".join("\N{SYMBOL FOR NEWLINE}" if unicodedata.category(c) in _NOT_DRAWN else c for c in text)
    if font.getlength(text) <= room_px:
        return text
    for kept in range(len(text) - 1, 2, -1):
        short = f"{text[: (kept + 1) // 2]}…{text[len(text) - kept // 2 :]}"
        if font.getlength(short) <= room_px:
            return short
    return text[:1]
