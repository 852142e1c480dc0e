"""Tissue, pen and missing ground on a thumbnail. Pure; no network and no learned weights.

The signal is optical density against the slide's own glass. Stains absorb colours unequally, so the spread between
the channels' densities finds them even where they are faint, and shadows, dust and scanner shading, which are grey,
do not count. Where a slide has no glass at all, a usual glass colour stands in, so a slide full of tissue is tissue.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from tiling.grid import TissueSpec

Mask = NDArray[np.bool_]
Plane = NDArray[np.float32]

# Densities are -log10(transmission): 0.03 is 7 % of the light lost, 0.02 is 4.5 %.
_STRONG = 0.03
"""Every piece of tissue must reach this spread of the channels' densities somewhere; faint eosin has 0.03 to 0.06."""
_WEAK = 0.02
"""The spread down to which tissue extends from there; on two real scans 99 % of the glass stayed below 0.018."""
_BLUR_UM = 4.0
"""Blur against single noisy pixels of thumbnails finer than 8 µm/px; coarser ones are averages already."""
_USUAL_GLASS = 240.0
"""Brightness of glass on the usual scanner, for slides that show none of it."""
_GLASS_LEAST = 150
"""Glass is never darker than this in any channel of an image exposed for bright field."""
_GLASS_TINT = 40
"""Largest difference between glass's channels: lamps are yellowish, old mounting media more so."""
_GLASS_MAGENTA = 8
"""Glass's green lies at most this far below the mean of red and blue. Lamps and media are yellow or blue; faint H&E,
which can be as bright and smooth, is magenta."""
_GLASS_SMOOTH = 2.5
"""Glass varies less than this many grey levels within 40 µm, tissue more."""
_GLASS_SHARE = 0.003
"""Below this share of the picture, bright smooth spots are gaps inside tissue, not glass."""
_GLASS_PIXELS = 500_000
"""As many pixels are enough to tell the colour of glass; of larger pictures, every other one is looked at."""
_FILL = 253
"""From here on, white is what software paints where nothing was scanned."""
_DARK = 0.45
"""Least grey density of black borders, missing tiles and black ink."""
_LIGHTLESS = 1.4
"""Mean grey density (4 % of the glass's light) from which black is no ink but was never scanned."""
_DARK_TINT = 0.12
"""Largest spread of their channels' densities; DAB, melanin and crowded nuclei have more."""
_DARK_TINT_GAIN = 0.2
"""How much more spread each unit of density above the least allows: the darker, the less a camera's colours mean."""
_TOO_DARK = 1.2
"""Grey density (6 % of the light) above which a camera's colours mean nothing."""
_INK_DENSITY = 0.3
"""Felt pens colour strongly; less than this spread of densities is left to the stains."""
_WINDOW_UM = 40.0
"""Side of the window in which glass is told by its smoothness: several cells."""
_INK_REACH_UM = 48.0
"""How far from certain ink its paler colour is still taken for ink: streaks and blurred edges of a stroke."""
_RIM_UM = 24.0
"""What is grown around ink and missing ground: their rims are blends with glass, coloured like tissue."""
_STROKE_UM2 = 15_000.0
"""Smallest pen mark; a felt tip is at least 0.5 mm wide."""


@dataclass(frozen=True, kw_only=True)
class TissueMap:
    """What a thumbnail shows; masks are (h, w), over the whole slide."""

    tissue: Mask
    pen: Mask
    missing: Mask
    """Black ground: not scanned, or painted black."""
    note: str = ""
    """Why there is no tissue, where the picture says so."""


class _Density(NamedTuple):
    """Optical density against glass, 0 and more; each (h, w)."""

    red: Plane
    green: Plane
    blue: Plane
    low: Plane
    high: Plane
    mean: Plane
    grey_picture: bool


def find_tissue(thumbnail_rgb: NDArray[np.uint8], spec: TissueSpec, *, mpp: float) -> Mask:
    """(h, w) where there is tissue. thumbnail_rgb: (h, w, 3) of the whole slide, at `mpp` µm per pixel."""
    return map_tissue(thumbnail_rgb, spec, mpp=mpp).tissue


