"""BagStore: one HDF5 file a slide, self-describing, written atomically with the same bytes every time.

A file is complete when its name, row count, size and header digest agree; that is checked in milliseconds.
"""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray

from tiling.atomic import atomic_file
from tiling.store import trident_attributes
from wsi_mil.bag_header import SCHEMA_VERSION, BagHeader, attributes_of, check_one_contract, header_from
from wsi_mil.bags import Bag
from wsi_mil.errors import StoreError

__all__ = [
    "BagHeader",
    "BagStore",
    "FailedTile",
    "check_one_contract",
    "load_bag",
    "read_bag_header",
    "read_failed",
    "why_incomplete",
    "write_bag",
]
SUFFIX = ".h5"
_COLUMNS = ("features", "coords", "grid_xy", "tissue_fraction")


@dataclass(frozen=True, kw_only=True)
class FailedTile:
    """A tile that could not be read. It is not a row of the bag."""

    coords_l0: tuple[int, int]
    reason: str


def write_bag(
    path: Path,
    header: BagHeader,
    *,
    features: NDArray[Any],
    coords_l0: NDArray[np.int64],
    grid_xy: NDArray[np.int64],
    tissue_fraction: NDArray[np.float32] | None = None,
    failed: Sequence[FailedTile] = (),
) -> None:
    """Write one bag: features (n, d) fp16 or fp32, coords_l0 and grid_xy (n, 2), tissue_fraction (n,).

    `header.n` and `header.dim` are taken from `features`. Raises StoreError when a value is not finite, or the file
    name is not the slide id; ValueError when the columns differ in length.
    """
    columns = _columns(features, coords_l0, grid_xy, tissue_fraction)
    if path.name != header.slide_id + SUFFIX:
        raise StoreError(f"{path.name}: a bag of slide {header.slide_id!r} must be named {header.slide_id}{SUFFIX}.")
    bad = int((~np.isfinite(features).all(axis=1)).sum())
    if bad:
        raise StoreError(
            f"{path.name}: {bad} of {len(features)} rows hold NaN or infinite features. Nothing is stored."
        )
    attributes = attributes_of(header) | {"n": len(features), "dim": features.shape[1], "data_digest": _digest(columns)}
    with atomic_file(path) as handle:
        with h5py.File(handle, "w") as file:
            _write_columns(file, columns)
            _write_failed(file, failed)
            _mirror_trident(file, header)
            file.attrs.update(attributes)
            file.attrs["header_digest"] = _header_digest(file)
            file.attrs["file_bytes"] = np.int64(0)
        size = handle.seek(0, io.SEEK_END)
        with h5py.File(handle, "r+") as file:
            file.attrs.modify("file_bytes", np.int64(size))


def read_bag_header(path: Path) -> BagHeader:
    """Read a bag's header. Raises StoreError when the file is missing, damaged, incomplete or not a bag."""
    with _open(path) as file:
        _refuse_incomplete(path, file)
        return header_from(file.attrs)


def load_bag(path: Path) -> Bag:
    """Read a whole bag; features become float32. Raises StoreError as `read_bag_header` does."""
    with _open(path) as file:
        _refuse_incomplete(path, file)
        slide_id = str(file.attrs["slide_id"])
        features = np.empty(file["features"].shape, dtype=np.float32)
        file["features"].read_direct(features)
        coords, grid_xy = file["coords"][:], file["grid_xy"][:]
    return Bag(
        features=torch.from_numpy(features),
        coords_l0=torch.from_numpy(coords),
        grid_xy=torch.from_numpy(grid_xy),
        slide_index=torch.zeros(len(features), dtype=torch.int64),
        slide_ids=(slide_id,),
        id=slide_id,
    )


def read_failed(path: Path) -> list[FailedTile]:
    """The tiles of the slide that could not be read."""
    with _open(path) as file:
        rows = zip(file["failed_coords"][:].tolist(), file["failed_reason"].asstr()[:].tolist(), strict=True)
        return [FailedTile(coords_l0=(x, y), reason=reason) for (x, y), reason in rows]


def why_incomplete(path: Path, *, params_digest: str | None = None, deep: bool = False) -> str | None:
    """The reason why `path` is not a complete bag (made with these parameters), or None when it is.

    `deep` reads every row and compares its digest too.
    """
    try:
        with _open(path) as file:
            _refuse_incomplete(path, file)
            if params_digest is not None and file.attrs["params_digest"] != params_digest:
                return f"{path.name}: made with other settings."
            if deep and _digest({name: file[name][:] for name in _COLUMNS}) != file.attrs["data_digest"]:
                return f"{path.name}: its rows changed after it was written. Delete it and encode the slide again."
    except StoreError as error:
        return str(error)
    return None


