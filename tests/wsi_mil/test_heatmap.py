"""Scores back on level-0 ground: exact places, honest means, the right class, numbers a legend can stand by."""

import json
from dataclasses import replace

import numpy as np
import pytest

from wsi_mil.heatmap import (
    COLORMAPS,
    ScoreColumn,
    TileGeometry,
    TileScores,
    bar_length_um,
    caution,
    colour,
    colour_table,
    default_column,
    geojson,
    mean_scores,
    meaning,
    overlay,
    percentile_rank,
    rasterise,
    scales_of,
    shade,
)
from wsi_mil.results.heatmap_figure import figure

ATTENTION = ScoreColumn(name="attention", kind="attention", label=None)
CONTRIBUTION = ScoreColumn(name="contribution:b", kind="contribution", label="b")
PROBABILITY = ScoreColumn(name="probability:b", kind="probability", label="b")


def make(
    grid_xy: object,
    values: object,
    *,
    tile: tuple[int, int] = (100, 100),
    stride: tuple[int, int] = (100, 100),
    origin: tuple[int, int] = (0, 0),
    size: tuple[int, int] = (1000, 800),
    bounds: tuple[int, int, int, int] | None = None,
    columns: tuple[ScoreColumn, ...] = (ATTENTION,),
) -> TileScores:
    grid = np.asarray(grid_xy, dtype=np.int64)
    geometry = TileGeometry(
        level0_size=size,
        mpp=(0.5, 0.5),
        tile_size_l0=tile,
        stride_l0=stride,
        origin_l0=origin,
        bounds_l0=bounds or (0, 0, *size),
    )
    return TileScores(
        slide_id="s",
        slide_fingerprint="f",
        geometry=geometry,
        coords_l0=np.asarray(origin) + grid * np.asarray(stride),
        grid_xy=grid,
        columns=columns,
        values=np.asarray(values, dtype=np.float32).reshape(len(grid), len(columns)),
    )


def test_each_tile_without_overlap_is_its_own_cell_and_the_rest_is_empty() -> None:
    raster = rasterise(
        make([(2, 1), (4, 3)], [0.25, 0.75], origin=(7, 9), stride=(101, 97), tile=(101, 97)), "attention"
    )
    assert raster.origin_l0 == (7 + 2 * 101, 9 + 97)
    assert raster.cell_l0 == raster.filled_l0 == (101, 97)
    expected = np.full((3, 3), np.nan)
    expected[0, 0], expected[2, 2] = 0.25, 0.75
    np.testing.assert_array_equal(raster.values, expected.astype(np.float32))


def test_overlapping_tiles_are_averaged_by_the_area_they_share() -> None:
    raster = rasterise(make([(0, 0), (1, 0)], [1.0, 0.0], tile=(150, 100), stride=(100, 100)), "attention")
    # columns: first tile alone; 50 of the first and 100 of the second; 50 of the second
    np.testing.assert_allclose(raster.values, [[1.0, 50 / 150, 0.0]], rtol=1e-6)


def test_tiles_off_the_lattice_are_spread_not_snapped() -> None:
    scores = make([(0, 0), (3, 0)], [1.0, 0.0])
    moved = replace(scores, coords_l0=scores.coords_l0 + np.array([[25, 0], [0, 0]]))
    raster = rasterise(moved, "attention")
    np.testing.assert_array_equal(raster.values, [[1.0, 1.0, np.nan, 0.0]])
    assert raster.filled_l0 == raster.cell_l0


def test_a_stride_wider_than_the_tile_leaves_gaps() -> None:
    scores = make([(0, 0), (1, 0)], [1.0, 0.5], tile=(60, 40), stride=(100, 100))
    raster = rasterise(scores, "attention")
    assert raster.filled_l0 == (60, 40)
    picture = overlay(np.zeros((80, 100, 3), np.uint8), raster, scores.geometry, scale="raw", opacity=1.0)
    drawn = picture.any(axis=-1)
    assert np.flatnonzero(drawn[0]).tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]
    assert np.flatnonzero(drawn[:, 0]).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("n", [1, 8])