def map_tissue(thumbnail_rgb: NDArray[np.uint8], spec: TissueSpec, *, mpp: float) -> TissueMap:
    """Say of each pixel whether it is tissue, pen or missing; see the module for the way."""
    nothing = np.zeros(thumbnail_rgb.shape[:2], bool)
    least_px = min(spec.min_area_um2 / mpp**2, nothing.size / 4)  # a slide smaller than a piece may still be tissue
    glass = glass_colour(thumbnail_rgb, mpp=mpp)
    if glass is None and _is_dark_field(thumbnail_rgb):
        note = "the picture is mostly black (fluorescence?); tissue is found on bright field only, give a mask instead"
        return TissueMap(tissue=nothing, pen=nothing, missing=nothing, note=note)
    density = _density(thumbnail_rgb, np.full(3, _USUAL_GLASS) if glass is None else glass)
    missing, black_ink = _dark_ground(density, mpp=mpp)
    pen = (find_pen(density, mpp=mpp) | black_ink) if spec.exclude_pen else nothing
    excluded = missing | pen
    signal = _smoothed(_signal(density), mpp=mpp)
    tissue = _linked((signal > _WEAK) & ~excluded, (signal > _STRONG) & ~excluded)
    tissue = _tidy(tissue, spec, mpp=mpp) & ~excluded
    return TissueMap(tissue=_without_small(tissue, least_px), pen=pen & ~missing, missing=missing)


def glass_colour(thumbnail_rgb: NDArray[np.uint8], *, mpp: float) -> NDArray[np.float64] | None:
    """The slide's glass, one value a channel: the brightest common colour that is smooth and nearly grey.

    None where there is no such ground. White that software filled in is glass only when nothing else is.
    """
    spread = _spread(cv2.cvtColor(thumbnail_rgb, cv2.COLOR_RGB2GRAY).astype(np.float32), mpp=mpp)
    step = ceil(sqrt(spread.size / _GLASS_PIXELS))
    smooth, thumbnail_rgb = spread[::step, ::step] < _GLASS_SMOOTH, thumbnail_rgb[::step, ::step].copy()
    low, high = _extremes(cv2.split(thumbnail_rgb))
    grey = cv2.cvtColor(thumbnail_rgb, cv2.COLOR_RGB2GRAY)
    red, green, blue = cv2.split(thumbnail_rgb.astype(np.int16))
    candidates = smooth & (low >= _GLASS_LEAST) & (high - low <= _GLASS_TINT)
    candidates &= red + blue - 2 * green <= 2 * _GLASS_MAGENTA
    scanned = candidates & (low < _FILL)
    if scanned.sum() >= 0.2 * candidates.sum():
        candidates = scanned
    if candidates.sum() < max(1, _GLASS_SHARE * candidates.size):
        return None
    counts = np.convolve(np.bincount(grey[candidates], minlength=256), np.ones(5), mode="same")
    level = int(np.flatnonzero(counts >= counts.max() / 10)[-1])
    common = counts[: level + 1]
    top = int(np.argmax(np.where(np.arange(level + 1) >= level - 12, common, -1)))
    near = candidates & (np.abs(grey.astype(np.int16) - top) <= 4)
    return np.asarray(np.median(thumbnail_rgb[near], axis=0), np.float64)


def find_pen(density: _Density, *, mpp: float) -> Mask:
    """Solid, strong colours that no common stain has: blue, green and red ink, with its rim. Black is `_dark_ground`'s.

    Haematoxylin takes red and green alike, eosin takes green, DAB takes blue most: none leaves green or blue alone
    to pass, or red alone while green and blue go equally. Single blue nuclei do not fill the 24 µm square that a
    stroke does. A green counterstain is taken for ink: `exclude_pen` off.
    """
    red, green, blue = density.red, density.green, density.blue
    strong = density.high - density.low > _INK_DENSITY
    greenish = (green < 0.75 * red) & (green < 0.9 * blue)
    bluish = (blue < 0.6 * green) & (green < 0.8 * red)
    reddish = (red < 0.12 * green) & (blue > 0.75 * green) & (green > 0.6)
    seeds = _opened(strong & (greenish | bluish | reddish))
    if not seeds.any():
        return seeds
    pale = (density.high - density.low > 2 * _WEAK) & (
        (green < 0.9 * np.minimum(red, blue))
        | ((blue < 0.75 * green) & (green < 0.9 * red))
        | ((red < 0.3 * green) & (blue > 0.7 * green))
    )
    strokes = seeds | _linked(pale & _grown(seeds, _INK_REACH_UM / mpp), seeds)
    return _grown(_without_small(strokes, _STROKE_UM2 / mpp**2), _RIM_UM / mpp)


def _dark_ground(density: _Density, *, mpp: float) -> tuple[Mask, Mask]:
    """Ground that was not scanned, and black ink, each with its rim."""
    dark = density.low > _DARK
    tint = _DARK_TINT + _DARK_TINT_GAIN * (density.low - _DARK)
    dark = _opened(dark & ((density.high - density.low < tint) | (density.low > _TOO_DARK)))
    if not dark.any():
        return dark, dark
    _, labels, stats, _ = cv2.connectedComponentsWithStats(dark.astype(np.uint8), connectivity=8)
    area = np.maximum(1, stats[:, cv2.CC_STAT_AREA])
    lightless = np.bincount(labels.ravel(), density.low.ravel(), minlength=len(stats)) / area > _LIGHTLESS
    at_edge = np.zeros(len(stats), bool)
    for line in (labels[0], labels[-1], labels[:, 0], labels[:, -1]):
        at_edge[line] = True
    large = area >= _STROKE_UM2 / 4 / mpp**2
    large[0] = False
    unscanned = large & (lightless | at_edge)
    return _grown(unscanned[labels], _RIM_UM / mpp), _grown((large & ~unscanned)[labels], _RIM_UM / mpp)


