"""Windows of an image, with fractional edges, at a given size: by area when shrinking, linear when growing."""

import cv2
import numpy as np
from numpy.typing import NDArray

Rgb = NDArray[np.uint8]
Window = tuple[float, float, float, float]
"""x0, y0, x1, y1 in pixels of the array; pixel i covers [i, i + 1)."""

_INT32_PIXELS = 2**31 // 255
"""An image of more pixels could overflow 32-bit sums."""


def resample(pixels: Rgb, window: Window, *, size_px: tuple[int, int]) -> Rgb:
    """The part of `pixels` inside `window`, at `size_px` (width, height).

    Each axis by itself: where it shrinks or keeps its size, a pixel of the result is the mean over the ground it
    covers, and a partly covered pixel counts by its part; where it grows, the value is interpolated at the centre
    between the pixels of the window. pixels: (h, w, 3), large enough for the window. A window of whole pixels and the
    wanted size comes back as it is.
    """
    x0, y0, x1, y1 = window
    width, height = size_px
    if all(float(edge).is_integer() for edge in window) and x1 - x0 >= width and y1 - y0 >= height:
        part = pixels[int(y0) : int(y1), int(x0) : int(x1)]
        if part.shape[1::-1] == size_px:
            return np.ascontiguousarray(part)
        return np.asarray(cv2.resize(part, size_px, interpolation=cv2.INTER_AREA), dtype=np.uint8)
    grows_x, grows_y = x1 - x0 < width, y1 - y0 < height
    values: NDArray[np.uint8] | NDArray[np.float64] = pixels
    if not (grows_x and grows_y):
        columns = np.arange(pixels.shape[1] + 1.0) if grows_x else np.linspace(x0, x1, width + 1)
        rows = np.arange(pixels.shape[0] + 1.0) if grows_y else np.linspace(y0, y1, height + 1)
        values = _means(pixels, columns, rows)
    if grows_y:
        values = _between(values, y0, y1, height, axis=0)
    if grows_x:
        values = _between(values, x0, x1, width, axis=1)
    return np.rint(values).clip(0, 255).astype(np.uint8)


def _means(pixels: Rgb, columns: NDArray[np.float64], rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean of each cell between neighbouring edges.

    The sum over everything left of and above a point is linear between pixel corners, so its value at fractional
    edges is exact, and the sum of a cell is the difference at its four corners.
    """
    depth = cv2.CV_32S if pixels.shape[0] * pixels.shape[1] < _INT32_PIXELS else cv2.CV_64F
    sums = _at(_at(cv2.integral(np.ascontiguousarray(pixels), sdepth=depth), rows, axis=0), columns, axis=1)
    area = np.diff(rows)[:, None, None] * np.diff(columns)[None, :, None]
    return np.asarray(np.diff(np.diff(sums, axis=0), axis=1) / area, dtype=np.float64)


def _between(values: NDArray[np.generic], start: float, stop: float, n: int, *, axis: int) -> NDArray[np.float64]:
    """Interpolate at the centres of `n` cells between `start` and `stop`, without looking outside the window."""
    centres = start + (np.arange(n) + 0.5) * ((stop - start) / n) - 0.5
    return _at(values, centres.clip(np.floor(start), np.ceil(stop) - 1), axis=axis)


def _at(values: NDArray[np.generic], places: NDArray[np.float64], *, axis: int) -> NDArray[np.float64]:
    """Values at fractional places along an axis, linear between neighbours."""
    low = np.minimum(places.astype(np.int64), values.shape[axis] - 1)
    part = np.expand_dims(places - low, axis=tuple(i for i in range(values.ndim) if i != axis))
    below = np.take(values, low, axis=axis).astype(np.float64)
    above = np.take(values, np.minimum(low + 1, values.shape[axis] - 1), axis=axis)
    return np.asarray(below + (above - below) * part, dtype=np.float64)


def on_white(rgba: NDArray[np.uint8]) -> Rgb:
    """Compose (h, w, 4), not premultiplied, on white."""
    alpha = rgba[..., 3:].astype(np.uint16)
    if alpha.size == 0 or alpha.min() == 255:
        return np.ascontiguousarray(rgba[..., :3])
    mixed = rgba[..., :3] * alpha + np.uint16(255) * (255 - alpha)
    return np.asarray((mixed + 127) // 255, dtype=np.uint8)
