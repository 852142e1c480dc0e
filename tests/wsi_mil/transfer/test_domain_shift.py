"""Domain shift: what is far is read off the training slides, each measured against the others alone."""

import io

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from wsi_mil.transfer import domain_shift as shift
from wsi_mil.transfer.domain_shift import Measured, Reference, Training


def slides(rows, *, mpp=0.5, stain=None):
    return [Measured(slide_id=f"s{i}", features=row, mpp=mpp, stain=stain) for i, row in enumerate(rows)]


def test_distance_is_the_root_mean_square_of_standardised_differences():
    reference = Reference(mean=np.array([1.0, 2.0]), std=np.array([2.0, 0.5]), quantiles=np.linspace(0, 10, 101))
    assert reference.distance(np.array([7.0, 4.0])) == pytest.approx(np.sqrt((3**2 + 4**2) / 2))
    assert reference.limit == pytest.approx(9.5)
    assert [reference.share_nearer(d) for d in (-1, 2.5, 99)] == [0, 0.25, 1]


def test_the_training_slides_are_each_measured_against_the_others_alone():
    rows = np.random.default_rng(0).normal(size=(7, 5))
    apart = []
    for i in range(len(rows)):
        others = np.delete(rows, i, axis=0)
        z = (rows[i] - others.mean(0)) / others.std(0, ddof=1)
        apart.append(np.sqrt((z**2).mean()))
    expected = np.quantile(apart, np.linspace(0, 1, 101))
    np.testing.assert_allclose(Reference.of(rows).quantiles, expected)


@pytest.mark.parametrize("n", [10, 60])
def test_slides_of_the_same_kind_are_far_about_as_often_as_promised(n):
    rng = np.random.default_rng(1)
    far = []
    for _ in range(200):
        reference = Reference.of(rng.normal(size=(n, 32)))
        far += [reference.distance(row) > reference.limit for row in rng.normal(size=(5, 32))]
    assert 0.02 < np.mean(far) < 0.10


def test_a_shift_moves_the_figure_and_is_told_and_none_is_not():
    rng = np.random.default_rng(2)
    training = Training.of(slides(rng.normal(size=(40, 8))))
    means = []
    for offset in (0, 1, 3):
        found = shift.compare(training, slides(rng.normal(size=(20, 8)) + offset))
        means.append(found["features_distance"].mean())
        told = [text for text in shift.sentences(training, found) if "features" in text]
        assert bool(told) == (offset > 0)
    assert means == sorted(means)
    assert "20 of 20 slides" in told[0]
    assert set(found["unusual"]) == {"features"}


def test_a_feature_that_never_varied_does_not_drown_the_rest():
    rows = np.random.default_rng(3).normal(size=(20, 4))
    rows[:, 0] = 1.0
    reference = Reference.of(rows)
    near = np.array([1.0 + 1e-9, 0, 0, 0])
    assert reference.distance(near) < reference.limit
    assert reference.distance(near + np.array([1, 0, 0, 0])) > 10 * reference.limit


def test_two_slides_are_no_reference():
    training = Training.of(slides(np.eye(2)))
    found = shift.compare(training, slides(np.eye(2)))
    assert training.features is None
    assert found["features_distance"].isna().all()
    assert "not measured" in shift.sentences(training, found)[-1]


def test_another_pixel_size_is_unusual():
    training = Training.of(slides(np.eye(4), mpp=0.25) + slides(np.eye(4), mpp=0.5))
    found = shift.compare(training, [*slides(np.eye(4)[:1], mpp=0.26), *slides(np.eye(4)[:1], mpp=1.0)])
    assert ["mpp" in text.split() for text in found["unusual"]] == [False, True]
    assert any("1 of 2 slides lie outside the 0.25 to 0.5" in text for text in shift.sentences(training, found))


def test_optical_density_is_that_of_tissue_under_tiles():
    rgb = np.full((10, 10, 3), 255, np.uint8)
    rgb[2:4, 2:4] = (127, 63, 255)
    rgb[8:, 8:] = 0  # no tile lies there
    under = np.zeros((10, 10), bool)
    under[:6, :6] = True
    expected = [np.log10(2), np.log10(4), 0]
    np.testing.assert_allclose(shift.optical_density(rgb, under), expected, atol=1e-9)
    assert shift.optical_density(np.full_like(rgb, 255), under) is None


def test_a_darker_stain_is_far_and_slides_without_one_are_left_open():
    rng = np.random.default_rng(4)
    rows = rng.normal(size=(12, 3))
    training = Training.of([Measured(slide_id="", features=r, mpp=0.5, stain=0.3 + 0.01 * r) for r in rows])
    new = [Measured(slide_id=f"{i}", features=rows[i], mpp=0.5, stain=0.6 + 0.01 * rows[i]) for i in range(3)]
    found = shift.compare(training, [*new, Measured(slide_id="x", features=rows[0], mpp=0.5, stain=None)])
    assert ["stain" in text.split() for text in found["unusual"]] == [True] * 3 + [False]
    assert np.isnan(found["stain_distance"].iloc[3])
    assert any("Domain shift in stain: 3 of 3" in text for text in shift.sentences(training, found))


def test_a_reference_survives_being_stored_and_the_picture_is_one():
    training = Training.of(slides(np.random.default_rng(5).normal(size=(6, 3)), stain=np.ones(3)))
    again = shift.from_arrays(shift.to_arrays(training))
    new = slides(np.zeros((3, 3)))
    pd.testing.assert_frame_equal(shift.compare(again, new), shift.compare(training, new))
    picture = Image.open(io.BytesIO(shift.draw(again, shift.compare(again, new))))
    assert picture.format == "PNG"
    assert len(np.unique(np.asarray(picture))) > 10
