"""Reads tiles ahead of the encoder, across slides, into batches of one fixed shape.

A batch is planned before it is read: every tile has its slot, so readers write straight into the batch and in any
order. A tile that cannot be read leaves a slot that nobody looks at. The number of batches in flight is fixed, and with
it the memory: `depth * batch_size * tile_px ** 2 * 3` bytes, besides what the open slides cache.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from tiling.errors import SlideError, UserError
from tiling.grid import ReadPlan, TileGrid

_log = logging.getLogger(__name__)
_PIECE = 16
"""Tiles that one reader takes at a time: enough to use a decoded file tile twice, few enough to share the work."""
_POLL_S = 0.1


class TileReader(Protocol):
    """What is asked of an open slide. `read_tile` may be called from several threads."""

    def read_tile(self, x_l0: int, y_l0: int, plan: ReadPlan) -> NDArray[np.uint8]:
        """The tile at this level-0 corner, (tile_px, tile_px, 3). Raises SlideError."""

    def close(self) -> None:
        """Let the file go."""


def most_failed(n: int, fraction: float) -> int:
    """How many of a slide's `n` tiles may be unreadable."""
    return int(fraction * n)


@dataclass(frozen=True, kw_only=True)
class SlideJob:
    """One slide to read. Grid and slide are opened when its turn comes."""

    slide_id: str
    n: int
    """Tiles in its grid."""
    grid: Callable[[], TileGrid]
    open_slide: Callable[[TileGrid], TileReader]


@dataclass(kw_only=True)
class SlideState:
    """How far one slide has come. Readers and the collector share it under `lock`."""

    job: SlideJob
    max_failed: int
    grid: TileGrid | None = None
    slide: TileReader | None = None
    unread: int
    encoded: int = 0
    features: NDArray[np.float16] | None = None
    failed: dict[int, str] = field(default_factory=dict)
    """Row to reason."""
    broken: tuple[str, str] | None = None
    """Outcome and reason, when the slide cannot be used."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ready(self) -> tuple[TileGrid, TileReader]:
        """Grid and open slide; opened by the first reader that comes."""
        with self.lock:
            if self.grid is None or self.slide is None:
                self.grid = self.job.grid()
                self.slide = self.job.open_slide(self.grid)
            return self.grid, self.slide

    def fail_tile(self, row: int, reason: str) -> None:
        """Note that a tile could not be read; too many of them break the slide."""
        with self.lock:
            self.failed[row] = reason
            if len(self.failed) > self.max_failed and self.broken is None:
                self.broken = (
                    "degraded",
                    f"more than {self.max_failed} of {self.job.n} tiles cannot be read; the first: "
                    f"{self.failed[min(self.failed)]}",
                )

    def fail(self, outcome: str, reason: str) -> None:
        """Note that the whole slide cannot be used; the first reason stays."""
        with self.lock:
            self.broken = self.broken or (outcome, reason)

    def count_read(self, rows: int) -> None:
        """Note that the readers are through with `rows` more tiles; after the last one the file is let go."""
        with self.lock:
            self.unread -= rows
            slide, self.slide = (self.slide, None) if self.unread == 0 else (None, self.slide)
        if slide is not None:
            slide.close()


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows [start, stop) of one slide's grid, in the slots of a batch from `slot` on."""

    state: SlideState
    start: int
    stop: int
    slot: int

    def pieces(self) -> Iterator["Part"]:
        """The part in portions for the readers."""
        for start in range(self.start, self.stop, _PIECE):
            stop = min(start + _PIECE, self.stop)
            yield Part(state=self.state, start=start, stop=stop, slot=self.slot + start - self.start)


@dataclass(kw_only=True)
class Batch:
    """A buffer of (batch_size, tile_px, tile_px, 3) uint8 and whose tiles are in it. Unused slots hold anything."""

    tiles: torch.Tensor
    parts: list[Part] = field(default_factory=list)
    pending: int = 0

    @property
    def used(self) -> int:
        """Slots that belong to a tile."""
        return sum(part.stop - part.start for part in self.parts)


