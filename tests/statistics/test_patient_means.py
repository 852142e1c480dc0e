"""One row a patient."""

import numpy as np

from wsi_mil.statistics.decisions import choose_threshold, choose_threshold_of_patients
from wsi_mil.statistics.patient_means import patient_means


def test_rows_of_a_patient_are_averaged_and_patients_of_two_classes_left_out():
    targets, means = patient_means(
        ["b", "a", "b", "mixed", "mixed"], np.array([1, 2, 1, 0, 1]), np.array([[0.2], [0.9], [0.6], [0.0], [1.0]])
    )
    assert targets.tolist() == [2, 1]
    np.testing.assert_allclose(means, [[0.9], [0.4]])


def test_nobody():
    targets, means = patient_means([], np.empty(0, int), np.empty((0, 3)))
    assert (targets.shape, means.shape) == ((0,), (0, 3))


def test_the_threshold_is_that_of_the_means():
    positive = np.repeat([False, True], 12)
    scores = np.where(positive, 0.8, 0.3) + np.arange(24) / 1000
    names = [f"p{i:02d}" for i in range(24)]
    rows = choose_threshold_of_patients(names * 2, np.tile(positive, 2), np.concatenate([scores + 0.1, scores - 0.1]))
    assert abs(rows.value - choose_threshold(positive, scores).value) < 1e-12
