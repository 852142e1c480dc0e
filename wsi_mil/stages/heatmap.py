"""wsi-mil heatmap: pictures and QuPath files from stored scores. Nothing is encoded or predicted again."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tiling.atomic import write_bytes
from tiling.slide import Slide
from wsi_mil.errors import ConfigError, RunError, UserError
from wsi_mil.heatmap import (
    Scale,
    ScoreColumn,
    TileScores,
    caution,
    default_colormap,
    default_column,
    geojson,
    mean_scores,
    meaning,
    overlay,
    rasterise,
    scales_of,
    shade,
)
from wsi_mil.outcomes import Failure, Summary
from wsi_mil.progress import progress
from wsi_mil.results.cases import Case, SlideFinder, check_same_slide, check_tested, read_cases, slides_root
from wsi_mil.results.heatmap_figure import figure
from wsi_mil.runs import RunDir

_WIDEST_PX = 20_000
_NOTE = {
    "crossval": "out-of-fold: drawn by {}, which did not see this patient",
    "predict": "drawn by the run's models, which were trained on another cohort",
}


def heatmap(
    run: Path,
    *,
    slides: Path | None = None,
    out: Path | None = None,
    slide: list[str] | None = None,
    method: str | None = None,
    column: str | None = None,
    scale: Scale = "percentile",
    width_px: int = 1200,
) -> Summary:
    """Draw each slide's heatmap (PNG) and write its tiles for QuPath (GeoJSON), from stored scores.

    Args:
        run: The run folder that crossval or predict wrote.
        slides: Folder of the slides; the one the run was made from when not given.
        out: Folder for the pictures; `heatmaps` in the run folder when not given.
        slide: Ids of the slides to draw; all tested slides when not given.
        method: Label of one method; all methods of the run when not given.
        column: Which scores to draw, such as `attention` or `probability:tumour`; the method's own, of the predicted
            class where it has one a class, when not given.
        scale: percentile (share of the slide's tiles that score lower), raw, or lift (attention times number of tiles).
        width_px: Width of the slide in the picture.
    """
    if not 1 <= width_px <= _WIDEST_PX:
        raise ConfigError(f"width_px is {width_px}; it must be from 1 to {_WIDEST_PX}.")
    folder = RunDir(run)
    check_tested(folder)
    finder = SlideFinder(slides_root(folder, slides))
    kind = str(folder.config().get("kind", "crossval"))
    jobs = list(_jobs(folder, methods=[method] if method else folder.methods(), wanted=slide or []))
    jobs.sort(key=lambda job: job[1].slide_id)  # one slide after the other, so that each is read once
    ground = _Ground(finder, width_px)
    target = out or folder.heatmaps_dir
    done, failures = [], []
    with progress("heatmap", len(jobs), "pictures") as bar:
        for label, case in jobs:
            item = f"{label}/{case.slide_id}"
            try:
                scores = out_of_fold_scores(folder, label, case)
                which = choose_column(scores, column, case)
                picture = _draw(case, scores, which, ground=ground, scale=scale, about=(label, kind))
                _write(target / label, case.slide_id, picture, geojson(scores, which.name))
                done.append(item)
            except (UserError, OSError, ValueError) as error:
                failures.append(Failure(item=item, outcome=getattr(error, "outcome", "failed"), reason=str(error)))
            bar.advance()
    notes = (f"Pictures and GeoJSON (drop it on the slide in QuPath) are in {target}.",) if done else ()
    return Summary(stage="heatmap", out=target, done=tuple(done), failures=tuple(failures), notes=notes)


def out_of_fold_scores(run: RunDir, method: str, case: Case) -> TileScores:
    """The mean over the models that were tested on this slide. Raises RunError when none of them stored scores."""
    keys = [key for key in case.keys if run.scores_path(method, key, case.slide_id).is_file()]
    if not keys:
        raise RunError(
            f"{case.slide_id}: {method} stored no tile scores for it. Give the command that made {run.path.name} "
            f"again; it redoes what is missing."
        )
    return mean_scores([run.scores(method, key, case.slide_id) for key in keys])


def choose_column(scores: TileScores, column: str | None, case: Case) -> ScoreColumn:
    """The column that was asked for, else the method's own. Raises ConfigError with the names there are."""
    if column is None:
        return default_column(scores.columns, case.predicted)
    for candidate in scores.columns:
        if candidate.name == column:
            return candidate
    raise ConfigError(f"{case.slide_id}: no scores {column!r}; there are {', '.join(c.name for c in scores.columns)}.")


def _jobs(run: RunDir, *, methods: list[str], wanted: list[str]) -> Iterator[tuple[str, Case]]:
    for label in methods:
        cases = read_cases(run, label)
        unknown = sorted(set(wanted) - {case.slide_id for case in cases})
        if unknown:
            raise ConfigError(f"{label} was not tested on {', '.join(unknown)}. {_closest(unknown[0], cases)}")
        yield from ((label, case) for case in cases if not wanted or case.slide_id in wanted)


def _closest(name: str, cases: list[Case]) -> str:
    import difflib

    ids = [case.slide_id for case in cases]
    near = difflib.get_close_matches(name, ids, n=3) or ids[:3]
    return f"Among its {len(ids)} slides are {', '.join(near)}."


class _Ground:
    """Thumbnails to draw on; the last one is kept, since several methods draw on the same slide."""

    def __init__(self, finder: SlideFinder, width_px: int) -> None:
        self._finder, self._width_px = finder, width_px
        self._slide_id = ""
        self._thumbnail: NDArray[np.uint8] = np.empty((0, 0, 3), np.uint8)

    def thumbnail(self, case: Case, scores: TileScores) -> NDArray[np.uint8]:
        """The slide of a case, (h, w, 3), about as wide as asked for. Raises SlideError for another slide's file."""
        if case.slide_id != self._slide_id:
            mpp = scores.geometry.mpp[0] * max(1.0, scores.geometry.level0_size[0] / self._width_px)
            with Slide(self._finder.find(case), slide_id=case.slide_id, cohort_mpp=case.mpp) as opened:
                check_same_slide(opened, scores)
                self._thumbnail = opened.thumbnail(mpp=mpp)
            self._slide_id = case.slide_id
        return self._thumbnail


def _draw(
    case: Case,
    scores: TileScores,
    column: ScoreColumn,
    *,
    ground: _Ground,
    scale: Scale,
    about: tuple[str, str],
) -> NDArray[np.uint8]:
    method, kind = about
    shown: Scale = scale if scale in scales_of(column) else "raw"
    width_l0 = scores.geometry.level0_size[0]
    thumbnail = ground.thumbnail(case, scores)
    raster = rasterise(scores, column.name)
    picture = overlay(thumbnail, raster, scores.geometry, column=column, scale=shown)
    said = case.said + (f", label {case.label}" if case.label else "")
    told = meaning(column, shown, classed=bool(case.probabilities))
    of_class = f" · {column.label}" if column.label and column.label not in column.name else ""
    return figure(
        picture,
        shade(raster, column, scale=shown),
        colormap=default_colormap(column),
        mpp=scores.geometry.mpp[0] * width_l0 / thumbnail.shape[1],
        title=f"{case.slide_id} · {method} · {column.name}{of_class}",
        lines=(said, _NOTE.get(kind, "drawn by models of this run").format(", ".join(map(str, case.keys)))),
        legend=f"{told} {caution(column)} Research use only, not for diagnosis.",
    )


def _write(folder: Path, slide_id: str, picture: NDArray[np.uint8], collection: dict[str, object]) -> None:
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, format="PNG", compress_level=2)
    write_bytes(folder / f"{slide_id}.png", stream.getvalue())
    text = json.dumps(collection, separators=(",", ":"), ensure_ascii=False).encode()
    write_bytes(folder / f"{slide_id}.geojson", text)
