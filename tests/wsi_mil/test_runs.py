import subprocess
import sys

import h5py
import numpy as np
import pandas as pd
import pytest

from wsi_mil.errors import RunError
from wsi_mil.heatmap import ScoreColumn, TileGeometry, TileScores
from wsi_mil.runs import FoldKey, RunDir, Selection, write_frame

KEY = FoldKey(0, 1, 2)
CONFIG = {
    "kind": "crossval",
    "version": "0.1.0",
    "table": "a.csv",
    "task": {"target": "label", "level": "slide", "classes": ["no", "yes"], "kind": "binary", "targets": []},
    "train": {"epochs": 20, "lr": 2e-4, "cache": "none"},
    "methods": [{"label": "abmil", "name": "abmil", "params": {}}],
}


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    run.claim(CONFIG)
    return run


def scores_of(slide_id):
    geometry = TileGeometry(
        level0_size=(5000, 4000),
        mpp=(0.25, 0.26),
        tile_size_l0=(448, 431),
        stride_l0=(448, 430),
        origin_l0=(7, 9),
        bounds_l0=(7, 9, 4000, 3000),
    )
    columns = (ScoreColumn(name="attention", kind="attention", label=None),)
    return TileScores(
        slide_id=slide_id,
        slide_fingerprint="f1",
        geometry=geometry,
        coords_l0=np.array([[7, 9], [455, 439]]),
        grid_xy=np.array([[0, 0], [1, 1]]),
        columns=columns,
        values=np.array([[0.25], [0.75]], np.float32),
    )


def test_a_key_survives_its_folder_name():
    assert str(FoldKey(3, 1, 20)) == "r3_f1_s20"
    assert FoldKey.parse("r3_f1_s20") == FoldKey(3, 1, 20)
    with pytest.raises(ValueError, match="no fold key"):
        FoldKey.parse("r3_f1_s20_old")


def test_scores_come_back_as_they_were_written(run):
    written = scores_of("0012")
    run.write_scores("abmil", KEY, written)
    read = run.scores("abmil", KEY, "0012")
    assert (read.geometry, read.columns, read.slide_id) == (written.geometry, written.columns, "0012")
    np.testing.assert_array_equal(read.coords_l0, written.coords_l0)
    np.testing.assert_array_equal(read.column("attention"), [0.25, 0.75])


def test_the_models_that_scored_a_slide_are_found_and_named_when_another_is_asked(run):
    run.write_scores("abmil", KEY, scores_of("a"))
    assert run.score_keys("abmil", "a") == [KEY]
    assert run.score_keys("abmil", "b") == []
    with pytest.raises(RunError, match="r0_f1_s2"):
        run.scores("abmil", FoldKey(0, 0, 0), "a")


def test_a_damaged_scores_file_is_named(run):
    path = run.scores_path("abmil", KEY, "a")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not hdf5")
    with pytest.raises(RunError, match=r"a\.h5 is damaged"):
        run.scores("abmil", KEY, "a")


def test_ids_stay_text_and_floats_stay_exact(run):
    value = float(np.float64(1) / 3)
    row = {"method": "abmil", "target_name": "label", "repeat": 0, "fold": 1, "seed": 2, "level": "slide"}
    row |= {"patient": "007", "slide": "12e3", "target": "NA", "prob_no": value, "prob_yes": 1 - value}
    write_frame(run.predictions_path, pd.DataFrame([row]))
    read = run.predictions().iloc[0]
    assert (read.patient, read.slide, read.target) == ("007", "12e3", "NA")
    assert read.prob_no == value
    assert read.fold == 1


def test_only_models_with_a_selection_are_finished(run):
    run.model_dir("abmil", FoldKey(0, 0, 0)).mkdir(parents=True)
    selection = Selection(epoch=3, chosen_by="validation loss", metric="loss", value=0.5, epochs_run=9)
    run.write_selection("abmil", KEY, selection)
    assert run.keys("abmil") == [KEY]
    assert run.selection("abmil", KEY) == selection


def test_the_same_run_goes_on_and_another_is_refused_with_the_difference(run):
    assert run.claim(CONFIG | {"table": "moved/a.csv"}) is True
    with pytest.raises(RunError, match=r"train\.epochs: 20 -> 30"):
        run.claim(CONFIG | {"train": CONFIG["train"] | {"epochs": 30}})
    assert run.config()["train"]["epochs"] == 20


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.docx").touch()
    with pytest.raises(RunError, match="holds no run"):
        RunDir(tmp_path).claim(CONFIG)
    with pytest.raises(RunError, match="holds no run"):
        RunDir(tmp_path).config()


def test_reading_runs_loads_no_torch():
    code = "import sys, wsi_mil.runs; sys.exit(bool({'torch', 'lightning', 'timm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_changes_no_result_makes_no_other_run(run):
    told = {"counts": {"extra": 3}, "warnings": ["3 slides have no row"], "fixes": "f.csv", "bags_sha256": "a"}
    method = CONFIG["methods"][0]
    before = CONFIG | {"cohort": told, "folds": {"file": "a.csv", "sha256": "x"}}
    run.write_config(before)
    other = {"counts": {"extra": 4, "rows": 1}, "warnings": [], "fixes": None, "bags_sha256": "a"}
    asked = before | {"cohort": other, "folds": {"file": "b.csv", "sha256": "x"}}
    asked |= {"train": CONFIG["train"] | {"cache": "ram", "checkpoint_seconds": 60.0}}
    assert run.claim(asked | {"methods": [method | {"train": {"cache": "ram", "checkpoint_seconds": 1.0}}]})
    with pytest.raises(RunError, match=r"cohort\.bags_sha256: 'a' -> 'b'"):
        run.claim(asked | {"cohort": other | {"bags_sha256": "b"}})
    with pytest.raises(RunError, match=r"methods\.0\.train\.epochs: None -> 9"):
        run.claim(asked | {"methods": [method | {"train": {"epochs": 9}}]})


@pytest.mark.parametrize("columns", ["5", "[5]", '[{"nme": "a"}]', "[", "[]"])
def test_a_scores_file_with_columns_that_cannot_be_is_named(run, columns):
    run.write_scores("abmil", KEY, scores_of("a"))
    with h5py.File(run.scores_path("abmil", KEY, "a"), "r+") as file:
        file.attrs["columns"] = columns
    with pytest.raises(RunError, match=r"a\.h5 is damaged"):
        run.scores("abmil", KEY, "a")


@pytest.mark.parametrize("value", [3, "a", [1, 2, 3]])
def test_a_scores_file_with_a_geometry_that_cannot_be_is_named(run, value):
    run.write_scores("abmil", KEY, scores_of("a"))
    with h5py.File(run.scores_path("abmil", KEY, "a"), "r+") as file:
        file.attrs["stride_l0"] = value
    with pytest.raises(RunError, match=r"a\.h5 is damaged"):
        run.scores("abmil", KEY, "a")
