"""Where the methods look: held-out tile scores against the annotations of the lesion."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import shapely

from wsi_mil.annotations.reading import lesion_fraction, read_polygons
from wsi_mil.errors import UserError
from wsi_mil.heatmap import ScoreColumn, TileScores
from wsi_mil.outcomes import Failure
from wsi_mil.report.detection import Detection, Detector, detection_of
from wsi_mil.report.study import Study
from wsi_mil.results.thresholds import threshold_of
from wsi_mil.runs import FoldKey
from wsi_mil.statistics.froc import SlideMarks
from wsi_mil.statistics.intervals import Interval
from wsi_mil.statistics.localisation import (
    Localisation,
    MapDice,
    SlideLocalisation,
    dice,
    dice_all,
    localise,
    localise_all,
    mean_interval,
)
from wsi_mil.statistics.ranking import Bools, Floats

LESION_TILE = 0.5
"""A tile counts as lesion when the annotation covers at least this share of it."""
SEED = 20240502
NO_CUT = (
    "not defined: this score has no threshold of its own, and none can be chosen on validation slides, whose tile "
    "scores a run does not keep"
)
NO_CUT_OF_CLASSES = "not defined: there is a threshold for two classes only"


@dataclass(frozen=True, kw_only=True)
class SlidePointing:
    """One slide, one kind of score."""

    slide: str
    patient: str
    kind: str
    figures: SlideLocalisation
    cut: float
    """Where the tile map is cut, the mean over the models that scored it; NaN where there is no such cut."""
    dice: float
    """At the cut; NaN without one, or without a lesion tile."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Dice of the tile maps with the annotation, at a threshold in which no test slide had a say.

    For the probability of the positive class a tile is called from the model's own threshold for its patients up, which
    validation patients chose (or 0.5 stands in). It was fitted to patients, not to tiles: annotated validation slides
    leave no scores of tiles in a run. Attention and contributions have no threshold, so they have no Dice.
    """

    figures: MapDice | None
    interval: Interval
    """Of the mean over slides, by resampling patients; none below 10 patients."""
    cut: str
    """Where the threshold comes from, or why there is none."""


@dataclass(frozen=True, kw_only=True)
class Pointing:
    """One method, one kind of score (attention, probability, contribution), all annotated slides."""

    method: str
    kind: str
    own: bool
    """The method's own way of pointing, the one that heat maps draw."""
    slides: tuple[SlidePointing, ...]
    together: Localisation
    interval: Interval
    """Of the mean AUC over slides, by resampling patients; none below 10 patients."""
    overlap: Overlap
    detection: Detection | None
    """FROC of the method's own score; None for the others, and where no slide has an outline."""


def held_out_keys(study: Study, method: str, slide: str, patient: str) -> list[FoldKey]:
    """Models of a method that scored the slide without having seen its patient."""
    folds = study.folds
    own = folds[(folds["patient"] == patient) & (folds["part"] == "test")]
    unseen = {(int(repeat), int(fold)) for repeat, fold in own[["repeat", "fold"]].itertuples(index=False)}
    return [key for key in study.run.score_keys(method, slide) if (key.repeat, key.fold) in unseen]


def point(study: Study) -> tuple[list[Pointing], list[Failure]]:
    """Compare all methods with all annotations. A slide that cannot be compared is a Failure, and the rest goes on."""
    annotated = study.used[study.used["annotation"] != ""]
    failures: list[Failure] = []
    polygons: dict[str, tuple[shapely.Polygon, ...]] = {}
    for slide, path in annotated[["slide", "annotation"]].itertuples(index=False):
        try:
            polygons[slide] = read_polygons(Path(path), bounds_l0=_bounds_l0(study, slide))
        except UserError as error:
            failures.append(Failure(item=slide, outcome="no annotation", reason=str(error)))
    detector = Detector(study, polygons)
    found: list[Pointing] = []
    for method in study.methods:
        kinds, marks, failed = _collect(study, method.label, detector)
        failures.extend(failed)
        found.extend(
            _together(method.label, parts, place == 0, detection_of(marks, detector.negatives_are))
            for place, parts in enumerate(kinds)
        )
    return found, failures


def _bounds_l0(study: Study, slide: str) -> tuple[int, int, int, int]:
    """The scanned area of a slide, from its stored scores; none where no scores can be read, to compare with."""
    for method in study.methods:
        for key in study.run.score_keys(method.label, slide):
            try:
                return study.run.scores(method.label, key, slide).geometry.bounds_l0
            except (UserError, OSError):
                continue  # said where the scores are compared
    return 0, 0, 0, 0


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """One slide and kind of score, tile by tile."""

    about: SlidePointing
    lesion: Bools
    scores: Floats
    called: Bools | None
    cut: str


