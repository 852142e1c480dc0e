"""Bags on disk: what goes in comes out, the same bytes every time, and nothing half-made passes for whole."""

import pickle
import time
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from tiling.atomic import temporary_path
from tiling.geometry import full_grid, plan_read
from tiling.grid import TileGrid, TileSpec
from tiling.readers.header import SlideInfo
from tiling.store import write_grid
from wsi_mil.errors import StoreError
from wsi_mil.store import (
    BagHeader,
    BagStore,
    FailedTile,
    check_one_contract,
    load_bag,
    read_bag_header,
    read_failed,
    why_incomplete,
    write_bag,
)

HEADER = BagHeader(
    slide_id="S01.v2",
    slide_fingerprint="f00d",
    mpp=(0.25, 0.26),
    mpp_source="metadata",
    mpp_effective=(0.501, 0.499),
    level0_size=(9000, 7000),
    bounds_l0=(10, 20, 8000, 6000),
    tile_px=224,
    tile_um=112.0,
    tile_size_l0=(448, 430),
    stride_l0=(224, 215),
    origin_l0=(10, 20),
    encoder="synthetic",
    weights_sha256="ab",
    transform_digest="cd",
    transform="as they are",
    precision="fp32",
    params_digest="ef",
    icc_profile=True,
    n=5,
    dim=3,
    licence="Apache-2.0",
    contract_breach=("tiles are small",),
)
FEATURES = np.arange(15, dtype=np.float16).reshape(5, 3) / 8
GRID = np.stack([np.arange(5), np.arange(5) % 2], axis=1)


def write(folder: Path, header: BagHeader = HEADER, features=FEATURES, **more) -> Path:
    path = folder / f"{header.slide_id}.h5"
    write_bag(path, header, features=features, coords_l0=GRID * 224 + 7, grid_xy=GRID, **more)
    return path


def test_a_bag_comes_back_as_it_was_written(tmp_path):
    failed = (FailedTile(coords_l0=(900, 8), reason="damaged JPEG"),)
    path = write(tmp_path, failed=failed, tissue_fraction=np.linspace(0, 1, 5, dtype=np.float32))
    bag = load_bag(path)
    assert read_bag_header(path) == HEADER
    assert bag.id == "S01.v2"
    assert bag.slide_ids == ("S01.v2",)
    assert bag.features.dtype == torch.float32
    assert torch.equal(bag.features, torch.from_numpy(FEATURES.astype(np.float32)))
    assert bag.coords_l0.tolist() == (GRID * 224 + 7).tolist()
    assert bag.grid_xy.tolist() == GRID.tolist()
    assert read_failed(path) == list(failed)
    with h5py.File(path) as file:
        assert file["features"].dtype == np.float16
        assert file["features"].chunks is None  # contiguous


def test_the_same_bag_is_the_same_bytes_a_second_later(tmp_path):
    first = write(tmp_path).read_bytes()
    time.sleep(1.1)  # HDF5 keeps times in whole seconds
    assert write(tmp_path).read_bytes() == first


def test_tools_that_read_trident_find_their_attributes(tmp_path):
    with h5py.File(write(tmp_path)) as file:
        attributes = dict(file["coords"].attrs)
        assert file["features"].attrs["encoder"] == "synthetic"
    assert (attributes["patch_size"], attributes["patch_size_level0"], attributes["overlap"]) == (224, 448, 112)
    assert (attributes["level0_magnification"], attributes["target_magnification"]) == (40, 20)
    assert (attributes["level0_width"], attributes["level0_height"]) == (9000, 7000)
    assert attributes["name"] == "S01.v2"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_never_stored(tmp_path, bad):
    features = FEATURES.copy()
    features[2, 1] = bad
    with pytest.raises(StoreError, match="1 of 5 rows"):
        write(tmp_path, features=features)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_bag_alone(tmp_path, monkeypatch):
    path = write(tmp_path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tiling.atomic.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, features=FEATURES * 2)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_complete_means_made_with_the_same_parameters(tmp_path):
    write(tmp_path)
    store = BagStore(tmp_path)
    assert store.is_complete("S01.v2", params_digest="ef")
    assert not store.is_complete("S01.v2", params_digest="other")
    assert not store.is_complete("absent")


def test_completeness_is_known_in_milliseconds(tmp_path):
    n = 20_000
    path = tmp_path / "S01.v2.h5"
    columns = np.zeros((n, 2), np.int64)
    write_bag(path, HEADER, features=np.zeros((n, 512), np.float16), coords_l0=columns, grid_xy=columns)
    started = time.process_time()
    for _ in range(10):
        assert why_incomplete(path) is None
    assert (time.process_time() - started) / 10 < 0.05


