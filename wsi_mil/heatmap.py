"""Scores and coordinates -> raster, picture, GeoJSON features. Pure: numpy in, numpy out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import matplotlib
import numpy as np
from numpy.typing import NDArray

from wsi_mil.errors import RunError


@dataclass(frozen=True, kw_only=True)
class TileGeometry:
    """Where a slide's tiles lie on level-0 ground. Pairs are (x, y)."""

    level0_size: tuple[int, int]
    mpp: tuple[float, float]
    tile_size_l0: tuple[int, int]
    stride_l0: tuple[int, int]
    origin_l0: tuple[int, int]
    bounds_l0: tuple[int, int, int, int]
    """x, y, width, height of the scanned area; the whole slide where the file does not say."""


@dataclass(frozen=True, kw_only=True)
class ScoreColumn:
    """One column of scores."""

    name: str
    """Unique within the file: attention, attention:branch0, probability:tumour, contribution:tumour ..."""
    kind: str
    """probability, attention (softmax weight) or contribution (sums to the logit)."""
    label: str | None
    """The class it speaks of; None when it is class-agnostic."""


@dataclass(frozen=True, kw_only=True)
class TileScores:
    """What one model said of each tile of one slide."""

    slide_id: str
    slide_fingerprint: str
    geometry: TileGeometry
    coords_l0: NDArray[np.int64]
    """(n, 2) level-0 top-left."""
    grid_xy: NDArray[np.int64]
    """(n, 2) column and row."""
    columns: tuple[ScoreColumn, ...]
    """The first one is the method's own way of pointing, drawn by default."""
    values: NDArray[np.float32]
    """(n, len(columns))"""

    def column(self, name: str) -> NDArray[np.float32]:
        """(n,) the scores of one column. Raises KeyError with the names there are."""
        names = [column.name for column in self.columns]
        if name not in names:
            raise KeyError(f"no scores {name!r} for slide {self.slide_id}; there are {', '.join(names)}")
        return self.values[:, names.index(name)]


Scale = Literal["percentile", "raw", "lift"]
"""percentile: share of the slide's cells that score lower. raw: the score itself. lift: times the tiles' mean, so 1 is
uniform; for attention that sums to 1 over n tiles it is n * attention."""

COLORMAPS = {"viridis": "viridis", "cividis": "cividis", "inferno": "inferno", "blue-red": "RdBu_r"}
"""Our names -> matplotlib's; all are safe for colour-blind readers, and only blue-red has a middle."""

_SLIVER_L0 = 1.0
"""What rounding to whole pixels explains: an overlap, gap or shift of at most this many level-0 pixels is none. Where
a tile is hardly larger, half of the tile counts instead."""

_MEANING = {
    "attention": "weight of the tile in the model's pooling",
    "probability": "probability that the model gives to the tile alone",
    "contribution": "what the tile adds to the logit (below 0 it speaks against)",
}
_PREDICTED = {"contribution": "what the tile adds to the predicted {} (below 0 it takes away)"}
"""Of an output that is no class: a number, the risk of an event."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Raster:
    """Scores on a regular grid of level 0. Cell (row, column) begins at origin_l0 + (column, row) * cell_l0."""

    values: NDArray[np.float32]
    """(rows, columns); NaN where there is no tile."""
    origin_l0: tuple[float, float]
    cell_l0: tuple[float, float]
    """The stride of the tiles."""
    filled_l0: tuple[float, float]
    """The part of a cell, from its top-left, that tiles cover: less than the cell where the stride leaves gaps."""
    tile_mean: float
    """Mean over the tiles, the 1 of the scale `lift`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shading:
    """A raster on the scale it is shown in."""

    position: NDArray[np.float32]
    """(rows, columns) 0 to 1 along the colour bar; NaN where there is no tile."""
    ticks: tuple[tuple[float, str], ...]
    """Position on the colour bar and the number that stands there."""


