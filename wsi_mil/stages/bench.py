"""Stage `bench`: how fast slides are read and encoded here, and how near the pipeline comes to what is possible.

With e CPU seconds a tile for the encoder alone on tiles in memory and r for reading alone, no arrangement of the two
can do more than 1 / (e + r) tiles a core second. All three are measured in one run, in turns, on all cores.
"""

import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from tiling.atomic import write_text
from wsi_mil.cohort import CohortSpec
from wsi_mil.encoders import Encoder, EncodeSpec
from wsi_mil.encoding import Advance, Plan, available_cores, encode_slides
from wsi_mil.errors import ConfigError
from wsi_mil.malloc import keep_freed_memory
from wsi_mil.outcomes import Failure, Summary
from wsi_mil.reading import ReadAhead, SlideJob
from wsi_mil.stages.encode import prepare

_LOG = logging.getLogger(__name__)
_WHOLE_FOLDER = CohortSpec()
_USUAL_ENCODER = EncodeSpec()
_MEMORY_TILES = 512


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What some tiles took."""

    tiles: int
    wall_s: float
    cpu_s: float

    @property
    def tiles_per_s(self) -> float:
        """Tiles a second of wall time."""
        return self.tiles / self.wall_s

    @property
    def cpu_per_tile(self) -> float:
        """CPU seconds a tile, of all threads together."""
        return self.cpu_s / self.tiles


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured: medians over the rounds."""

    cores: int
    tiles: int
    reading: Cost
    encoding: Cost
    pipeline: Cost
    bottleneck: str
    peak_mib: int

    @property
    def bound(self) -> float:
        """Most tiles a core second that reading and encoding allow: 1 / (e + r)."""
        return 1 / (self.reading.cpu_per_tile + self.encoding.cpu_per_tile)

    @property
    def per_core_second(self) -> float:
        """Tiles a core second that the pipeline makes: wall time times cores, idle or not."""
        return self.pipeline.tiles / (self.pipeline.wall_s * self.cores)

    @property
    def share(self) -> float:
        """Share of the bound that is reached by wall time. Meaningful when nothing else runs on the machine."""
        return self.per_core_second / self.bound

    @property
    def share_of_cpu(self) -> float:
        """Share of the bound by CPU time: what the pipeline adds on top of reading and encoding, waiting aside."""
        return 1 / (self.pipeline.cpu_per_tile * self.bound)


def bench(
    slides: Path,
    *,
    grids: Path,
    out: Path | None = None,
    table: Path | None = None,
    cohort: CohortSpec = _WHOLE_FOLDER,
    encoding: EncodeSpec = _USUAL_ENCODER,
    rounds: int = 3,
) -> Summary:
    """Measure reading, encoding and both together on these slides. Nothing is kept but the figures.

    Args:
        slides: Folder of slides, as `tile` was given it.
        grids: Folder that `tile` made.
        out: Folder for bench.json and bench.md; none are written when not given.
        table: Cohort table; only the slides it names are used. Without it, all of the folder.
        cohort: How the table is read.
        encoding: Which encoder, and how it runs.
        rounds: How often each is measured, in turns; the medians are reported.
    """
    if rounds < 1:
        raise ConfigError(f"rounds is {rounds}; it must be 1 or more.")
    keep_freed_memory()
    ready = prepare(slides, grids=grids, table=table, cohort=cohort, encoding=encoding)
    if not ready.jobs:
        return Summary(
            stage="bench", out=out or grids, failures=ready.failures, notes=("There is no tile to measure.",)
        )
    figures, failures = measure(ready.jobs, ready.encoder, plan=ready.plan, tile_px=ready.tile_px, rounds=rounds)
    text = as_markdown(figures, ready.encoder, ready.plan, tile_px=ready.tile_px)
    if out is not None:
        record = asdict(figures) | {
            name: getattr(figures, name) for name in ("bound", "per_core_second", "share", "share_of_cpu")
        }
        write_text(out / "bench.json", json.dumps(record, indent=2) + "\n")
        write_text(out / "bench.md", text)
    return Summary(
        stage="bench",
        out=out or grids,
        done=tuple(job.slide_id for job in ready.jobs),
        failures=(*ready.failures, *failures),
        notes=(text,),
    )


