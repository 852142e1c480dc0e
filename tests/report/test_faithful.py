"""The figures that cross-validation left of deletion and insertion, by method."""

import numpy as np
import pandas as pd
import pytest

from wsi_mil.report.faithful import read_faithfulness
from wsi_mil.report.study import read_study
from wsi_mil.runs import FoldKey, write_frame
from wsi_mil.statistics.faithfulness import CURVES, STEPS


def _measure(run, method: str, mean: float) -> None:
    """Leave the figures of a model that is as faithful as `mean`, on the test patients of each fold."""
    folds = run.folds()
    for key in run.keys(method):
        tested = folds["patient"][(folds["fold"] == key.fold) & (folds["part"] == "test")].tolist()
        rows = [
            {"patient": patient, "bag": f"{patient}_S0", "tiles": 144, "answer": 0.8}
            | {"deletion": mean + 0.1, "insertion": mean - 0.1, "faithfulness": mean + 0.01 * place}
            | {f"{curve}_{step}": 0.8 - step / 100 for curve in CURVES for step in STEPS}
            for place, patient in enumerate(tested)
        ]
        write_frame(run.faithfulness_path(method, key), pd.DataFrame(rows))


def test_the_methods_that_were_measured_and_no_others(make_run):
    run = make_run(patients=20, signal=(("abmil", 2.0), ("acmil", 1.0), ("mean_pool", 0.5)))
    _measure(run, "acmil", 0.4)
    _measure(run, "abmil", 0.1)
    found, failures = read_faithfulness(read_study(run.path))
    assert failures == []
    assert [one.method for one in found] == ["abmil", "acmil"]
    assert [one.figures.n_patients for one in found] == [20, 20]
    assert found[1].figures.mean == pytest.approx(0.4 + 0.01 * 1.5)
    assert found[1].figures.deletion == pytest.approx(0.5)
    assert found[1].figures.insertion == pytest.approx(0.3)
    assert found[1].figures.interval.low < found[1].figures.mean < found[1].figures.interval.high
    assert found[1].answer == pytest.approx(0.8)
    np.testing.assert_allclose(found[1].curves["only_random"], 0.8 - np.array(STEPS) / 100)


def test_a_run_of_an_earlier_version_has_none_and_a_damaged_file_costs_one_model(make_run):
    run = make_run(patients=20, signal=(("acmil", 2.0),))
    assert read_faithfulness(read_study(run.path)) == ([], [])
    _measure(run, "acmil", 0.2)
    path = run.faithfulness_path("acmil", FoldKey(0, 0, 0))
    path.write_text(path.read_text().replace("0.8", "much", 1))
    run.faithfulness_path("acmil", FoldKey(0, 1, 0)).write_text("patient,bag\nP0,P0\n")
    found, failures = read_faithfulness(read_study(run.path))
    assert found[0].figures.n_bags == 12
    assert [failure.item for failure in failures] == ["acmil r0_f0_s0", "acmil r0_f1_s0"]
    assert all("faithfulness.csv is damaged" in failure.reason for failure in failures)


def test_a_bag_that_was_too_small_is_left_out(make_run):
    run = make_run(patients=20, signal=(("acmil", 2.0),))
    _measure(run, "acmil", 0.2)
    path = run.faithfulness_path("acmil", FoldKey(0, 0, 0))
    frame = pd.read_csv(path)
    frame.loc[0, ["deletion", "insertion", "faithfulness", "without_top_50"]] = float("nan")
    write_frame(path, frame)
    found, failures = read_faithfulness(read_study(run.path))
    assert failures == []
    assert found[0].figures.n_bags == 19
    assert found[0].curves["without_top"][-1] == pytest.approx(0.3)
