"""Stage `tile`: slides -> one grid file and one QC picture a slide, a contact sheet and a table."""

import io
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import cv2
import numpy as np
import pandas as pd
import yaml

from tiling.atomic import remove_leftovers, write_bytes, write_text
from tiling.discovery import SlideSource
from tiling.errors import NoTissue, UserError
from tiling.geometry import plan_read, upsampling
from tiling.grid import TileGrid, TileSpec
from tiling.masks import digest_of_mask
from tiling.pipeline import Survey, select_tiles, survey_slide
from tiling.qc import CAPTION_PX, PICTURE_PX, Cell, Rgb, cell_side, contact_sheet, qc_picture
from tiling.slide import Slide, SlideInfo
from tiling.store import grid_is_complete, grid_is_intact, read_grid, write_grid
from wsi_mil.cohort import CohortSpec, find_sources
from wsi_mil.errors import ConfigError
from wsi_mil.outcomes import Failure, Summary
from wsi_mil.progress import progress
from wsi_mil.table.records import Exclusion
from wsi_mil.workers import run_in_processes

_LOG = logging.getLogger(__name__)
_COLUMNS = (
    *("slide", "outcome", "tiles", "tissue_mm2", "mpp_x", "mpp_y", "mpp_source"),
    *("level", "tile_size_l0", "reason", "warnings"),
)
_JPEG_QUALITY = 88
_WHOLE_FOLDER = CohortSpec()
_USUAL_TILES = TileSpec()


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One slide's work, small enough to be sent to another process."""

    source: SlideSource
    spec: TileSpec
    default_mpp: float | None
    folder: Path

    @property
    def grid_path(self) -> Path:
        return self.folder / "grids" / f"{self.source.slide_id}.h5"

    @property
    def qc_path(self) -> Path:
        return self.folder / "qc" / f"{self.source.slide_id}.jpg"


@dataclass(frozen=True, kw_only=True)
class _Result:
    """One slide's row of tiles.csv."""

    slide_id: str
    outcome: str
    reused: bool = False
    row: dict[str, str]


def tile(
    slides: Path,
    *,
    out: Path,
    table: Path | None = None,
    cohort: CohortSpec = _WHOLE_FOLDER,
    tiles: TileSpec = _USUAL_TILES,
    workers: int = 2,
) -> Summary:
    """Find the tissue of every slide and lay a grid of tiles over it.

    Args:
        slides: Folder of slides, searched with all its subfolders. Nothing is ever written there.
        out: Folder for results; a subfolder named by the settings is made in it.
        table: Cohort table; only the slides it names are tiled. Without it, all of the folder.
        cohort: How the table is read.
        tiles: Size and place of the tiles, and what counts as tissue.
        workers: Processes that work side by side. The results do not depend on it.

    """
    if workers < 1:
        raise ConfigError(f"workers is {workers}; it must be 1 or more.")
    folder = out / f"tiles_{tiles.mpp:g}mpp_{tiles.tile_px}px_{tiles.digest()}"
    _refuse_inside(folder, slides)
    sources, excluded, problems = find_sources(slides, table, cohort)
    if not sources and not problems:
        raise ConfigError(f"{slides}: no slide was found there. Give a folder of slides, or correct the table.")
    removed = remove_leftovers(folder)
    write_text(folder / "tile_spec.yaml", _spec_text(tiles))
    jobs = [_Job(source=source, spec=tiles, default_mpp=cohort.slide_mpp, folder=folder) for source in sources]
    results = _run(jobs, workers=workers)
    failures = [Failure(item=item, outcome="failed", reason=reason) for item, reason in problems]
    failures += [_failure(result) for result in results if result.outcome != "tiled"]
    write_bytes(folder / "tiles.csv", _table(results, failures[: len(problems)], excluded).encode())
    _write_sheet(folder / "contact_sheet.jpg", jobs, results)
    return Summary(
        stage="tile",
        out=folder,
        done=tuple(result.slide_id for result in results if result.outcome == "tiled" and not result.reused),
        reused=tuple(result.slide_id for result in results if result.reused),
        failures=tuple(failures),
        notes=_notes(folder, results, excluded, removed),
    )


