"""A grid file is whole and of these settings, or it is not taken for one."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tiling.geometry import full_grid, plan_read
from tiling.grid import TileGrid, TileSpec
from tiling.readers.header import SlideInfo
from tiling.store import GridChangedError, GridFileError, grid_is_complete, grid_is_intact, read_grid, write_grid

SPEC = TileSpec(tile_px=256, stride_px=192, min_tissue=0.125)


def grid(**changes: Any) -> TileGrid:
    facts: dict[str, Any] = {
        "slide_id": "S01.v2.0",
        "fingerprint": "abc",
        "vendor": "aperio",
        "size_l0": (5070, 3549),
        "mpp": (0.2528, 0.2531),
        "mpp_source": "cohort",
        "bounds_l0": (11, 7, 5000, 3500),
        "level_downsamples": ((1.0, 1.0), (4.00158, 4.0)),
        "objective_power": 40.0,
        "file_tile_size": (256, 256),
        "warnings": ("ümlaut",),
    }
    info = SlideInfo(**facts | changes)
    plan = plan_read(info, SPEC)
    xy = full_grid(plan)[::3]
    fraction = np.linspace(0.2, 1, len(xy), dtype=np.float32)
    return TileGrid(
        slide=info, spec=SPEC, plan=plan, grid_xy=xy, tissue_fraction=fraction, tissue_mm2=0.75, mask_digest="m"
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    written = tmp_path / "S01.v2.0.h5"
    write_grid(written, grid())
    return written


def complete(path: Path, **changes: Any) -> bool:
    return grid_is_complete(path, **{"spec_digest": SPEC.digest(), "slide_fingerprint": "abc"} | changes)


def test_a_grid_comes_back_as_it_was(path: Path) -> None:
    back, was = read_grid(path), grid()
    for name in ("slide", "spec", "plan", "tissue_mm2", "mask_digest"):
        assert getattr(back, name) == getattr(was, name)
    for name in ("grid_xy", "coords_l0", "tissue_fraction"):
        np.testing.assert_array_equal(getattr(back, name), getattr(was, name))
        assert getattr(back, name).dtype == getattr(was, name).dtype


def test_the_file_speaks_for_itself(path: Path) -> None:
    with h5py.File(path) as file:
        attrs = dict(file.attrs)
        assert (attrs["kind"], attrs["schema_version"], attrs["n"]) == ("grid", 1, len(file["coords"]))
        assert (attrs["slide_id"], attrs["slide_fingerprint"]) == ("S01.v2.0", "abc")
        assert (attrs["mpp_x"], attrs["mpp_y"], attrs["mpp_source"]) == (0.2528, 0.2531, "cohort")
        assert (attrs["level0_width"], attrs["level0_height"]) == (5070, 3549)
        assert (attrs["bounds_x"], attrs["bounds_y"]) == (11, 7)
        assert (attrs["tile_px"], attrs["tile_um"]) == (256, 128.0)
        assert attrs["tile_size_l0"].tolist() == [506, 506]
        assert attrs["stride_l0"].tolist() == [380, 379]
        assert attrs["origin_l0"].tolist() == [11, 7]
        assert attrs["mpp_effective"] == pytest.approx([506 * 0.2528 / 256, 506 * 0.2531 / 256])
        assert attrs["params_digest"] == SPEC.digest()
        assert not attrs["icc_profile"]
        np.testing.assert_array_equal(file["coords"][:], attrs["origin_l0"] + file["grid_xy"][:] * attrs["stride_l0"])


def test_readers_of_trident_files_find_what_they_look_for(path: Path) -> None:
    with h5py.File(path) as file:
        attrs = dict(file["coords"].attrs)
        assert file["coords"].dtype == np.int64
    assert attrs == {
        "patch_size": 256,
        "patch_size_level0": 506,
        "level0_magnification": 40,
        "target_magnification": 20,
        "overlap": 64,
        "name": "S01.v2.0",
        "savetodir": ".",
        "level0_width": 5070,
        "level0_height": 3549,
    }


def test_the_same_grid_gives_the_same_bytes_at_another_time(path: Path, tmp_path: Path) -> None:
    time.sleep(1.1)  # HDF5's clock counts seconds
    again = tmp_path / "again" / path.name
    write_grid(again, grid())
    assert again.read_bytes() == path.read_bytes()


def test_a_whole_file_of_these_settings_is_complete(path: Path) -> None:
    assert complete(path)
    assert complete(path, slide_fingerprint=None)
    assert complete(path, mpp=(0.2528, 0.2531), mask_digest="m")


@pytest.mark.parametrize(
    "other",
    [{"spec_digest": "00000000"}, {"slide_fingerprint": "xyz"}, {"mpp": (0.25, 0.25)}, {"mask_digest": ""}],
)
def test_a_file_of_other_settings_is_not_complete(path: Path, other: dict[str, Any]) -> None:
    assert not complete(path, **other)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.6, 0.999])
def test_a_cut_file_is_not_complete(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    assert not complete(path)
    with pytest.raises(GridFileError, match="not a complete grid file"):
        read_grid(path)


def test_a_file_with_something_added_is_not_complete(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")
    assert not complete(path)


def test_a_changed_attribute_is_noticed(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file.attrs.modify("mpp_x", 0.25)
    assert not complete(path)


def test_missing_rows_are_noticed(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        rows = file["coords"][:20]
        del file["coords"]
        file["coords"] = rows
    assert not complete(path)


def test_a_file_under_another_slides_name_is_not_complete(path: Path) -> None:
    moved = path.rename(path.with_name("S01.v2.1.h5"))
    assert not complete(moved)


def test_files_that_are_no_grids_are_not_complete(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "bag.h5", "w") as file:
        file["coords"] = np.zeros((3, 2))
        file.attrs["kind"] = "bag"
    (tmp_path / "text.h5").write_text("hello")
    (tmp_path / "folder.h5").mkdir()
    for name in ("bag.h5", "text.h5", "folder.h5", "absent.h5"):
        assert not complete(tmp_path / name)


def test_changed_data_are_found_by_the_deep_check_alone(path: Path) -> None:
    assert grid_is_intact(path)
    with h5py.File(path, "r+") as file:
        file["tissue_fraction"][3] = 0.0
    assert complete(path)
    assert not grid_is_intact(path)


def test_an_empty_grid_never_becomes_a_file(tmp_path: Path) -> None:
    empty = replace(grid(), grid_xy=np.zeros((0, 2), np.int64), tissue_fraction=np.zeros(0, np.float32))
    with pytest.raises(ValueError, match="outcome, not a file"):
        write_grid(tmp_path / "S01.v2.0.h5", empty)
    assert not list(tmp_path.iterdir())


def test_changed_data_are_refused_when_they_are_read(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["grid_xy"][3] += 1
    with pytest.raises(GridChangedError, match=r"rows changed.*`tile` again"):
        read_grid(path)


@pytest.mark.parametrize("value", [(0.5 + 1e-9, 0.5), (0.5, 0.5 - 1e-12)])
def test_a_change_that_printing_would_round_away_is_noticed(path: Path, value: tuple[float, float]) -> None:
    with h5py.File(path, "r+") as file:
        was = file.attrs["mpp_effective"]
        file.attrs.modify("mpp_effective", was + np.array(value) - 0.5)
    assert not complete(path)