class BagStore:
    """The bags of one folder. Holds no open file: each access opens, reads and closes, so it can be pickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise StoreError(f"{folder}: no such folder of bags. Give the folder that `wsi-mil encode` made.")

    def ids(self) -> list[str]:
        """Slide ids of all bags, sorted."""
        names = (path.name for path in self.folder.glob(f"*{SUFFIX}"))
        return sorted(name.removesuffix(SUFFIX) for name in names if not name.startswith("."))

    def path(self, slide_id: str) -> Path:
        """Where the bag of this slide is, or would be."""
        return self.folder / f"{slide_id}{SUFFIX}"

    def header(self, slide_id: str) -> BagHeader:
        """Header of one bag."""
        return read_bag_header(self.path(slide_id))

    def bag(self, slide_id: str) -> Bag:
        """One whole bag."""
        return load_bag(self.path(slide_id))

    def is_complete(self, slide_id: str, *, params_digest: str | None = None) -> bool:
        """Whether the bag is there, whole, and made with these parameters."""
        return why_incomplete(self.path(slide_id), params_digest=params_digest) is None


def _open(path: Path) -> Any:
    try:
        return h5py.File(path, "r", locking=False)  # shares without lock support and read-only folders must work
    except FileNotFoundError:
        raise StoreError(f"{path}: no such bag. Encode the slide, or take it out of the table.") from None
    except OSError as error:
        raise StoreError(f"{path.name}: cannot be opened ({error}). Delete it and encode the slide again.") from None


def _refuse_incomplete(path: Path, file: Any) -> None:
    problem = _problem(path, file)
    if problem:
        raise StoreError(f"{path.name}: {problem}. Delete it and encode the slide again.")


def _problem(path: Path, file: Any) -> str | None:
    attributes = file.attrs
    if attributes.get("kind") != "bag" or "header_digest" not in attributes:
        return "is not a bag of this project, or was never finished"
    if attributes["schema_version"] != SCHEMA_VERSION:
        return f"has schema version {attributes['schema_version']}, this version reads {SCHEMA_VERSION}"
    if path.name != f"{attributes['slide_id']}{SUFFIX}":
        return f"holds slide {attributes['slide_id']!r}, which its name does not say"
    rows = {name: len(file[name]) if name in file else 0 for name in _COLUMNS}
    if set(rows.values()) != {int(attributes["n"])} or not rows["features"]:
        return f"should hold {attributes['n']} rows, holds {rows}"
    if path.stat().st_size != int(attributes["file_bytes"]):
        return f"should be {attributes['file_bytes']} bytes, is {path.stat().st_size}"
    if _header_digest(file) != attributes["header_digest"]:
        return "has a header that was changed after it was written"
    return None


def _header_digest(file: Any) -> str:
    """Digest over all attributes and the shape and type of all datasets."""
    skipped = ("header_digest", "file_bytes")
    attributes = {key: np.asarray(value).tolist() for key, value in file.attrs.items() if key not in skipped}
    datasets = {name: [list(item.shape), str(item.dtype)] for name, item in file.items()}
    return hashlib.sha256(json.dumps([attributes, datasets], sort_keys=True).encode()).hexdigest()


def _digest(columns: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in _COLUMNS:
        digest.update(np.ascontiguousarray(columns[name]).tobytes())
    return digest.hexdigest()


def _columns(
    features: NDArray[Any],
    coords_l0: NDArray[np.int64],
    grid_xy: NDArray[np.int64],
    tissue_fraction: NDArray[np.float32] | None,
) -> dict[str, NDArray[Any]]:
    n = len(features)
    if features.dtype not in (np.float16, np.float32) or features.ndim != 2 or n == 0:
        raise ValueError(f"features must be (n, d) fp16 or fp32 with n > 0, not {features.dtype} {features.shape}")
    fraction = np.full(n, np.nan) if tissue_fraction is None else tissue_fraction
    if coords_l0.shape != (n, 2) or grid_xy.shape != (n, 2) or fraction.shape != (n,):
        raise ValueError(f"{n} features, but coords {coords_l0.shape}, grid {grid_xy.shape}, tissue {fraction.shape}")
    return {
        "features": features,
        "coords": coords_l0.astype(np.int64),
        "grid_xy": grid_xy.astype(np.int64),
        "tissue_fraction": fraction.astype(np.float32),
    }


def _write_columns(file: Any, columns: Mapping[str, NDArray[Any]]) -> None:
    for name in _COLUMNS:
        file.create_dataset(name, data=columns[name], track_times=False)


def _write_failed(file: Any, failed: Sequence[FailedTile]) -> None:
    coords = np.array([tile.coords_l0 for tile in failed], dtype=np.int64).reshape(-1, 2)
    file.create_dataset("failed_coords", data=coords, track_times=False)
    reasons = np.array([tile.reason for tile in failed], dtype=object)
    file.create_dataset("failed_reason", data=reasons, dtype=h5py.string_dtype(), track_times=False)


def _mirror_trident(file: Any, header: BagHeader) -> None:
    """What readers of TRIDENT's files look for, on the datasets where they look."""
    overlap_px = round((1 - header.stride_l0[0] / header.tile_size_l0[0]) * header.tile_px)
    file["coords"].attrs.update(
        trident_attributes(
            slide_id=header.slide_id,
            slide_mpp=header.mpp[0],
            size_l0=header.level0_size,
            tile_px=header.tile_px,
            tile_mpp=header.tile_um / header.tile_px,
            tile_size_l0=header.tile_size_l0[0],
            overlap_px=overlap_px,
        )
    )
    file["features"].attrs.update(encoder=header.encoder, name=header.slide_id, savetodir=".")
