"""The worst errors, seen: thumbnail and heat map of a model, or of models, that had not seen the patient."""

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import shapely
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from tiling.slide import Slide
from wsi_mil.annotations.reading import read_polygons
from wsi_mil.errors import UserError
from wsi_mil.heatmap import ScoreColumn, TileGeometry, TileScores, default_column, meaning, overlay, rasterise
from wsi_mil.outcomes import Failure
from wsi_mil.report.pointing import held_out_keys
from wsi_mil.report.study import Study
from wsi_mil.report.tile_pictures import Place, choose_tiles, cut_tiles, mark_tiles
from wsi_mil.results.cases import SlideFinder, check_same_slide
from wsi_mil.runs import FoldKey
from wsi_mil.statistics.ranking import Floats, Ints

Rgb = NDArray[np.uint8]

SIDE_PX = 420
LISTED = 10
PICTURED = 4


@dataclass(frozen=True, kw_only=True)
class TilePicture:
    """One tile of the slide. Its address is a data: URI."""

    uri: str
    mark: str
    highest: bool
    score: float


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What is shown of one slide. Addresses are data: URIs; empty where there is nothing to show."""

    slide: str
    thumbnail: str
    heatmap: str
    caption: str
    remark: str
    """Why there is no heat map; empty when there is one."""
    tiles: tuple[TilePicture, ...]
    """Highest score first, then from the lowest up; empty without the slide."""


class JudgedPatients(Protocol):
    """One row a patient."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Names."""

    @property
    def targets(self) -> Ints:
        """(n,) place of the true class."""

    @property
    def decisions(self) -> Ints:
        """(n,) place of the class that was called, of which a heat map speaks."""

    @property
    def losses(self) -> Floats:
        """(n,) the higher, the worse the error."""


class Judged(Protocol):
    """As much of a method's figures as its worst cases need."""

    @property
    def label(self) -> str:
        """Of the method."""

    @property
    def patients(self) -> JudgedPatients:
        """Who was judged."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A patient with a high loss."""

    place: int
    """Row in the method's patients."""
    picture: Picture | None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Seen:
    """What was read from the slide's file; nothing where it is not at hand."""

    thumbnail: Rgb | None = None
    tiles: tuple[Rgb, ...] = ()
    trouble: str = ""
    """Why there is no tile although there is a thumbnail."""


def worst_cases(study: Study, figures: Judged, *, slides_root: Path | None) -> tuple[list[Case], list[Failure]]:
    """The patients with the highest loss, the first few with a picture; what cannot be shown is a Failure."""
    finder = SlideFinder(slides_root) if slides_root is not None else None
    order = np.argsort(-figures.patients.losses, kind="stable")[:LISTED]
    cases, failures = [], []
    for rank, place in enumerate(order.tolist()):
        picture = None
        if rank < PICTURED:
            picture, failed = _picture(study, figures, place, finder=finder)
            failures.extend(failed)
        cases.append(Case(place=place, picture=picture))
    return cases, failures


def data_uri(kind: str, content: bytes) -> str:
    """An image that travels inside the page."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _picture(
    study: Study, figures: Judged, place: int, *, finder: SlideFinder | None
) -> tuple[Picture | None, list[Failure]]:
    patient = figures.patients.ids[place]
    slide = _telling_slide(study, figures, patient, int(figures.patients.targets[place]))
    if slide is None:
        return None, []
    keys = held_out_keys(study, figures.label, slide, patient)
    failures: list[Failure] = []
    scores: TileScores | None = None
    try:
        scores = study.run.scores(figures.label, keys[0], slide) if keys else None
    except UserError as error:
        failures.append(Failure(item=slide, outcome="no heat map", reason=str(error)))
    if scores is not None and _is_no_slide(study, slide, scores.geometry):
        return None, []
    predicted = study.classes[int(figures.patients.decisions[place])]
    column = default_column(scores.columns, predicted) if scores is not None and scores.columns else None
    chosen = choose_tiles(scores, column) if scores is not None and column is not None else ()
    seen = _Seen()
    try:
        seen = _look(study, slide, finder, scores, chosen)
    except Exception as error:  # any reader, any damaged file: a picture must not cost the report
        failures.append(Failure(item=slide, outcome="no thumbnail", reason=str(error)))
    if seen.trouble:
        failures.append(Failure(item=slide, outcome="no tiles", reason=seen.trouble))
    try:
        return _compose(study, slide, seen, scores, column, chosen, keys), failures
    except Exception as error:  # as above
        failures.append(Failure(item=slide, outcome="no heat map", reason=str(error)))
        return _compose(study, slide, seen, None, None, (), keys), failures


def _is_no_slide(study: Study, slide: str, geometry: TileGeometry) -> bool:
    """Whether a bag was imported from numbers that never were tiles: no file is named, and a tile is one pixel."""
    path = study.used["path"][study.used["slide"] == slide].iloc[0]
    return not path and max(geometry.tile_size_l0) <= 1


def _compose(
    study: Study,
    slide: str,
    seen: _Seen,
    scores: TileScores | None,
    column: ScoreColumn | None,
    chosen: tuple[Place, ...],
    keys: list[FoldKey],
) -> Picture:
    if scores is None or column is None:
        remark = "No heat map: no tile scores are stored for this slide, or they cannot be drawn."
        return Picture(slide=slide, thumbnail=_jpeg(seen.thumbnail), heatmap="", caption="", remark=remark, tiles=())
    heat, caption = _heat(
        scores, seen.thumbnail, column, classed=len(study.classes) > 1, drawn_by=_drawn_by(study, keys[0])
    )
    outline = _outline(study, slide, scores.geometry)
    size_l0 = scores.geometry.level0_size
    thumbnail = _outlined(seen.thumbnail, outline, size_l0)
    if thumbnail is not None:
        thumbnail = mark_tiles(thumbnail, scores, chosen)
    return Picture(
        slide=slide,
        thumbnail=_jpeg(thumbnail),
        heatmap=_jpeg(_outlined(heat, outline, size_l0)),
        caption=caption + (" Black line: the annotation." if outline else ""),
        remark="",
        tiles=tuple(
            TilePicture(uri=_jpeg(tile), mark=place.mark, highest=place.highest, score=place.score)
            for place, tile in zip(chosen, seen.tiles, strict=False)  # no tile where the slide is not at hand
        ),
    )


def _telling_slide(study: Study, figures: Judged, patient: str, target: int) -> str | None:
    """At slide level the patient's slide with the highest loss, else its first one."""
    own = sorted(study.used["slide"][study.used["patient"] == patient])
    if not own:
        return None
    test = next(method.test for method in study.methods if method.label == figures.label)
    losses = {
        slide: float(p[target])
        for slide, name, p in zip(test.slides, test.patients, test.probabilities, strict=True)
        if name == patient and slide
    }
    return min(sorted(losses), key=lambda slide: losses[slide]) if losses else str(own[0])