def test_instances_a_pixel_apart_are_cells_of_their_own(n: int) -> None:
    scores = make([(x, 0) for x in range(n)], range(n), tile=(1, 1), stride=(1, 1), size=(n, 1))
    raster = rasterise(scores, "attention")
    assert raster.values.tolist() == [list(range(n))]
    assert raster.filled_l0 == (1.0, 1.0)


def test_unknown_columns_and_empty_slides_are_refused() -> None:
    with pytest.raises(KeyError, match="there are attention"):
        rasterise(make([(0, 0)], [1.0]), "nothing")
    with pytest.raises(ValueError, match="no tile"):
        rasterise(make(np.zeros((0, 2)), []), "attention")


def test_the_mean_over_models_needs_the_same_tiles() -> None:
    one, two = make([(0, 0), (1, 0)], [0.2, 0.8]), make([(0, 0), (1, 0)], [0.6, 0.4])
    np.testing.assert_allclose(mean_scores([one, two]).values[:, 0], [0.4, 0.6], rtol=1e-6)
    with pytest.raises(ValueError, match="other tiles"):
        mean_scores([one, make([(0, 0), (0, 1)], [0.2, 0.8])])


def test_percentile_counts_equals_half_and_keeps_what_is_missing() -> None:
    values = np.array([[3.0, 1.0], [np.nan, 1.0]], np.float32)
    np.testing.assert_allclose(percentile_rank(values), [[2.5 / 3, 1 / 3], [np.nan, 1 / 3]], rtol=1e-6)
    np.testing.assert_allclose(percentile_rank(np.full(5, 0.2, np.float32)), 0.5)


def test_each_scale_puts_its_own_numbers_at_the_bar() -> None:
    scores = make([(0, 0), (1, 0), (2, 0), (3, 0)], [0.1, 0.2, 0.3, 0.4])
    raster = rasterise(scores, "attention")
    assert [text for _, text in shade(raster, ATTENTION).ticks] == ["0%", "25%", "50%", "75%", "100%"]
    raw = shade(raster, ATTENTION, scale="raw")
    assert [text for _, text in raw.ticks] == ["0", "0.2", "0.4"]
    np.testing.assert_allclose(raw.position, [[0.25, 0.5, 0.75, 1.0]], rtol=1e-6)
    lift = shade(raster, ATTENTION, scale="lift")
    assert [text for _, text in lift.ticks] == ["0", "0.8", "1.6"], "4 tiles x 0.4"
    probability = shade(raster, PROBABILITY, scale="raw")
    np.testing.assert_allclose(probability.position, [[0.1, 0.2, 0.3, 0.4]], rtol=1e-6)


def test_a_signed_score_has_zero_in_the_middle() -> None:
    raster = rasterise(make([(0, 0), (1, 0), (2, 0)], [-2.0, 0.0, 1.0], columns=(CONTRIBUTION,)), "contribution:b")
    shading = shade(raster, CONTRIBUTION, scale="raw")
    np.testing.assert_allclose(shading.position, [[0.0, 0.5, 0.75]])
    assert [text for _, text in shading.ticks] == ["-2", "0", "2"]


def test_the_default_is_the_methods_own_and_of_the_predicted_class() -> None:
    per_class = tuple(ScoreColumn(name=f"attention:{c}", kind="attention", label=c) for c in "abc")
    assert default_column((*per_class, PROBABILITY), "c").name == "attention:c"
    assert default_column((*per_class, PROBABILITY), "unheard of").name == "attention:a"
    assert default_column((ATTENTION, PROBABILITY), "b") is ATTENTION
    of_predicted = ScoreColumn(name="probability", kind="probability", label=None)
    assert default_column((of_predicted, PROBABILITY), "b") is PROBABILITY, "the class is named where it can be"


def test_a_legend_says_what_colour_and_score_mean() -> None:
    assert "class b" in meaning(CONTRIBUTION, "raw")
    number = meaning(CONTRIBUTION, "raw", classed=False)
    assert number.endswith("Score: what the tile adds to the predicted b (below 0 it takes away).")
    assert "score lower" in meaning(ATTENTION, "percentile")
    assert "1 is uniform" in meaning(ATTENTION, "lift")
    assert "not importance" in caution(ATTENTION)
    assert caution(PROBABILITY) == ""
    assert "lift" not in scales_of(PROBABILITY)


