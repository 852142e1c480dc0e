"""Scores of the tiles of one slide <-> HDF5. Loads no torch."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tiling.atomic import atomic_file
from wsi_mil.errors import RunError
from wsi_mil.heatmap import ScoreColumn, TileGeometry, TileScores

_SCORES_SCHEMA = 1


def write_scores(path: Path, scores: TileScores) -> None:
    """Store the tile scores of one slide."""
    geometry = scores.geometry
    attributes = {
        "kind": "instance_scores",
        "schema_version": _SCORES_SCHEMA,
        "slide_id": scores.slide_id,
        "slide_fingerprint": scores.slide_fingerprint,
        "columns": json.dumps([asdict(column) for column in scores.columns]),
        "level0_width": geometry.level0_size[0],
        "level0_height": geometry.level0_size[1],
        "mpp_x": geometry.mpp[0],
        "mpp_y": geometry.mpp[1],
        "tile_size_l0": geometry.tile_size_l0,
        "stride_l0": geometry.stride_l0,
        "origin_l0": geometry.origin_l0,
    }
    bounds = dict(zip(("bounds_x", "bounds_y", "bounds_width", "bounds_height"), geometry.bounds_l0, strict=True))
    with atomic_file(path) as handle, h5py.File(handle, "w") as h5:
        h5.attrs.update(attributes | bounds)
        h5.create_dataset("coords", data=scores.coords_l0.astype(np.int64))
        h5.create_dataset("grid_xy", data=scores.grid_xy.astype(np.int64))
        h5.create_dataset("scores", data=scores.values.astype(np.float32))


def read_scores(path: Path) -> TileScores:
    """Read the tile scores of one slide. Raises RunError when the file is something else or damaged."""
    try:
        with h5py.File(path, "r", locking=False) as h5:
            attributes = dict(h5.attrs)
            coords, grid_xy, values = (h5[name][()] for name in ("coords", "grid_xy", "scores"))
        if attributes["kind"] != "instance_scores" or attributes["schema_version"] != _SCORES_SCHEMA:
            raise KeyError(f"kind {attributes['kind']}, schema {attributes['schema_version']}")
        columns = tuple(ScoreColumn(**column) for column in json.loads(attributes["columns"]))
        geometry = _geometry(attributes)
        if not coords.shape == grid_xy.shape == (len(values), 2) or values.shape != (len(values), len(columns)):
            raise ValueError(f"{len(coords)} places, {len(grid_xy)} grid places, scores of shape {values.shape}")
    except (
        OSError,
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        RuntimeError,
    ) as error:  # what h5py raises depends on the damage
        raise RunError(
            f"{path} is damaged or holds no tile scores ({error}). Remove it and give the command that made the run "
            f"again: it makes anew what is missing."
        ) from error
    return TileScores(
        slide_id=str(attributes["slide_id"]),
        slide_fingerprint=str(attributes["slide_fingerprint"]),
        geometry=geometry,
        coords_l0=coords,
        grid_xy=grid_xy,
        columns=columns,
        values=values,
    )


def _geometry(attributes: dict[str, Any]) -> TileGeometry:
    def pair(name: str) -> tuple[int, int]:
        x, y = attributes[name]
        return int(x), int(y)

    x, y, width, height = (int(attributes[f"bounds_{name}"]) for name in ("x", "y", "width", "height"))
    return TileGeometry(
        level0_size=(int(attributes["level0_width"]), int(attributes["level0_height"])),
        mpp=(float(attributes["mpp_x"]), float(attributes["mpp_y"])),
        tile_size_l0=pair("tile_size_l0"),
        stride_l0=pair("stride_l0"),
        origin_l0=pair("origin_l0"),
        bounds_l0=(x, y, width, height),
    )
