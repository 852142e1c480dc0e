"""One slide with a pixel size that can be trusted: header facts, and RGB from any place. The only `import openslide`.

Frames: positions are level-0 pixels (`_l0`), sizes are pixels of the level that is read (`_lv`) or of the result
(`_px`); pairs are (x, y), arrays are (row, column). A pixel i of a level covers [i, i + 1) * downsample on level 0,
where the downsample is level-0 size over level size of that axis, unrounded.
"""

import logging
import math
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import openslide

from tiling.errors import SlideError
from tiling.readers.area import Rgb, Window, on_white, resample
from tiling.readers.header import Pair, PixelSize, SlideHeader, SlideInfo, choose_mpp, decide
from tiling.readers.layout import TiffLayout, header_of, tiff_layout
from tiling.readers.raw_tiff import RawTiff, TileError, agrees
from tiling.readers.tiff import open_tiff, why_not_a_slide

if TYPE_CHECKING:
    from tiling.grid import ReadPlan

__all__ = ["PixelSize", "Slide", "SlideHeader", "SlideInfo", "choose_mpp", "read_header"]

_log = logging.getLogger(__name__)
_BLOCK_LV = 2048
"""Side of the blocks in which a thumbnail is read: about 50 MB of working memory, however large the level."""
_NO_TIFF = ("hamamatsu", "mirax", "dicom")


@dataclass(kw_only=True)
class _Opened:
    """What is open in one process."""

    slide: openslide.OpenSlide
    raw: RawTiff | None
    pid: int


def read_header(path: Path, *, slide_id: str | None = None) -> SlideHeader:
    """Read what the file says about itself, without pixels. Raises SlideError with the reason."""
    header, opened = _open(Path(path), slide_id)
    _close(opened)
    return header


