"""Deep-zoom tiles: exact sizes, the right pixels at odd edges, bounded reads."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from apps.viewer.tiles import BASE_PX, Pyramid, jpeg, render_base, render_region, render_tile
from tiling.slide import Slide


@pytest.fixture(scope="module")
def coded(
    tmp_path_factory: pytest.TempPathFactory, make_pyramid: Callable[..., Path], coded_rgb
) -> tuple[Slide, np.ndarray]:
    rgb = coded_rgb(4099, 1031)
    path = tmp_path_factory.mktemp("coded") / "odd.tif"
    make_pyramid(path, rgb, levels=(1, 2, 4), compression=None, photometric="rgb")
    return Slide(path), rgb


@pytest.mark.parametrize(("size", "top"), [((1, 1), 0), ((2, 1), 1), ((512, 3), 9), ((513, 3), 10), ((100_000, 9), 17)])
def test_the_top_level_is_the_slide_and_level_0_one_pixel(size: tuple[int, int], top: int) -> None:
    pyramid = Pyramid(size_l0=size)
    assert pyramid.top == top
    assert pyramid.size_px(top) == size
    assert pyramid.size_px(0) == (1, 1)


def test_tiles_cover_each_level_once_with_one_pixel_of_overlap() -> None:
    pyramid = Pyramid(size_l0=(3075, 1031))
    for level in range(pyramid.top + 1):
        width, _ = pyramid.size_px(level)
        columns = [pyramid.tile_px(level, column, 0) for column in range(-(-width // 510))]
        assert columns[0][0] == 0
        assert columns[-1][2] == width
        assert pyramid.tile_px(level, len(columns), 0) is None
        for left, right in itertools.pairwise(columns):
            assert left[2] - right[0] == 2, "one pixel from each side of the seam"
    assert pyramid.tile_px(pyramid.top + 1, 0, 0) is None
    assert pyramid.tile_px(pyramid.top, -1, 0) is None


def test_a_full_size_tile_is_the_slides_own_pixels(coded: tuple[Slide, np.ndarray]) -> None:
    slide, rgb = coded
    top = Pyramid(size_l0=slide.size_l0).top
    tile = render_tile(slide, top, 8, 2, base=lambda: render_base(slide))
    np.testing.assert_array_equal(tile, rgb[1019:1031, 4079:4099])


def test_every_edge_tile_shows_its_place_and_no_black(coded: tuple[Slide, np.ndarray]) -> None:
    slide, _ = coded
    pyramid = Pyramid(size_l0=slide.size_l0)
    base = render_base(slide)
    assert max(base.shape) <= BASE_PX
    for level in range(5, pyramid.top + 1):
        width, height = pyramid.size_px(level)
        column, row = (width - 1) // 510, (height - 1) // 510
        tile = render_tile(slide, level, column, row, base=lambda: base)
        left, top, right, bottom = pyramid.tile_px(level, column, row)
        assert tile.shape == (bottom - top, right - left, 3)
        # the colour tells the place; the browser draws the tile up to the slide's true edge, a part of a pixel short
        true_right, true_bottom = (length / 2 ** (pyramid.top - level) for length in slide.size_l0)
        x = np.linspace(left, true_right, 2 * (right - left) + 1)[1::2] / true_right
        y = np.linspace(top, true_bottom, 2 * (bottom - top) + 1)[1::2] / true_bottom
        np.testing.assert_allclose(tile[..., 0].mean(axis=0), 110 + 120 * x, atol=1.5)
        np.testing.assert_allclose(tile[..., 2].mean(axis=1), 110 + 120 * y, atol=1.5)


def test_a_region_read_in_blocks_equals_one_read_whole(coded: tuple[Slide, np.ndarray], monkeypatch) -> None:
    slide, _ = coded
    whole = render_region(slide, (0, 0, *slide.size_l0), size_px=(1025, 258))
    monkeypatch.setattr("apps.viewer.tiles._READ_PX", 100)
    blocks = render_region(slide, (0, 0, *slide.size_l0), size_px=(1025, 258))
    assert np.abs(whole.astype(int) - blocks).max() <= 2


def test_jpeg_is_a_jpeg_of_the_same_size() -> None:
    import io

    from PIL import Image

    picture = Image.open(io.BytesIO(jpeg(np.full((7, 9, 3), 200, np.uint8))))
    assert (picture.format, picture.size) == ("JPEG", (9, 7))