def rasterise(scores: TileScores, column: str) -> Raster:
    """Lay one column of scores on cells of one stride; a cell is the mean of its tiles, weighted by shared area.

    Raises KeyError for an unknown column and ValueError when there is no tile.
    """
    values = scores.column(column).astype(np.float64)
    if not len(values):
        raise ValueError(f"slide {scores.slide_id} has no tile")
    origin, cell, offset_l0 = _lattice(scores)
    tile = np.asarray(scores.geometry.tile_size_l0, dtype=np.float64)
    first = np.floor(offset_l0 / cell + 1e-9).astype(np.int64)
    sliver = min(_SLIVER_L0, float(min(*tile, *cell)) / 2)
    low, reach = first.min(axis=0), np.ceil(tile / cell).astype(np.int64) + 1
    columns, rows = (first.max(axis=0) + reach - low).tolist()
    total, weight = np.zeros((rows, columns)), np.zeros((rows, columns))
    for step in np.ndindex(*reach.tolist()):
        index = first + np.asarray(step)
        shared = np.minimum(offset_l0 + tile, (index + 1) * cell) - np.maximum(offset_l0, index * cell)
        area = np.where((shared > sliver).all(axis=1), shared.prod(axis=1), 0.0)
        where = (index[:, 1] - low[1], index[:, 0] - low[0])
        np.add.at(total, where, area * values)
        np.add.at(weight, where, area)
    mean = np.divide(total, weight, out=np.full_like(total, np.nan), where=weight > 0)
    used = weight > 0
    mean = mean[: np.flatnonzero(used.any(axis=1))[-1] + 1, : np.flatnonzero(used.any(axis=0))[-1] + 1]
    on_lattice = np.allclose(offset_l0, first * cell)
    return Raster(
        values=mean.astype(np.float32),
        origin_l0=_pair(origin + low * cell),
        cell_l0=_pair(cell),
        filled_l0=_pair(np.where((cell - tile > sliver) & on_lattice, tile, cell)),
        tile_mean=float(values.mean()),
    )


def mean_scores(scores: Sequence[TileScores]) -> TileScores:
    """The mean of what several models said of the same tiles. Raises ValueError when tiles or columns differ."""
    first = scores[0]
    for other in scores[1:]:
        if other.columns != first.columns or not np.array_equal(other.coords_l0, first.coords_l0):
            raise ValueError(f"slide {first.slide_id}: the models scored other tiles or other columns")
    total = np.sum([one.values for one in scores], axis=0, dtype=np.float64)
    return replace(first, values=np.asarray(total / len(scores), dtype=np.float32))


