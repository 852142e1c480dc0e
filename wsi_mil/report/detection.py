"""Which slides count when lesions are counted, and what each method's heat maps detect on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import shapely

from wsi_mil.annotations.lesions import Lesions, lesions_of, mark
from wsi_mil.heatmap import TileScores
from wsi_mil.report.study import Study
from wsi_mil.statistics.froc import Froc, SlideMarks, froc, score_interval
from wsi_mil.statistics.intervals import Interval
from wsi_mil.statistics.ranking import Floats

SEED = 20240503


@dataclass(frozen=True, kw_only=True)
class Detection:
    """FROC of one method's own score, over all slides that count.

    The scores of different models meet on one scale here (attention as lift over the slide's mean), as in the pooled
    tile AUC.
    """

    froc: Froc
    interval: Interval
    """Of the mean sensitivity, by resampling patients; none below 10 patients with a lesion."""
    negatives_are: str
    """Which slides count as free of lesions."""


class Detector:
    """The lesions of a study's slides, worked out once, and the slides that hold none.

    A slide counts as free of lesions when its annotation file holds no outline (and its label is not the positive
    class, which would contradict it), or, in a study of two classes, when it is of the negative class and has no
    annotation. The latter only while no slide of the negative class is outlined: else what is outlined is something
    that the negative class has too, and a slide without annotation may hold it.
    """

    def __init__(self, study: Study, polygons: Mapping[str, tuple[shapely.Polygon, ...]]) -> None:
        self.polygons = dict(polygons)
        self._lesions: dict[str, Lesions] = {}
        targets = dict(study.used[["slide", "target"]].itertuples(index=False))
        positive = study.positive if study.binary else None
        empty = {slide for slide, found in polygons.items() if not found and targets[slide] != positive}
        negative = study.classes[0] if study.binary else None
        outlined = any(found and targets[slide] == negative for slide, found in polygons.items())
        plain = study.used[(study.used["annotation"] == "") & (study.used["target"] == negative)]
        unannotated = set() if outlined else set(plain["slide"])
        self.negatives = frozenset(empty | unannotated)
        self.negatives_are = (
            f"slides of class {negative} without annotation, and slides whose annotation holds no outline"
            if negative is not None and not outlined
            else "slides whose annotation holds no outline"
        )

    def counts(self, slide: str) -> bool:
        """Whether the slide counts in FROC: its lesions are outlined, or it has none."""
        return slide in self.negatives or bool(self.polygons.get(slide))

    def marks(self, scores: TileScores, values: Floats) -> SlideMarks:
        """What this tile map detects. values: (n,) one score a tile of `scores`."""
        if scores.slide_id not in self._lesions:
            outlines = self.polygons.get(scores.slide_id, ())
            self._lesions[scores.slide_id] = lesions_of(outlines, scores.geometry.mpp)
        return mark(scores, values, self._lesions[scores.slide_id])


def detection_of(marks: Sequence[tuple[str, SlideMarks]], negatives_are: str) -> Detection | None:
    """The figures of one method; None without a slide. marks: of each slide, with its patient."""
    if not marks:
        return None
    slides, patients = [slide for _, slide in marks], [patient for patient, _ in marks]
    return Detection(
        froc=froc(slides), interval=score_interval(slides, patients, seed=SEED), negatives_are=negatives_are
    )
