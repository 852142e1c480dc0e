"""How alike two slides are, by their thumbnails and by the features of their tiles. Pure: no file is opened here.

Pictures. The tissue's box in a thumbnail, glass replaced by the tissue's mean, reduced to 32 x 32, its lowest 16 x 16
cosine coefficients, of each the sign: 255 bits (the mean is left out). The signs do not change with brightness, and
those of a turned or mirrored picture are the same ones, transposed or changed in every other row or column, so the
least distance over the eight symmetries needs no second look at the slide. Two slides are held to be alike at 64 bits
or less. Measured:

- different slides: 7140 pairs of 120 composed ones (wsi_mil.demo.compose) lie 88 bits apart or more, half of them 116
  or more; 780 pairs of them cut to the same round outline 98 or more; 9180 pairs of 136 real H&E tiles
  (CRC-VAL-HE-7K, NCT-CRC-HE-100K) 94 or more.
- copies of 40 composed slides, the farthest: JPEG quality 50: 33 bits, turned or mirrored 24, half the resolution 21,
  stained otherwise or darker 25, moved 34, moved, turned by 1 degree, brighter and saved again 35, the same with 3
  degrees and another stain 60, all of it turned by 90 degrees 42.
- missed: 1 of 40 with 40 % less stain, half of those turned by 5 degrees, half of those that lost a fifth of their
  width. A copy that shows a part only is not looked for.

Tiles. A signature of 64 directions, the highest and lowest projection of the bag on each, finds in no time which bags
may share tiles; those are then compared tile by tile. Two tiles are twins when their distance is at most 4.5 % of that
to the bag's mean (a cosine of 0.999 between them, seen from there). Half precision keeps twins; other pixels do not: on
the demo's 40 bags, whose slides are laid from the same source tiles, the nearest two of different slides lie 37 % apart
(cosine 0.93), and a copy of a slide in JPEG quality 60 or 3 % brighter has no twins. A tile with a twin in its own bag,
as blank ones have, is no evidence.
"""

from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.bool_]
Matrix = NDArray[np.float32]

PICTURE_BITS = 255
NEAR_BITS = 64
"""At most this many of the 255 bits apart, two slides look alike; see the module for what was measured."""
TWIN_DISTANCE = 0.045
"""Of the distance to the bag's mean."""
LEAST_PX = 16
"""Tissue of fewer pixels than this, in width or height of its thumbnail, shows too little to be compared."""

_STRAY = 0.005
"""Of the tissue on each side of its box: a piece of dust that only one of two scans shows must not move the box."""
_GRID_PX = 32
_SIDE = 16
_DIRECTIONS = 64
_SEED = 0
_SAMPLE = 256
_BLOCK = 1024
_SAME_VALUE = 0.02
"""Two extremes are held to be of the same tile up to this part of the projections' spread: half precision moves them
by a tenth of it, and different tiles meet so in 2 to 4 of 100."""
_LEAST_HITS = 20
"""So many of the 128 extremes in common make two bags worth comparing tile by tile."""
_COMMON = 8
"""An extreme that more bags than this share, and more than a quarter of all, is of a blank tile or so."""


def picture_bits(thumbnail_rgb: NDArray[np.uint8], tissue: Bits) -> Bits | None:
    """(255,) bits of the picture inside the tissue's box; None where there is too little to tell it by.

    thumbnail_rgb: (h, w, 3).  tissue: (h, w).
    """
    if not tissue.any():
        return None
    box = (_span(tissue.sum(axis=1)), _span(tissue.sum(axis=0)))
    grey, inside = cv2.cvtColor(thumbnail_rgb[box], cv2.COLOR_RGB2GRAY).astype(np.float32), tissue[box]
    if min(grey.shape) < LEAST_PX or np.ptp(grey[inside]) < 1:
        return None
    filled = np.where(inside, grey, grey[inside].mean()).astype(np.float32)
    small = cv2.resize(filled, (_GRID_PX, _GRID_PX), interpolation=cv2.INTER_AREA)
    return np.asarray(cv2.dct(small)[:_SIDE, :_SIDE] > 0).ravel()[1:]


def _span(tissue_px: NDArray[np.int64]) -> slice:
    """The rows (or columns) that hold the tissue but for what lies at its far ends. tissue_px: pixels in each."""
    share = np.cumsum(tissue_px) / tissue_px.sum()
    first = int(np.searchsorted(share, _STRAY, side="right"))
    last = int(np.searchsorted(share, 1 - _STRAY - 1e-9))
    return slice(first, last + 1)


