import numpy as np
import pytest

from tiling.readers.area import on_white, resample


def covered(start: float, stop: float, n: int, length: int) -> np.ndarray:
    """(n, length) part of each of `length` pixels that lies in each of `n` cells, by its definition."""
    edges = np.linspace(start, stop, n + 1)
    pixels = np.arange(length)
    low = np.maximum(edges[:-1, None], pixels[None])
    high = np.minimum(edges[1:, None], pixels[None] + 1)
    return np.maximum(0, high - low) / np.diff(edges)[:, None]


@pytest.mark.parametrize("window", [(0, 0, 61, 47), (3, 2, 51, 46), (0.4, 0.9, 60.2, 46.7), (2.25, 3.5, 58.25, 35.5)])
@pytest.mark.parametrize("size", [(28, 16), (13, 32), (1, 1), (48, 30)])
def test_shrinking_is_the_mean_over_the_covered_ground(window, size):
    pixels = np.random.default_rng(0).integers(0, 256, (47, 61, 3), dtype=np.uint8)
    x0, y0, x1, y1 = window
    expected = np.einsum(
        "iy,jx,yxc->ijc", covered(y0, y1, size[1], 47), covered(x0, x1, size[0], 61), pixels.astype(float)
    )
    assert np.abs(resample(pixels, window, size_px=size) - expected).max() <= 0.51


def test_a_window_of_whole_pixels_and_the_same_size_is_not_touched():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    np.testing.assert_array_equal(resample(pixels, (5, 7, 45, 37), size_px=(40, 30)), pixels[7:37, 5:45])


def test_growing_is_linear_and_stays_in_the_window():
    ramp = np.repeat((np.arange(8, dtype=np.uint8) * 20)[None, :, None], 3, axis=2).repeat(4, axis=0)
    row = resample(ramp, (2, 0, 6, 4), size_px=(8, 8))[0, :, 0]
    np.testing.assert_array_equal(row, [40, 45, 55, 65, 75, 85, 95, 100])


def test_each_axis_follows_its_own_rule():
    pixels = np.random.default_rng(1).integers(0, 256, (10, 64, 3), dtype=np.uint8)
    both = resample(pixels, (0, 0, 64, 10), size_px=(16, 20))
    wide = resample(pixels, (0, 0, 64, 10), size_px=(16, 10))
    assert np.abs(both.astype(int) - resample(wide, (0, 0, 16, 10), size_px=(16, 20))).max() <= 1


def test_large_sums_do_not_overflow():
    white = np.full((2900, 3000, 3), 255, np.uint8)
    assert resample(white, (0.5, 0.5, 2999.5, 2899.5), size_px=(7, 5)).min() == 255


def test_what_is_transparent_shows_white():
    rgba = np.array([[[10, 20, 30, 255], [10, 20, 30, 0], [0, 100, 200, 128]]], np.uint8)
    np.testing.assert_array_equal(on_white(rgba), [[[10, 20, 30], [255, 255, 255], [127, 177, 227]]])
