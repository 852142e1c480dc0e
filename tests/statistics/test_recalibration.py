"""Calibrators: the best ones by other means, scikit-learn's isotonic curve, and what small samples get."""

import json

import numpy as np
import pytest
from scipy import optimize
from sklearn.isotonic import IsotonicRegression

from wsi_mil.statistics.calibration import log_loss
from wsi_mil.statistics.ranking import auc
from wsi_mil.statistics.recalibration import Calibrator, fit_calibrator


def _softmax(logits):
    grown = np.exp(logits - logits.max(axis=1, keepdims=True))
    return grown / grown.sum(axis=1, keepdims=True)


def _names(n):
    return [f"p{i:05d}" for i in range(n)]


def _sample(n, k, temperature, seed=0):
    """Labels drawn from the softmax of logits, and the probabilities of logits that are `temperature` times as far."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(n, k)) * 1.5
    targets = np.array([generator.choice(k, p=p) for p in _softmax(logits)])
    return targets, _softmax(temperature * logits)


@pytest.mark.parametrize(("k", "temperature"), [(2, 3.0), (2, 0.4), (5, 2.0)])
def test_the_temperature_of_an_overconfident_model_is_found(k, temperature):
    targets, probabilities = _sample(6000, k, temperature)
    calibrator = fit_calibrator(_names(6000), targets, probabilities, "temperature")
    assert calibrator.temperature == pytest.approx(temperature, rel=0.06)
    assert log_loss(targets, calibrator.apply(probabilities)) < log_loss(targets, probabilities)


@pytest.mark.parametrize("k", [2, 4])
def test_no_other_temperature_has_a_smaller_loss(k):
    targets, probabilities = _sample(90, k, 2.5, seed=k)
    found = fit_calibrator(_names(90), targets, probabilities, "temperature").temperature
    logits = np.log(probabilities)
    best = optimize.minimize_scalar(
        lambda t: log_loss(targets, _softmax(logits / t)), bounds=(0.05, 50), method="bounded",
        options={"xatol": 1e-10},
    ).x  # fmt: skip
    assert found == pytest.approx(best, rel=1e-5)


def test_temperature_leaves_order_and_calls_alone_and_rows_add_up():
    targets, probabilities = _sample(200, 3, 3.0)
    after = fit_calibrator(_names(200), targets, probabilities, "temperature").apply(probabilities)
    np.testing.assert_array_equal(after.argmax(axis=1), probabilities.argmax(axis=1))
    np.testing.assert_allclose(after.sum(axis=1), 1)
    two = fit_calibrator(_names(200), *_sample(200, 2, 3.0), "temperature")
    positive, scores = _sample(200, 2, 3.0)
    assert auc(positive == 1, two.apply(scores)[:, 1]) == auc(positive == 1, scores[:, 1])


def test_a_calibrated_model_is_left_nearly_alone_and_temperature_one_wholly():
    _, probabilities = _sample(50, 3, 1.0)
    one = Calibrator(kind="temperature", reason="", temperature=1.0)
    np.testing.assert_allclose(one.apply(probabilities), probabilities)
    targets, probabilities = _sample(6000, 3, 1.0)
    assert fit_calibrator(_names(6000), targets, probabilities, "temperature").temperature == pytest.approx(1, rel=0.06)


def test_a_probability_of_zero_stays_a_number():
    calibrator = Calibrator(kind="temperature", reason="", temperature=2.0)
    after = calibrator.apply(np.array([[0.0, 1.0], [0.5, 0.5]]))
    assert np.isfinite(after).all()
    assert after[0, 1] > 0.999
    assert after[1].tolist() == [0.5, 0.5]


def test_separated_patients_have_no_best_temperature_and_a_model_worse_than_chance_the_greatest():
    targets = np.repeat([0, 1], 15)
    right = np.where(targets[:, None] == [0, 1], 0.7, 0.3)
    calibrator = fit_calibrator(_names(30), targets, right, "temperature")
    assert calibrator.kind == "none"
    assert "no temperature is best" in calibrator.reason
    np.testing.assert_array_equal(calibrator.apply(right), right)
    wrong = fit_calibrator(_names(30), targets, 1 - right, "temperature")
    assert wrong.temperature == pytest.approx(100.0)
    np.testing.assert_allclose(wrong.apply(1 - right), 0.5, atol=0.01)
    level = fit_calibrator(_names(30), targets, np.full((30, 2), 0.5), "temperature")
    assert level.kind == "none"


@pytest.mark.parametrize(("kind", "least"), [("temperature", 10), ("isotonic", 50)])
def test_least_numbers_are_kept_and_named(kind, least):
    generator = np.random.default_rng(0)
    for few, expected in ((least - 1, "none"), (least, kind)):
        targets = np.repeat([0, 1], [200, few])
        positive = generator.random(len(targets))
        found = fit_calibrator(_names(len(targets)), targets, np.stack([1 - positive, positive], axis=1), kind)
        assert found.kind == expected
    assert f"{least} are needed" in fit_calibrator(
        _names(200), np.zeros(200, int), np.full((200, 2), 0.5), kind
    ).reason  # fmt: skip


def test_isotonic_is_scikit_learns_with_its_ends_held_off():
    generator = np.random.default_rng(4)
    scores = np.round(generator.random(300), 2)
    targets = (generator.random(300) < scores**2).astype(int)
    calibrator = fit_calibrator(_names(300), targets, np.stack([1 - scores, scores], axis=1), "isotonic")
    margin = 1 / 302
    other = IsotonicRegression(y_min=margin, y_max=1 - margin, out_of_bounds="clip").fit(scores, targets)
    new = np.linspace(0, 1, 1001)
    after = calibrator.apply(np.stack([1 - new, new], axis=1))
    np.testing.assert_allclose(after[:, 1], other.predict(new), atol=1e-9)
    np.testing.assert_allclose(after.sum(axis=1), 1)
    assert (np.diff(after[:, 1]) >= 0).all()
    assert after.min() >= margin - 1e-12
    assert len(calibrator.x) < 60  # level stretches keep their ends alone


def test_isotonic_repairs_what_a_temperature_cannot():
    generator = np.random.default_rng(5)
    scores = generator.random(4000)
    targets = (generator.random(4000) < 0.1 + 0.3 * scores).astype(int)
    both = np.stack([1 - scores, scores], axis=1)
    losses = [
        log_loss(targets, fit_calibrator(_names(4000), targets, both, kind).apply(both))
        for kind in ("isotonic", "temperature", "none")
    ]
    assert losses[0] < losses[1] < losses[2]


def test_isotonic_of_three_classes_is_not_fitted():
    targets, probabilities = _sample(300, 3, 1.0)
    assert "two classes" in fit_calibrator(_names(300), targets, probabilities, "isotonic").reason


def test_a_patient_counts_once_and_those_without_one_label_not_at_all():
    targets, probabilities = _sample(60, 2, 2.0, seed=3)
    plain = fit_calibrator(_names(60), targets, probabilities, "temperature")
    names = [*_names(60), *_names(1) * 40, "unknown", "mixed", "mixed"]
    more_targets = np.concatenate([targets, np.repeat(targets[0], 40), [-1, 0, 1]])
    more = np.concatenate([probabilities, np.repeat(probabilities[:1], 40, axis=0), np.tile([0.9, 0.1], (3, 1))])
    again = fit_calibrator(names, more_targets, more, "temperature")
    assert again.temperature == pytest.approx(plain.temperature)
    assert again.reason == plain.reason == "temperature of 60 validation patients"


@pytest.mark.parametrize("kind", ["temperature", "isotonic", "none"])
def test_a_calibrator_comes_back_from_a_file(kind):
    targets, probabilities = _sample(300, 2, 2.0)
    calibrator = fit_calibrator(_names(300), targets, probabilities, kind)
    assert calibrator.kind == kind
    again = Calibrator.from_config(json.loads(json.dumps(calibrator.as_config())))
    assert again == calibrator
    np.testing.assert_array_equal(again.apply(probabilities), calibrator.apply(probabilities))


@pytest.mark.parametrize(
    "config",
    [{}, {"kind": "platt"}, {"kind": "temperature"}, {"kind": "temperature", "temperature": 0.0},
     {"kind": "isotonic", "x": [0.1], "y": []}, {"kind": "isotonic"}],
)  # fmt: skip
def test_what_is_no_calibrator_is_refused(config):
    with pytest.raises(ValueError, match="not a calibration"):
        Calibrator.from_config(config)


def test_nobody_an_unknown_kind_and_no_number():
    nobody = fit_calibrator([], np.empty(0, int), np.empty((0, 2)), "temperature")
    assert "no validation patient" in nobody.reason
    targets, probabilities = _sample(30, 2, 1.0)
    with pytest.raises(ValueError, match="platt"):
        fit_calibrator(_names(30), targets, probabilities, "platt")
    probabilities[3] = np.nan
    with pytest.raises(ValueError, match="missing"):
        fit_calibrator(_names(30), targets, probabilities, "temperature")
