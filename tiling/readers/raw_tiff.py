"""The fast path: compressed tiles straight from the TIFF, decoded by libjpeg-turbo, stitched in numpy.

OpenSlide decodes the same bytes with the same library, and then composes premultiplied ARGB with cairo, which
openslide-python turns into RGBA and we into RGB; those three passes are what is saved. A reader that is not asked
for a level it cannot read exactly, and that refuses a tile it has doubts about, gives the same pixels.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import imagecodecs
import numpy as np
import tifffile

from tiling.errors import SlideError
from tiling.readers.area import Rgb
from tiling.readers.tiff import is_rgb8

CACHE_BYTES = 64 * 2**20
"""Decoded file tiles that one open slide keeps, so that neighbours do not decode a file tile twice."""
_LOSSLESS = (1, 5, 8, 32946)
_ZEROS = bytes(64)


class TileError(Exception):
    """A file tile is missing, cut or damaged; the message says which and why."""


class RawTiff:
    """Tiles of some pages of a TIFF as RGB. Thread-safe; decoding runs outside the interpreter lock."""

    def __init__(self, tiff: tifffile.TiffFile, pages: Sequence[tifffile.TiffPage | None]) -> None:
        self._tiff = tiff
        self._pages = [page if page is not None and _can_read(page) else None for page in pages]
        self._index: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
        self._cache: OrderedDict[tuple[int, int], Rgb] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()

    def can_read(self, level: int) -> bool:
        """Whether the level's page is of a kind whose pixels are known to come out the same."""
        return self._pages[level] is not None

    def inside_a_tile(self, level: int, part: float) -> tuple[int, int, tuple[int, int]]:
        """x, y, (w, h) of a file tile that lies at a part of the level's width and height, without its far rim."""
        page = self._page(level)
        x_lv, y_lv = (
            int(size * part) // tile * tile
            for size, tile in ((page.imagewidth, page.tilewidth), (page.imagelength, page.tilelength))
        )
        width, height = min(page.tilewidth, page.imagewidth - x_lv), min(page.tilelength, page.imagelength - y_lv)
        return x_lv, y_lv, (max(1, width - 2), max(1, height - 2))

    def window(self, level: int, x_lv: int, y_lv: int, *, size_lv: tuple[int, int]) -> Rgb:
        """The pixels of a window that lies inside the level. Raises TileError."""
        page = self._page(level)
        tile_w, tile_h = page.tilewidth, page.tilelength
        right, bottom = x_lv + size_lv[0], y_lv + size_lv[1]
        across = -(-page.imagewidth // tile_w)
        out = np.empty((size_lv[1], size_lv[0], 3), np.uint8)
        for row in range(y_lv // tile_h, -(-bottom // tile_h)):
            top, low = max(y_lv, row * tile_h), min(bottom, (row + 1) * tile_h)
            for column in range(x_lv // tile_w, -(-right // tile_w)):
                left, far = max(x_lv, column * tile_w), min(right, (column + 1) * tile_w)
                tile = self._tile(level, row * across + column)
                out[top - y_lv : low - y_lv, left - x_lv : far - x_lv] = tile[
                    top - row * tile_h : low - row * tile_h, left - column * tile_w : far - column * tile_w
                ]
        return out

    def close(self) -> None:
        """Close the file and forget the tiles."""
        self._tiff.close()
        self._cache.clear()
        self._cached_bytes = 0

    def _page(self, level: int) -> tifffile.TiffPage:
        page = self._pages[level]
        if page is None:
            raise ValueError(f"level {level} has no page that can be read here")
        return page

    def _tile(self, level: int, index: int) -> Rgb:
        key = (level, index)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
            data = self._bytes(level, index)
        tile = _decode(self._page(level), index, data)
        with self._lock:
            if key not in self._cache:
                self._cache[key] = tile
                self._cached_bytes += tile.nbytes
            while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        return tile

    def _bytes(self, level: int, index: int) -> bytes:
        if level not in self._index:
            page = self._page(level)
            self._index[level] = page.dataoffsets, page.databytecounts
        offsets, counts = self._index[level]
        if index >= len(offsets) or not offsets[index] or not counts[index]:
            raise TileError(f"tile {index} is missing from the file")
        self._tiff.filehandle.seek(offsets[index])
        data = bytes(self._tiff.filehandle.read(counts[index]))
        if len(data) != counts[index]:
            raise TileError(f"tile {index} is cut off: {len(data)} of {counts[index]} bytes")
        return data


def agrees(
    raw: RawTiff, level: int, *, downsample: float, reference: Callable[[int, int, tuple[int, int]], Rgb]
) -> bool:
    """Whether two file tiles of a level, the middle one and the first, come out as in `reference(x, y, size)`.

    Equal where the tile's corner is a whole level-0 position at the reference's `downsample`. Elsewhere the reference
    interpolates between level pixels, and the difference that this can make at most is allowed. Tiles that one of
    the two cannot read are passed over; at least one must have been compared.
    """
    compared = False
    for part in (0.5, 0.0):
        x_lv, y_lv, size_lv = raw.inside_a_tile(level, part)
        shift = sum(abs(round(place * downsample) / downsample - place) for place in (x_lv, y_lv))
        try:
            ours = raw.window(level, x_lv, y_lv, size_lv=size_lv).astype(np.int16)
            theirs = reference(x_lv, y_lv, size_lv)
        except (TileError, SlideError):
            continue
        if np.abs(ours - theirs).max() > math.ceil(255 * shift - 1e-6):
            return False
        compared = True
    return compared


def _can_read(page: tifffile.TiffPage) -> bool:
    if not (page.is_tiled and is_rgb8(page)):
        return False
    return page.compression == 7 or (page.compression in _LOSSLESS and page.photometric == 2)


def _decode(page: tifffile.TiffPage, index: int, data: bytes) -> Rgb:
    shape = (page.tilelength, page.tilewidth, 3)
    try:
        if page.compression == 7:
            _check_jpeg(data)
            space = "RGB" if page.photometric == 2 else "YCBCR"
            tile = imagecodecs.jpeg8_decode(data, tables=page.jpegtables, colorspace=space, outcolorspace="RGB")
        else:
            segment = page.decode(data, index)[0]
            if segment is None:
                raise ValueError("it is empty")
            tile = np.pad(segment[0], [(0, want - have) for want, have in zip(shape, segment[0].shape, strict=True)])
    except (ValueError, RuntimeError, tifffile.TiffFileError) as error:
        raise TileError(f"tile {index}: {error}") from error
    if tile.shape != shape:
        raise TileError(f"tile {index} decodes to {tile.shape}, not {shape}")
    tile.flags.writeable = False
    return np.asarray(tile, dtype=np.uint8)


def _check_jpeg(data: bytes) -> None:
    """Refuse a JPEG stream that a strict decoder would warn about. Raises ValueError.

    imagecodecs keeps libjpeg's warnings to itself and returns grey for what is missing, where OpenSlide fails. The
    marks of a damaged copy can be seen without decoding: no end mark, holes of zeros, marks inside the coded data.
    """
    whole = data.rstrip(b"\0")
    start = whole.find(b"\xff\xda")
    if not whole.startswith(b"\xff\xd8") or not whole.endswith(b"\xff\xd9") or start < 0:
        raise ValueError("the JPEG data do not begin and end as they should")
    if whole.find(_ZEROS) >= 0:
        raise ValueError("there are holes in the JPEG data")
    coded = np.frombuffer(whole, np.uint8, offset=start + 2)[:-2]
    follows = coded[1:][coded[:-1] == 0xFF]
    if not ((follows == 0) | ((follows >= 0xD0) & (follows <= 0xD7))).all():
        raise ValueError("there are marks inside the JPEG data")
