"""Closed-form numbers and laws of the arithmetic between frames."""

from typing import Any

import numpy as np
import pytest

from tiling.errors import SlideError, SlideTooSmall
from tiling.geometry import full_grid, l0_from_px, n_steps, plan_read, tissue_fractions, upsampling
from tiling.grid import TileSpec
from tiling.readers.header import SlideInfo


def info(**changes: Any) -> SlideInfo:
    facts: dict[str, Any] = {
        "slide_id": "s",
        "fingerprint": "f",
        "vendor": "v",
        "size_l0": (1536, 1152),
        "mpp": (0.5, 0.5),
        "mpp_source": "metadata",
        "level_downsamples": ((1.0, 1.0), (4.0, 4.0)),
    }
    facts |= changes
    return SlideInfo(**{"bounds_l0": (0, 0, *facts["size_l0"])} | facts)


PYRAMID = ((1.0, 1.0), (2.0, 2.0), (4.0, 4.0045), (16.067, 16.067))


@pytest.mark.parametrize(
    ("slide_mpp", "wish", "level"),
    [
        (0.25, 0.25, 0),
        (0.25, 0.3, 0),
        (0.25, 0.5, 1),
        (0.26, 0.5, 1),  # 0.52 is within 5 % of 0.5
        (0.265, 0.5, 0),  # 0.53 is not
        (0.2625, 0.5, 1),  # exactly at the tolerance counts
        (0.25, 1.0, 2),
        (0.25, 3.9, 3),  # 4.02 is within 5 % of 3.9
        (0.25, 3.0, 2),
        (0.25, 40.0, 3),
        (0.525, 0.5, 0),
    ],
)
def test_the_level_is_the_coarsest_that_is_fine_enough(slide_mpp: float, wish: float, level: int) -> None:
    slide = info(mpp=(slide_mpp, slide_mpp), level_downsamples=PYRAMID, size_l0=(100_000, 80_000))
    plan = plan_read(slide, TileSpec(mpp=wish))
    assert plan.level == level
    assert plan.level_downsample == PYRAMID[level]


def test_one_coarse_axis_is_enough_to_rule_a_level_out() -> None:
    slide = info(mpp=(0.25, 0.5), level_downsamples=((1.0, 1.0), (2.0, 2.0)), size_l0=(3072, 1152))
    plan = plan_read(slide, TileSpec(mpp=0.5, tile_px=256))
    assert plan.level == 0
    assert plan.tile_size_l0 == (512, 256)
    assert plan.stride_l0 == (512, 256)
    assert plan.grid_size == (6, 4)
    assert plan.mpp_effective == (0.5, 0.5)


def test_a_finer_wish_is_refused_with_both_numbers_and_a_cure() -> None:
    slide = info(mpp=(1.0, 1.0))
    with pytest.raises(SlideError, match=r"1 x 1 µm/px.*0.5 µm/px.*allow_upsampling"):
        plan_read(slide, TileSpec(mpp=0.5))


def test_upsampling_reads_level_0_and_says_how_much_is_made_up() -> None:
    slide = info(mpp=(1.0, 1.0))
    plan = plan_read(slide, TileSpec(mpp=0.5, tile_px=256, allow_upsampling=True))
    assert (plan.level, plan.tile_size_l0, plan.mpp_effective) == (0, (128, 128), (0.5, 0.5))
    assert upsampling(slide, plan) == 2.0


def test_positions_do_not_drift() -> None:
    slide = info(mpp=(0.2528, 0.2528), size_l0=(100_000, 100_000), level_downsamples=((1.0, 1.0),))
    plan = plan_read(slide, TileSpec(mpp=0.5, tile_px=256))
    assert plan.tile_size_l0 == plan.stride_l0 == (506, 506)
    assert plan.mpp_effective[0] == pytest.approx(506 * 0.2528 / 256)
    corners = np.asarray(plan.origin_l0) + full_grid(plan) * np.asarray(plan.stride_l0)
    assert corners.dtype == np.int64
    assert (np.diff(np.unique(corners[:, 0])) == 506).all()
    assert corners.max() + 506 <= 100_000


