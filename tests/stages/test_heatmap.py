"""wsi-mil heatmap on a made run: a picture and a QuPath file a slide, failures kept apart, nothing computed again."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from wsi_mil.errors import ConfigError, RunError
from wsi_mil.results.cases import read_cases
from wsi_mil.runs import FoldKey, RunDir
from wsi_mil.stages.heatmap import heatmap


@pytest.fixture(scope="module")
def facts() -> ModuleType:
    """The module beside the viewer's tests that makes the run; test folders are no packages."""
    path = Path(__file__).parents[1] / "viewer" / "conftest.py"
    spec = importlib.util.spec_from_file_location("viewer_fixtures", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(facts: ModuleType, tmp_path_factory: pytest.TempPathFactory, make_pyramid: Callable[..., Path]) -> Path:
    return Path(facts.make_study(tmp_path_factory.mktemp("heatmap"), make_pyramid).run)


def test_every_slide_gets_a_picture_and_a_missing_one_is_listed(run: Path, tmp_path: Path, facts: ModuleType) -> None:
    summary = heatmap(run, out=tmp_path, width_px=1152)
    assert set(summary.done) == {f"{m}/{s}" for m in ("abmil", "acmil") for s in ("fiducials", facts.ODD_NAME)}
    assert [failure.item for failure in summary.failures] == ["abmil/gone", "acmil/gone"]
    assert "--slides DIR" in summary.failures[0].reason
    assert summary.exit_code == 3
    assert sorted(path.name for path in (tmp_path / "abmil").iterdir()) == sorted(
        f"{s}{e}" for s in ("fiducials", facts.ODD_NAME) for e in (".png", ".geojson")
    )
    features = json.loads((tmp_path / "abmil" / "fiducials.geojson").read_text())["features"]
    assert len(features) == 22 * 15


def test_the_hot_tile_of_the_picture_lies_on_its_square(run: Path, tmp_path: Path, facts: ModuleType) -> None:
    heatmap(run, out=tmp_path, slide=["fiducials"], method="abmil", scale="raw", width_px=1153)
    page = np.asarray(Image.open(tmp_path / "abmil" / "fiducials.png")).astype(int)
    # half opaque: the square is dark under yellow, its surroundings light under violet
    yellow = (np.abs(page - [141, 130, 33]) < 14).all(axis=-1)
    column, _ = facts.FIDUCIALS[2]
    rows, columns = np.nonzero(yellow)
    near = (abs(columns - (24 + (column + 0.5) * 50.5)) < 60) & (rows > 300) & (rows < 700)
    width = np.ptp(columns[near]) + 1
    assert width == pytest.approx(50.5, abs=1.5), "the square is dark only where the heat is yellow"
    assert yellow[rows[near].min() : rows[near].max(), columns[near].min() : columns[near].max()].mean() > 0.97


def test_a_class_wise_method_shows_the_predicted_class(run: Path, tmp_path: Path) -> None:
    heatmap(run, out=tmp_path, slide=["fiducials"], method="acmil")
    features = json.loads((tmp_path / "acmil" / "fiducials.geojson").read_text())["features"]
    assert list(features[0]["properties"]["measurements"]) == ["probability:tumour", "probability:tumour percentile"]


def test_only_models_that_did_not_see_the_patient_are_averaged(run: Path, tmp_path: Path) -> None:
    heatmap(run, out=tmp_path, slide=["fiducials"], method="acmil")
    features = json.loads((tmp_path / "acmil" / "fiducials.geojson").read_text())["features"]
    highest = max(feature["properties"]["measurements"]["probability:tumour"] for feature in features)
    assert highest == pytest.approx(0.5), "seeds 0 and 1 give 0.4 and 0.6; the model of the other fold would give 1.0"


def test_unknown_wishes_are_refused_with_what_there_is(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not tested on fiducial\..*fiducials"):
        heatmap(run, out=tmp_path, slide=["fiducial"], method="abmil")
    with pytest.raises(ConfigError, match="abmil, acmil"):
        heatmap(run, out=tmp_path, method="clam")
    summary = heatmap(run, out=tmp_path, method="abmil", column="nothing", slide=["fiducials"])
    assert "there are attention, contribution:tumour" in summary.failures[0].reason
    assert summary.exit_code == 1
    with pytest.raises(RunError, match="--slides DIR"):
        heatmap(run, slides=tmp_path / "nowhere")


def test_a_slide_that_is_not_the_scored_one_is_not_drawn(
    run: Path, tmp_path: Path, make_pyramid: Callable[..., Path]
) -> None:
    make_pyramid(tmp_path / "other" / "fiducials.tif", np.full((800, 900, 3), 200, np.uint8))
    summary = heatmap(run, slides=tmp_path / "other", out=tmp_path / "out", slide=["fiducials"], method="abmil")
    assert "is not the file that was scored" in summary.failures[0].reason
    assert not (tmp_path / "out").exists()


def test_cases_come_worst_first_with_the_models_that_tested_them(run: Path, facts: ModuleType) -> None:
    cases = read_cases(RunDir(run), "acmil")
    assert [case.slide_id for case in cases] == [facts.ODD_NAME, "gone", "fiducials"]
    assert [case.is_error for case in cases] == [True, False, False]
    assert cases[0].loss == pytest.approx(-np.log(0.3))
    assert cases[0].keys == (FoldKey(0, 0, 0), FoldKey(0, 0, 1))
