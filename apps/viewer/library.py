"""What the viewer's one process shares: the run, its slides behind opaque ids, signed tokens, bounded caches."""

import hashlib
import hmac
import os
import queue
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from apps.viewer.tiles import jpeg, render_base, render_region, render_tile
from tiling.slide import Slide
from wsi_mil.results.cases import Case, SlideFinder, read_cases, slides_root
from wsi_mil.runs import RunDir

_HOUR_S = 3600
_UNTIL = re.compile(r"[0-9a-f]{1,12}")
_TOKEN_HOURS = 24
_TILE_CACHE_BYTES = 128 << 20
_BASE_CACHE_BYTES = 64 << 20
_OPEN_SLIDES = 4
LARGEST_CROP_PX = 512

Key = TypeVar("Key")
Value = TypeVar("Value")


class Signer:
    """Gives and checks tokens, one a slide, with a secret that lives as long as the process."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def token(self, opaque_id: str) -> str:
        """A token that holds for about a day; the same within an hour, so the browser's cache works."""
        until = (int(time.time()) // _HOUR_S + _TOKEN_HOURS) * _HOUR_S
        return f"{until:x}.{self._mac(opaque_id, until)}"

    def is_valid(self, opaque_id: str, token: str) -> bool:
        """Whether this process gave the token for this slide, and it still holds."""
        until, _, mac = token.partition(".")
        if not _UNTIL.fullmatch(until):
            return False
        expires = int(until, 16)
        known = self._mac(opaque_id, expires).encode()
        return hmac.compare_digest(known, mac.encode()) and expires > time.time()

    def opaque_id(self, name: str) -> str:
        """A name that can stand in an address and tells nothing."""
        return hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()[:16]

    def _mac(self, opaque_id: str, until: int) -> str:
        return hmac.new(self._secret, f"{opaque_id}.{until}".encode(), hashlib.sha256).hexdigest()[:32]


class ByteCache(Generic[Key, Value]):
    """The most recently used values, up to a number of bytes. Safe between threads."""

    def __init__(self, most_bytes: int, size: Callable[[Value], int]) -> None:
        self._most, self._size, self._held = most_bytes, size, 0
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Value | None:
        """The value, or None."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Key, value: Value) -> None:
        """Keep a value and drop the oldest ones beyond the limit."""
        with self._lock:
            if key in self._values:
                return
            self._values[key] = value
            self._held += self._size(value)
            while self._held > self._most and self._values:
                _, dropped = self._values.popitem(last=False)
                self._held -= self._size(dropped)


class OpenSlides:
    """Handles of the slides in use: a handle serves one thread at a time, and only a few slides stay open."""

    def __init__(self) -> None:
        self._idle: OrderedDict[str, queue.SimpleQueue[Slide]] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self, opaque_id: str, case: Case, path: Path) -> Iterator[Slide]:
        """An open handle of one slide, returned at the end of the block, closed when the block fails."""
        slide = self._take(opaque_id) or Slide(path, slide_id=case.slide_id, cohort_mpp=case.mpp)
        try:
            yield slide
        except BaseException:
            slide.close()
            raise
        self._give(opaque_id, slide)

    def _take(self, opaque_id: str) -> Slide | None:
        with self._lock:
            idle = self._idle.get(opaque_id)
        try:
            return idle.get_nowait() if idle else None
        except queue.Empty:
            return None

    def _give(self, opaque_id: str, slide: Slide) -> None:
        closing: list[Slide] = []
        with self._lock:
            self._idle.setdefault(opaque_id, queue.SimpleQueue()).put(slide)
            self._idle.move_to_end(opaque_id)
            while len(self._idle) > _OPEN_SLIDES:
                _, old = self._idle.popitem(last=False)
                while not old.empty():
                    closing.append(old.get())
        for handle in closing:
            handle.close()


class Library:
    """The run and its slides, as page and routes share them."""

    def __init__(self, run: RunDir, slides: Path | None) -> None:
        self.run = run
        self.root = slides_root(run, slides)
        self.signer = Signer()
        self._finder = SlideFinder(self.root)
        self._cases: dict[str, tuple[int, list[Case]]] = {}
        self._known: dict[str, tuple[Case, Path]] = {}
        self._open = OpenSlides()
        self._tiles: ByteCache[tuple[object, ...], bytes] = ByteCache(_TILE_CACHE_BYTES, len)
        self._bases: ByteCache[str, NDArray[np.uint8]] = ByteCache(_BASE_CACHE_BYTES, lambda array: array.nbytes)
        self._base_lock = threading.Lock()
        self._renders = threading.BoundedSemaphore(max(2, os.cpu_count() or 2))

    def cases(self, method: str) -> list[Case]:
        """The cases of a method, the worst first; read again when they changed. Empty for an unknown method."""
        if method not in self.run.methods():
            return []
        changed = self.run.predictions_path.stat().st_mtime_ns
        known = self._cases.get(method)
        if known is None or known[0] != changed:
            known = self._cases[method] = (changed, read_cases(self.run, method))
        return known[1]

    def admit(self, case: Case) -> str:
        """Let the routes serve a case's slide and return its opaque id. Raises SlideError when its file is missing."""
        path = self._finder.find(case)
        opaque = self.signer.opaque_id(case.slide_id)
        self._known[opaque] = (case, path)
        return opaque

    def knows(self, opaque_id: str) -> bool:
        """Whether a slide was admitted under this id."""
        return opaque_id in self._known

    def slide_id(self, opaque_id: str) -> str:
        """The slide behind an id."""
        return self._known[opaque_id][0].slide_id

    @contextmanager
    def slide(self, opaque_id: str) -> Iterator[Slide]:
        """An open handle of an admitted slide."""
        with self._open.borrow(opaque_id, *self._known[opaque_id]) as slide:
            yield slide

    def tile(self, opaque_id: str, level: int, column: int, row: int) -> bytes | None:
        """A deep-zoom tile as JPEG, or None where there is none."""

        def render(slide: Slide) -> NDArray[np.uint8] | None:
            return render_tile(slide, level, column, row, base=lambda: self._base(opaque_id, slide))

        return self._cached((opaque_id, "tile", level, column, row), render)

    def crop(self, opaque_id: str, box_l0: tuple[int, int, int, int], *, size_px: tuple[int, int]) -> bytes | None:
        """A part of level 0 (left, top, right, bottom) as JPEG of `size_px`; None when it is not inside the slide."""

        def render(slide: Slide) -> NDArray[np.uint8] | None:
            left, top, right, bottom = box_l0
            inside = 0 <= left < right <= slide.size_l0[0] and 0 <= top < bottom <= slide.size_l0[1]
            return render_region(slide, box_l0, size_px=size_px) if inside else None

        return self._cached((opaque_id, "crop", *box_l0, *size_px), render)

    def _cached(self, key: tuple[object, ...], render: Callable[[Slide], NDArray[np.uint8] | None]) -> bytes | None:
        known = self._tiles.get(key)
        if known is not None:
            return known
        with self._renders, self.slide(str(key[0])) as slide:
            pixels = render(slide)
        if pixels is None:
            return None
        encoded = jpeg(pixels)
        self._tiles.put(key, encoded)
        return encoded

    def _base(self, opaque_id: str, slide: Slide) -> NDArray[np.uint8]:
        with self._base_lock:  # one render serves all the coarse tiles that a first view asks for at once
            base = self._bases.get(opaque_id)
            if base is None:
                base = render_base(slide)
                self._bases.put(opaque_id, base)
            return base


_library: Library | None = None


def install(library: Library) -> None:
    """Make `library` the one of this process. The page runs as a script and has no other way to reach it."""
    global _library
    _library = library


def current() -> Library:
    """The process's library. Raises RuntimeError before install()."""
    if _library is None:
        raise RuntimeError("start the viewer with `wsi-mil view RUN`: the page alone does not know its run")
    return _library
