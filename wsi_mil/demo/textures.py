"""Planes of one tissue class, laid from real tiles with soft seams. Pure: arrays in, arrays out."""

import cv2
import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]
_OVERLAP = 32


def lay(
    tiles: list[Image], size: tuple[int, int], needed: NDArray[np.bool_], rng: np.random.Generator
) -> NDArray[np.float32]:
    """Cover a plane with tiles in random order, turned and mirrored, their seams cross-faded.

    tiles: (t, t, 3) each.  size: (width, height).  needed: (height, width); places where no tile is needed stay 0.
    Returns (height, width, 3).
    """
    width, height = size
    side = tiles[0].shape[0]
    step = side - _OVERLAP
    weight = _window(side)
    plane = np.zeros((height + 2 * side, width + 2 * side, 3), np.float32)
    total = np.full((height + 2 * side, width + 2 * side, 1), 1e-6, np.float32)
    x_start, y_start = (int(v) for v in rng.integers(0, step, 2))
    for y in range(y_start, height + side, step):
        for x in range(x_start, width + side, step):
            tile = _turned(tiles[int(rng.integers(len(tiles)))], int(rng.integers(8)))
            if needed[max(0, y - side) : max(0, y), max(0, x - side) : max(0, x)].any():
                plane[y : y + side, x : x + side] += weight * tile
                total[y : y + side, x : x + side] += weight
    return np.asarray((plane / total)[side : side + height, side : side + width], np.float32)


def _window(side: int) -> NDArray[np.float32]:
    """(side, side, 1) weights that rise over the overlap and are flat inside."""
    ramp = np.minimum(1.0, (np.arange(side) + 0.5) / _OVERLAP)
    edge = np.minimum(ramp, ramp[::-1]).astype(np.float32)
    return (edge[:, None] * edge[None, :])[..., None]


def _turned(tile: Image, which: int) -> Image:
    """One of the eight ways to turn and mirror a square."""
    turned = np.rot90(tile, which % 4)
    return turned[:, ::-1] if which >= 4 else turned


def smooth_noise(size: tuple[int, int], cell_px: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """(height, width) smooth random field of about zero mean and unit spread; bumps are about `cell_px` wide."""
    width, height = size
    coarse = rng.standard_normal((height // cell_px + 3, width // cell_px + 3)).astype(np.float32)
    return np.asarray(cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC), np.float32)