def _refuse_inside(folder: Path, slides: Path) -> None:
    if folder.resolve().is_relative_to(slides.resolve()):
        raise ConfigError(
            f"out is {folder.parent}, inside the slides' folder {slides}. Nothing is written there; name another."
        )


def _run(jobs: Sequence[_Job], *, workers: int) -> list[_Result]:
    """Work through all jobs; the results are in the jobs' order."""
    found: dict[str, _Result] = {}
    with progress("tile", len(jobs)) as bar:
        for result in _results(jobs, workers):
            found[result.slide_id] = result
            bar.advance(note=result.slide_id if result.outcome == "tiled" else f"{result.slide_id}: {result.outcome}")
    return [found[job.source.slide_id] for job in jobs]


def _results(jobs: Sequence[_Job], workers: int) -> Iterator[_Result]:
    if workers == 1 or len(jobs) < 2:
        yield from map(_tile_one, jobs)
        return
    for job, result in run_in_processes(_tile_one, jobs, workers=min(workers, len(jobs)), start=_start_worker):
        yield result or _failed(
            job.source.slide_id,
            "failed",
            f"{job.source.path.name}: the process that worked on it was killed, twice; the usual reason is too little "
            "memory. Run again with fewer workers, or on a machine with more memory.",
        )


def _start_worker() -> None:
    cv2.setNumThreads(1)  # the processes share the cores already


def _tile_one(job: _Job) -> _Result:
    """Tile one slide, or say why not. Never raises for what a slide can be blamed for."""
    source, info = job.source, None
    try:
        with Slide(
            source.path, slide_id=source.slide_id, cohort_mpp=source.slide_mpp, default_mpp=job.default_mpp
        ) as slide:
            info = slide.info
            return _tile_open(job, slide)
    except Exception as error:
        job.grid_path.unlink(missing_ok=True)  # a grid of an earlier run must not stand for a slide that fails now
        if not isinstance(error, NoTissue):
            job.qc_path.unlink(missing_ok=True)
        if isinstance(error, UserError):
            return _failed(source.slide_id, getattr(error, "outcome", "failed"), str(error), info)
        if isinstance(error, OSError):
            return _failed(source.slide_id, "failed", _why_not_written(job, error), info)
        _LOG.exception("%s failed", source.slide_id)
        return _failed(source.slide_id, "failed", f"{source.path.name}: {type(error).__name__}: {error}", info)


def _why_not_written(job: _Job, error: OSError) -> str:
    return f"{job.source.path.name}: {error}. Make room in {job.folder} or check the rights, and run the same again."


def _tile_open(job: _Job, slide: Slide) -> _Result:
    mask, info = job.source.mask, slide.info
    plan_read(info, job.spec)  # refuses in no time what a thumbnail would be made for in vain
    complete = grid_is_complete(
        job.grid_path,
        spec_digest=job.spec.digest(),
        slide_fingerprint=info.fingerprint,
        mpp=info.mpp,
        mask_digest=digest_of_mask(mask, info),
    ) and grid_is_intact(job.grid_path)
    if complete and job.qc_path.is_file():
        return _tiled(read_grid(job.grid_path), reused=True)
    survey = survey_slide(slide, job.spec, mask_path=mask)
    base_rgb = _sharper(slide, survey)
    try:
        grid = select_tiles(survey, job.spec)
    except NoTissue as error:
        _write_jpeg(job.qc_path, qc_picture(survey, None, base_rgb=base_rgb, outcome=error.outcome))
        raise
    if not complete:
        write_grid(job.grid_path, grid)
    _write_jpeg(job.qc_path, qc_picture(survey, grid, base_rgb=base_rgb))
    return _tiled(grid, reused=complete)


def _sharper(slide: Slide, survey: Survey) -> Rgb | None:
    """A picture fit for people where the thumbnail that the mask was made on is too small for them."""
    if max(survey.thumbnail_rgb.shape) >= 0.8 * PICTURE_PX:
        return None
    longest_um = max(size * mpp for size, mpp in zip(slide.info.size_l0, slide.info.mpp, strict=True))
    return slide.thumbnail(mpp=max(longest_um / PICTURE_PX, *slide.info.mpp))