def _look(
    study: Study, slide: str, finder: SlideFinder | None, scores: TileScores | None, chosen: tuple[Place, ...]
) -> _Seen:
    """The slide small, and the chosen tiles. Raises SlideError unless the scored file is found; nothing is seen where
    no folder of slides is known."""
    if finder is None:
        return _Seen()
    row = study.used[study.used["slide"] == slide].iloc[0]
    path = finder.locate(slide, path=row["path"])
    mpp = (float(row["mpp_x"]), float(row["mpp_y"])) if row["mpp_x"] and row["mpp_y"] else None
    with Slide(path, slide_id=slide, cohort_mpp=mpp) as opened:
        if scores is not None:
            check_same_slide(opened, scores)
        width, height = opened.size_l0
        longest_um = max(width * opened.info.mpp[0], height * opened.info.mpp[1])
        thumbnail = opened.thumbnail(mpp=longest_um / SIDE_PX)
        try:
            tiles = tuple(cut_tiles(opened, scores, chosen)) if scores is not None else ()
        except Exception as error:  # as above: a damaged place must not cost the thumbnail
            return _Seen(thumbnail=thumbnail, trouble=str(error))
        return _Seen(thumbnail=thumbnail, tiles=tiles)


def _heat(
    scores: TileScores, thumbnail: Rgb | None, column: ScoreColumn, *, classed: bool, drawn_by: str
) -> tuple[Rgb, str]:
    """The picture and what stands below it. classed: whether the model's outputs are classes."""
    ground = thumbnail if thumbnail is not None else _blank(scores)
    picture = overlay(ground, rasterise(scores, column.name), scores.geometry, column=column)
    about = [f"Class shown: {column.label}." if column.label is not None else "It speaks of no particular class."]
    told = [meaning(column, "percentile", classed=classed), *(about if classed else []), drawn_by]
    return picture, " ".join(told)


def _drawn_by(study: Study, key: FoldKey) -> str:
    if study.external is not None:
        return "Drawn from the mean scores of all models."
    return f"Drawn by model {key}, which did not see this patient."


def _blank(scores: TileScores) -> Rgb:
    width, height = scores.geometry.level0_size
    shrink = SIDE_PX / max(width, height)
    return np.full((max(1, round(height * shrink)), max(1, round(width * shrink)), 3), 255, dtype=np.uint8)


def _outline(study: Study, slide: str, geometry: TileGeometry) -> tuple[shapely.Polygon, ...]:
    """The annotation of a slide; none where there is no readable one (that is reported where it is measured)."""
    path = study.used["annotation"][study.used["slide"] == slide].iloc[0]
    try:
        return read_polygons(Path(path), bounds_l0=geometry.bounds_l0) if path else ()
    except UserError:
        return ()


def _outlined(
    picture: Rgb | None, polygons: tuple[shapely.Polygon, ...], size_l0: tuple[int, int] | None
) -> Rgb | None:
    if picture is None or not polygons or size_l0 is None:
        return picture
    image = Image.fromarray(picture)
    draw = ImageDraw.Draw(image)
    shrink = np.array([image.width / size_l0[0], image.height / size_l0[1]])
    for polygon in polygons:
        for ring in (polygon.exterior, *polygon.interiors):
            points = [tuple(point) for point in (np.asarray(ring.coords) * shrink).tolist()]
            draw.line(points, fill=(255, 255, 255), width=4)
            draw.line(points, fill=(0, 0, 0), width=2)
    return np.asarray(image)


def _jpeg(picture: Rgb | None) -> str:
    if picture is None:
        return ""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="JPEG", quality=85)
    return data_uri("image/jpeg", buffer.getvalue())
