"""FROC by hand, and against the counting loop of the challenge."""

import numpy as np
import pytest

from wsi_mil.statistics.froc import OUTSIDE, RATES, SlideMarks, froc, score_interval


def _marks(*detections: tuple[float, int], isolated: tuple[bool, ...] = ()) -> SlideMarks:
    return SlideMarks(
        scores=np.array([score for score, _ in detections], dtype=np.float64),
        lesion=np.array([lesion for _, lesion in detections], dtype=np.int64),
        isolated=np.array(isolated, dtype=bool),
    )


# Two slides with three lesions that count and one group of isolated cells, two slides without any.
BY_HAND = [
    _marks((0.9, 0), (0.4, 0), (0.85, OUTSIDE), (0.3, 1), (0.95, 2), isolated=(False, False, True)),
    _marks((0.2, OUTSIDE), isolated=(False,)),
    _marks((0.6, OUTSIDE), (0.5, OUTSIDE)),
    _marks(),
]


def test_the_curve_by_hand():
    figures = froc(BY_HAND)
    assert (figures.n_slides, figures.n_without_lesion, figures.n_lesions, figures.n_isolated) == (4, 2, 3, 1)
    # from the top: hit .9 | alarm .85 | alarm .6 | alarm .5 | hit .3 | alarm .2; .4 is a second hit, .95 is isolated
    np.testing.assert_allclose(figures.false_positives, [0, 0, 0.25, 0.5, 0.75, 0.75, 1])
    np.testing.assert_allclose(figures.sensitivity, np.array([0, 1, 1, 1, 1, 2, 2]) / 3)
    np.testing.assert_allclose(figures.at_rates, np.array([1, 1, 2, 2, 2, 2]) / 3)
    assert figures.score == pytest.approx(10 / 18)


def test_between_two_points_the_curve_is_straight():
    slides = [_marks((0.9, 0), (0.8, OUTSIDE), (0.8, OUTSIDE), (0.8, 1), isolated=(False, False))]
    # one step of equal scores: from (0, 1/2) to (2, 1)
    np.testing.assert_allclose(froc(slides).at_rates, [0.5625, 0.625, 0.75, 1, 1, 1])


def test_slides_without_lesion_dilute_the_false_positives_of_the_others():
    alone = froc(BY_HAND[:2])
    assert alone.false_positives[-1] == 1
    assert froc(BY_HAND[:2] + [_marks()] * 6).false_positives[-1] == pytest.approx(0.25)


def test_a_lesion_that_no_tile_came_near_stays_among_all_lesions():
    assert froc([_marks((0.5, 0), isolated=(False, False, False, False))]).score == 0.25


def test_without_a_lesion_that_counts_there_is_no_sensitivity():
    for slides in ([_marks((0.5, OUTSIDE))], [_marks((0.5, 0), isolated=(True,))]):
        assert np.isnan(froc(slides).score)
        assert np.isnan(froc(slides).at_rates).all()
    with pytest.raises(ValueError, match="no slide"):
        froc([])


def _random(n_slides: int, seed: int = 0) -> list[SlideMarks]:
    generator = np.random.default_rng(seed)
    slides = []
    for place in range(n_slides):
        n_lesions = int(generator.integers(1, 5)) if place % 2 else 0
        lesion = generator.integers(-1, n_lesions, size=20) if n_lesions else np.full(20, OUTSIDE)
        scores = np.round(generator.random(20) + 0.3 * (lesion >= 0), 2)
        slides.append(SlideMarks(scores=scores, lesion=lesion, isolated=generator.random(n_lesions) < 0.3))
    return slides


def _as_the_challenge_counts(slides: list[SlideMarks]) -> np.ndarray:
    """A loop over thresholds, slides and lesions."""
    thresholds = sorted({float(score) for slide in slides for score in slide.scores}, reverse=True)
    curve = {0.0: 0.0}
    n_lesions = sum(not isolated for slide in slides for isolated in slide.isolated)
    for threshold in thresholds:
        hits = total = 0
        for slide in slides:
            called = slide.lesion[slide.scores >= threshold].tolist()
            total += called.count(OUTSIDE)
            hits += len({lesion for lesion in called if lesion != OUTSIDE and not slide.isolated[lesion]})
        curve[total / len(slides)] = hits / n_lesions
    return np.interp(RATES, list(curve), list(curve.values()))


@pytest.mark.parametrize("seed", range(5))
def test_the_six_sensitivities_are_those_of_the_challenge(seed: int):
    slides = _random(12, seed)
    np.testing.assert_allclose(froc(slides).at_rates, _as_the_challenge_counts(slides))


def test_the_interval_holds_the_score_and_narrows_with_patients():
    widths = []
    for n in (24, 240):
        slides = _random(n, seed=3)
        interval = score_interval(slides, [f"p{place}" for place in range(n)], draws=200)
        assert interval.low < froc(slides).score < interval.high
        widths.append(interval.high - interval.low)
    assert widths[1] < 0.6 * widths[0]


def test_patients_are_drawn_with_all_their_slides_and_few_of_them_give_no_interval():
    slides = _random(48, seed=1)
    patients = [f"p{place}" for place in range(48)]
    apart = score_interval(slides, patients, draws=200)
    thrice = score_interval(list(np.repeat(slides, 3)), list(np.repeat(patients, 3)), draws=200)
    assert (thrice.low, thrice.high) == pytest.approx((apart.low, apart.high))
    assert np.isnan(score_interval(slides[:18], patients[:18]).low)