def measure(
    jobs: Sequence[SlideJob], encoder: Encoder, *, plan: Plan, tile_px: int, rounds: int
) -> tuple[Figures, list[Failure]]:
    """Take the three measures in turns, `rounds` times, after one batch of warming up."""
    tiles = sum(job.n for job in jobs)
    batches = _some_batches(jobs, plan, tile_px)
    _encode(batches[:1] * plan.encoders, encoder, plan)
    readings, encodings, pipelines = [], [], []
    notes: list[str] = []
    failures: list[Failure] = []
    again = -(-min(tiles, 4 * _MEMORY_TILES) // (plan.batch_size * len(batches)))
    for _ in range(rounds):
        readings.append(_cost(tiles, lambda: _read(jobs, plan, tile_px)))
        encodings.append(_cost(again * len(batches) * plan.batch_size, lambda: _encode(batches * again, encoder, plan)))
        failures.clear()
        pipelines.append(_cost(tiles, lambda: notes.extend(_pipeline(jobs, encoder, plan, tile_px, failures))))
    figures = Figures(
        cores=available_cores(),
        tiles=tiles,
        reading=_median(readings),
        encoding=_median(encodings),
        pipeline=_median(pipelines),
        bottleneck=max(sorted(set(notes)), key=notes.count),
        peak_mib=_peak_mib(),
    )
    return figures, failures


def as_markdown(figures: Figures, encoder: Encoder, plan: Plan, *, tile_px: int) -> str:
    """The figures as a table with a sentence on each side."""
    lines = [
        f"Encoder {encoder.name} ({encoder.label}), {figures.tiles} tiles of {tile_px} px, {figures.cores} cores, "
        f"{encoder.device.type}, {plan.precision}, batches of {plan.batch_size}, {plan.encoders} encoder and "
        f"{plan.readers} reader threads.",
        "",
        "| stage | tiles/s | CPU ms per tile |",
        "|---|---|---|",
    ]
    for name, cost in (
        ("reading alone", figures.reading),
        ("encoder alone, tiles in memory", figures.encoding),
        ("pipeline", figures.pipeline),
    ):
        lines.append(f"| {name} | {cost.tiles_per_s:.1f} | {1000 * cost.cpu_per_tile:.2f} |")
    return "\n".join(
        [
            *lines,
            "",
            f"Bound 1/(e + r): {figures.bound:.1f} tiles per core second; the pipeline makes "
            f"{figures.per_core_second:.1f}, a share of {figures.share:.3f} (by CPU time {figures.share_of_cpu:.3f}). "
            f"Bottleneck: {figures.bottleneck}. Peak memory: {figures.peak_mib} MiB.",
            "",
        ]
    )


def _cost(tiles: int, work: Callable[[], object]) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Cost(tiles=tiles, wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost(
        tiles=costs[0].tiles,
        wall_s=median(cost.wall_s for cost in costs),
        cpu_s=median(cost.cpu_s for cost in costs),
    )


@contextmanager
def _reading(jobs: Sequence[SlideJob], plan: Plan, tile_px: int) -> Iterator[ReadAhead]:
    with ReadAhead(
        jobs,
        tile_px=tile_px,
        batch_size=plan.batch_size,
        readers=plan.readers,
        depth=plan.depth,
        max_failed_tiles=plan.max_failed_tiles,
    ) as ahead:
        yield ahead


def _read(jobs: Sequence[SlideJob], plan: Plan, tile_px: int) -> None:
    with _reading(jobs, plan, tile_px) as ahead:
        while (batch := ahead.take()) is not None:
            ahead.give_back(batch)


def _some_batches(jobs: Sequence[SlideJob], plan: Plan, tile_px: int) -> list[torch.Tensor]:
    """Full batches of real tiles, on the way to being encoded from memory."""
    kept: list[torch.Tensor] = []
    with _reading(jobs, plan, tile_px) as ahead:
        while len(kept) * plan.batch_size < _MEMORY_TILES and (batch := ahead.take()) is not None:
            kept.append(batch.tiles.clone())
            ahead.give_back(batch)
    return kept


def _encode(batches: Sequence[torch.Tensor], encoder: Encoder, plan: Plan) -> None:
    """Run the encoder alone, with as many threads as the pipeline gives it."""
    waiting: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    for batch in batches:
        waiting.put(batch)

    def work() -> None:
        if encoder.device.type == "cpu":
            torch.set_num_threads(1)
        while True:
            try:
                tiles = waiting.get_nowait()
            except queue.Empty:
                return
            encoder.encode_batch(tiles.to(encoder.device), precision=plan.precision).cpu()

    threads_before = torch.get_num_threads()
    workers = [threading.Thread(target=work) for _ in range(plan.encoders)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torch.set_num_threads(threads_before)


def _pipeline(
    jobs: Sequence[SlideJob], encoder: Encoder, plan: Plan, tile_px: int, failures: list[Failure]
) -> Iterator[str]:
    """The bottleneck at each advance."""
    for event in encode_slides(jobs, encoder, plan=plan, tile_px=tile_px):
        if isinstance(event, Advance):
            yield event.bottleneck
        elif isinstance(event, Failure):
            failures.append(event)


def _peak_mib() -> int:
    """Most memory this process ever held; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak // (2**20 if sys.platform == "darwin" else 2**10))
