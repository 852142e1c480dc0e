"""Faults of stored features that other tools had: STO-01, STO-07, STO-08, CLI-07, CLI-10."""

import multiprocessing
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tiling.atomic import remove_leftovers, temporary_path
from wsi_mil.store import BagHeader, BagStore, why_incomplete, write_bag

HEADER = BagHeader(
    slide_id="a",
    slide_fingerprint="f",
    mpp=(0.5, 0.5),
    mpp_source="metadata",
    mpp_effective=(0.5, 0.5),
    level0_size=(900, 900),
    bounds_l0=(0, 0, 900, 900),
    tile_px=64,
    tile_um=32.0,
    tile_size_l0=(64, 64),
    stride_l0=(64, 64),
    origin_l0=(0, 0),
    encoder="synthetic",
    weights_sha256="w",
    transform_digest="t",
    precision="fp32",
    params_digest="p",
    icc_profile=False,
    n=0,
    dim=0,
)


def write(folder: Path, slide_id: str, *, n: int = 50, value: float | None = None) -> Path:
    path = folder / f"{slide_id}.h5"
    features = np.random.default_rng(0).normal(size=(n, 16)).astype(np.float32)
    if value is not None:
        features[:] = value
    grid = np.stack([np.arange(n), np.zeros(n, int)], axis=1)
    write_bag(path, replace(HEADER, slide_id=slide_id), features=features, coords_l0=grid * 64, grid_xy=grid)
    return path


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(0.6 * len(data))])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def stop_after_20(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        rows = file["features"][:20]
        del file["features"]
        file.create_dataset("features", data=rows)


def preallocate(path: Path) -> None:
    """As a writer that appends in place leaves it: the shape is final, most rows were never written, no digest."""
    with h5py.File(path, "r+") as file:
        file["features"][20:] = 0
        del file.attrs["header_digest"]


@pytest.mark.parametrize("damage", [cut, empty, stop_after_20, preallocate])
def test_sto_01_a_half_written_bag_is_not_complete(tmp_path, damage):
    path = write(tmp_path, "a")
    damage(path)
    assert not BagStore(tmp_path).is_complete("a", params_digest="p")
    assert "Delete it and encode the slide again" in (why_incomplete(path) or "")


class ByIndex(Dataset[torch.Tensor]):
    def __init__(self, folder: Path) -> None:
        self.store = BagStore(folder)
        self.ids = self.store.ids()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.store.bag(self.ids[index]).features


@pytest.mark.parametrize(("workers", "start"), [(0, None), (2, "fork"), (2, "spawn")])
def test_sto_07_every_row_of_bag_i_is_i_whatever_the_workers(tmp_path, workers, start):
    for i in range(12):
        write(tmp_path, f"b{i:02}", n=5 + i, value=i)
    data = ByIndex(tmp_path)
    data[3]  # used before it is sent to the workers
    context = multiprocessing.get_context(start) if start else None
    loader = DataLoader(
        data, batch_size=None, num_workers=workers, multiprocessing_context=context, persistent_workers=workers > 0
    )
    for _ in range(2):
        for i, features in enumerate(loader):
            assert features.shape == (5 + i, 16)
            assert (features == i).all()


def test_sto_08_a_read_only_folder_and_a_file_open_elsewhere_are_read():
    code = (
        "import os, sys; from pathlib import Path; from wsi_mil.store import BagStore\n"
        "os.getuid() == 0 and os.setuid(65534)\n"  # only now: the interpreter's own files may be closed to others
        "assert not os.access(sys.argv[1], os.W_OK)\n"
        "print(len(BagStore(Path(sys.argv[1])).bag('a')))"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = write(folder, "a")
        path.chmod(0o444)
        folder.chmod(0o555)
        try:
            with h5py.File(path, "r"):
                command = [sys.executable, "-c", code, name]
                result = subprocess.run(command, capture_output=True, text=True, check=False)
        finally:
            folder.chmod(0o755)
    assert result.stdout.strip() == "50", result.stderr


def test_cli_07_markers_of_a_dead_writer_are_neither_obeyed_nor_taken_for_work(tmp_path):
    write(tmp_path, "a")
    for name in ("b.h5.lock", "b.unfinished", "b.h5.tmp"):
        (tmp_path / name).write_text("999999")
    ours = temporary_path(tmp_path / "b.h5", 999999999)
    ours.write_bytes(b"half")
    assert BagStore(tmp_path).ids() == ["a"]
    assert remove_leftovers(tmp_path) == [ours]
    assert (tmp_path / "b.h5.tmp").exists()  # not ours to remove