def picture_pairs(bits: Bits, *, most: int = NEAR_BITS) -> list[tuple[int, int, int]]:
    """(i, j, bits apart) of all pictures at most `most` bits apart in one of the eight symmetries, nearest first.

    bits: (n, 255).  Costs 8 products of (n, 255) with its transpose, in blocks: seconds for thousands of slides.
    """
    signs = _signs(bits)
    turned = [_signs(variant) for variant in _symmetries(bits)]
    found = []
    for start in range(0, len(bits), _BLOCK):
        likest = np.max([part[start : start + _BLOCK] @ signs.T for part in turned], axis=0)
        apart = np.rint((PICTURE_BITS - likest) / 2).astype(np.int64)
        found += [
            (int(apart[i, j]), start + int(i), int(j)) for i, j in np.argwhere(apart <= most) if start + int(i) < j
        ]
    return [(i, j, distance) for distance, i, j in sorted(found)]


def _symmetries(bits: Bits) -> list[Bits]:
    """The bits of the picture turned and mirrored: mirrored, the coefficients of odd order change their sign."""
    square = np.concatenate([np.zeros((len(bits), 1), bool), bits], axis=1).reshape(-1, _SIDE, _SIDE)
    odd = np.arange(_SIDE) % 2 == 1
    variants = []
    for turned in (square, square.transpose(0, 2, 1)):
        for rows in (np.zeros_like(odd), odd):
            for columns in (np.zeros_like(odd), odd):
                mirrored = turned ^ rows[:, None] ^ columns[None, :]
                variants.append(mirrored.reshape(len(bits), -1)[:, 1:])
    return variants


def _signs(bits: Bits) -> Matrix:
    return np.where(bits, np.float32(1), np.float32(-1))


def bag_signature(features: Matrix) -> Matrix:
    """(129,) what tells a bag whatever the order of its tiles: the spread, then the extremes in 64 fixed directions.

    features: (n, d).  The highest projections, then the lowest; the spread is the median standard deviation of a
    direction over the bag. Costs one product (n, d) x (d, 64).
    """
    d = features.shape[1]
    directions = np.random.default_rng(_SEED).standard_normal((d, _DIRECTIONS)).astype(np.float32) / np.sqrt(d)
    projected = features @ directions.astype(np.float32)
    spread = np.median(projected.std(axis=0))
    return np.concatenate([[spread], projected.max(axis=0), projected.min(axis=0)]).astype(np.float32)


def signature_pairs(signatures: Matrix) -> list[tuple[int, int]]:
    """The bags that may share tiles, the likeliest first. signatures: (n, 129).

    Costs n^2 / 2 comparisons of 128 numbers, a row at a time: seconds for thousands of bags.
    """
    spread, extremes = signatures[:, :1], signatures[:, 1:]
    telling = _telling(extremes, _SAME_VALUE * spread)
    found = []
    for i in range(len(extremes) - 1):
        tolerance = _SAME_VALUE * np.maximum(spread[i + 1 :], spread[i])
        same = (np.abs(extremes[i + 1 :] - extremes[i]) <= tolerance) & telling[i] & telling[i + 1 :]
        hits = same.sum(axis=1)
        found += [(-int(hits[j]), i, i + 1 + int(j)) for j in np.flatnonzero(hits >= _LEAST_HITS)]
    return [(i, j) for _, i, j in sorted(found)]


def _telling(extremes: Matrix, tolerance: Matrix) -> Bits:
    """(n, 128) which extremes are not shared by many bags."""
    most = max(_COMMON, len(extremes) // 4)
    telling = np.empty(extremes.shape, bool)
    for k, column in enumerate(extremes.T):
        ordered = np.sort(column)
        low = np.searchsorted(ordered, column - tolerance[:, 0], side="left")
        high = np.searchsorted(ordered, column + tolerance[:, 0], side="right")
        telling[:, k] = high - low - 1 <= most
    return telling


def twin_share(features: Sequence[Matrix]) -> tuple[float, int]:
    """Of two bags, the share of the smaller one's telling tiles that have a twin in the other, and how many they are.

    features: two of (n, d). Tiles with a twin in their own bag do not tell; at most 256 of the rest are looked at,
    always the same ones. (0, 0) where no tile tells.
    """
    small, large = sorted(features, key=len)
    centre = small.mean(axis=0)
    picked = np.random.default_rng(_SEED).permutation(len(small))[:_SAMPLE]
    sample = small[picked] - centre
    reach = (TWIN_DISTANCE * np.linalg.norm(sample, axis=1)) ** 2
    telling = (_twins(sample, small, centre, reach) <= 1) & (reach > 0)
    shared = (_twins(sample, large, centre, reach) > 0) & telling
    count = int(telling.sum())
    return (float(shared.sum() / count), count) if count else (0.0, 0)


def _twins(sample: Matrix, others: Matrix, centre: Matrix, reach: Matrix) -> NDArray[np.int64]:
    """(m,) how many of `others` lie within the root of `reach` of each tile; blocks bound the memory."""
    counts = np.zeros(len(sample), np.int64)
    squares = (sample**2).sum(axis=1)
    for start in range(0, len(others), _BLOCK):
        block = others[start : start + _BLOCK] - centre
        apart = squares[:, None] + (block**2).sum(axis=1) - 2 * (sample @ block.T)
        counts += (apart <= reach[:, None]).sum(axis=1)
    return counts
