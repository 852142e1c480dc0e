"""The tiles that are shown are those that the model weighed most and least, and they are the slide's own ground."""

from dataclasses import replace

import numpy as np
import pytest

from tiling.slide import Slide
from wsi_mil.report.tile_pictures import EACH, TILE_PX, choose_tiles, cut_tiles, mark_tiles
from wsi_mil.runs import FoldKey


@pytest.fixture
def scored(make_run):
    """The stored scores of a slide with a lesion, a signal that nothing drowns, and its file."""
    run = make_run(patients=4, n_folds=2, slides=True, validation=0, signal=(("acmil", 30.0),))
    key = next(key for key in (FoldKey(0, 0, 0), FoldKey(0, 1, 0)) if key in run.score_keys("acmil", "P001_S0"))
    return run.scores("acmil", key, "P001_S0"), run.path.parent / "slides" / "P001_S0.tif"


def test_the_highest_come_first_then_the_lowest_and_none_is_both(scored):
    scores, _ = scored
    places = choose_tiles(scores, scores.columns[0])
    values = scores.column("attention")
    assert [place.mark for place in places] == ["1", "2", "3", "4", "a", "b", "c", "d"]
    assert sorted(values)[::-1][:EACH] == [values[place.row] for place in places[:EACH]]
    assert sorted(values)[:EACH] == [values[place.row] for place in places[EACH:]]
    assert len({place.row for place in places}) == 2 * EACH


def test_a_bag_of_three_tiles_shows_one_of_each_end(scored):
    scores, _ = scored
    few = replace(scores, coords_l0=scores.coords_l0[:3], grid_xy=scores.grid_xy[:3], values=scores.values[:3])
    assert [place.mark for place in choose_tiles(few, few.columns[0])] == ["1", "a"]


def test_a_tile_shows_the_ground_that_was_scored(scored):
    scores, path = scored
    places = choose_tiles(scores, scores.columns[0])
    with Slide(path, cohort_mpp=0.5) as slide:
        tiles = cut_tiles(slide, scores, places)
    purple = np.array([128, 80, 150])
    for place, tile in zip(places, tiles, strict=True):
        assert tile.shape == (TILE_PX, TILE_PX, 3)
        near = np.abs(tile.reshape(-1, 3).mean(axis=0) - purple).max() < 20
        assert near == place.highest, "the planted lesion is purple, and it alone is weighed"


def test_a_mark_lies_where_its_tile_is_and_nowhere_else(scored):
    scores, _ = scored
    place = next(p for p in choose_tiles(scores, scores.columns[0]) if np.ptp(scores.coords_l0[p.row]) > 200)
    bare = np.full((384, 384, 3), 200, dtype=np.uint8)
    rows, columns = np.nonzero((mark_tiles(bare, scores, [place]) != bare).any(axis=2))
    left, top = scores.coords_l0[place.row] // 4
    assert np.abs([columns.min() - left, rows.min() - top]).max() <= 3
    assert np.abs([columns.max() - left - 32, rows.max() - top - 32]).max() <= 3