@pytest.mark.parametrize(
    ("length", "tile", "stride", "drop", "pad"),
    [
        (1000, 250, 250, 4, 4),
        (1001, 250, 250, 4, 5),
        (999, 250, 250, 3, 4),
        (250, 250, 250, 1, 1),
        (249, 250, 250, 0, 1),
        (1000, 250, 125, 7, 7),
        (1001, 250, 125, 7, 8),
        (1000, 100, 300, 4, 4),
        (950, 100, 300, 3, 4),
        (900, 100, 300, 3, 3),  # the fourth would begin at 900, outside
    ],
)
def test_the_number_of_tiles_along_an_axis(length: int, tile: int, stride: int, drop: int, pad: int) -> None:
    assert n_steps(length, tile, stride, edge="drop") == drop
    assert n_steps(length, tile, stride, edge="pad") == pad


def test_the_grid_covers_the_scanned_bounds_only() -> None:
    slide = info(size_l0=(10_000, 8_000), bounds_l0=(1003, 517, 2000, 1000))
    plan = plan_read(slide, TileSpec(mpp=0.5, tile_px=250))
    assert plan.origin_l0 == (1003, 517)
    assert plan.grid_size == (8, 4)


def test_bounds_that_reach_over_the_slide_are_cut() -> None:
    slide = info(size_l0=(1000, 1000), bounds_l0=(-10, 500, 5000, 5000))
    plan = plan_read(slide, TileSpec(mpp=0.5, tile_px=250))
    assert (plan.origin_l0, plan.grid_size) == ((0, 500), (4, 2))


def test_a_slide_smaller_than_a_tile_is_named() -> None:
    slide = info(size_l0=(2000, 200))
    with pytest.raises(SlideTooSmall, match=r"2000 x 200 px, a tile of 256 px at 0.5 µm/px needs 256 x 256"):
        plan_read(slide, TileSpec(tile_px=256))
    assert plan_read(slide, TileSpec(tile_px=256, edge="pad")).grid_size == (8, 1)


def test_a_stride_is_never_0() -> None:
    assert l0_from_px(1, mpp=0.25, slide_mpp=1.0) == 1
    assert l0_from_px(225, mpp=0.5, slide_mpp=0.25) == 450
    assert l0_from_px(1, mpp=0.5, slide_mpp=0.2) == 3  # 2.5: halves go up, whatever the number


def test_the_full_grid_is_row_by_row() -> None:
    plan = plan_read(info(size_l0=(600, 400)), TileSpec(tile_px=200))
    assert full_grid(plan).tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1], [2, 1]]


def test_tissue_under_a_tile_is_exact_by_area() -> None:
    """A mask of 3 x 2 pixels over 900 x 400: tiles of 200 cut its pixels of 300 x 200 at a third and two thirds."""
    slide = info(size_l0=(900, 400))
    plan = plan_read(slide, TileSpec(tile_px=200))
    mask = np.array([[1, 0, 1], [0, 1, 0]], bool)
    expected = [1.0, 0.5, 0.0, 1.0, 0.0, 0.5, 1.0, 0.0]
    np.testing.assert_allclose(tissue_fractions(mask, slide, plan), expected, atol=1e-6)


def test_tissue_fractions_equal_a_count_of_pixels() -> None:
    rng = np.random.default_rng(0)
    mask = rng.random((60, 90)) < 0.4
    slide = info(size_l0=(900, 600), bounds_l0=(15, 7, 885, 593))
    plan = plan_read(slide, TileSpec(tile_px=130, stride_px=70, edge="pad"))
    large = np.zeros((1200, 1200))
    large[:600, :900] = np.kron(mask, np.ones((10, 10)))
    corners = np.asarray(plan.origin_l0) + full_grid(plan) * np.asarray(plan.stride_l0)
    counted = [large[y : y + 130, x : x + 130].mean() for x, y in corners.tolist()]
    np.testing.assert_allclose(tissue_fractions(mask, slide, plan), counted, atol=1e-6)


@pytest.mark.parametrize(("mpp", "tile_px"), [(1e-9, 224), (0.001, 224), (0.7, 1)])
def test_a_tile_that_whole_pixels_cannot_make_is_refused(mpp: float, tile_px: int) -> None:
    with pytest.raises(SlideError, match="whole pixels of the slide make"):
        plan_read(info(), TileSpec(mpp=mpp, tile_px=tile_px, allow_upsampling=True))


def test_a_tile_of_one_pixel_is_allowed_where_it_has_the_wished_size() -> None:
    assert plan_read(info(), TileSpec(mpp=0.52, tile_px=1, mpp_tolerance=0.0)).tile_size_l0 == (1, 1)
