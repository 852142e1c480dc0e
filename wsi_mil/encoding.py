"""The encoding pipeline: tiles are read ahead across slides, travel as uint8 and come out as fp16 features.

On a CPU one encoder thread a core works with one thread of arithmetic each, on its own batch. No thread ever waits for
another at the end of a layer, so readers take what they need from any core, and a batch's result cannot depend on how
many threads there are. On a GPU one encoder thread feeds the device. Batches have one fixed shape and no row of a batch
depends on another, so it does not matter where in which batch a tile stood.
"""

import os
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tiling.grid import TileGrid
from wsi_mil.encoders import Encoder
from wsi_mil.encoders._base import Precision
from wsi_mil.errors import ConfigError
from wsi_mil.malloc import keep_freed_memory
from wsi_mil.outcomes import Failure
from wsi_mil.reading import Batch, Part, ReadAhead, SlideJob, SlideState
from wsi_mil.store import FailedTile

CPU_BATCH = 16
GPU_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the work is spread. Changes nothing in the features, except `batch_size` and `precision` (within 1e-5)."""

    batch_size: int
    encoders: int
    """Encoder threads."""
    readers: int
    """Reader threads."""
    precision: Precision = "fp32"
    max_failed_tiles: float = 0.01

    @property
    def depth(self) -> int:
        """Batches in flight: one with each encoder, one waiting for each, and two being read."""
        return 2 * self.encoders + 2

    def buffer_bytes(self, tile_px: int) -> int:
        """Memory that the tiles in flight take, whatever the slides."""
        return self.depth * self.batch_size * tile_px * tile_px * 3


@dataclass(frozen=True, kw_only=True)
class EncodedSlide:
    """Features of one slide. `rows` are the rows of the grid that could be read; features has one row for each."""

    slide_id: str
    grid: TileGrid
    rows: NDArray[np.int64]
    features: NDArray[np.float16]
    failed: tuple[FailedTile, ...]


@dataclass(frozen=True, kw_only=True)
class Advance:
    """So many more tiles are through, and what held the work up most."""

    tiles: int
    bottleneck: str


def make_plan(
    encoder: Encoder, *, batch_size: int | None, readers: int | None, tile_px: int, precision: Precision,
    max_failed_tiles: float = 0.01,
) -> Plan:  # fmt: skip
    """Spread the work over this machine; a batch size that is not given is found."""
    cores = available_cores()
    on_gpu = encoder.device.type == "cuda"
    return Plan(
        batch_size=batch_size or (_largest_batch(encoder, tile_px, precision) if on_gpu else CPU_BATCH),
        encoders=1 if on_gpu else cores,
        readers=readers or min(16, max(2, cores)),
        precision=precision,
        max_failed_tiles=max_failed_tiles,
    )


def encode_slides(
    jobs: Sequence[SlideJob], encoder: Encoder, *, plan: Plan, tile_px: int
) -> Iterator[EncodedSlide | Failure | Advance]:
    """Encode slides; yields each as soon as it is whole, or its failure, and the advance in between.

    A slide that fails does not stop the others. Raises what the encoder raises.
    """
    keep_freed_memory()
    ahead = ReadAhead(
        jobs,
        tile_px=tile_px,
        batch_size=plan.batch_size,
        readers=plan.readers,
        depth=plan.depth,
        takers=plan.encoders,
        max_failed_tiles=plan.max_failed_tiles,
        pin_memory=encoder.device.type == "cuda",
    )
    results: queue.Queue[_Result] = queue.Queue()
    threads_before = torch.get_num_threads()
    workers = [
        threading.Thread(target=_work, args=(ahead, encoder, plan.precision, results), name=f"encoder-{i}", daemon=True)
        for i in range(plan.encoders)
    ]
    with ahead:
        try:
            for worker in workers:
                worker.start()
            yield from _collect(results, workers=len(workers), dim=encoder.dim, ahead=ahead)
        finally:
            ahead.cancel()
            for worker in workers:
                worker.join()
            torch.set_num_threads(threads_before)


@dataclass(frozen=True, kw_only=True)
class _Result:
    """One batch that is through, or the end of a worker with what ended it."""

    parts: tuple[Part, ...] = ()
    features: NDArray[np.float32] | None = None
    error: BaseException | None = None
    last: bool = False


def _work(ahead: ReadAhead, encoder: Encoder, precision: Precision, results: "queue.Queue[_Result]") -> None:
    if encoder.device.type == "cpu":
        torch.set_num_threads(1)
    try:
        while (batch := ahead.take()) is not None:
            parts = tuple(batch.parts)
            features = encode_buffer(batch, encoder, precision=precision)
            ahead.give_back(batch)
            results.put(_Result(parts=parts, features=features))
        results.put(_Result(last=True))
    except BaseException as error:  # raised again where the results are collected
        results.put(_Result(error=error, last=True))


def encode_buffer(batch: Batch, encoder: Encoder, *, precision: Precision) -> NDArray[np.float32] | None:
    """Features (batch_size, dim) of a whole buffer, unused slots included; None when no slide in it can be used."""
    if all(part.state.broken for part in batch.parts):
        return None
    tiles = batch.tiles.to(encoder.device, non_blocking=True)
    return encoder.encode_batch(tiles, precision=precision).cpu().numpy()


def _collect(
    results: "queue.Queue[_Result]", *, workers: int, dim: int, ahead: ReadAhead
) -> Iterator[EncodedSlide | Failure | Advance]:
    running = workers
    while running:
        result = results.get()
        if result.error is not None:
            raise result.error
        running -= result.last
        for part in result.parts:
            _store(part, result.features, dim)
            yield Advance(tiles=part.stop - part.start, bottleneck="encoding" if ahead.waiting else "reading")
            if part.state.encoded == part.state.job.n:
                yield _finish(part.state)


def _store(part: Part, features: NDArray[np.float32] | None, dim: int) -> None:
    state = part.state
    state.encoded += part.stop - part.start
    if features is None or state.broken:
        return
    if state.features is None:
        state.features = np.zeros((state.job.n, dim), np.float16)
    rows = features[part.slot : part.slot + part.stop - part.start]
    with np.errstate(over="ignore"):
        state.features[part.start : part.stop] = rows


def _finish(state: SlideState) -> EncodedSlide | Failure:
    job, grid, features = state.job, state.grid, state.features
    if state.broken:
        return Failure(item=job.slide_id, outcome=state.broken[0], reason=state.broken[1])
    if grid is None or features is None:
        raise RuntimeError(f"{job.slide_id}: all tiles are through, but nothing was read")
    state.features = None
    failed = sorted(state.failed)
    rows = np.setdiff1d(np.arange(job.n), failed)
    bad = rows[~np.isfinite(features[rows]).all(axis=1)]
    if len(bad):
        x_l0, y_l0 = grid.coords_l0[bad[0]]
        return Failure(
            item=job.slide_id,
            outcome="failed",
            reason=f"{job.slide_id}: {len(bad)} of {len(rows)} tiles give features that are not finite in fp16, the "
            f"first at level-0 position ({x_l0}, {y_l0}). Try --precision fp32, or look at that tile.",
        )
    tiles = tuple(
        FailedTile(coords_l0=(int(x), int(y)), reason=state.failed[row])
        for row, (x, y) in zip(failed, grid.coords_l0[failed], strict=True)
    )
    kept = features if len(rows) == job.n else features[rows]
    return EncodedSlide(slide_id=job.slide_id, grid=grid, rows=rows, features=kept, failed=tiles)


def _largest_batch(encoder: Encoder, tile_px: int, precision: Precision) -> int:
    size = GPU_BATCH
    while size >= 1:
        try:
            blank = torch.zeros((size, tile_px, tile_px, 3), dtype=torch.uint8, device=encoder.device)
            encoder.encode_batch(blank, precision=precision)
        except torch.cuda.OutOfMemoryError:
            size //= 2
            torch.cuda.empty_cache()
        else:
            return size
    raise ConfigError(f"encoder {encoder.name}: not even one tile of {tile_px} px fits on the GPU. Use --device cpu.")


def available_cores() -> int:
    """Cores this process may use, which a scheduler may have made fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
