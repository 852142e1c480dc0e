"""TileGrid <-> HDF5: one self-describing file a slide, written whole or not at all, the same bytes every time."""

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tiling.atomic import SteadyFile, atomic_file
from tiling.errors import UserError
from tiling.grid import ReadPlan, TileGrid, TileSpec, TissueSpec
from tiling.readers.header import SlideInfo

SCHEMA_VERSION = 1
_SEAL = "header_digest"
_DATASETS = ("coords", "grid_xy", "tissue_fraction")
_MAGNIFICATIONS = ((0.16, 80), (0.2, 60), (0.3, 40), (0.6, 20), (1.2, 10), (2.4, 5))
"""Microns per pixel below which TRIDENT speaks of a magnification."""


class GridFileError(UserError):
    """A grid file is damaged, incomplete or of another kind."""


class GridChangedError(GridFileError):
    """A grid file is whole, but its rows are not the ones that were written."""


def write_grid(path: Path, grid: TileGrid) -> None:
    """Write a grid atomically. Raises ValueError for an empty grid, which must never become a file."""
    if not len(grid):
        raise ValueError(f"{grid.slide.slide_id}: a grid without tiles is an outcome, not a file")
    data = {"coords": grid.coords_l0, "grid_xy": grid.grid_xy, "tissue_fraction": grid.tissue_fraction}
    with atomic_file(path) as handle:
        with h5py.File(handle, "w") as file:
            for name, values in data.items():
                file.create_dataset(name, data=values, track_times=False)
            file["coords"].attrs.update(_trident_attributes_of(grid))
            file.attrs.update(_attributes(grid))
            file.attrs["data_sha256"] = _data_digest(file)
            file.attrs["file_size"] = np.int64(0)
            file.attrs.create(_SEAL, np.bytes_(b"0" * 64))
        _seal(handle)


def read_grid(path: Path) -> TileGrid:
    """Read a grid. Raises GridFileError when the file is no complete grid of this schema, or its rows changed."""
    if not _is_sealed(path, kind="grid"):
        raise GridFileError(
            f"{path}: not a complete grid file of schema {SCHEMA_VERSION}. Remove it and run `tile` again."
        )
    if not grid_is_intact(path):
        raise GridChangedError(f"{path}: its rows changed after it was written. Remove it and run `tile` again.")
    with h5py.File(path, "r", locking=False) as file:
        attrs = file.attrs
        spec = json.loads(attrs["spec"])
        return TileGrid(
            slide=SlideInfo(**_tuples(json.loads(attrs["slide"]))),
            spec=TileSpec(**spec | {"tissue": TissueSpec(**spec["tissue"])}),
            plan=ReadPlan(**_tuples(json.loads(attrs["plan"]))),
            grid_xy=file["grid_xy"][:],
            tissue_fraction=file["tissue_fraction"][:],
            tissue_mm2=float(attrs["tissue_mm2"]),
            mask_digest=str(attrs["mask_digest"]),
        )


def grid_is_complete(
    path: Path,
    *,
    spec_digest: str,
    slide_fingerprint: str | None = None,
    mpp: tuple[float, float] | None = None,
    mask_digest: str | None = None,
) -> bool:
    """Whether `path` holds a whole grid made with these settings; what is None is not compared. Takes milliseconds."""
    if not _is_sealed(path, kind="grid"):
        return False
    with h5py.File(path, "r", locking=False) as file:
        attrs = file.attrs
        return (
            attrs["params_digest"] == spec_digest
            and slide_fingerprint in (None, attrs["slide_fingerprint"])
            and mpp in (None, (float(attrs["mpp_x"]), float(attrs["mpp_y"])))
            and mask_digest in (None, attrs["mask_digest"])
        )


def grid_is_intact(path: Path) -> bool:
    """Whether a complete grid's data still have the digest they were written with: reads all of it."""
    if not _is_sealed(path, kind="grid"):
        return False
    with h5py.File(path, "r", locking=False) as file:
        return bool(file.attrs["data_sha256"] == _data_digest(file))


def _seal(handle: SteadyFile) -> None:
    """Fill in `file_size` and the header digest of a file whose attributes already hold room for them.

    Both are overwritten in place, so that the size the file tells of is the size it has.
    """
    size = handle.seek(0, io.SEEK_END)
    with h5py.File(handle, "r+") as file:
        file.attrs.modify("file_size", np.int64(size))
        file.attrs.modify(_SEAL, np.bytes_(_header_digest(file).encode()))


