"""What people must be able to see in the pictures, found again by its colour."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tiling.grid import TileGrid, TileSpec
from tiling.pipeline import Survey, select_tiles
from tiling.qc import Cell, Rgb, cell_side, contact_sheet, qc_picture
from tiling.readers.header import SlideInfo
from tiling.tissue import TissueMap

GREEN, BLUE, MAGENTA, ORANGE = (0, 130, 60), (30, 70, 200), (220, 0, 200), (225, 110, 0)


def survey(**changes: Any) -> Survey:
    info = SlideInfo(
        slide_id="Präparat 07",
        fingerprint="f",
        vendor="v",
        size_l0=(4000, 2000),
        mpp=(0.5, 0.5),
        mpp_source="metadata",
        bounds_l0=(0, 0, 4000, 2000),
        level_downsamples=((1.0, 1.0),),
    )
    nothing = np.zeros((125, 250), bool)
    tissue, pen, missing = nothing.copy(), nothing.copy(), nothing.copy()
    tissue[40:80, 50:150] = True
    pen[20:100, 200:220] = True
    missing[:10] = True
    ground = TissueMap(tissue=tissue, pen=pen, missing=missing)
    return Survey(**{"slide": info, "thumbnail_rgb": np.full((125, 250, 3), 240, np.uint8), "ground": ground} | changes)


def grid(tile_px: int = 200) -> TileGrid:
    return select_tiles(survey(), TileSpec(tile_px=tile_px))


def where(picture: Rgb, colour: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of what has exactly this colour in the slide's part of the picture."""
    rows, columns = np.nonzero((picture[:500] == colour).all(axis=2))
    return int(columns.min()), int(rows.min()), int(columns.max()), int(rows.max())


def test_tissue_tiles_pen_and_missing_ground_are_drawn_where_they_are() -> None:
    picture = qc_picture(survey(), grid())
    np.testing.assert_allclose(where(picture, GREEN), (200, 160, 600, 320), atol=3)
    np.testing.assert_allclose(where(picture, BLUE), (200, 150, 600, 350), atol=3)
    np.testing.assert_allclose(where(picture, MAGENTA), (800, 80, 880, 400), atol=3)
    np.testing.assert_allclose(where(picture, ORANGE), (0, 0, 999, 40), atol=3)


def test_tiles_too_small_to_outline_are_tinted() -> None:
    picture = qc_picture(survey(), grid(tile_px=20))
    assert not (picture[:500] == BLUE).all(axis=2).any()
    assert picture[240, 400].tolist() == [int(240 * 0.8 + c * 0.2) for c in BLUE]
    assert picture[450, 400].tolist() == [240, 240, 240]


def test_the_caption_stands_below_and_the_slide_keeps_its_shape() -> None:
    picture = qc_picture(survey(), grid())
    assert picture.shape[1] == 1000
    assert 550 < picture.shape[0] < 620
    assert (picture[500:] < 100).all(axis=2).sum() > 300


def test_the_scale_bar_has_a_round_length() -> None:
    """2 mm over 1000 px: a fifth is 400 µm, the next round length below 200 µm, 100 px."""
    strip = qc_picture(survey(), grid())[510:522, 700:]
    assert (strip == (30, 30, 30)).all(axis=2).any(axis=0).sum() == pytest.approx(101, abs=1)


def test_a_narrow_slide_has_room_for_its_caption() -> None:
    info = replace(survey().slide, size_l0=(200, 4000), bounds_l0=(0, 0, 200, 4000))
    nothing = np.zeros((250, 12), bool)
    narrow = survey(
        slide=info,
        thumbnail_rgb=np.full((250, 12, 3), 240, np.uint8),
        ground=TissueMap(tissue=nothing, pen=nothing, missing=nothing),
    )
    picture = qc_picture(narrow, None, outcome="no tissue")
    assert picture.shape[1] >= 700
    assert picture.shape[0] > 1000


def test_a_sharper_base_is_used_for_the_picture_only() -> None:
    sharp = np.full((500, 1000, 3), 200, np.uint8)
    picture = qc_picture(survey(), grid(), base_rgb=sharp)
    assert picture[450, 400].tolist() == [200, 200, 200]
    np.testing.assert_allclose(where(picture, GREEN), (200, 160, 600, 320), atol=3)


def test_a_contact_sheet_has_a_cell_for_every_slide() -> None:
    red = np.zeros((600, 400, 3), np.uint8)
    red[..., 0] = 255
    cells = [Cell(slide_id=f"s{i}", outcome="tiled", picture=red) for i in range(5)]
    cells += [Cell(slide_id="x" * 200, outcome="no pixel size", picture=None)]
    sheet = contact_sheet(cells)
    side = cell_side(len(cells))
    assert sheet.shape[1] == 3 * side
    assert (sheet == (255, 0, 0)).all(axis=2).sum() == pytest.approx(5 * (side - 8) ** 2 * 2 / 3, rel=0.02)
    assert (sheet == (205, 205, 205)).all(axis=2).sum() > 0.9 * (side - 8) ** 2  # the grey cell of the failure
    assert (sheet == (190, 0, 0)).all(axis=2).any()  # its outcome, in red


@pytest.mark.parametrize("n", [1, 7, 1000])
def test_a_contact_sheet_stays_within_what_a_jpeg_holds(n: int) -> None:
    sheet = contact_sheet([Cell(slide_id=str(i), outcome="failed", picture=None) for i in range(n)])
    assert max(sheet.shape) < 10_000


def test_a_name_of_several_lines_is_drawn_in_one() -> None:
    hostile = replace(survey(), slide=replace(survey().slide, slide_id="new\nline\x07"))
    assert qc_picture(hostile, None, outcome="no tissue").shape == qc_picture(survey(), None, outcome="x").shape
    sheets = [contact_sheet([Cell(slide_id=name, outcome="a\nb", picture=None)]) for name in ("new\nline", "new␤line")]
    assert np.array_equal(*sheets)