class Slide:
    """An open pyramid with a trusted pixel size.

    path: any file that OpenSlide reads, or an OME-TIFF pyramid. slide_id: the path's name without suffix when not
    given. cohort_mpp: the cohort's word on microns per level-0 pixel, which goes before the file's; default_mpp: for
    a file that says nothing. Raises SlideError, or MissingPixelSize when nobody knows.

    It can be pickled and survives a fork: the file is opened again where it is used. A damaged place fails alone: the
    handle is opened anew after an error, so later reads of healthy places work. Several threads may read from it.
    """

    def __init__(
        self,
        path: Path,
        *,
        slide_id: str | None = None,
        cohort_mpp: float | Pair | None = None,
        default_mpp: float | Pair | None = None,
    ) -> None:
        self._lock = threading.RLock()
        self._opened: _Opened | None = None
        self._trusted: dict[int, bool] = {}
        self.path = Path(path)
        header, opened = _open(self.path, slide_id)
        self._opened = opened
        self.level_sizes = header.level_sizes
        self.info = decide(header, choose_mpp(header, cohort_mpp=cohort_mpp, default_mpp=default_mpp))

    @property
    def mpp(self) -> Pair:
        """Microns per level-0 pixel."""
        return self.info.mpp

    @property
    def size_l0(self) -> tuple[int, int]:
        """Width and height of level 0."""
        return self.info.size_l0

    @property
    def level_downsamples(self) -> tuple[Pair, ...]:
        """True level-0 pixels per pixel of each level."""
        return self.info.level_downsamples

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "info": self.info, "level_sizes": self.level_sizes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock(), _opened=None, _trusted={})

    def __del__(self) -> None:
        if "_opened" in self.__dict__:
            self.close()

    def close(self) -> None:
        """Let the file go. A later read opens it again."""
        opened, self._opened = self._opened, None
        if opened is not None:
            _close(opened)

    def read_rgb(self, x_l0: float, y_l0: float, *, level: int, size_lv: tuple[int, int]) -> Rgb:
        """Read `size_lv` pixels of a level, the first of them at the level pixel edge nearest to (x_l0, y_l0).

        Returns (h, w, 3), alpha composited on white, white outside the slide. Raises SlideError.
        """
        dx, dy = self.level_downsamples[level]
        return self._window(level, math.floor(x_l0 / dx + 0.5), math.floor(y_l0 / dy + 0.5), size_lv)

    def read_tile(self, x_l0: int, y_l0: int, plan: "ReadPlan") -> Rgb:
        """Read the tile with its top left corner at (x_l0, y_l0) as the plan says.

        Exactly the level-0 ground [x, x + tile_size_l0) is shown: its edges fall between pixels of the plan's level,
        and a level pixel counts by the part of it that is inside. Returns (tile_px, tile_px, 3). Raises SlideError.
        """
        dx, dy = plan.level_downsample
        width, height = plan.tile_size_l0
        window = (x_l0 / dx, y_l0 / dy, (x_l0 + width) / dx, (y_l0 + height) / dy)
        return self._resampled(plan.level, window, (plan.tile_px, plan.tile_px))

    def thumbnail(self, *, mpp: float) -> Rgb:
        """Read the whole slide at about `mpp`, reduced by area from the coarsest level that is fine enough.

        Each axis is rounded to whole pixels, at least one and never more than level 0 has. Raises SlideError.
        """
        width, height = (
            min(max(1, round(size * own / mpp)), size) for size, own in zip(self.size_l0, self.mpp, strict=True)
        )
        level = max(i for i, (w, h) in enumerate(self.level_sizes) if i == 0 or (w >= width and h >= height))
        scale_x, scale_y = self.level_sizes[level][0] / width, self.level_sizes[level][1] / height
        step_x, step_y = max(1, int(_BLOCK_LV / scale_x)), max(1, int(_BLOCK_LV / scale_y))
        out = np.empty((height, width, 3), np.uint8)
        for top in range(0, height, step_y):
            low = min(height, top + step_y)
            for left in range(0, width, step_x):
                far = min(width, left + step_x)
                window = (left * scale_x, top * scale_y, far * scale_x, low * scale_y)
                out[top:low, left:far] = self._resampled(level, window, (far - left, low - top))
        return out

    def associated_image(self, name: str) -> Rgb | None:
        """The label, macro or other picture of that name; None when the file has none. Raises SlideError."""
        opened = self._now()
        try:
            image = opened.slide.associated_images.get(name)
        except openslide.OpenSlideError as error:
            opened.slide = _open_slide(self.path)
            raise SlideError(f"{self.path.name}: the {name} picture cannot be read: {error}") from error
        return None if image is None else on_white(np.asarray(image.convert("RGBA")))

    def _resampled(self, level: int, window: Window, size_px: tuple[int, int]) -> Rgb:
        """A window given in pixels of the level, with fractional edges, at `size_px`."""
        x0, y0, x1, y1 = (_snap(edge) for edge in window)
        left, top = math.floor(x0), math.floor(y0)
        pixels = self._window(level, left, top, (math.ceil(x1) - left, math.ceil(y1) - top))
        return resample(pixels, (x0 - left, y0 - top, x1 - left, y1 - top), size_px=size_px)

    def _window(self, level: int, x_lv: int, y_lv: int, size_lv: tuple[int, int]) -> Rgb:
        """Whole pixels of a level, white where the window reaches over its edge."""
        if not 0 <= level < len(self.level_sizes):
            raise IndexError(f"level {level} of {len(self.level_sizes)}")
        width, height = self.level_sizes[level]
        left, top = max(0, x_lv), max(0, y_lv)
        right, bottom = min(width, x_lv + size_lv[0]), min(height, y_lv + size_lv[1])
        inside = right > left and bottom > top
        if inside and (right - left, bottom - top) == tuple(size_lv):
            return self._pixels(level, left, top, size_lv)
        out = np.full((size_lv[1], size_lv[0], 3), 255, np.uint8)
        if inside:
            pixels = self._pixels(level, left, top, (right - left, bottom - top))
            out[top - y_lv : bottom - y_lv, left - x_lv : right - x_lv] = pixels
        return out

    def _pixels(self, level: int, x_lv: int, y_lv: int, size_lv: tuple[int, int]) -> Rgb:
        """Pixels of a window inside the level: by the fast path where it is trusted, else by OpenSlide."""
        raw = self._now().raw
        try:
            if raw is not None and self._trusts(raw, level):
                return raw.window(level, x_lv, y_lv, size_lv=size_lv)
        except TileError as error:
            if level >= self._now().slide.level_count:
                raise self._failed(level, x_lv, y_lv, size_lv, error) from error
        return self._by_openslide(level, x_lv, y_lv, size_lv)

    def _by_openslide(self, level: int, x_lv: int, y_lv: int, size_lv: tuple[int, int]) -> Rgb:
        """The same by OpenSlide, which takes whole level-0 positions and has one downsample for both axes of a level.

        Where that makes no whole level pixel OpenSlide interpolates, at most half a level-0 pixel aside; at the far
        edge up to one pixel before, as its edge pixels would mix with what is outside. A handle is broken for good by
        its first error, also by one of another thread: a new one is tried.
        """
        opened = self._now()
        downsample = opened.slide.level_downsamples[level]
        ends = (x_lv + size_lv[0], y_lv + size_lv[1])
        x_l0, y_l0 = (
            math.floor(start * downsample) if end == size else round(start * downsample)
            for start, end, size in zip((x_lv, y_lv), ends, self.level_sizes[level], strict=True)
        )
        try:
            return on_white(np.asarray(opened.slide.read_region((x_l0, y_l0), level, size_lv)))
        except openslide.OpenSlideError:
            opened.slide = _open_slide(self.path)
        try:
            return on_white(np.asarray(opened.slide.read_region((x_l0, y_l0), level, size_lv)))
        except openslide.OpenSlideError as error:
            opened.slide = _open_slide(self.path)
            raise self._failed(level, x_lv, y_lv, size_lv, error) from error

    def _failed(self, level: int, x_lv: int, y_lv: int, size_lv: tuple[int, int], error: Exception) -> SlideError:
        dx, dy = self.level_downsamples[level]
        return SlideError(
            f"{self.path.name}: {size_lv[0]} x {size_lv[1]} pixels of level {level} at level-0 position "
            f"({round(x_lv * dx)}, {round(y_lv * dy)}) cannot be read: {error}"
        )

    def _now(self) -> _Opened:
        """What is open in this process; opened if need be."""
        opened = self._opened
        if opened is not None and opened.pid == os.getpid():
            return opened
        with self._lock:
            if self._opened is None or self._opened.pid != os.getpid():
                self._opened = _open(self.path, self.info.slide_id)[1]
            return self._opened

    def _trusts(self, raw: RawTiff, level: int) -> bool:
        """Whether the fast path is used for a level: seen to agree with OpenSlide where OpenSlide has that level."""
        if level not in self._trusted:
            with self._lock:
                self._trusted[level] = raw.can_read(level) and self._agrees(raw, level)
            if raw.can_read(level) and not self._trusted[level]:
                _log.info("%s: level %d is read by OpenSlide alone", self.path.name, level)
        return self._trusted[level]

    def _agrees(self, raw: RawTiff, level: int) -> bool:
        downsamples = self._now().slide.level_downsamples
        if level >= len(downsamples):
            return True
        return agrees(
            raw,
            level,
            downsample=downsamples[level],
            reference=lambda x, y, size: self._by_openslide(level, x, y, size),
        )