def _signal(density: _Density) -> Plane:
    """Colour; in a picture without any, as grey cameras make, density. Dust and shadows, being grey, have no signal."""
    return density.mean if density.grey_picture else density.high - density.low


def _is_dark_field(thumbnail_rgb: NDArray[np.uint8]) -> bool:
    """Whether more than half is black, and what is lit shines in one colour or in grey: no stain in bright light."""
    low, high = _extremes(cv2.split(thumbnail_rgb))
    lit = high >= 64
    if lit.mean() >= 0.5:
        return False
    return bool((low[lit] < 64).mean() > 0.5 or (high - low).max() < 8) if lit.any() else True


def _density(thumbnail_rgb: NDArray[np.uint8], glass: NDArray[np.float64]) -> _Density:
    """Look each brightness up in its channel's table of densities."""
    tables = np.maximum(0, np.log10((glass[None, :] + 1) / np.arange(1, 257)[:, None])).astype(np.float32)
    channels = cv2.split(thumbnail_rgb)
    red, green, blue = (np.asarray(cv2.LUT(c, tables[:, i]), np.float32) for i, c in enumerate(channels))
    low, high = _extremes((red, green, blue))
    grey_picture = bool((channels[0] == channels[1]).all() and (channels[1] == channels[2]).all())
    mean = np.asarray((red + green + blue) * np.float32(1 / 3), np.float32)
    return _Density(red, green, blue, low, high, mean, grey_picture)


def _extremes(channels: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Lowest and highest value of three channels, pixel by pixel; far faster than along an axis."""
    red, green, blue = channels
    return np.minimum(np.minimum(red, green), blue), np.maximum(np.maximum(red, green), blue)


def _spread(plane: Plane, *, mpp: float) -> Plane:
    """Standard deviation within a window around each pixel."""
    side = 2 * max(1, int(_WINDOW_UM / mpp / 2)) + 1
    mean = cv2.boxFilter(plane, -1, (side, side), borderType=cv2.BORDER_REFLECT_101)
    square = cv2.boxFilter(plane * plane, -1, (side, side), borderType=cv2.BORDER_REFLECT_101)
    return np.asarray(np.sqrt(np.maximum(square - mean * mean, 0)), np.float32)


def _smoothed(plane: Plane, *, mpp: float) -> Plane:
    sigma_px = _BLUR_UM / mpp
    return plane if sigma_px <= 0.5 else np.asarray(cv2.GaussianBlur(plane, (0, 0), sigma_px), np.float32)


def _linked(weak: Mask, strong: Mask) -> Mask:
    """The connected pieces of `weak` that hold a pixel of `strong`."""
    count, labels = cv2.connectedComponents(weak.astype(np.uint8), connectivity=8)
    keep = np.zeros(count, bool)
    keep[labels[strong & weak]] = True
    keep[0] = False
    return np.asarray(keep[labels])


def _tidy(mask: Mask, spec: TissueSpec, *, mpp: float) -> Mask:
    """Close gaps of about a cell's width, then fill small holes: fat cells and ducts belong to the tissue around."""
    closed = cv2.morphologyEx(mask.astype(np.uint8), cv2.MORPH_CLOSE, _disc(max(1, round(8 / mpp))))
    holes = np.asarray(closed == 0)
    return np.asarray(~_without_small(holes, spec.max_hole_um2 / mpp**2, connectivity=4))


def _without_small(mask: Mask, least_px: float, connectivity: int = 8) -> Mask:
    _, labels, stats, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=connectivity)
    keep = stats[:, cv2.CC_STAT_AREA] >= least_px
    keep[0] = False
    return np.asarray(keep[labels])


def _opened(mask: Mask) -> Mask:
    return cv2.morphologyEx(mask.astype(np.uint8), cv2.MORPH_OPEN, np.ones((3, 3), np.uint8)).astype(bool)


def _grown(mask: Mask, radius_px: float) -> Mask:
    return cv2.dilate(mask.astype(np.uint8), _disc(max(1, round(radius_px)))).astype(bool)


def _disc(radius: int) -> NDArray[np.uint8]:
    return np.asarray(cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (2 * radius + 1, 2 * radius + 1)), np.uint8)
