"""Faults of heatmaps and viewers that other tools had, each as the input that showed it (VIS-01, 03, 05, 07, 10)."""

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image

from apps.viewer.tiles import Pyramid, render_base, render_tile
from tiling.slide import Slide
from wsi_mil.heatmap import (
    ScoreColumn,
    TileGeometry,
    TileScores,
    colour_table,
    default_column,
    overlay,
    rasterise,
)


def _scores(
    coords_l0: np.ndarray,
    values: np.ndarray,
    *,
    size: tuple[int, int],
    tile: int,
    stride: int,
    columns: tuple[ScoreColumn, ...] = (ScoreColumn(name="attention", kind="attention", label=None),),
) -> TileScores:
    return TileScores(
        slide_id="s",
        slide_fingerprint="f",
        geometry=TileGeometry(
            level0_size=size,
            mpp=(0.5, 0.5),
            tile_size_l0=(tile, tile),
            stride_l0=(stride, stride),
            origin_l0=(0, 0),
            bounds_l0=(0, 0, *size),
        ),
        coords_l0=coords_l0,
        grid_xy=coords_l0 // stride,
        columns=columns,
        values=values.astype(np.float32).reshape(len(coords_l0), -1),
    )


def _grid(columns: int, rows: int, step: float) -> np.ndarray:
    xy = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1).reshape(-1, 2)
    return np.round(xy * step).astype(np.int64)


def test_vis_01_the_heat_does_not_drift_towards_the_lower_right() -> None:
    """At 0.2528 µm a tile of 256 px at 0.5 µm is 506.33 px; coordinates are stepped exactly, then rounded."""
    coords = _grid(10, 7, 506.3291139)
    assert coords[69].tolist() == [4557, 3038]
    scores = _scores(coords, np.arange(70) == 69, size=(5070, 3549), tile=506, stride=506)
    raster = rasterise(scores, "attention")
    row, column = np.argwhere(raster.values == 1)[0]
    left_top = np.array(raster.origin_l0) + (column, row) * np.array(raster.cell_l0)
    assert np.abs(left_top - (4557, 3038)).max() < 1
    assert raster.values.shape == (7, 10)
    heat = overlay(np.zeros((111, 159, 3), np.uint8), raster, scores.geometry, scale="raw", opacity=1)
    rows, columns = np.nonzero(heat[..., 1] > colour_table("viridis")[140][1])
    found = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    assert np.abs(found - np.array([4557, 3038, 5063, 3544]) / 31.9).max() <= 1, "at 1/32, within a pixel"


def test_vis_01_an_integer_grid_stays_on_its_coordinates_to_the_end() -> None:
    """Two hundred columns of 507 px on a slide as wide: the last cell begins where the last tile does."""
    coords = _grid(200, 3, 507)
    raster = rasterise(_scores(coords, np.arange(600), size=(101_400, 1521), tile=507, stride=507), "attention")
    assert raster.cell_l0 == raster.filled_l0 == (507, 507)
    assert raster.origin_l0[0] + 199 * raster.cell_l0[0] == coords[-1, 0]
    np.testing.assert_array_equal(raster.values.ravel(), np.arange(600))


def test_vis_03_overlapping_tiles_are_averaged_and_the_peak_stays() -> None:
    """88 tiles of 256 px every 128 px, one of them hot: the peak is that tile's ground, no more and no less."""
    coords = _grid(11, 8, 128)
    hot = (coords == (768, 512)).all(axis=1)
    raster = rasterise(_scores(coords, hot, size=(1536, 1152), tile=256, stride=128), "attention")
    rows, columns = np.nonzero(raster.values == raster.values.max())
    extent = (columns.min() * 128, rows.min() * 128, (columns.max() + 1) * 128, (rows.max() + 1) * 128)
    assert extent == (768, 512, 1024, 768)
    assert raster.values.max() == 0.25, "four tiles share each cell"
    assert raster.values.shape == (9, 12)
    assert np.isfinite(raster.values).all()


