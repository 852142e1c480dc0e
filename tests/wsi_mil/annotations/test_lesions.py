"""Lesions, detections and their meeting, by hand, in microns."""

import dataclasses

import numpy as np
import pytest
import shapely

from wsi_mil.annotations.lesions import Lesions, lesions_of, local_maxima, mark
from wsi_mil.heatmap import ScoreColumn, TileGeometry, TileScores
from wsi_mil.statistics.froc import OUTSIDE

MPP = (0.5, 0.5)


def _map(values, *, tile_l0: int = 200, stride_l0: int | None = None, mpp=MPP) -> TileScores:
    """A tile map of these rows of scores; NaN where there is no tile. 200 px at 0.5 µm are 100 µm."""
    rows, columns = np.nonzero(np.isfinite(np.array(values, dtype=float)))
    grid_xy = np.stack([columns, rows], axis=1)
    stride = stride_l0 or tile_l0
    return TileScores(
        slide_id="s",
        slide_fingerprint="f",
        geometry=TileGeometry(
            level0_size=(9999, 9999),
            mpp=mpp,
            tile_size_l0=(tile_l0, tile_l0),
            stride_l0=(stride, stride),
            origin_l0=(0, 0),
            bounds_l0=(0, 0, 9999, 9999),
        ),
        coords_l0=grid_xy * stride,
        grid_xy=grid_xy,
        columns=(ScoreColumn(name="attention", kind="attention", label=None),),
        values=np.array(values, dtype=np.float32)[rows, columns, None],
    )


def _peaks(values, radius_um=150.0, **how) -> list[list[int]]:
    scores = _map(values, **how)
    return scores.grid_xy[local_maxima(scores, scores.values[:, 0].astype(float), radius_um=radius_um)].tolist()


def _square(x_um: float, side_um: float) -> shapely.Polygon:
    """In level-0 pixels, on the x axis."""
    return shapely.box(x_um / 0.5, 0, (x_um + side_um) / 0.5, side_um / 0.5)


@pytest.mark.parametrize(("gap_um", "lesions"), [(74.0, 1), (76.0, 2)])
def test_outlines_within_75_um_are_one_lesion(gap_um: float, lesions: int):
    assert len(lesions_of([_square(0, 300), _square(300 + gap_um, 300)], MPP).regions_um) == lesions


def test_a_lesion_reaches_37_5_um_beyond_its_outline_in_microns_along_both_axes():
    (region,) = lesions_of([shapely.box(0, 0, 1000, 1000)], (0.5, 0.25)).regions_um
    assert region.bounds == pytest.approx((-37.5, -37.5, 537.5, 287.5))
    assert region.area == pytest.approx(500 * 250 + 2 * 37.5 * 750 + np.pi * 37.5**2, rel=1e-3)


@pytest.mark.parametrize(("across_um", "isolated"), [(198.0, True), (202.0, False)])
def test_isolated_tumour_cells_are_below_200_um_as_drawn(across_um: float, isolated: bool):
    disc = shapely.Point(1000, 1000).buffer(across_um / 2 / 0.5, quad_segs=64)
    assert lesions_of([disc], MPP).isolated.tolist() == [isolated]


def test_the_longest_diameter_counts_and_not_the_mean_one():
    bar, block = shapely.box(0, 0, 420, 20), shapely.box(0, 0, 200, 200)
    assert lesions_of([bar], MPP).isolated.tolist() == [False]
    assert lesions_of([block], MPP).isolated.tolist() == [True]


def test_small_groups_that_merge_are_no_longer_isolated():
    assert lesions_of([_square(place * 150, 100) for place in range(3)], MPP).isolated.tolist() == [False]


def test_holes_are_filled_and_what_lies_in_them_belongs_to_the_lesion():
    ring = shapely.box(0, 0, 4000, 4000).difference(shapely.box(1000, 1000, 3000, 3000))
    lesions = lesions_of([ring, shapely.box(1900, 1900, 2100, 2100)], MPP)
    (region,) = lesions.regions_um
    assert not region.interiors
    assert region.contains(shapely.Point(750, 750))


def test_no_outline_is_no_lesion():
    assert lesions_of([], MPP).regions_um == ()
    assert len(lesions_of([], MPP).isolated) == 0


def test_a_detection_is_the_best_tile_within_the_radius():
    values = [[1, 2, 3, 2, 1, 4], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0]]
    assert _peaks(values) == [[0, 3], [5, 0], [2, 0]]
    assert _peaks(values, radius_um=350) == [[0, 3], [5, 0]]


def test_of_equal_neighbours_the_first_in_reading_order_is_the_one_detection():
    assert _peaks([[7, 7, 7], [7, 7, 7]]) == [[0, 0]]
    scores = _map([[7, 7, 7], [7, 7, 7]])
    backwards = dataclasses.replace(scores, grid_xy=scores.grid_xy[::-1], coords_l0=scores.coords_l0[::-1])
    assert local_maxima(backwards, np.full(6, 7.0), radius_um=150).tolist() == [5]


def test_the_radius_is_that_of_a_circle():
    gap = float("nan")
    values = [[1, gap, gap], [gap, gap, gap], [gap, gap, 2]]
    assert _peaks(values, radius_um=280) == [[2, 2], [0, 0]]
    assert _peaks(values, radius_um=285) == [[2, 2]]


def test_the_radius_is_in_microns_and_takes_in_the_eight_neighbours_at_least():
    values = [[1, 0, 2, 0, 3]]
    assert _peaks(values, radius_um=100) == [[4, 0], [2, 0], [0, 0]]
    assert _peaks(values, radius_um=200) == [[4, 0]]
    assert _peaks(values, radius_um=200, mpp=(1.0, 1.0)) == [[4, 0], [2, 0], [0, 0]]
    assert _peaks([[1, 0], [0, 2]], radius_um=1) == [[1, 1]]


def test_overlapping_tiles_and_missing_ones_are_no_obstacle():
    gap = float("nan")
    assert _peaks([[1, gap, 2], [gap, gap, gap], [3, gap, gap]], radius_um=150, stride_l0=100) == [[0, 2]]
    assert _peaks([[1, gap, 2], [gap, gap, gap], [3, gap, gap]], radius_um=150) == [[0, 2], [2, 0], [0, 0]]


def test_a_detection_lies_where_the_centre_of_its_tile_lies():
    scores = _map([[9, 0, 0, 0, 0, 5]])  # centres at x = 50 and 550 µm, y = 50 µm
    values = scores.values[:, 0].astype(float)
    there = [shapely.box(540, 40, 560, 60), shapely.box(45, 45, 49.9, 60)]
    marks = mark(scores, values, Lesions(regions_um=tuple(there), isolated=np.array([False, True])))
    assert (marks.scores.tolist(), marks.lesion.tolist()) == ([9.0, 5.0], [OUTSIDE, 0])
    assert marks.isolated.tolist() == [False, True]


def test_values_need_not_be_those_stored_with_the_tiles():
    scores = _map([[9, 0, 0, 0, 0, 5]])
    turned = mark(scores, -scores.values[:, 0].astype(float), lesions_of([], MPP))
    assert turned.scores[0] == 0
    for steps in (7, -700):
        moved = dataclasses.replace(scores, grid_xy=scores.grid_xy + steps)
        assert local_maxima(moved, scores.values[:, 0].astype(float), radius_um=150).tolist() == [0, 5]
