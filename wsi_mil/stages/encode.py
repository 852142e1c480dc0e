"""Stage `encode`: slides and their grids -> one bag of features a slide, and a table."""

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from tiling.atomic import remove_leftovers, write_text
from tiling.discovery import SlideSource
from tiling.errors import SlideError, UserError
from tiling.grid import TileGrid
from tiling.slide import Slide
from tiling.store import read_grid
from wsi_mil.cohort import CohortSpec, find_sources
from wsi_mil.encode_settings import Settings, check_spec, header_of, make_folder, settle
from wsi_mil.encoders import Encoder, EncodeSpec
from wsi_mil.encoding import Advance, EncodedSlide, Plan, encode_slides, make_plan
from wsi_mil.errors import ConfigError
from wsi_mil.malloc import keep_freed_memory
from wsi_mil.outcomes import Failure, Summary
from wsi_mil.progress import progress
from wsi_mil.reading import SlideJob, most_failed
from wsi_mil.store import read_bag_header, read_failed, why_incomplete, write_bag
from wsi_mil.table.records import Exclusion

_LOG = logging.getLogger(__name__)
_COLUMNS = ("slide", "outcome", "tiles", "failed_tiles", "dim", "encoder", "contract_breach", "reason")
_WHOLE_FOLDER = CohortSpec()
_USUAL_ENCODER = EncodeSpec()


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What there is to encode, and what there is not, with the reason."""

    grids: Mapping[str, TileGrid]
    jobs: tuple[SlideJob, ...]
    failures: tuple[Failure, ...]
    excluded: tuple[Exclusion, ...]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """An open encoder and the slides it could be run on."""

    jobs: tuple[SlideJob, ...]
    failures: tuple[Failure, ...]
    encoder: Encoder
    plan: Plan
    tile_px: int


def encode(
    slides: Path,
    *,
    grids: Path,
    out: Path,
    table: Path | None = None,
    cohort: CohortSpec = _WHOLE_FOLDER,
    encoding: EncodeSpec = _USUAL_ENCODER,
) -> Summary:
    """Turn the tiles of every slide into features with a frozen encoder.

    Args:
        slides: Folder of slides, as `tile` was given it. Nothing is ever written there.
        grids: Folder that `tile` made.
        out: Folder for results; a subfolder named by encoder and settings is made in it.
        table: Cohort table; only the slides it names are encoded. Without it, all of the folder.
        cohort: How the table is read.
        encoding: Which encoder, and how it runs.
    """
    keep_freed_memory()
    check_spec(encoding)
    work = _find_work(slides, grids, table, cohort)
    failures, excluded = list(work.failures), work.excluded
    if not work.grids:
        return Summary(stage="encode", out=out, failures=work.failures, notes=(f"{grids} has no grid to encode.",))
    settings = settle(encoding, work.grids)
    folder = make_folder(settings, out=out, slides=slides)
    settings = replace(settings, folder=folder)
    removed = remove_leftovers(folder)
    plan = _plan(encoding, settings)
    reused = tuple(slide_id for slide_id, grid in work.grids.items() if _is_done(settings, slide_id, grid, plan))
    done, failed = _run([job for job in work.jobs if job.slide_id not in set(reused)], settings, plan)
    failures += failed
    rows = _rows(settings, (*done, *reused), failures)
    rows += [{"slide": item.item, "outcome": "excluded", "reason": item.reason} for item in excluded]
    write_text(settings.folder / "bags.csv", _csv(rows))
    return Summary(
        stage="encode",
        out=settings.folder,
        done=tuple(done),
        reused=reused,
        failures=tuple(sorted(failures, key=lambda failure: failure.item)),
        notes=_notes(settings, plan, len(removed)),
    )


def prepare(slides: Path, *, grids: Path, table: Path | None, cohort: CohortSpec, encoding: EncodeSpec) -> Prepared:
    """Everything that encoding these slides takes, without a place to write to."""
    check_spec(encoding)
    work = _find_work(slides, grids, table, cohort)
    settings = settle(encoding, work.grids)
    return Prepared(
        jobs=work.jobs,
        failures=work.failures,
        encoder=settings.encoder,
        plan=_plan(encoding, settings),
        tile_px=settings.tiles.tile_px,
    )


def _find_work(slides: Path, grids: Path, table: Path | None, cohort: CohortSpec) -> _Work:
    sources, excluded, problems = find_sources(slides, table, cohort)
    found, failures = _read_grids(sources, grids)
    failures += [Failure(item=item, outcome="failed", reason=reason) for item, reason in problems]
    jobs = (_job(source, grids, len(found[source.slide_id]), cohort) for source in sources if source.slide_id in found)
    return _Work(grids=found, jobs=tuple(jobs), failures=tuple(failures), excluded=excluded)


def _plan(spec: EncodeSpec, settings: Settings) -> Plan:
    return make_plan(
        settings.encoder,
        batch_size=spec.batch_size,
        readers=spec.readers,
        tile_px=settings.tiles.tile_px,
        precision=spec.precision,
        max_failed_tiles=spec.max_failed_tiles,
    )


def _read_grids(sources: Sequence[SlideSource], grids: Path) -> tuple[dict[str, TileGrid], list[Failure]]:
    """Grids by slide id, and the slides that have none, with the reason that `tile` gave."""
    folder = grids / "grids"
    if not folder.is_dir() and not (grids / "tile_spec.yaml").is_file():
        raise ConfigError(f"{grids}: no folder of grids. Give the folder that `wsi-mil tile` made.")
    reasons = _tile_outcomes(grids / "tiles.csv")
    found: dict[str, TileGrid] = {}
    failures = []
    for source in sources:
        path = folder / f"{source.slide_id}.h5"
        try:
            if path.is_file():
                found[source.slide_id] = read_grid(path)
                continue
            outcome, reason = reasons.get(source.slide_id, ("not tiled", "It has no grid. Run `wsi-mil tile` again."))
        except UserError as error:
            outcome, reason = "failed", str(error)
        failures.append(Failure(item=source.slide_id, outcome=outcome, reason=reason))
    return found, failures


def _tile_outcomes(path: Path) -> Mapping[str, tuple[str, str]]:
    if not path.is_file():
        return {}
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    bad = table[table["outcome"] != "tiled"]
    return {row["slide"]: (row["outcome"], f"no grid: {row['reason']}") for row in bad.to_dict("records")}


def _is_done(settings: Settings, slide_id: str, grid: TileGrid, plan: Plan) -> bool:
    """Whether the slide has a whole bag of these settings that lacks no more tiles than are allowed now."""
    path = settings.path(slide_id)
    if why_incomplete(path, params_digest=settings.params_digest(grid)) is not None:
        return False
    return len(read_failed(path)) <= most_failed(len(grid), plan.max_failed_tiles)


def _job(source: SlideSource, grids: Path, n: int, cohort: CohortSpec) -> SlideJob:
    def open_slide(grid: TileGrid) -> Slide:
        slide = Slide(source.path, slide_id=source.slide_id, cohort_mpp=source.slide_mpp, default_mpp=cohort.slide_mpp)
        if (slide.info.fingerprint, slide.mpp) != (grid.slide.fingerprint, grid.slide.mpp):
            slide.close()
            raise SlideError(
                f"{source.path.name}: the file or its pixel size changed since it was tiled ({grid.slide.mpp} then, "
                f"{slide.mpp} now). Run `wsi-mil tile` again."
            )
        return slide

    path = grids / "grids" / f"{source.slide_id}.h5"
    return SlideJob(slide_id=source.slide_id, n=n, grid=lambda: read_grid(path), open_slide=open_slide)


def _run(jobs: Sequence[SlideJob], settings: Settings, plan: Plan) -> tuple[list[str], list[Failure]]:
    """Encode and write; a bag is on disk as soon as its last tile is through."""
    done: list[str] = []
    failures: list[Failure] = []
    if not jobs:
        return done, failures
    with progress("encode", sum(job.n for job in jobs), unit="tiles") as bar:
        for event in encode_slides(jobs, settings.encoder, plan=plan, tile_px=settings.tiles.tile_px):
            if isinstance(event, Advance):
                bar.advance(event.tiles, note=f"bottleneck: {event.bottleneck}")
            elif isinstance(event, Failure):
                settings.path(event.item).unlink(missing_ok=True)  # an earlier bag must not stand for a failed slide
                failures.append(event)
            else:
                failure = _write(event, settings)
                failures += [failure] if failure else []
                done += [] if failure else [event.slide_id]
    lost = {job.slide_id for job in jobs} - {*done, *(failure.item for failure in failures)}
    reason = "its tiles went in, and nothing came out. Run the same command again."
    for slide_id in sorted(lost):
        settings.path(slide_id).unlink(missing_ok=True)
        failures.append(Failure(item=slide_id, outcome="failed", reason=reason))
    return sorted(done), failures


def _write(encoded: EncodedSlide, settings: Settings) -> Failure | None:
    grid, rows = encoded.grid, encoded.rows
    try:
        write_bag(
            settings.path(encoded.slide_id),
            header_of(encoded, settings),
            features=encoded.features,
            coords_l0=grid.coords_l0[rows],
            grid_xy=grid.grid_xy[rows],
            tissue_fraction=grid.tissue_fraction[rows],
            failed=encoded.failed,
        )
    except (OSError, UserError) as error:
        reason = (
            f"{settings.path(encoded.slide_id)}: the bag cannot be written ({error}). Make room or check the rights."
        )
        return Failure(item=encoded.slide_id, outcome="failed", reason=reason)
    return None


def _rows(settings: Settings, encoded: Sequence[str], failures: Sequence[Failure]) -> list[dict[str, str]]:
    """bags.csv: a row for each slide, in the order of their ids."""
    rows = []
    for slide_id in encoded:
        header = read_bag_header(settings.path(slide_id))
        rows.append(
            {
                "slide": slide_id,
                "outcome": "encoded",
                "tiles": str(header.n),
                "failed_tiles": str(len(read_failed(settings.path(slide_id)))),
                "dim": str(header.dim),
                "encoder": header.encoder,
                "contract_breach": "; ".join(header.contract_breach),
            }
        )
    rows += [{"slide": item.item, "outcome": item.outcome, "reason": item.reason} for item in failures]
    return sorted(rows, key=lambda row: row["slide"])


def _csv(rows: Sequence[Mapping[str, str]]) -> str:
    text = io.StringIO()
    pd.DataFrame(rows, columns=list(_COLUMNS), dtype=object).to_csv(text, index=False, lineterminator="\n")
    return text.getvalue()


def _notes(settings: Settings, plan: Plan, n_removed: int) -> tuple[str, ...]:
    encoder = settings.encoder
    notes = [
        f"Encoder {encoder.name}: {encoder.label}. Licence of its weights: {encoder.licence}.",
        f"{plan.readers} readers, {plan.encoders} encoder threads, batches of {plan.batch_size}; tiles on their way "
        f"took {plan.buffer_bytes(settings.tiles.tile_px) / 2**20:.0f} MiB at most.",
    ]
    notes += [f"Contract breach accepted, and written into every bag: {breach}." for breach in settings.breaches]
    if n_removed:
        notes.append(f"Removed {n_removed} unfinished files that an interrupted run had left.")
    return tuple(notes)
