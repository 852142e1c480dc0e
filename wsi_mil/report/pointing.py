"""Where the methods look: held-out tile scores against the annotations of the lesion."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import shapely

from wsi_mil.annotations import lesion_fraction, read_polygons
from wsi_mil.errors import UserError
from wsi_mil.heatmap import ScoreColumn, TileScores
from wsi_mil.outcomes import Failure
from wsi_mil.report.study import Study
from wsi_mil.runs import FoldKey
from wsi_mil.statistics import intervals
from wsi_mil.statistics.localisation import Localisation, SlideLocalisation, localise, localise_all
from wsi_mil.statistics.ranking import Bools, Floats

LESION_TILE = 0.5
"""A tile counts as lesion when the annotation covers at least this share of it."""
SEED = 20240502


@dataclass(frozen=True, kw_only=True)
class SlidePointing:
    """One slide, one kind of score."""

    slide: str
    patient: str
    kind: str
    figures: SlideLocalisation


@dataclass(frozen=True, kw_only=True)
class Pointing:
    """One method, one kind of score (attention, probability, contribution), all annotated slides."""

    method: str
    kind: str
    own: bool
    """The method's own way of pointing, the one that heat maps draw."""
    slides: tuple[SlidePointing, ...]
    together: Localisation
    interval: intervals.Interval
    """Of the mean AUC over slides, by resampling patients; none below 10 patients."""


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
    found: list[Pointing] = []
    for method in study.methods:
        parts, failed = _collect(study, method.label, polygons)
        failures.extend(failed)
        found.extend(_together(method.label, kind, place == 0, slides) for place, (kind, slides) in enumerate(parts))
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


_Part = tuple[SlidePointing, Bools, Floats]


def _collect(
    study: Study, method: str, polygons: dict[str, tuple[shapely.Polygon, ...]]
) -> tuple[list[tuple[str, list[_Part]]], list[Failure]]:
    """Kinds of score in the method's order, each with its slides."""
    kinds: dict[str, list[_Part]] = {}
    failures: list[Failure] = []
    rows = study.used[study.used["slide"].isin(list(polygons))]
    for slide, patient, target in rows[["slide", "patient", "target"]].itertuples(index=False):
        try:
            keys = held_out_keys(study, method, slide, patient)
            stored = [study.run.scores(method, key, slide) for key in keys]
            for kind, part in _slide_parts(study, stored, slide, patient, target, polygons[slide]):
                kinds.setdefault(kind, []).append(part)
        except (UserError, OSError, ValueError) as error:
            failures.append(Failure(item=slide, outcome="not compared", reason=f"{method}: {error}"))
    return list(kinds.items()), failures


def _slide_parts(
    study: Study,
    stored: list[TileScores],
    slide: str,
    patient: str,
    target: str,
    polygons: tuple[shapely.Polygon, ...],
) -> list[tuple[str, _Part]]:
    if not stored:
        return []
    first = stored[0]
    lesion = lesion_fraction(first.coords_l0, first.geometry.tile_size_l0, polygons) >= LESION_TILE
    sought = study.positive if study.binary else target
    parts = []
    for column in _one_a_kind(first.columns, sought):
        scores = np.mean([_comparable(one, column) for one in stored], axis=0)
        figures = localise(lesion, scores)
        about = SlidePointing(slide=slide, patient=patient, kind=column.kind, figures=figures)
        parts.append((column.kind, (about, lesion, scores)))
    return parts


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


def _together(method: str, kind: str, own: bool, parts: list[_Part]) -> Pointing:
    slides = tuple(about for about, _, _ in parts)
    return Pointing(
        method=method,
        kind=kind,
        own=own,
        slides=slides,
        together=localise_all([lesion for _, lesion, _ in parts], [scores for _, _, scores in parts]),
        interval=_interval(slides),
    )


def _interval(slides: tuple[SlidePointing, ...]) -> intervals.Interval:
    defined = [slide for slide in slides if np.isfinite(slide.figures.auc)]
    patients = sorted({slide.patient for slide in defined})
    if len(patients) < intervals.FEW:
        return intervals.percentile_interval(np.empty(0))
    weights = intervals.patient_weights(np.zeros(len(patients), dtype=np.int64), seed=SEED)
    rows = weights[:, [patients.index(slide.patient) for slide in defined]]
    values = np.array([slide.figures.auc for slide in defined])
    return intervals.percentile_interval(intervals.bootstrap_mean(values, weights=rows))
