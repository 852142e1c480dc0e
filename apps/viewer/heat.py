"""What the component draws of a slide: the numbers it needs, as plain data, and the raster, as bytes."""

import base64
from typing import Any

import numpy as np

from apps.viewer.library import Library
from wsi_mil.errors import RunError
from wsi_mil.heatmap import (
    COLORMAPS,
    ScoreColumn,
    TileScores,
    colour_table,
    default_colormap,
    mean_scores,
    meaning,
    percentile_rank,
    rasterise,
    scales_of,
)
from wsi_mil.results.cases import Case
from wsi_mil.runs import FoldKey, RunDir

MEAN = "mean"
GALLERY_TILES = 12


def models_of(run: RunDir, method: str, case: Case) -> list[str]:
    """The models whose scores may be shown: those tested on this slide, and their mean where there are several."""
    keys = [str(key) for key in case.keys if run.scores_path(method, key, case.slide_id).is_file()]
    return [MEAN, *keys] if len(keys) > 1 else keys


def scores_of(run: RunDir, method: str, case: Case, models: str) -> TileScores:
    """Scores of one model by its key, or the mean of all out-of-fold ones. Raises RunError when they are not there."""
    allowed = models_of(run, method, case)
    if models not in allowed:
        raise RunError(
            f"{case.slide_id}: {method} has no out-of-fold scores {models!r}; there are {', '.join(allowed)}."
        )
    keys = [key for key in allowed if key != MEAN] if models == MEAN else [models]
    return mean_scores([run.scores(method, FoldKey.parse(key), case.slide_id) for key in keys])


def raster_bytes(library: Library, opaque_id: str, method: str, models: str, column: str) -> bytes | None:
    """The raster of one column of an admitted slide as little-endian float32, or None where there is none."""
    case = next((c for c in library.cases(method) if c.slide_id == library.slide_id(opaque_id)), None)
    if case is None or models not in models_of(library.run, method, case):
        return None
    scores = scores_of(library.run, method, case, models)
    if column not in [one.name for one in scores.columns]:
        return None
    return rasterise(scores, column).values.astype("<f4").tobytes()


def heat_data(
    scores: TileScores, column: ScoreColumn, *, address: dict[str, str], classed: bool = True
) -> dict[str, Any]:
    """Everything beside the raster itself. `address` are the query parameters the raster is asked for with.

    classed: whether the target has classes, for the words.
    """
    raster = rasterise(scores, column.name)
    rows, columns = raster.values.shape
    return {
        "address": address,
        "rows": rows,
        "columns": columns,
        "origin": raster.origin_l0,
        "cell": raster.cell_l0,
        "filled": raster.filled_l0,
        "tileMean": raster.tile_mean,
        "name": column.name,
        "kind": column.kind,
        "label": column.label,
        "scales": {scale: meaning(column, scale, classed=classed) for scale in scales_of(column)},
        "colormap": default_colormap(column),
        "gallery": _top_tiles(scores, column.name),
    }


def colour_tables() -> dict[str, str]:
    """Every colormap as base64 of 256 x RGB."""
    return {name: base64.b64encode(colour_table(name).tobytes()).decode() for name in COLORMAPS}


def _top_tiles(scores: TileScores, column: str) -> list[dict[str, Any]]:
    """The highest tiles, each with its rank among all."""
    values = scores.column(column)
    ranks = percentile_rank(values)
    width, height = scores.geometry.level0_size
    tile = scores.geometry.tile_size_l0
    order = np.argsort(-values, kind="stable")[:GALLERY_TILES].tolist()
    return [
        {
            "x": x,
            "y": y,
            "w": min(tile[0], width - x),
            "h": min(tile[1], height - y),
            "score": float(values[index]),
            "rank": float(ranks[index]),
        }
        for index in order
        for x, y in [scores.coords_l0[index].tolist()]
    ]
