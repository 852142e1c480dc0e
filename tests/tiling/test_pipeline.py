"""A slide becomes tiles: the tissue's, all of them, and only them; or an outcome with a name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from tiling.errors import NoTissue, SlideError
from tiling.grid import TileSpec
from tiling.pipeline import select_tiles, survey_slide, tile_slide
from tiling.slide import Slide

Rgb = NDArray[np.uint8]
SPEC = TileSpec(tile_px=128)


def squares(width: int, height: int, *boxes: tuple[int, int, int, int]) -> Rgb:
    """Glass with rectangles (x, y, width, height) of tissue."""
    rng = np.random.default_rng(0)
    rgb = np.full((height, width, 3), (243, 241, 244), np.uint8)
    share = rng.random((height, width, 1))
    tissue = (np.array([225, 150, 195]) * (1 - share) + np.array([140, 90, 160]) * share).astype(np.uint8)
    for x, y, w, h in boxes:
        rgb[y : y + h, x : x + w] = tissue[y : y + h, x : x + w]
    return rgb


@pytest.fixture
def slide_of(tmp_path: Path, make_pyramid: Callable[..., Path]) -> Callable[..., Slide]:
    def make(rgb: Rgb, **options: Any) -> Slide:
        return Slide(make_pyramid(tmp_path / "s.tif", rgb, **options))

    return make


def test_the_tiles_are_those_of_the_tissue(slide_of: Callable[..., Slide]) -> None:
    with slide_of(squares(1024, 768, (256, 128, 384, 256))) as slide:
        grid = tile_slide(slide, SPEC)
    expected = [[column, row] for row in (1, 2) for column in (2, 3, 4)]
    assert grid.grid_xy.tolist() == expected
    assert grid.coords_l0.tolist() == [[128 * column, 128 * row] for column, row in expected]
    assert (grid.tissue_fraction > 0.95).all()
    assert grid.tissue_mm2 == pytest.approx(384 * 256 * 0.25e-6, rel=0.15)
    assert grid.mask_digest == ""


def test_the_same_tissue_at_half_the_pixel_size_gives_the_same_tiles(
    tmp_path: Path, make_pyramid: Callable[..., Path]
) -> None:
    rgb = squares(1024, 768, (256, 128, 384, 256))
    wide = np.repeat(rgb, 2, axis=1)
    paths = make_pyramid(tmp_path / "a.tif", rgb), make_pyramid(tmp_path / "b.tif", wide, mpp=(0.25, 0.5))
    grids = []
    for path in paths:
        with Slide(path) as slide:
            grids.append(tile_slide(slide, SPEC))
    assert grids[0].grid_xy.tolist() == grids[1].grid_xy.tolist()
    assert grids[1].plan.tile_size_l0 == (256, 128)


@pytest.mark.parametrize(("fraction", "kept"), [(0.45, 1), (0.6, 0)])
def test_min_tissue_decides_on_a_half_covered_tile(slide_of: Callable[..., Slide], fraction: float, kept: int) -> None:
    with slide_of(squares(1024, 1024, (512, 512, 512, 256))) as slide:
        survey = survey_slide(slide, SPEC)
    spec = TileSpec(tile_px=512, min_tissue=fraction)
    if kept:
        assert select_tiles(survey, spec).grid_xy.tolist() == [[1, 1]]
    else:
        with pytest.raises(NoTissue, match=r"no tile of 512 px.*least fraction 0.6; the best has 0.5"):
            select_tiles(survey, spec)


def test_min_tissue_0_keeps_every_tile(slide_of: Callable[..., Slide]) -> None:
    with slide_of(squares(512, 384)) as slide:
        assert len(tile_slide(slide, TileSpec(tile_px=128, min_tissue=0))) == 12


def test_a_blank_slide_is_no_tissue(slide_of: Callable[..., Slide]) -> None:
    with slide_of(squares(512, 512)) as slide, pytest.raises(NoTissue, match=r"no tissue found.*mask") as caught:
        tile_slide(slide, SPEC)
    assert caught.value.outcome == "no tissue"


def test_a_wish_that_cannot_be_met_costs_no_thumbnail(
    slide_of: Callable[..., Slide], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slide, "thumbnail", lambda *_, **__: pytest.fail("read"))
    with slide_of(squares(512, 512), mpp=1.0) as slide, pytest.raises(SlideError, match="finer"):
        tile_slide(slide, SPEC)


def test_the_users_mask_replaces_the_tissue_found(slide_of: Callable[..., Slide], tmp_path: Path) -> None:
    mask = np.zeros((48, 64), np.uint8)
    mask[:8, 56:] = 1  # on glass, upper right: the user's word counts
    (tmp_path / "mask.png").write_bytes(cv2.imencode(".png", mask)[1].tobytes())
    with slide_of(squares(1024, 768, (256, 128, 384, 256))) as slide:
        grid = tile_slide(slide, SPEC, mask_path=tmp_path / "mask.png")
    assert grid.grid_xy.tolist() == [[7, 0]]
    assert grid.tissue_fraction.tolist() == [1.0]
    assert len(grid.mask_digest) == 64


def test_an_empty_mask_is_no_tissue_and_says_whose(slide_of: Callable[..., Slide], tmp_path: Path) -> None:
    (tmp_path / "mask.png").write_bytes(cv2.imencode(".png", np.zeros((48, 64), np.uint8))[1].tobytes())
    with slide_of(squares(1024, 768, (256, 128, 384, 256))) as slide, pytest.raises(NoTissue, match=r"mask.png marks"):
        tile_slide(slide, SPEC, mask_path=tmp_path / "mask.png")