def _collect(
    study: Study, method: str, detector: Detector
) -> tuple[list[list[_Part]], list[tuple[str, SlideMarks]], list[Failure]]:
    """For each kind of score, in the method's order, its annotated slides; and for the first the detections of all
    slides that count in FROC, each with its patient.
    """
    kinds: dict[str, list[_Part]] = {}
    marks: list[tuple[str, SlideMarks]] = []
    failures: list[Failure] = []
    rows = study.used[study.used["slide"].isin([*detector.polygons, *detector.negatives])]
    for slide, patient, target in rows[["slide", "patient", "target"]].itertuples(index=False):
        try:
            keys = held_out_keys(study, method, slide, patient)
            stored = [study.run.scores(method, key, slide) for key in keys]
            columns = _one_a_kind(stored[0].columns, study.positive if study.binary else target) if stored else []
            values = [np.mean([_comparable(one, column) for one in stored], axis=0) for column in columns]
            if slide in detector.polygons and stored:
                lesion = _lesion_tiles(stored[0], detector.polygons[slide])
                for column, scores in zip(columns, values, strict=True):
                    cut, source = _cut(study, method, keys, column)
                    part = _part(slide, patient, column.kind, lesion, scores, cut=cut, source=source)
                    kinds.setdefault(column.kind, []).append(part)
            if columns and detector.counts(slide):
                marks.append((patient, detector.marks(stored[0], values[0])))
        except (UserError, OSError, ValueError) as error:
            failures.append(Failure(item=slide, outcome="not compared", reason=f"{method}: {error}"))
    return list(kinds.values()), marks, failures


def _lesion_tiles(scores: TileScores, polygons: tuple[shapely.Polygon, ...]) -> Bools:
    return lesion_fraction(scores.coords_l0, scores.geometry.tile_size_l0, polygons) >= LESION_TILE


def _part(slide: str, patient: str, kind: str, lesion: Bools, scores: Floats, *, cut: float, source: str) -> _Part:
    called = scores >= cut if np.isfinite(cut) else None
    about = SlidePointing(
        slide=slide,
        patient=patient,
        kind=kind,
        figures=localise(lesion, scores),
        cut=cut,
        dice=float("nan") if called is None else dice(lesion, called),
    )
    return _Part(about=about, lesion=lesion, scores=scores, called=called, cut=source)


def _cut(study: Study, method: str, keys: list[FoldKey], column: ScoreColumn) -> tuple[float, str]:
    """Where these models' tile map is cut, and the words for it; NaN where it is not defined."""
    if column.kind != "probability":
        return float("nan"), NO_CUT
    if not study.binary:
        return float("nan"), NO_CUT_OF_CLASSES
    cuts = [threshold_of(study.run, method, key, study.classes, target=study.target) for key in keys]
    return float(np.mean([cut.value for cut in cuts])), "; ".join(sorted({cut.source for cut in cuts}))


def _one_a_kind(columns: tuple[ScoreColumn, ...], sought: str) -> list[ScoreColumn]:
    """Of each kind the column that speaks of no class, or of the sought one."""
    kept: dict[str, ScoreColumn] = {}
    for column in columns:
        if column.label in (None, sought):
            kept.setdefault(column.kind, column)
    return list(kept.values())


def _comparable(scores: TileScores, column: ScoreColumn) -> Floats:
    """Attention as lift over uniform, since softmax weights shrink with the number of tiles."""
    values = scores.column(column.name).astype(np.float64)
    return values / values.mean() if column.kind == "attention" and values.mean() > 0 else values


def _together(method: str, parts: list[_Part], own: bool, detection: Detection | None) -> Pointing:
    slides = tuple(part.about for part in parts)
    return Pointing(
        method=method,
        kind=slides[0].kind,
        own=own,
        slides=slides,
        together=localise_all([part.lesion for part in parts], [part.scores for part in parts]),
        interval=_interval([slide.figures.auc for slide in slides], slides),
        overlap=_overlap(parts, slides),
        detection=detection if own else None,
    )


def _overlap(parts: list[_Part], slides: tuple[SlidePointing, ...]) -> Overlap:
    cut = "; ".join(sorted({part.cut for part in parts}))
    called = [part.called for part in parts if part.called is not None]
    whole = len(called) == len(parts)
    return Overlap(
        figures=dice_all([part.lesion for part in parts], called) if whole else None,
        interval=_interval([slide.dice for slide in slides], slides),
        cut=cut,
    )


def _interval(values: list[float], slides: tuple[SlidePointing, ...]) -> Interval:
    return mean_interval(np.array(values), [slide.patient for slide in slides], seed=SEED)
