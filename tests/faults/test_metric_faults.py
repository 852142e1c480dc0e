"""MET-02, MET-03, MET-05: public reports of wrong figures, replayed on their inputs."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from wsi_mil.report.evaluate import evaluate
from wsi_mil.report.study import Trained, rows_of
from wsi_mil.statistics import decisions, ranking

DATA = Path(__file__).parents[1] / "data" / "report"


def _read(name: str) -> pd.DataFrame:
    frame = pd.read_csv(DATA / name, dtype=str)
    numbers = [column for column in frame.columns if column.startswith("prob_")]
    frame = frame.astype(dict.fromkeys(numbers, float))
    if len(numbers) > 2:  # rounded to four digits in the file, so that some rows sum to 1.0001
        frame[numbers] = frame[numbers].div(frame[numbers].sum(axis=1), axis=0)
    return frame


def _trained(test: pd.DataFrame, classes: tuple[str, ...], validation: pd.DataFrame | None = None) -> Trained:
    columns = {"method": "case", "repeat": 0, "seed": 0}
    frames = [
        frame.assign(**columns, target=frame["label"], fold=frame.get("fold", "0"), patient=frame["slide"]).astype(
            {"fold": int}
        )
        for frame in ([test] if validation is None else [test, validation])
    ]
    rows = [rows_of(frame, classes, source="case") for frame in frames]
    chosen = dict.fromkeys(set(rows[0].keys), rows[1]) if validation is not None else {}
    return Trained(label="case", test=rows[0], validation=chosen, selections={})


def test_met_02_a_class_absent_from_a_fold_is_undefined_and_the_matrix_keeps_its_shape():
    figures = evaluate(_trained(_read("MET-02_predictions.csv"), ("A", "B", "C")))
    fold = figures.folds[1]
    assert fold.counts == (5, 4, 0)
    assert fold.class_aucs[:2] == (1.0, 0.95)
    assert np.isnan(fold.class_aucs[2])
    assert fold.auc == pytest.approx(0.975)
    assert figures.confusion.shape == (3, 3)
    truth = _read("MET-02_predictions.csv").query("fold == '1'")
    probabilities = truth[["prob_A", "prob_B", "prob_C"]].to_numpy()
    targets = np.array(["ABC".index(label) for label in truth["label"]])
    matrix = decisions.confusion_matrix(targets, probabilities.argmax(axis=1), n_classes=3)
    assert matrix.shape == (3, 3)
    assert matrix[2].tolist() == [0, 0, 0]


def test_met_03_figures_are_of_all_patients_never_means_over_batches():
    frame = _read("MET-03_predictions.csv")
    frame["prob_0"] = 1 - frame["prob_1"]
    figures = evaluate(_trained(frame, ("0", "1")))
    assert figures.primary.value == pytest.approx(0.7302, abs=5e-5)
    assert decisions.f1(figures.confusion, average="positive") == pytest.approx(0.3077, abs=5e-5)
    assert decisions.accuracy(figures.confusion) == pytest.approx(0.70)


def test_met_05_the_threshold_is_never_searched_on_the_test_part():
    test, validation = (_read(f"MET-05_{part}.csv") for part in ("test", "validation"))
    for frame in (test, validation):
        frame["prob_1"] = frame["prob_1"].clip(0)  # one of the file's scores is a little below 0
        frame["prob_0"] = 1 - frame["prob_1"]
    for chosen in (validation, None):
        figures = evaluate(_trained(test, ("0", "1"), chosen))
        assert figures.folds[0].threshold.from_validation == (chosen is not None)
        assert decisions.accuracy(figures.confusion) == 0.5
    positive = (test["label"] == "1").to_numpy()
    curve = ranking.roc_curve(positive, test["prob_1"].to_numpy())
    oracle = max((curve.y * positive.sum() + (1 - curve.x) * (~positive).sum()) / len(positive))
    assert oracle == pytest.approx(0.9667, abs=5e-5)  # what a threshold tuned on the test part would claim
