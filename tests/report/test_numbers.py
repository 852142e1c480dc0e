"""The further figures of a method against a second library, brute force and closed forms."""

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import accuracy_score, cohen_kappa_score, f1_score

from wsi_mil.errors import RunError
from wsi_mil.report.decision_figures import FIXED
from wsi_mil.report.evaluate import evaluate
from wsi_mil.report.metrics import named_figures
from wsi_mil.report.study import read_study

THREE = {"classes": ("a", "b", "c"), "patients": 60, "signal": (("acmil", 1.0),)}


@pytest.fixture
def figures(make_run):
    return lambda **wishes: evaluate(read_study(make_run(scores=False, **wishes).path).methods[0])


@pytest.mark.parametrize("wishes", [{"patients": 60}, THREE])
def test_decisions_agree_with_a_second_library(figures, wishes):
    found = figures(**wishes)
    truth, called = found.patients.targets, found.patients.decisions
    decided = found.decided
    assert decided.accuracy.value == pytest.approx(accuracy_score(truth, called))
    assert decided.kappa.value == pytest.approx(cohen_kappa_score(truth, called))
    assert decided.f1_macro.value == pytest.approx(f1_score(truth, called, average="macro"))
    if decided.f1_positive:
        assert decided.f1_positive.value == pytest.approx(f1_score(truth, called))
    assert (decided.f1_positive is None) == (len(found.confusion) == 3)


@pytest.mark.parametrize(
    "wishes", [{"patients": 60}, THREE, {"patients": 60, "level": "slide", "slides_per_patient": 2}]
)
def test_every_interval_names_its_method_and_holds_its_figure(figures, wishes):
    for name, figure in named_figures(figures(**wishes)).items():
        assert figure.interval.method
        assert figure.interval.low <= figure.value <= figure.interval.high, name


def test_the_operating_points_are_the_best_ones_that_keep_the_other_side(figures):
    found = figures(patients=60)
    scores, positive = found.patients.probabilities[:, 1], found.patients.targets == 1
    cuts = [*scores, np.inf]
    pairs = [((scores[positive] >= cut).mean(), (scores[~positive] < cut).mean()) for cut in cuts]
    assert found.operating.sensitivity.value == max(up for up, down in pairs if down >= FIXED)
    assert found.operating.specificity.value == max(down for up, down in pairs if up >= FIXED)


def test_each_class_against_the_rest_is_counted_within_folds(figures):
    found = figures(**THREE)
    rows = found.rows
    for column, one in enumerate(found.classes):
        won = pairs = 0
        for key in set(rows.keys):
            own = rows.of(key)
            up, down = (own.probabilities[(own.targets == column) == side, column] for side in (True, False))
            won += ((up[:, None] > down) + 0.5 * (up[:, None] == down)).sum()
            pairs += len(up) * len(down)
        assert one.within.value == pytest.approx(won / pairs)
    assert found.primary.value == pytest.approx(np.mean([one.within.value for one in found.classes]))


def test_slides_are_decided_one_by_one_and_their_interval_draws_patients(make_run):
    run = make_run(patients=60, level="slide", slides_per_patient=2, scores=False, signal=(("acmil", 0.8),))
    found = evaluate(read_study(run.path).methods[0])
    frame = run.predictions()
    called, truth = frame["prob_tumour"] >= 0.5, frame["target"] == "tumour"
    expected = ((called & truth).sum() / truth.sum() + (~called & ~truth).sum() / (~truth).sum()) / 2
    assert found.slides.balanced_accuracy.value == pytest.approx(expected)
    assert found.slides.balanced_accuracy.interval.method == "patient bootstrap"


def test_calibrated_probabilities_have_their_own_distances_and_decide_nothing(make_run):
    run = make_run(patients=60, calibrated=True, scores=False, signal=(("acmil", 1.0),))
    found = evaluate(read_study(run.path).methods[0])
    frame = run.predictions()
    truth = (frame["target"] == "tumour").to_numpy()
    calibrated = frame["calibrated_tumour"].astype(float).to_numpy()
    assert found.calibrated.brier.value == pytest.approx(np.mean((calibrated - truth) ** 2))
    right = np.where(truth, calibrated, 1 - calibrated)
    assert found.calibrated.log_loss.value == pytest.approx(-np.log(right).mean())
    assert found.calibrated.ece.value != found.raw.ece.value
    frame.drop(columns=["calibrated_normal", "calibrated_tumour"]).to_csv(run.predictions_path, index=False)
    without = evaluate(read_study(run.path).methods[0])
    assert without.calibrated is None
    np.testing.assert_array_equal(without.patients.decisions, found.patients.decisions)
    assert without.raw == found.raw


def test_where_nothing_was_fitted_nothing_is_called_calibrated(make_run):
    run = make_run(calibrated=True, scores=False, signal=(("acmil", 1.0),))
    for key in run.keys("acmil"):
        path = run.selection_path("acmil", key)
        path.write_text(path.read_text().replace('"temperature", "reason"', '"none", "reason"'))
    assert evaluate(read_study(run.path).methods[0]).calibrated is None


@pytest.mark.parametrize(("cell", "words"), [("1.5", "outside 0 to 1"), ("much", "no number|damaged")])
def test_a_calibrated_probability_that_is_none_is_refused(make_run, cell, words):
    run = make_run(calibrated=True, scores=False)
    frame = pd.read_csv(run.predictions_path, dtype=str)
    frame.loc[3, "calibrated_tumour"] = cell
    frame.to_csv(run.predictions_path, index=False)
    with pytest.raises(RunError, match=words):
        read_study(run.path)


def test_the_interval_of_the_calibration_error_is_reflected_since_resampling_inflates_it(figures):
    ece = figures(patients=120, signal=(("acmil", 1.0),)).raw.ece
    assert ece.interval.method == "patient bootstrap, reflected, bins held fixed"
    assert 0 <= ece.interval.low < ece.value < ece.interval.high
    assert ece.value - ece.interval.low > ece.interval.high - ece.value, "the bias is taken off, not added"


def test_each_training_is_judged_for_itself(make_run):
    run = make_run(patients=60, seeds=(0, 1), repeats=2, scores=False, signal=(("acmil", 1.0),))
    found = evaluate(read_study(run.path).methods[0])
    for (repeat, seed), one in found.by_training.items():
        frame = run.predictions().query(f"repeat == {repeat} and seed == {seed}")
        truth = (frame["target"] == "tumour").to_numpy()
        assert one.brier == pytest.approx(np.mean((frame["prob_tumour"] - truth) ** 2))
    assert len(found.by_training) == 4