class ReadAhead:
    """Context manager: threads fill batches; `take` gives the next one that is full, `give_back` frees its buffer."""

    def __init__(
        self,
        jobs: Sequence[SlideJob],
        *,
        tile_px: int,
        batch_size: int,
        readers: int,
        depth: int,
        takers: int = 1,
        max_failed_tiles: float = 0.01,
        pin_memory: bool = False,
    ) -> None:
        self._jobs, self._max_failed_tiles, self._takers = jobs, max_failed_tiles, takers
        self._free: queue.Queue[Batch] = queue.Queue()
        self._full: queue.Queue[Batch | None] = queue.Queue()
        shape = (batch_size, tile_px, tile_px, 3)
        for _ in range(depth):
            self._free.put(Batch(tiles=torch.zeros(shape, dtype=torch.uint8, pin_memory=pin_memory)))
        self._batch_size = batch_size
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="reader")
        self._feeder = threading.Thread(target=self._feed, name="feeder", daemon=True)
        self._states: list[SlideState] = []
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self._feeder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True)  # what still waits returns at once; a cancelled future would never count as done
        self._feeder.join()
        self.cancel()
        for state in self._states:
            if state.slide is not None:
                state.slide.close()

    def take(self) -> Batch | None:
        """The next batch that has been read; None when there is no more. Waits. Raises what stopped the feeder."""
        batch = self._full.get()
        if batch is None and self._error is not None:
            raise self._error
        return None if self._stop.is_set() else batch

    def give_back(self, batch: Batch) -> None:
        """Free a batch's buffer for the next one."""
        batch.parts = []
        self._free.put(batch)

    def cancel(self) -> None:
        """Let nobody wait for a batch any longer."""
        self._stop.set()
        for _ in range(self._takers):
            self._full.put(None)

    @property
    def waiting(self) -> int:
        """Batches that are read and wait for an encoder: none means that reading is the bottleneck."""
        return self._full.qsize()

    def _feed(self) -> None:
        futures: list[Future[None]] = []
        try:
            for batch in self._plan():
                pieces = [piece for part in batch.parts for piece in part.pieces()]
                batch.pending = len(pieces)
                futures = [future for future in futures if not future.done()]
                futures += [self._pool.submit(self._read, batch, piece) for piece in pieces]
            wait(futures)
        except BaseException as error:  # raised again where batches are taken: nobody looks at this thread
            if not self._stop.is_set():  # a pool that shuts down takes no more work
                self._error = error
        finally:
            for _ in range(self._takers):
                self._full.put(None)

    def _plan(self) -> Iterator[Batch]:
        """Slot after slot, slide after slide, into whatever buffer is free."""
        batch = None
        for job in self._jobs:
            state = SlideState(job=job, max_failed=most_failed(job.n, self._max_failed_tiles), unread=job.n)
            self._states = [old for old in self._states if old.unread] + [state]
            row = 0
            while row < job.n:
                batch = batch or self._next_free()
                if batch is None:
                    return
                stop = min(job.n, row + self._batch_size - batch.used)
                batch.parts.append(Part(state=state, start=row, stop=stop, slot=batch.used))
                row = stop
                if batch.used == self._batch_size:
                    yield batch
                    batch = None
        if batch is not None:
            yield batch

    def _next_free(self) -> Batch | None:
        while not self._stop.is_set():
            try:
                return self._free.get(timeout=_POLL_S)
            except queue.Empty:
                continue
        return None

    def _read(self, batch: Batch, piece: Part) -> None:
        state = piece.state
        try:
            self._fill(batch.tiles.numpy(), piece)
        except (UserError, OSError) as error:
            state.fail(getattr(error, "outcome", "failed"), str(error))
        except Exception as error:  # one slide must not stop the others: it is recorded, and logged in full
            _log.exception("slide %s", state.job.slide_id)
            state.fail("failed", f"{state.job.slide_id}: {type(error).__name__}: {error}")
        finally:
            state.count_read(piece.stop - piece.start)
            with self._lock:
                batch.pending -= 1
                done = batch.pending == 0
            if done:
                self._full.put(batch)

    def _fill(self, tiles: NDArray[np.uint8], piece: Part) -> None:
        state = piece.state
        if state.broken or self._stop.is_set():
            return
        grid, slide = state.ready()
        rows = zip(range(piece.start, piece.stop), grid.coords_l0[piece.start : piece.stop].tolist(), strict=True)
        for row, (x_l0, y_l0) in rows:
            if state.broken or self._stop.is_set():
                return
            try:
                tiles[piece.slot + row - piece.start] = slide.read_tile(x_l0, y_l0, grid.plan)
            except (SlideError, OSError) as error:
                state.fail_tile(row, str(error))