def percentile_rank(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Share of the finite values that are lower, equal ones counted half; NaN stays NaN. Any shape."""
    rank = np.full(values.shape, np.nan, dtype=np.float32)
    finite = np.isfinite(values)
    _, inverse, counts = np.unique(values[finite], return_inverse=True, return_counts=True)
    rank[finite] = ((np.cumsum(counts) - counts / 2) / max(1, counts.sum()))[inverse]
    return rank


def shade(raster: Raster, column: ScoreColumn, *, scale: Scale = "percentile") -> Shading:
    """Place a raster along the colour bar.

    Raw probabilities span 0 to 1, contributions are symmetric around 0, the rest spans 0 to its maximum.
    """
    if scale == "percentile":
        ticks = tuple((share, f"{share:.0%}") for share in (0.0, 0.25, 0.5, 0.75, 1.0))
        return Shading(position=percentile_rank(raster.values), ticks=ticks)
    values = raster.values / np.float32(raster.tile_mean or 1.0) if scale == "lift" else raster.values
    low, high = _span(values, column.kind, scale=scale)
    position = ((values - low) / (high - low)).clip(0.0, 1.0).astype(np.float32)
    ticks = tuple((share, f"{low + share * (high - low):.3g}") for share in (0.0, 0.5, 1.0))
    return Shading(position=position, ticks=ticks)


def scales_of(column: ScoreColumn) -> tuple[Scale, ...]:
    """The scales that make sense for a column: lift is for attention, which depends on the number of tiles."""
    return ("percentile", "raw", "lift") if column.kind == "attention" else ("percentile", "raw")


def default_column(columns: Sequence[ScoreColumn], predicted: str | None) -> ScoreColumn:
    """The method's own way of pointing; where that speaks of classes, the one of the predicted class.

    Raises RunError where there is none: probabilities are a method's only scores, and the target has no classes.
    """
    if not columns:
        raise RunError(
            "there are no scores of tiles to draw: this method's are probabilities of classes, and the target has "
            "none. For a map take a method with attention or contributions (`wsi-mil list models`)."
        )
    own = columns[0]
    if own.kind == "attention" and own.label is None:
        return own
    return next((column for column in columns if column.kind == own.kind and column.label == predicted), own)


def meaning(column: ScoreColumn, scale: Scale, *, classed: bool = True) -> str:
    """What a legend must say: what the colour stands for, and what the score is, of which class.

    classed: whether the outputs that columns are named for are classes, not numbers or risks.
    """
    how = {
        "percentile": "share of this slide's tiles that score lower",
        "raw": "the score itself",
        "lift": "the score divided by the slide's mean; 1 is uniform",
    }
    words = _MEANING.get(column.kind, "score of the tile")
    if not classed:
        whose = f" for {column.label}" if column.label and column.kind not in _PREDICTED else ""
        words = f"{_PREDICTED.get(column.kind, words).format(column.label or 'value')}{whose}"
    elif column.label:
        words = f"{words} for class {column.label}"
    elif column.kind != "attention":
        words = f"{words} for the class that was predicted"
    return f"Colour: {how[scale]}. Score: {words}."


def caution(column: ScoreColumn) -> str:
    """What must not be read into a column; empty when there is nothing to warn of."""
    if column.kind != "attention":
        return ""
    return "Attention is not importance: it says where the model looked, not what decided."


def colour_table(name: str) -> NDArray[np.uint8]:
    """(256, 3) RGB from the low to the high end. Raises KeyError for a name outside COLORMAPS."""
    rgba = matplotlib.colormaps[COLORMAPS[name]](np.arange(256))
    return np.asarray(np.round(rgba[:, :3] * 255), dtype=np.uint8)


def colour(position: NDArray[np.float32], colormap: str) -> NDArray[np.uint8]:
    """(..., 3) RGB of positions 0 to 1; NaN gives the low end."""
    index = (np.nan_to_num(position) * 255 + 0.5).astype(np.int64).clip(0, 255)
    return np.asarray(colour_table(colormap)[index], dtype=np.uint8)


def default_colormap(column: ScoreColumn) -> str:
    """blue-red for signed scores, viridis for the others."""
    return "blue-red" if column.kind == "contribution" else "viridis"


def overlay(
    thumbnail_rgb: NDArray[np.uint8],
    raster: Raster,
    geometry: TileGeometry,
    *,
    column: ScoreColumn | None = None,
    scale: Scale = "percentile",
    colormap: str | None = None,
    opacity: float = 0.5,
    threshold: float = 0.0,
) -> NDArray[np.uint8]:
    """Colour a thumbnail of the whole slide (h, w, 3), cell by cell; what lies below `threshold` (0 to 1) stays bare.

    The centre of each thumbnail pixel is carried to level 0 by the true ratio of the sizes, so no error can add up.
    """
    column = column or ScoreColumn(name="score", kind="attention", label=None)
    rows = _cells(thumbnail_rgb.shape[0], raster, geometry, axis=1)
    columns = _cells(thumbnail_rgb.shape[1], raster, geometry, axis=0)
    position = shade(raster, column, scale=scale).position[np.ix_(rows.clip(min=0), columns.clip(min=0))]
    with np.errstate(invalid="ignore"):
        drawn = (rows >= 0)[:, None] & (columns >= 0) & np.isfinite(position) & (position >= threshold)
    mixed = (1 - opacity) * thumbnail_rgb + opacity * colour(position, colormap or default_colormap(column))
    return np.where(drawn[..., None], np.round(mixed), thumbnail_rgb).astype(np.uint8)


def bar_length_um(mpp: float, width_px: int) -> float:
    """The longest of 1, 2, 5, 10, 20 ... µm that a scale bar may take: a quarter of a picture `width_px` wide."""
    most = max(mpp * width_px / 4, 1e-6)
    power = 10.0 ** np.floor(np.log10(most))
    return float(max(step * power for step in (1, 2, 5) if step * power <= most * (1 + 1e-9)))


def geojson(scores: TileScores, column: str) -> dict[str, Any]:
    """A FeatureCollection for QuPath: a detection a tile, measured by score and rank, classed by the rank's fifth.

    QuPath crops a slide to its scanned bounds, so their corner is subtracted.
    """
    values, ranks = scores.column(column), percentile_rank(scores.column(column))
    which = next(item for item in scores.columns if item.name == column)
    left, top = scores.geometry.bounds_l0[:2]
    width, height = scores.geometry.tile_size_l0
    palette = colour(np.linspace(0.1, 0.9, 5, dtype=np.float32), default_colormap(which))
    features = []
    for (x_l0, y_l0), value, rank in zip((scores.coords_l0 - (left, top)).tolist(), values, ranks, strict=True):
        fifth = min(4, int(rank * 5))
        ring = [[x_l0, y_l0], [x_l0 + width, y_l0], [x_l0 + width, y_l0 + height], [x_l0, y_l0 + height], [x_l0, y_l0]]
        rgb = palette[fifth].tolist()
        properties = {
            "objectType": "detection",
            "isLocked": True,
            "classification": {"name": f"{column} {fifth * 20}-{fifth * 20 + 20} %", "color": rgb},
            "measurements": {column: float(value), f"{column} percentile": float(rank)},
        }
        features.append(
            {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [ring]}, "properties": properties}
        )
    return {"type": "FeatureCollection", "features": features}


def _lattice(scores: TileScores) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Origin and cell of the grid that the tiles lie on, and each tile's offset from the origin, in level-0 pixels.

    A grid whose steps were rounded one by one (506, 507, 506 ...) has a fractional cell, found from its two ends.
    """
    coords, grid = scores.coords_l0.astype(np.float64), scores.grid_xy.astype(np.float64)
    stride, origin = (
        np.asarray(pair, dtype=np.float64) for pair in (scores.geometry.stride_l0, scores.geometry.origin_l0)
    )
    steps = np.ptp(grid, axis=0)
    cell = np.where(steps > 0, np.ptp(coords, axis=0) / np.maximum(steps, 1), stride)
    start = coords.min(axis=0) - grid.min(axis=0) * cell
    close = np.abs(cell - stride).max() <= _SLIVER_L0
    if close and np.abs(coords - (start + grid * cell)).max() <= _SLIVER_L0:
        return start, cell, grid * cell
    return origin, stride, coords - origin


def _pair(values: NDArray[np.float64]) -> tuple[float, float]:
    return float(values[0]), float(values[1])


def _span(values: NDArray[np.float32], kind: str, *, scale: Scale) -> tuple[float, float]:
    if kind == "probability" and scale == "raw":
        return 0.0, 1.0
    finite = values[np.isfinite(values)]
    if kind == "contribution":
        most = float(np.abs(finite).max(initial=0.0)) or 1.0
        return -most, most
    return 0.0, float(finite.max(initial=0.0)) or 1.0


def _cells(length_px: int, raster: Raster, geometry: TileGeometry, *, axis: int) -> NDArray[np.int64]:
    """(length_px,) index of the cell under the centre of each pixel of a row or column; -1 where there is none."""
    centre_l0 = (np.arange(length_px) + 0.5) * (geometry.level0_size[axis] / length_px) - raster.origin_l0[axis]
    index = np.floor(centre_l0 / raster.cell_l0[axis]).astype(np.int64)
    covered = centre_l0 - index * raster.cell_l0[axis] < raster.filled_l0[axis]
    inside = (index >= 0) & (index < raster.values.shape[1 - axis]) & covered
    return np.where(inside, index, -1)