def _tiled(grid: TileGrid, *, reused: bool) -> _Result:
    row = _facts(grid.slide) | {
        "tiles": str(len(grid)),
        "tissue_mm2": f"{grid.tissue_mm2:.4f}",
        "level": str(grid.plan.level),
        "tile_size_l0": "x".join(map(str, grid.plan.tile_size_l0)),
    }
    factor = upsampling(grid.slide, grid.plan)
    if factor > 1 + grid.spec.mpp_tolerance:
        row["warnings"] = "; ".join(filter(None, (row["warnings"], f"upsampled x{factor:.2g}")))
    return _Result(slide_id=grid.slide.slide_id, outcome="tiled", reused=reused, row=row)


def _failed(slide_id: str, outcome: str, reason: str, info: SlideInfo | None = None) -> _Result:
    return _Result(slide_id=slide_id, outcome=outcome, row=({} if info is None else _facts(info)) | {"reason": reason})


def _facts(info: SlideInfo) -> dict[str, str]:
    return {
        "mpp_x": repr(info.mpp[0]),
        "mpp_y": repr(info.mpp[1]),
        "mpp_source": info.mpp_source,
        "warnings": "; ".join(info.warnings),
    }


def _failure(result: _Result) -> Failure:
    return Failure(item=result.slide_id, outcome=result.outcome, reason=result.row["reason"])


def _table(results: Iterable[_Result], problems: Iterable[Failure], excluded: Iterable[Exclusion]) -> str:
    """tiles.csv: the slides in order, then files that are no usable slide, then what the user left out."""
    rows = [result.row | {"slide": result.slide_id, "outcome": result.outcome} for result in results]
    rows += [{"slide": problem.item, "outcome": problem.outcome, "reason": problem.reason} for problem in problems]
    rows += [{"slide": item.item, "outcome": "excluded", "reason": item.reason} for item in excluded]
    text = io.StringIO()
    pd.DataFrame(rows, columns=list(_COLUMNS), dtype=object).to_csv(text, index=False, lineterminator="\n")
    return text.getvalue()


def _write_sheet(path: Path, jobs: Sequence[_Job], results: Sequence[_Result]) -> None:
    if not jobs:
        return
    side = cell_side(len(jobs))
    cells = [
        Cell(
            slide_id=result.slide_id,
            outcome=result.outcome,
            picture=_read_small(job.qc_path, side),
            note=_n_tiles(result),
        )
        for job, result in zip(jobs, results, strict=True)
    ]
    _write_jpeg(path, contact_sheet(cells))


def _n_tiles(result: _Result) -> str:
    return f"{int(result.row['tiles']):,} tiles" if "tiles" in result.row else ""


def _read_small(path: Path, side: int) -> Rgb | None:
    """The slide in a QC picture, shrunk to a contact sheet's cell, so that a thousand of them fit into memory."""
    picture = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR_RGB) if path.is_file() else None
    if picture is None:
        return None
    picture = picture[:-CAPTION_PX]
    scale = side / max(picture.shape[:2])
    return np.asarray(cv2.resize(picture, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA), np.uint8)


def _write_jpeg(path: Path, picture_rgb: Rgb) -> None:
    _, data = cv2.imencode(".jpg", picture_rgb[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])
    write_bytes(path, data.tobytes())


def _spec_text(spec: TileSpec) -> str:
    fields = asdict(spec) | {"stride_px": spec.step_px, "digest": spec.digest()}
    return f"# The settings that every grid in this folder was made with.\n{yaml.safe_dump(fields, sort_keys=False)}"


def _notes(
    folder: Path, results: Sequence[_Result], excluded: Sequence[Exclusion], removed: Sequence[Path]
) -> tuple[str, ...]:
    tiled = [result for result in results if result.outcome == "tiled"]
    notes = [
        f"{sum(int(result.row['tiles']) for result in tiled):,} tiles on {len(tiled)} of {len(results)} slides. "
        f"Look at {folder / 'contact_sheet.jpg'} before you go on."
    ]
    warned = [result.slide_id for result in tiled if result.row["warnings"]]
    if warned:
        notes.append(f"{len(warned)} slides have warnings, such as {warned[0]}: see {folder / 'tiles.csv'}.")
    if excluded:
        notes.append(f"{len(excluded)} left out on purpose: see {folder / 'tiles.csv'}.")
    if removed:
        notes.append(f"Removed {len(removed)} unfinished files that an interrupted run had left.")
    return tuple(notes)