def _is_sealed(path: Path, *, kind: str) -> bool:
    """Whether name, row count, size and header digest agree, and the file is of this kind and schema."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            attrs = file.attrs
            return bool(
                attrs["kind"] == kind
                and attrs["schema_version"] == SCHEMA_VERSION
                and f"{attrs['slide_id']}.h5" == path.name
                and attrs["file_size"] == path.stat().st_size
                and all(file[name].shape[0] == attrs["n"] for name in _DATASETS)
                and attrs[_SEAL].decode() == _header_digest(file)
            )
    except (OSError, KeyError, ValueError, RuntimeError, AttributeError):
        return False  # cut, empty, foreign or damaged: whatever it is, it is not a complete file of ours


def _header_digest(file: h5py.File) -> str:
    """Digest over every attribute but itself, and over the datasets' names, shapes and types."""
    attributes = [(name, np.asarray(value).tolist()) for name, value in sorted(file.attrs.items()) if name != _SEAL]
    datasets = [(name, item.shape, str(item.dtype)) for name, item in sorted(file.items())]
    return hashlib.sha256(json.dumps([attributes, datasets]).encode()).hexdigest()


def _data_digest(file: h5py.File) -> str:
    digest = hashlib.sha256()
    for name in _DATASETS:
        digest.update(np.ascontiguousarray(file[name][:]).tobytes())
    return digest.hexdigest()


def _attributes(grid: TileGrid) -> dict[str, Any]:
    slide, spec, plan = grid.slide, grid.spec, grid.plan
    return {
        "kind": "grid",
        "schema_version": SCHEMA_VERSION,
        "n": len(grid),
        "slide_id": slide.slide_id,
        "slide_fingerprint": slide.fingerprint,
        "mpp_x": slide.mpp[0],
        "mpp_y": slide.mpp[1],
        "mpp_source": slide.mpp_source,
        "mpp_effective": plan.mpp_effective,
        "level0_width": slide.size_l0[0],
        "level0_height": slide.size_l0[1],
        "bounds_x": slide.bounds_l0[0],
        "bounds_y": slide.bounds_l0[1],
        "bounds_width": slide.bounds_l0[2],
        "bounds_height": slide.bounds_l0[3],
        "tile_px": spec.tile_px,
        "tile_um": spec.tile_px * spec.mpp,
        "tile_size_l0": plan.tile_size_l0,
        "stride_l0": plan.stride_l0,
        "origin_l0": plan.origin_l0,
        "params_digest": spec.digest(),
        "mask_digest": grid.mask_digest,
        "tissue_mm2": grid.tissue_mm2,
        "icc_profile": slide.icc_profile,
        "slide": json.dumps(asdict(slide), sort_keys=True),
        "spec": json.dumps(asdict(spec), sort_keys=True),
        "plan": json.dumps(asdict(plan), sort_keys=True),
    }


def trident_attributes(
    *,
    slide_id: str,
    slide_mpp: float,
    size_l0: tuple[int, int],
    tile_px: int,
    tile_mpp: float,
    tile_size_l0: int,
    overlap_px: int,
) -> dict[str, Any]:
    """What readers of TRIDENT's files look for on `coords`; its magnifications are binned, so mpp is the truth here."""
    return {
        "patch_size": tile_px,
        "patch_size_level0": tile_size_l0,
        "level0_magnification": _magnification(slide_mpp),
        "target_magnification": _magnification(tile_mpp),
        "overlap": max(0, overlap_px),
        "name": slide_id,
        "savetodir": ".",
        "level0_width": size_l0[0],
        "level0_height": size_l0[1],
    }


def _magnification(mpp: float) -> int:
    return next((power for limit, power in _MAGNIFICATIONS if mpp < limit), 1)


def _trident_attributes_of(grid: TileGrid) -> dict[str, Any]:
    return trident_attributes(
        slide_id=grid.slide.slide_id,
        slide_mpp=grid.slide.mpp[0],
        size_l0=grid.slide.size_l0,
        tile_px=grid.spec.tile_px,
        tile_mpp=grid.spec.mpp,
        tile_size_l0=grid.plan.tile_size_l0[0],
        overlap_px=grid.spec.tile_px - grid.spec.step_px,
    )


def _tuples(record: Mapping[str, Any]) -> dict[str, Any]:
    """JSON's lists back to tuples, at every depth."""

    def back(value: Any) -> Any:
        return tuple(back(item) for item in value) if isinstance(value, list) else value

    return {name: back(value) for name, value in record.items()}
