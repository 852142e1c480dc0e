"""The demo as a user runs it, once."""

import csv
import json
from pathlib import Path

import pytest

METHODS = {"mean_pool", "abmil_gated", "abmil_gated+aem", "acmil", "focusmil"}


@pytest.fixture(scope="module")
def full_demo(tmp_path_factory: pytest.TempPathFactory, commands) -> Path:
    out = tmp_path_factory.mktemp("full") / "demo"
    assert commands.run("demo", "--out", str(out)) == 0
    return out


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as handle:
        return list(csv.DictReader(handle))


@pytest.mark.long
def test_every_method_predicts_all_forty_patients_and_points_at_twenty_lesions(full_demo: Path) -> None:
    rows = rows_of(full_demo / "run" / "predictions.csv")
    assert {row["method"] for row in rows} == METHODS
    for method in METHODS:
        patients = [row["patient"] for row in rows if row["method"] == method]
        assert len(patients) == len(set(patients)) == 40
    metrics = json.loads((full_demo / "run" / "metrics.json").read_text())
    assert metrics["audit"]["clean"]
    for found in metrics["methods"].values():
        assert 0 <= found["auc"]["low"] < found["auc"]["value"] < found["auc"]["high"] <= 1
        drawn = next(score for score in found["localisation"] if score["drawn_by_default"])
        assert drawn["slides"] == 20
        assert 0 < drawn["prevalence"] < 0.2


@pytest.mark.long
def test_no_site_is_on_both_sides_of_a_fold(full_demo: Path) -> None:
    folds = rows_of(full_demo / "run" / "folds.csv")
    assert {row["fold"] for row in folds} == {"0", "1", "2", "3", "4"}
    for fold in range(5):
        sites = {
            part: {row["patient"].split("_")[0] for row in folds if row["fold"] == str(fold) and row["part"] == part}
            for part in ("train", "validation", "test")
        }
        assert sites["test"]
        assert not sites["test"] & sites["train"]
        assert not sites["test"] & sites["validation"]
        assert not sites["train"] & sites["validation"]


@pytest.mark.long
def test_the_real_scan_is_scored_by_every_method(full_demo: Path) -> None:
    rows = rows_of(full_demo / "outside" / "prediction" / "predictions.csv")
    assert {row["method"] for row in rows} == METHODS
    assert len(list((full_demo / "run" / "heatmaps").rglob("*.png"))) == 200
    assert len(list((full_demo / "outside" / "prediction" / "heatmaps").rglob("*.png"))) == 5
