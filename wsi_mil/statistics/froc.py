"""FROC: how many lesions are found at how many false alarms a slide, after the rules of CAMELYON16.

Bejnordi et al., JAMA 2017, 318:2199, and the evaluation script of the challenge. Its rules, all kept here:

1. The annotated ground is widened by 37.5 µm, so that outlines less than 75 µm apart are one lesion, and holes are
   filled (`wsi_mil.annotations.lesions`).
2. A lesion whose longest diameter, so widened, is below 275 µm is a group of isolated tumour cells. It is left out of
   both counts: finding it is no hit, and a detection in it is no false positive.
3. A detection is a point with a score. Several detections in one lesion are one hit, at the highest of their scores.
4. A detection outside every lesion is a false positive. Their number is averaged over all slides, those without any
   lesion included.
5. Sensitivity is the share of all lesions of all slides together that were hit.
6. The curve is read at 1/4, 1/2, 1, 2, 4 and 8 false positives a slide, between two points of it linearly, and beyond
   its last point as there. The score is the mean of these six sensitivities.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wsi_mil.statistics import intervals
from wsi_mil.statistics.ranking import Bools, Floats, Ints

RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""False positives a slide at which the curve is read."""
OUTSIDE = -1
"""The lesion of a detection that lies in none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SlideMarks:
    """The detections and the lesions of one slide."""

    scores: Floats
    """(m,) of the detections."""
    lesion: Ints
    """(m,) the number of the lesion that the detection lies in, or OUTSIDE."""
    isolated: Bools
    """(lesions,) whether the lesion is a group of isolated tumour cells only."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Froc:
    """The curve of all slides together; sensitivities are NaN without a lesion that counts."""

    n_slides: int
    n_without_lesion: int
    """Slides on which nothing is annotated."""
    n_lesions: int
    """Those that count."""
    n_isolated: int
    """Groups of isolated tumour cells, which do not."""
    false_positives: Floats
    """(points,) a slide, rising from 0."""
    sensitivity: Floats
    """(points,)"""
    at_rates: Floats
    """(6,) sensitivities at RATES."""

    @property
    def score(self) -> float:
        """Mean of the six sensitivities."""
        return float(self.at_rates.mean())


def froc(slides: Sequence[SlideMarks]) -> Froc:
    """The curve of all slides together. Raises ValueError without any slide."""
    if not slides:
        raise ValueError("no slide to count false positives on")
    events = _events(slides)
    false_positives, sensitivity = _curve(events, np.ones(len(slides)))
    return Froc(
        n_slides=len(slides),
        n_without_lesion=sum(not len(slide.isolated) for slide in slides),
        n_lesions=len(events.lesion_slide),
        n_isolated=sum(int(slide.isolated.sum()) for slide in slides),
        false_positives=false_positives,
        sensitivity=sensitivity,
        at_rates=_at_rates(false_positives, sensitivity),
    )


def score_interval(
    slides: Sequence[SlideMarks], patients: Sequence[str], *, draws: int = 1000, seed: int = 0
) -> intervals.Interval:
    """Bootstrap interval of the score: patients are drawn with all their slides, those with a lesion among themselves.

    patients: of each slide. Not defined with fewer than 10 patients who have a lesion that counts.
    """
    events = _events(slides)
    names, place = np.unique(np.asarray(patients, dtype=object).astype(str), return_inverse=True)
    diseased = np.isin(np.arange(len(names)), place[events.lesion_slide])
    if diseased.sum() < intervals.FEW:
        return intervals.percentile_interval(np.empty(0))
    weights = intervals.patient_weights(
        np.zeros(len(names), dtype=np.int64), classes=diseased.astype(np.int64), draws=draws, seed=seed
    )
    samples = [_at_rates(*_curve(events, weight[place])).mean() for weight in weights]
    return intervals.percentile_interval(np.array(samples))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Events:
    """False positives and first hits from the highest score down."""

    is_hit: Bools
    slide: Ints
    last: Ints
    """Places of the last event of each distinct score."""
    lesion_slide: Ints
    """(lesions that count,) the slide of each, found or not."""


def _events(slides: Sequence[SlideMarks]) -> _Events:
    scores: list[Floats] = []
    hits: list[Bools] = []
    places: list[Ints] = []
    of_lesions: list[Ints] = []
    for place, slide in enumerate(slides):
        best = np.full(len(slide.isolated), -np.inf)
        inside = slide.lesion != OUTSIDE
        np.maximum.at(best, slide.lesion[inside], slide.scores[inside])
        first = best[~slide.isolated & np.isfinite(best)]
        alarms = slide.scores[~inside]
        scores += [first, alarms]
        hits += [np.ones(len(first), dtype=bool), np.zeros(len(alarms), dtype=bool)]
        places.append(np.full(len(first) + len(alarms), place))
        of_lesions.append(np.full(int((~slide.isolated).sum()), place))
    values = np.concatenate(scores)
    order = np.argsort(-values, kind="stable")
    ends = np.append(np.diff(values[order]) != 0, True)[: len(values)]
    return _Events(
        is_hit=np.concatenate(hits)[order],
        slide=np.concatenate(places)[order],
        last=np.flatnonzero(ends),
        lesion_slide=np.concatenate(of_lesions),
    )


def _curve(events: _Events, weights: Floats) -> tuple[Floats, Floats]:
    """False positives a slide, and sensitivity, from the highest score down. weights: how often each slide counts."""
    each = weights[events.slide]
    alarms = np.cumsum(np.where(events.is_hit, 0.0, each))[events.last] / weights.sum()
    n_lesions = weights[events.lesion_slide].sum()
    if n_lesions == 0:
        return np.append(0.0, alarms), np.full(len(alarms) + 1, np.nan)
    found = np.cumsum(np.where(events.is_hit, each, 0.0))[events.last] / n_lesions
    return np.append(0.0, alarms), np.append(0.0, found)


def _at_rates(false_positives: Floats, sensitivity: Floats) -> Floats:
    """(6,) read off the curve; of the points with the same number of false positives the highest counts."""
    highest = np.append(np.diff(false_positives) > 0, True)
    return np.asarray(np.interp(RATES, false_positives[highest], sensitivity[highest]), dtype=np.float64)