@pytest.mark.parametrize("name", COLORMAPS)
def test_colours_go_from_end_to_end_and_stay_apart_without_red_and_green(name: str) -> None:
    table = colour_table(name).astype(float)
    np.testing.assert_array_equal(colour(np.float32([0.0, 1.0]), name), table[[0, 255]])
    luminance = table @ [0.2126, 0.7152, 0.0722]
    halves = [luminance] if name != "blue-red" else [luminance[:128], luminance[:127:-1]]
    assert all((np.diff(half) > -1.5).all() and half[-1] - half[0] > 100 for half in halves)


def test_the_overlay_colours_the_tiles_and_leaves_the_rest() -> None:
    scores = make([(1, 1), (8, 6)], [0.2, 0.8])
    thumbnail = np.full((80, 100, 3), 200, np.uint8)
    raster = rasterise(scores, "attention")
    picture = overlay(thumbnail, raster, scores.geometry, scale="raw", opacity=1.0, threshold=0.5)
    changed = (picture != thumbnail).any(axis=-1)
    assert np.argwhere(changed).min(axis=0).tolist() == [60, 80]
    assert np.argwhere(changed).max(axis=0).tolist() == [69, 89]
    np.testing.assert_array_equal(picture[65, 85], colour_table("viridis")[255])
    np.testing.assert_array_equal(overlay(thumbnail, raster, scores.geometry, opacity=0.0), thumbnail)
    half = overlay(thumbnail, raster, scores.geometry, scale="raw", opacity=0.5)
    np.testing.assert_allclose(half[65, 85], (200 + colour_table("viridis")[255].astype(float)) / 2, atol=1)


def test_a_scale_bar_is_a_round_length_of_at_most_a_quarter() -> None:
    for mpp, width in [(0.25, 800), (8.0, 1500), (3.3, 417), (0.5, 2305)]:
        length = bar_length_um(mpp, width)
        assert length <= mpp * width / 4 < length * 2.5
        assert f"{length:e}"[0] in "125"


def test_qupath_features_are_detections_relative_to_the_scanned_bounds() -> None:
    scores = make([(2, 3), (4, 3)], [0.1, 0.9], bounds=(150, 50, 700, 700))
    collection = json.loads(json.dumps(geojson(scores, "attention")))
    first, second = collection["features"]
    assert collection["type"] == "FeatureCollection"
    assert "crs" not in collection
    assert first["geometry"]["coordinates"] == [[[50, 250], [150, 250], [150, 350], [50, 350], [50, 250]]]
    assert first["properties"]["objectType"] == "detection"
    assert first["properties"]["measurements"] == {"attention": pytest.approx(0.1), "attention percentile": 0.25}
    assert second["properties"]["classification"]["name"] == "attention 60-80 %"
    assert all(0 <= part <= 255 for part in second["properties"]["classification"]["color"])


def test_the_figure_holds_the_picture_unchanged_and_room_for_words() -> None:
    raster = rasterise(make([(0, 0), (1, 0)], [0.2, 0.8]), "attention")
    picture = np.random.default_rng(0).integers(0, 255, (300, 1000, 3)).astype(np.uint8)
    words = {"title": "Präparat (копия) " * 20, "lines": ("one", "two"), "legend": meaning(ATTENTION, "raw")}
    page = figure(picture, shade(raster, ATTENTION, scale="raw"), colormap="viridis", mpp=4.0, **words)
    row = next(y for y in range(page.shape[0]) if (page[y, 24:1024] == picture[0]).all())
    np.testing.assert_array_equal(page[row : row + 200, 24:1024], picture[:200])
    assert (page[:row] < 100).any(), "the title is written"
    below = page[row + 301 :]
    assert (below == colour_table("viridis")[255]).all(axis=-1).any(), "the colour bar reaches its end"