def test_a_changed_row_is_found_when_all_is_read(tmp_path):
    path = write(tmp_path)
    with h5py.File(path, "r+") as file:
        file["features"][3, 0] = 7
    assert why_incomplete(path) is None
    assert "changed after it was written" in (why_incomplete(path, deep=True) or "")


@pytest.mark.parametrize("attribute", ["encoder", "mpp_x", "n", "params_digest"])
def test_a_changed_header_is_not_complete(tmp_path, attribute):
    path = write(tmp_path)
    with h5py.File(path, "r+") as file:
        value = file.attrs[attribute]
        file.attrs.modify(attribute, "xx" if isinstance(value, str) else type(value)(value + 1))
    with pytest.raises(StoreError):
        load_bag(path)


def test_bytes_after_the_end_are_not_complete(tmp_path):
    path = write(tmp_path)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"more")
    assert f"should be {size} bytes, is {size + 4}" in (why_incomplete(path) or "")


def test_a_renamed_bag_does_not_stand_for_another_slide(tmp_path):
    other = write(tmp_path).rename(tmp_path / "S02.h5")
    assert "holds slide 'S01.v2'" in (why_incomplete(other) or "")


def test_ids_are_whole_names_and_temporary_files_are_none(tmp_path):
    for slide_id in ("S01.block1", "S01.block2", "S01.v2.0"):
        write(tmp_path, replace(HEADER, slide_id=slide_id))
    temporary_path(tmp_path / "S03.h5", 1).write_bytes(b"")
    (tmp_path / ".hidden.h5").write_bytes(b"")
    assert BagStore(tmp_path).ids() == ["S01.block1", "S01.block2", "S01.v2.0"]


def test_a_store_pickles_before_and_after_use_and_holds_no_file(tmp_path):
    write(tmp_path)
    store = BagStore(tmp_path)
    for _ in range(2):
        assert len(pickle.loads(pickle.dumps(store)).bag("S01.v2")) == 5
        store.bag("S01.v2")
    with h5py.File(store.path("S01.v2"), "r+"):  # would fail if a reader still had it open
        pass


def test_odd_bags_are_named_with_what_is_odd():
    usual = [replace(HEADER, slide_id=f"s{i}") for i in range(4)]
    odd = replace(HEADER, slide_id="alien", encoder="uni", weights_sha256="zz")
    with pytest.raises(StoreError, match=r"1 of 5 bags .*alien \(encoder uni, the rest synthetic, weights_sha256 zz"):
        check_one_contract([*usual, odd])
    check_one_contract(usual)
    check_one_contract([])


def test_a_footprint_may_differ_by_two_percent_and_no_more():
    check_one_contract([HEADER, replace(HEADER, slide_id="b", tile_um=113.0)])
    with pytest.raises(StoreError, match="tile_um"):
        check_one_contract([HEADER, HEADER, replace(HEADER, slide_id="b", tile_um=116.0)])


@pytest.mark.parametrize("mpp", [0.12, 0.17, 0.22, 0.25, 0.3, 0.35, 0.5, 0.7, 1.0, 2.0])
def test_the_grid_and_the_bag_of_a_slide_tell_readers_of_trident_files_the_same(tmp_path, mpp):
    info = SlideInfo(
        slide_id="S01.v2",
        fingerprint="f00d",
        vendor="aperio",
        size_l0=(9000, 7000),
        mpp=(mpp, mpp * 1.04),
        mpp_source="metadata",
        bounds_l0=(10, 20, 8000, 6000),
        level_downsamples=((1.0, 1.0),),
    )
    spec = TileSpec(mpp=2.0, tile_px=224, stride_px=168)
    plan = plan_read(info, spec)
    xy = full_grid(plan)[:3]
    grid = TileGrid(slide=info, spec=spec, plan=plan, grid_xy=xy, tissue_fraction=np.ones(3, np.float32))
    write_grid(tmp_path / "grids" / "S01.v2.h5", grid)
    header = replace(HEADER, mpp=info.mpp, tile_um=448.0, tile_size_l0=plan.tile_size_l0, stride_l0=plan.stride_l0)
    told = []
    for path in (tmp_path / "grids" / "S01.v2.h5", write(tmp_path, header)):
        with h5py.File(path) as file:
            told.append(dict(file["coords"].attrs))
    assert told[0] == told[1]
