"""Stage bench: the figures are what they are said to be."""

import json

import pytest

from tiling.grid import TileSpec
from wsi_mil.encoders import EncodeSpec
from wsi_mil.errors import ConfigError
from wsi_mil.stages.bench import Cost, Figures, bench
from wsi_mil.stages.tile import tile


def test_bound_and_share_follow_from_what_was_measured():
    figures = Figures(
        cores=2,
        tiles=100,
        reading=Cost(tiles=100, wall_s=1.0, cpu_s=0.5),
        encoding=Cost(tiles=100, wall_s=1.0, cpu_s=1.5),
        pipeline=Cost(tiles=100, wall_s=1.25, cpu_s=2.2),
        bottleneck="encoding",
        peak_mib=1,
    )
    assert figures.bound == pytest.approx(100 / 2.0)
    assert figures.per_core_second == pytest.approx(100 / 2.5)
    assert figures.share == pytest.approx(0.8)
    assert figures.share_of_cpu == pytest.approx(2.0 / 2.2)


def test_it_measures_real_slides_and_writes_table_and_figures(tmp_path, make_pyramid, tissue_rgb):
    make_pyramid(tmp_path / "slides" / "a.tif", tissue_rgb(900, 700))
    grids = tile(tmp_path / "slides", out=tmp_path, tiles=TileSpec(tile_px=96), workers=1).out
    summary = bench(
        tmp_path / "slides", grids=grids, out=tmp_path / "bench", rounds=1, encoding=EncodeSpec(batch_size=8)
    )
    assert summary.exit_code == 0
    record = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert 0 < record["reading"]["cpu_s"] < record["pipeline"]["cpu_s"]
    assert 0 < record["share_of_cpu"] < 3
    text = (tmp_path / "bench" / "bench.md").read_text()
    assert text == summary.notes[0]
    assert text.count("|") == 4 * 5
    assert "not a pathology one" in text


def test_no_rounds_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="1 or more"):
        bench(tmp_path, grids=tmp_path, rounds=0)
