"""The demo's own promises, on the mini-demo."""

import csv
import json
import re
from pathlib import Path

import numpy as np
from shapely.geometry import shape

from wsi_mil.demo.compose import LESION, TISSUES, plan_cohort, source_tiles


def test_sites_share_no_source_tile() -> None:
    seen: set[bytes] = set()
    for site in range(5):
        tiles = source_tiles(site, 5)
        assert set(tiles) == {LESION, *TISSUES}
        here = {tile.tobytes() for group in tiles.values() for tile in group}
        assert len(here) >= 3 * len(tiles)
        assert not here & seen
        seen |= here


def test_half_of_each_site_has_a_lesion() -> None:
    plan = plan_cohort(n_slides=40, n_sites=5, side_px=2500, seed=0)
    for site in range(5):
        lesions = [slide.lesion for slide in plan if slide.site == site]
        assert (len(lesions), sum(lesions)) == (8, 4)


def test_lesions_cover_three_to_twenty_percent_of_the_tissue(mini_demo: Path) -> None:
    from tiling.slide import Slide

    outlines = sorted((mini_demo / "cohort" / "annotations").glob("*.geojson"))
    assert len(outlines) == 4
    for path in outlines:
        lesion = shape(json.loads(path.read_text())["features"][0]["geometry"])
        site, case = path.stem.split("_")
        slide = Slide(mini_demo / "cohort" / "slides" / site / f"{case}.tif")
        with slide:
            tissue_l0 = (slide.thumbnail(mpp=4.0).min(axis=2) < 225).mean() * np.prod(slide.size_l0)
        assert 0.02 < lesion.area / tissue_l0 < 0.30, path.stem


def test_every_patient_is_predicted_once_by_a_model_of_another_site(mini_demo: Path) -> None:
    with (mini_demo / "run" / "predictions.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    with (mini_demo / "run" / "folds.csv").open() as handle:
        folds = list(csv.DictReader(handle))
    methods = {row["method"] for row in rows}
    assert len(methods) == 2
    for method in methods:
        patients = [row["patient"] for row in rows if row["method"] == method]
        assert len(patients) == len(set(patients)) == 8
    for fold in {row["fold"] for row in folds}:
        sites = {
            part: {row["patient"].split("_")[0] for row in folds if row["fold"] == fold and row["part"] == part}
            for part in ("train", "test")
        }
        assert not sites["train"] & sites["test"]


def test_the_scan_from_outside_is_scored(mini_demo: Path) -> None:
    with (mini_demo / "outside" / "prediction" / "predictions.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    assert {row["slide"] or row["patient"] for row in rows} == {"CMU-1-Small-Region"}
    for row in rows:
        assert abs(float(row["prob_normal"]) + float(row["prob_tumour"]) - 1) < 1e-6


def test_what_people_look_at_is_there(mini_demo: Path) -> None:
    report = (mini_demo / "run" / "report.html").read_text()
    assert "Research use only" in report
    assert "ImageNet" in report
    inside = re.sub(r'href="http://localhost:8501/\?[^"]*"', "", report)  # the viewer, on this computer
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", inside)
    assert len(list((mini_demo / "run" / "heatmaps").rglob("*.png"))) == 16
    metrics = json.loads((mini_demo / "run" / "metrics.json").read_text())
    assert len(metrics["methods"]) == 2
