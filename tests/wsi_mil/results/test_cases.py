"""A run seen slide by slide, at both levels, with and without labels."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from wsi_mil.errors import ConfigError, RunError, SlideError
from wsi_mil.results.cases import SlideFinder, check_tested, read_cases, slides_root
from wsi_mil.runs import FoldKey, RunDir, Selection, write_frame

COLUMNS = ["method", "target_name", "repeat", "fold", "seed", "patient", "slide", "target", "prob_a"]
TARGET = {"kind": "binary", "name": "t", "classes": ["a", "b"]}
TASK = {"target": "t", "level": "patient", "kind": "binary", "classes": ["a", "b"], "targets": [TARGET]}


def make_run(folder: Path, rows: list[tuple[str, str, str, int, float]], *, kind: str = "crossval") -> RunDir:
    """rows: patient, slide (empty at level patient), target, seed, probability of b."""
    run = RunDir(folder)
    run.write_config({"kind": kind, "slides": None, "task": TASK, "methods": [{"label": "m"}]})
    table = [("m", "t", 0, 0, seed, patient, slide, target, 1 - b, b) for patient, slide, target, seed, b in rows]
    write_frame(run.predictions_path, pd.DataFrame(table, columns=[*COLUMNS, "prob_b"]))
    slides = [("P1", "s1"), ("P1", "s2"), ("P2", "s3"), ("P3", "s4")]
    cohort = [{"slide": s, "patient": p, "path": f"sub/{s}.tif", "mpp_x": "0.25", "mpp_y": "0.26"} for p, s in slides]
    rest = {"site": "", "target": "", "annotation": "", "status": "used", "tiles": "9"}
    write_frame(run.cohort_path, pd.DataFrame(cohort).assign(**rest))
    return run


def test_a_patients_prediction_stands_at_each_of_its_slides_and_untested_slides_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, [("P1", "", "a", 0, 0.6), ("P1", "", "a", 1, 0.8), ("P2", "", "b", 0, 0.9)])
    cases = read_cases(run, "m")
    assert [(c.slide_id, c.label, c.predicted, c.is_error) for c in cases] == [
        ("s1", "a", "b", True),
        ("s2", "a", "b", True),
        ("s3", "b", "b", False),
    ]
    assert cases[0].probabilities == pytest.approx({"a": 0.3, "b": 0.7}), "the mean over the models"
    assert cases[0].loss == pytest.approx(-np.log(0.3))
    assert cases[0].keys == (FoldKey(0, 0, 0), FoldKey(0, 0, 1))
    assert cases[0].mpp == (0.25, 0.26)


@pytest.mark.parametrize("stored", [True, False])
def test_the_threshold_of_the_report_decides_stored_or_chosen_from_validation(tmp_path: Path, stored: bool) -> None:
    run = make_run(tmp_path, [("P1", "s1", "b", 0, 0.31), ("P1", "s2", "b", 0, 0.19), ("P2", "s3", "a", 0, 0.4)])
    key = FoldKey(0, 0, 0)
    rows = pd.DataFrame(
        [("m", "t", *key, f"V{n}", "", "ab"[n % 2], 0.9 - n % 2 * 0.4) for n in range(20)], columns=COLUMNS
    )
    write_frame(run.validation_path("m", key), rows.assign(prob_b=1 - rows["prob_a"]))  # a at 0.1, b at 0.5
    cut = {"thresholds": {"t": {"value": 0.2, "source": "Youden point of the validation part"}}} if stored else {}
    chosen: dict[str, Any] = {"epoch": 1, "chosen_by": "validation loss", "metric": None, "value": None}
    run.write_selection("m", key, Selection(**chosen, epochs_run=1, **cut))
    cases = {case.slide_id: case for case in read_cases(run, "m")}
    assert cases["s1"].threshold == pytest.approx(0.2 if stored else 0.3)
    assert {name: (case.predicted, case.is_error) for name, case in cases.items()} == {
        "s1": ("b", False),
        "s2": ("a", True),
        "s3": ("b", True),
    }
    assert cases["s1"].how_sure == f"0.31, b from {0.2 if stored else 0.3:.2f} up"


def test_with_several_seeds_the_mean_threshold_decides_and_without_any_a_half(tmp_path: Path) -> None:
    run = make_run(tmp_path, [("P1", "s1", "b", 0, 0.3), ("P1", "s1", "b", 1, 0.3)])
    assert [(case.threshold, case.predicted, case.how_sure) for case in read_cases(run, "m")] == [(0.5, "a", "0.70")]
    for seed, cut in enumerate((0.1, 0.4)):
        chosen = Selection(epoch=1, chosen_by="validation loss", metric=None, value=None, epochs_run=1)
        found = replace(chosen, thresholds={"t": {"value": cut, "source": "Youden point of the validation part"}})
        run.write_selection("m", FoldKey(0, 0, seed), found)
    assert [(case.threshold, case.predicted) for case in read_cases(run, "m")] == [(0.25, "b")]


def test_without_labels_nothing_is_wrong_and_the_order_is_by_name(tmp_path: Path) -> None:
    run = make_run(tmp_path, [("P2", "s3", "", 0, 0.1), ("P1", "s1", "", 0, 0.9)], kind="predict")
    cases = read_cases(run, "m")
    assert [case.slide_id for case in cases] == ["s1", "s3"]
    assert np.isnan([case.loss for case in cases]).all()
    assert not any(case.is_error for case in cases)


def test_a_slide_is_found_by_its_path_or_by_its_id_and_else_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [("P1", "s1", "a", 0, 0.1), ("P2", "s3", "a", 0, 0.2), ("P3", "s4", "a", 0, 0.3)])
    root = tmp_path / "slides"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "s1.tif").write_bytes(b"")
    (root / "s3.svs").write_bytes(b"")
    s4, s3, s1 = read_cases(run, "m")
    finder = SlideFinder(root)
    assert finder.find(s1) == root / "sub" / "s1.tif"
    assert finder.find(s3) == root / "s3.svs", "moved, and known by its id"
    with pytest.raises(SlideError, match=r"sub/s4\.tif is not below .*--slides DIR"):
        finder.find(s4)


def test_runs_that_cannot_be_shown_say_what_to_give_instead(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [("P1", "s1", "a", 0, 0.1)])
    with pytest.raises(RunError, match="--slides DIR"):
        slides_root(run, None)
    with pytest.raises(ConfigError, match="has no method 'x'; it has m"):
        read_cases(run, "x")
    trained = RunDir(tmp_path / "trained")
    trained.write_config({"kind": "train", "task": TASK, "methods": []})
    write_frame(trained.predictions_path, pd.DataFrame(columns=["method"]))  # training leaves one without rows
    with pytest.raises(RunError, match="wsi-mil predict"):
        check_tested(trained)
    with pytest.raises(RunError, match="holds no run"):
        check_tested(RunDir(tmp_path / "nothing"))
