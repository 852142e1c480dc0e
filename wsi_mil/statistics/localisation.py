"""Does the heat map point at the lesion? Tile scores against lesion labels, by slide and together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wsi_mil.statistics import intervals
from wsi_mil.statistics.concordance import concordance
from wsi_mil.statistics.ranking import Bools, Floats, auc, average_precision, macro


@dataclass(frozen=True, kw_only=True)
class SlideLocalisation:
    """How one slide's scores order its tiles. Chance is 0.5 for the AUC and the prevalence for average precision."""

    n_tiles: int
    n_lesion: int
    prevalence: float
    auc: float
    average_precision: float


@dataclass(frozen=True, kw_only=True)
class Localisation:
    """All annotated slides of a method together."""

    n_slides: int
    """Slides that hold both kinds of tile; the others have no AUC."""
    n_tiles: int
    prevalence: float
    """Of all tiles: the chance level of the pooled average precision."""
    mean_prevalence: float
    """Mean over the slides that hold both kinds: the chance level of the mean average precision."""
    mean_auc: float
    """Plain mean of the slides' AUCs: each slide counts alike."""
    mean_average_precision: float
    within_slide_auc: float
    """Over pairs within a slide: each tile pair counts alike."""
    pooled_auc: float
    """Over all tiles: also asks whether scores compare between slides."""
    pooled_average_precision: float


@dataclass(frozen=True, kw_only=True)
class MapDice:
    """Overlap of tile maps, cut at a threshold, with the annotated tiles. No chance level: it grows with prevalence."""

    n_slides: int
    """Slides with a lesion tile; the others have no Dice."""
    mean: float
    """Plain mean of the slides' figures."""
    pooled: float
    """Of all tiles together, where alarms on slides without a lesion tile count too."""


def dice(lesion: Bools, called: Bools) -> float:
    """2 |lesion and called| / (|lesion| + |called|) in tiles; NaN where no tile is lesion.   Both (n,)."""
    lesion, called = np.asarray(lesion, dtype=bool), np.asarray(called, dtype=bool)
    if not lesion.any():
        return float("nan")
    return float(2 * (lesion & called).sum() / (lesion.sum() + called.sum()))


def dice_all(lesions: Sequence[Bools], called: Sequence[Bools]) -> MapDice:
    """Figures over several slides, one array each. Raises ValueError without any slide."""
    each = np.array([dice(lesion, call) for lesion, call in zip(lesions, called, strict=True)])
    return MapDice(
        n_slides=int(np.isfinite(each).sum()),
        mean=macro(each),
        pooled=dice(np.concatenate(list(lesions)), np.concatenate(list(called))),
    )


def localise(lesion: Bools, scores: Floats) -> SlideLocalisation:
    """Figures of one slide; NaN where it has no lesion tile, or nothing else.

    lesion, scores: (n,), n > 0.
    """
    lesion = np.asarray(lesion, dtype=bool)
    scores = np.asarray(scores, dtype=np.float64)
    both = bool(lesion.any() and not lesion.all())
    return SlideLocalisation(
        n_tiles=len(lesion),
        n_lesion=int(lesion.sum()),
        prevalence=float(lesion.mean()),
        auc=auc(lesion, scores),
        average_precision=average_precision(lesion, scores) if both else float("nan"),
    )


def localise_all(lesions: Sequence[Bools], scores: Sequence[Floats]) -> Localisation:
    """Figures over several slides, one array each. Raises ValueError without any slide."""
    each = [localise(lesion, score) for lesion, score in zip(lesions, scores, strict=True)]
    slides = np.concatenate([np.full(len(lesion), place) for place, lesion in enumerate(lesions)])
    truth, values = np.concatenate(list(lesions)).astype(bool), np.concatenate(list(scores)).astype(np.float64)
    pairs = concordance(truth, values, groups=slides, patients=slides, n_patients=len(each))
    return Localisation(
        n_slides=sum(bool(np.isfinite(one.auc)) for one in each),
        n_tiles=len(truth),
        prevalence=float(truth.mean()),
        mean_prevalence=macro(np.array([one.prevalence for one in each if np.isfinite(one.auc)])),
        mean_auc=macro(np.array([one.auc for one in each])),
        mean_average_precision=macro(np.array([one.average_precision for one in each])),
        within_slide_auc=pairs.auc,
        pooled_auc=auc(truth, values),
        pooled_average_precision=average_precision(truth, values),
    )


def mean_interval(values: Floats, patients: Sequence[str], *, seed: int = 0) -> intervals.Interval:
    """Of the plain mean over slides or bags, drawing patients with all of theirs; not defined below 10 patients.

    values, patients: (n,), NaN is left out.
    """
    defined = np.isfinite(values)
    names, place = np.unique(np.asarray(patients, dtype=object).astype(str)[defined], return_inverse=True)
    if len(names) < intervals.FEW:
        return intervals.percentile_interval(np.empty(0))
    weights = intervals.patient_weights(np.zeros(len(names), dtype=np.int64), seed=seed)
    return intervals.percentile_interval(intervals.bootstrap_mean(values[defined], weights=weights[:, place]))
