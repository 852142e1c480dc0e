"""An overlay made into a page of its own: title, legend with numbers, scale bar. Pure: arrays in, array out."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from wsi_mil.heatmap import Shading, bar_length_um, colour_table

_INK, _QUIET, _PAPER = (30, 34, 40), (95, 102, 112), (255, 255, 255)
_MARGIN = 24
_LEAST_WIDTH = 900


def figure(
    picture_rgb: NDArray[np.uint8],
    shading: Shading,
    *,
    colormap: str,
    mpp: float,
    title: str,
    lines: Sequence[str],
    legend: str,
) -> NDArray[np.uint8]:
    """Set a coloured picture (h, w, 3) on a page with `title` and `lines` above it and the colour bar below it.

    mpp: microns per pixel of the picture, for the scale bar. legend: what the numbers at the colour bar mean.
    """
    height, width = picture_rgb.shape[:2]
    page_width = max(width, _LEAST_WIDTH) + 2 * _MARGIN
    title_lines = _wrapped(title, 24, page_width - 2 * _MARGIN)
    small_lines = [part for line in lines for part in _wrapped(line, 16, page_width - 2 * _MARGIN)]
    legend_lines = _wrapped(legend, 16, page_width - 2 * _MARGIN)
    top = _MARGIN + 32 * len(title_lines) + 23 * len(small_lines) + 12
    page = Image.new("RGB", (page_width, top + height + 100 + 23 * len(legend_lines)), _PAPER)
    draw = ImageDraw.Draw(page)
    _write(draw, title_lines, at=(_MARGIN, _MARGIN), size=24, step=32, fill=_INK)
    _write(draw, small_lines, at=(_MARGIN, _MARGIN + 32 * len(title_lines)), size=16, step=23, fill=_QUIET)
    left = (page_width - width) // 2
    page.paste(Image.fromarray(picture_rgb), (left, top))
    draw.rectangle((left - 1, top - 1, left + width, top + height), outline=(205, 210, 216))
    _scale_bar(draw, mpp, left=left, bottom=top + height, width=width)
    _colour_bar(page, draw, shading, colormap=colormap, at=(_MARGIN, top + height + 20))
    _write(draw, legend_lines, at=(_MARGIN, top + height + 84), size=16, step=23, fill=_QUIET)
    return np.asarray(page)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", size)


def _wrapped(text: str, size: int, width: int) -> list[str]:
    """Break between words, and inside a word that alone is too long."""
    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".strip()
        if _font(size).getlength(joined) <= width:
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if _font(size).getlength(lines[-1] + letter) > width:
                lines.append("")
            lines[-1] += letter
    return lines


def _write(
    draw: ImageDraw.ImageDraw, lines: Sequence[str], *, at: tuple[int, int], size: int, step: int, fill: tuple[int, ...]
) -> None:
    for row, line in enumerate(lines):
        draw.text((at[0], at[1] + row * step), line, font=_font(size), fill=fill)


def _scale_bar(draw: ImageDraw.ImageDraw, mpp: float, *, left: int, bottom: int, width: int) -> None:
    length_um = bar_length_um(mpp, width)
    text = f"{length_um / 1000:g} mm" if length_um >= 1000 else f"{length_um:g} µm"
    length_px = round(length_um / mpp)
    box = max(length_px, round(_font(16).getlength(text))) + 20
    x, y = left + 12, bottom - 12
    draw.rectangle((x, y - 44, x + box, y), fill=_PAPER, outline=(205, 210, 216))
    draw.text((x + box / 2, y - 38), text, font=_font(16), fill=_INK, anchor="mt")
    draw.rectangle((x + (box - length_px) // 2, y - 14, x + (box - length_px) // 2 + length_px - 1, y - 9), fill=_INK)


def _colour_bar(
    page: Image.Image, draw: ImageDraw.ImageDraw, shading: Shading, *, colormap: str, at: tuple[int, int]
) -> None:
    x, y = at
    length, thick = 420, 20
    table = colour_table(colormap)[np.linspace(0, 255, length).round().astype(int)]
    page.paste(Image.fromarray(np.broadcast_to(table, (thick, length, 3)).copy()), (x + 12, y))
    for share, text in shading.ticks:
        place = x + 12 + share * (length - 1)
        draw.line((place, y + thick, place, y + thick + 5), fill=_INK)
        draw.text((place, y + thick + 9), text, font=_font(14), fill=_INK, anchor="mt")