def test_vis_05_the_predicted_class_is_drawn_not_the_first() -> None:
    """Three classes, each hot at another corner."""
    coords = _grid(4, 4, 256)
    corners = [(0, 0), (768, 0), (768, 768)]
    values = np.stack([(coords == corner).all(axis=1) for corner in corners], axis=1)
    columns = tuple(ScoreColumn(name=f"attention:{c}", kind="attention", label=c) for c in "abc")
    scores = _scores(coords, values, size=(1024, 1024), tile=256, stride=256, columns=columns)
    for label, corner in zip("abc", corners, strict=True):
        chosen = default_column(scores.columns, label)
        assert chosen.label == label
        row, column = np.argwhere(rasterise(scores, chosen.name).values == 1)[0]
        assert (column * 256, row * 256) == corner


def test_vis_07_a_huge_single_level_slide_is_served_in_bounded_memory(tmp_path: Path) -> None:
    """189 megapixels in one level, more than Pillow opens: first view and a full-size tile within 1 GB."""
    path = tmp_path / "flat.tif"
    tile = np.full((512, 512, 3), (230, 200, 220), np.uint8)
    tifffile.imwrite(
        path,
        (tile for _ in range(27 * 28)),
        shape=(13500, 14000, 3),
        dtype=np.uint8,
        tile=(512, 512),
        photometric="rgb",
        compression="jpeg",
        compressionargs={"level": 80, "outcolorspace": "RGB"},
        resolution=(2e4, 2e4),
        resolutionunit="CENTIMETER",
        metadata=None,
    )
    code = (
        "import sys\nfrom pathlib import Path\nfrom apps.viewer.tiles import render_base, render_tile\n"
        "from tiling.slide import Slide\n"
        "with Slide(Path(sys.argv[1])) as slide:\n"
        "    base = render_base(slide)\n"
        "    tiles = [render_tile(slide, l, c, 0, base=lambda: base) for l, c in ((8, 0), (11, 1), (14, 3))]\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print([t.shape for t in tiles], int(peak.split()[1]) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    shapes, megabytes = done.stdout.rsplit(maxsplit=1)
    assert shapes == "[(211, 219, 3), (511, 512, 3), (511, 512, 3)]"
    assert int(megabytes) < 1000


def test_vis_10_odd_sizes_have_exact_edge_tiles_without_black(
    tmp_path: Path, make_pyramid: Callable[..., Path], coded_rgb: Callable[[int, int], np.ndarray]
) -> None:
    """1537 x 1031, levels floored: every tile has its exact size, and level-0 (1500, 1000) shows its own colour."""
    rgb = coded_rgb(1537, 1031)
    path = make_pyramid(tmp_path / "odd.tif", rgb, levels=(1, 2, 4), compression=None, photometric="rgb")
    pyramid = Pyramid(size_l0=(1537, 1031))
    with Slide(path) as slide:
        base = render_base(slide)
        for level in range(pyramid.top + 1):
            scale = 2 ** (pyramid.top - level)
            width, height = -(-1537 // scale), -(-1031 // scale)
            for column in range(-(-width // 510)):
                for row in range(-(-height // 510)):
                    tile = render_tile(slide, level, column, row, base=lambda: base)
                    assert tile is not None
                    right, bottom = min(width, (column + 1) * 510 + 1), min(height, (row + 1) * 510 + 1)
                    assert tile.shape[:2] == (bottom - max(0, row * 510 - 1), right - max(0, column * 510 - 1))
                    assert tile[..., 0].min() >= 109, "no black bar"
            x, y = 1500 // scale, 1000 // scale
            tile = render_tile(slide, level, x // 510, y // 510, base=lambda: base)
            shown = tile[y - max(0, y // 510 * 510 - 1), x - max(0, x // 510 * 510 - 1)].astype(int)
            assert np.abs(shown - rgb[1000, 1500]).max() <= 2 + 1.1 * 120 * scale / 1031, (level, shown)


def test_tiles_are_encoded_without_a_colour_shift() -> None:
    """A tile's grey stays grey through JPEG."""
    from apps.viewer.tiles import jpeg

    picture = np.asarray(Image.open(io.BytesIO(jpeg(np.full((510, 510, 3), 243, np.uint8)))))
    assert np.abs(picture.astype(int) - 243).max() <= 1
