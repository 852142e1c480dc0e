"""Public fault reports of tilers (GEO, CLI, STO and VIS of the fault list), each made again here at its smallest."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from tiling.atomic import temporary_path
from tiling.discovery import find_slides
from tiling.errors import SlideError
from tiling.grid import TileGrid, TileSpec
from tiling.pipeline import survey_slide, tile_slide
from tiling.slide import Slide
from tiling.store import grid_is_complete, read_grid
from wsi_mil.outcomes import Summary
from wsi_mil.stages.tile import tile

Rgb = NDArray[np.uint8]
MakePyramid = Callable[..., Path]
SPEC = TileSpec(mpp=0.5, tile_px=256)
GLASS = (243, 241, 244)


def glass(width: int = 1536, height: int = 1152) -> Rgb:
    return np.full((height, width, 3), GLASS, np.uint8)


def tissue(width: int = 1536, height: int = 1152) -> Rgb:
    """Eosin with violet nuclei, edge to edge."""
    rng = np.random.default_rng(0)
    rgb = np.full((height, width, 3), (226, 155, 198), np.uint8)
    for x, y in rng.integers(0, (width, height), (width * height // 400, 2)).tolist():
        rgb[y : y + 8, x : x + 8] = (120, 80, 150)
    return rgb


def line(rgb: Rgb, x: int, y: int, width: int, height: int, colour: tuple[int, int, int]) -> None:
    rgb[y : y + height, x : x + width] = colour


def tiled(path: Path, spec: TileSpec = SPEC) -> TileGrid:
    with Slide(path) as slide:
        return tile_slide(slide, spec)


def test_geo_04_a_finer_wish_is_refused_or_recorded_never_read_from_a_coarser_level(
    tmp_path: Path, make_pyramid: MakePyramid
) -> None:
    path = make_pyramid(tmp_path / "only_1.0_mpp.tif", tissue(), mpp=1.0)
    with pytest.raises(SlideError, match="finer"):
        tiled(path)
    grid = tiled(path, TileSpec(mpp=0.5, tile_px=256, allow_upsampling=True))
    assert (grid.plan.level, grid.plan.tile_size_l0, grid.plan.mpp_effective) == (0, (128, 128), (0.5, 0.5))
    upsampled = tile(
        tmp_path,
        out=tmp_path.parent / "out_geo_04",
        tiles=TileSpec(mpp=0.5, tile_px=256, allow_upsampling=True),
        workers=1,
    )
    assert "upsampled x2" in (upsampled.out / "tiles.csv").read_text()


def test_geo_07_a_single_tile_is_kept(tmp_path: Path, make_pyramid: MakePyramid) -> None:
    rgb = glass()
    rgb[512:768, 768:1024] = tissue()[512:768, 768:1024]
    assert tiled(make_pyramid(tmp_path / "s.tif", rgb)).coords_l0.tolist() == [[768, 512]]


@pytest.mark.parametrize(("width", "height", "padded"), [(180, 140, 1), (2000, 200, 8)])
def test_geo_08_a_slide_smaller_than_a_tile_is_named_or_padded(
    tmp_path: Path, make_pyramid: MakePyramid, width: int, height: int, padded: int
) -> None:
    path = make_pyramid(tmp_path / "slides/s.tif", tissue(width, height), levels=(1,))
    summary = tile(tmp_path / "slides", out=tmp_path / "out", tiles=SPEC, workers=1)
    assert [failure.outcome for failure in summary.failures] == ["smaller than a tile"]
    grid = tiled(path, TileSpec(mpp=0.5, tile_px=256, edge="pad"))
    assert len(grid) == padded
    assert (grid.coords_l0 >= 0).all()
    assert grid.tissue_fraction[0] == pytest.approx(min(width, 256) * min(height, 256) / 256**2, abs=1e-4)


def test_geo_09_pen_marks_are_not_tissue_and_the_tissue_stays(tmp_path: Path, make_pyramid: MakePyramid) -> None:
    rgb = glass()
    rgb[200:950, 100:850] = tissue()[200:950, 100:850]
    line(rgb, 60, 540, 880, 40, (34, 68, 170))  # across the tissue
    for x, colour in ((980, (34, 68, 170)), (1200, (28, 124, 76)), (1400, (22, 20, 26))):
        line(rgb, x, 90, 64, 960, colour)
    path = make_pyramid(tmp_path / "s.tif", rgb)
    grid = tiled(path, TileSpec(mpp=0.5, tile_px=128))
    left = grid.coords_l0[:, 0]
    assert (left < 950).all()
    far_from_pen = [(x, y) for x in range(128, 640, 128) for y in (256, 640, 768)]
    assert set(far_from_pen) <= set(map(tuple, grid.coords_l0.tolist()))
    with Slide(path) as slide:
        survey = survey_slide(slide, SPEC)
    assert survey.ground.pen.mean() > 0.1  # and the QC picture shows it


def test_geo_12_a_slide_full_of_tissue_keeps_all_its_tiles(tmp_path: Path, make_pyramid: MakePyramid) -> None:
    grid = tiled(make_pyramid(tmp_path / "s.tif", tissue(1536, 1024)))
    assert len(grid) == 24
    assert (grid.tissue_fraction > 0.999).all()


def test_vis_01_tiles_do_not_drift(tmp_path: Path, make_pyramid: MakePyramid) -> None:
    """0.2528 µm/px: a tile of 256 px at 0.5 is 506.33 px. Every tile is where the file says, to the pixel."""
    grid = tiled(make_pyramid(tmp_path / "s.tif", tissue(2600, 1100), mpp=0.2528))
    assert grid.plan.tile_size_l0 == grid.plan.stride_l0 == (506, 506)
    assert grid.coords_l0.tolist() == (grid.grid_xy * 506).tolist()
    assert grid.coords_l0[-1].tolist() == [4 * 506, 506]


def small_cohort(root: Path, make_pyramid: MakePyramid, names: tuple[str, ...]) -> Path:
    for name in names:
        rgb = glass(768, 768)
        rgb[200:600, 150:650] = tissue(768, 768)[200:600, 150:650]
        make_pyramid(root / name, rgb)
    return root


def test_cli_05_each_slide_is_found_once_whatever_its_suffix_and_links(
    tmp_path: Path, make_pyramid: MakePyramid
) -> None:
    slides = small_cohort(tmp_path / "slides", make_pyramid, ("UPPER.TIF",))
    store = small_cohort(tmp_path / "store", make_pyramid, ("linked_slide.tif",))
    (slides / "._UPPER.TIF").write_bytes(bytes(4024))
    (slides / "linked_slide.tif").symlink_to(store / "linked_slide.tif")
    (slides / "dangling.tif").symlink_to(tmp_path / "nowhere.tif")
    (slides / "loop").symlink_to(slides, target_is_directory=True)
    summary = tile(slides, out=tmp_path / "out", tiles=SPEC, workers=1)
    assert summary.done == ("UPPER", "linked_slide")
    assert [failure.item for failure in summary.failures] == ["dangling.tif"]
    assert "dangling.tif,failed" in (summary.out / "tiles.csv").read_text()
    assert len(find_slides(slides).sources) == 2


AS_ANYBODY = """
import os, sys
from pathlib import Path
import encodings.idna
from tiling.grid import TileSpec
from wsi_mil.stages.tile import tile
slides, warm, out = map(Path, sys.argv[1:])
tile(slides, out=warm, tiles=TileSpec(tile_px=256), workers=1)
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
print(os.access(slides, os.W_OK), tile(slides, out=out, tiles=TileSpec(tile_px=256), workers=1).done)
"""


def test_cli_06_the_slides_folder_may_be_read_only(tmp_path: Path, make_pyramid: MakePyramid) -> None:
    """Root may write everywhere, so the work is done as an ordinary user."""
    slides, out = small_cohort(tmp_path / "slides", make_pyramid, ("a.tif",)), tmp_path / "out"
    out.mkdir()
    out.chmod(0o777)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and len(folder.parts) > 2:
            folder.chmod(folder.stat().st_mode | 0o055)
    slides.chmod(0o555)
    before = {path: path.stat().st_mtime_ns for path in slides.rglob("*")}
    command = [sys.executable, "-c", AS_ANYBODY, str(slides), str(tmp_path / "warm"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False ('a',)", done.stderr
    assert {path: path.stat().st_mtime_ns for path in slides.rglob("*")} == before


def test_cli_07_stale_marks_of_a_killed_run_stop_nothing(tmp_path: Path, make_pyramid: MakePyramid) -> None:
    slides = small_cohort(tmp_path / "slides", make_pyramid, ("a.tif", "b.tif"))
    grids = tmp_path / "out" / f"tiles_0.5mpp_256px_{SPEC.digest()}" / "grids"
    grids.mkdir(parents=True)
    (grids / "a.h5.lock").write_text("999999\n")
    (grids / "a.unfinished").touch()
    ours = temporary_path(grids / "a.h5", 999999999)
    ours.write_bytes(b"half")
    (grids / "b.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(200))
    summary = tile(slides, out=tmp_path / "out", tiles=SPEC, workers=1)
    assert summary.done == ("a", "b")
    assert not ours.exists()
    assert any("interrupted" in note for note in summary.notes)
    assert (grids / "a.h5.lock").exists()  # not ours: neither believed nor touched


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _fewer_rows(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        rows = file["tissue_fraction"][:2]
        del file["tissue_fraction"]
        file["tissue_fraction"] = rows


def _never_sealed(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file.attrs.modify("header_digest", np.bytes_(b"0" * 64))


def test_sto_01_half_written_files_are_redone_and_good_ones_left(tmp_path: Path, make_pyramid: MakePyramid) -> None:
    damage = {"cut": _cut, "empty": _empty, "fewer": _fewer_rows, "unsealed": _never_sealed}
    slides = small_cohort(tmp_path / "slides", make_pyramid, (*(f"{name}.tif" for name in damage), "good.tif"))

    def run() -> Summary:
        return tile(slides, out=tmp_path / "out", tiles=SPEC, workers=1)

    grids = run().out / "grids"
    before = {path.name: path.read_bytes() for path in grids.iterdir()}
    kept = (grids / "good.h5").stat().st_mtime_ns
    for name, harm in damage.items():
        harm(grids / f"{name}.h5")
        assert not grid_is_complete(grids / f"{name}.h5", spec_digest=SPEC.digest())
    summary = run()
    assert (summary.done, summary.reused) == (tuple(damage), ("good",))
    assert (grids / "good.h5").stat().st_mtime_ns == kept
    assert {path.name: path.read_bytes() for path in grids.iterdir()} == before


def test_sto_04_names_with_dots_stay_apart(tmp_path: Path, make_pyramid: MakePyramid) -> None:
    names = ("S01.block1.tif", "S01.block2.tif", "S01.v2.0.tif")
    summary = tile(small_cohort(tmp_path / "slides", make_pyramid, names), out=tmp_path / "out", tiles=SPEC, workers=1)
    assert summary.done == ("S01.block1", "S01.block2", "S01.v2.0")
    for name in summary.done:
        assert read_grid(summary.out / "grids" / f"{name}.h5").slide.slide_id == name


HOSTILE = (
    "  leading and trailing  ",
    "-dash-first",
    "O'Brien; rm -rf $HOME",
    "Präparat 07 (копия)",
    "[glob]x",
    "切片 #1 %23 a&b",
)


def test_cli_02_hostile_names_survive(tmp_path: Path, make_pyramid: MakePyramid) -> None:
    slides = small_cohort(tmp_path / "slides", make_pyramid, tuple(f"{name}.tif" for name in HOSTILE))
    summary = tile(slides, out=tmp_path / "out", tiles=SPEC, workers=1)
    assert set(summary.done) == set(HOSTILE)
    assert {path.name for path in (summary.out / "grids").iterdir()} == {f"{name}.h5" for name in HOSTILE}
    assert {path.name for path in (summary.out / "qc").iterdir()} == {f"{name}.jpg" for name in HOSTILE}
    assert HOSTILE[3] in (summary.out / "tiles.csv").read_text()