def _snap(edge: float) -> float:
    """A pixel edge that rounding errors moved by less than a millionth is put back."""
    return float(round(edge)) if abs(edge - round(edge)) < 1e-6 else edge


def _open(path: Path, slide_id: str | None) -> tuple[SlideHeader, _Opened]:
    slide = _open_slide(path)
    try:
        vendor = slide.properties["openslide.vendor"]
        tiff = None if vendor in _NO_TIFF else open_tiff(path)
        layout = TiffLayout(raw=None) if tiff is None else tiff_layout(tiff, vendor, tuple(slide.level_dimensions))
        try:
            header = header_of(slide.properties, tuple(slide.level_dimensions), path, layout=layout, slide_id=slide_id)
        except BaseException:
            if layout.raw is not None:
                layout.raw.close()
            raise
    except BaseException:
        slide.close()
        raise
    return header, _Opened(slide=slide, raw=layout.raw, pid=os.getpid())


def _close(opened: _Opened) -> None:
    if opened.pid == os.getpid():
        opened.slide.close()
    if opened.raw is not None:
        opened.raw.close()


def _open_slide(path: Path) -> openslide.OpenSlide:
    if not path.is_file():
        raise SlideError(f"{path}: there is no such file.")
    try:
        return openslide.OpenSlide(path)
    except openslide.OpenSlideUnsupportedFormatError as error:
        reason = why_not_a_slide(path) or "it is not in a format that OpenSlide reads, or it is damaged"
        raise SlideError(f"{path.name}: cannot be opened: {reason}.") from error
    except (openslide.OpenSlideError, OSError) as error:
        raise SlideError(f"{path.name}: cannot be opened: {error}.") from error
