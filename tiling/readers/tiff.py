"""What a TIFF's own tags and OME-XML say: pixel format, pixel size, and the levels that hide in SubIFDs.

OpenSlide reads pixels; these are the facts that it does not tell. Only headers are read here.
"""

import logging
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import tifffile

from tiling.readers.header import Pair

TAG_RANGE_UM = (0.05, 20.0)
"""TIFF tags outside are not believed: 72, 96, 300 and 600 dpi, which software writes by default, are 353 to 42 µm."""
_UNIT_UM = {"nm": 1e-3, "µm": 1.0, "μm": 1.0, "um": 1.0, "mm": 1e3, "cm": 1e4, "m": 1e6, "in": 25_400.0}
_RESOLUTION_UNIT_UM = {2: 25_400.0, 3: 10_000.0}
_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_BROKEN = (tifffile.TiffFileError, OSError, ValueError, LookupError, TypeError, struct.error, RuntimeError)

logging.getLogger("tifffile").addHandler(logging.NullHandler())  # its remarks on odd tags are not for our users,
logging.getLogger("tifffile").propagate = False  # not even where somebody listens to all loggers


@dataclass(frozen=True, kw_only=True)
class TiffFacts:
    """What the tags of the full-size image say."""

    refusal: str | None = None
    """Why its pixels cannot be shown as 8-bit RGB."""
    mpp_tags: Pair | None = None
    mpp_ome: Pair | None = None
    warnings: tuple[str, ...] = ()


def open_tiff(path: Path) -> tifffile.TiffFile | None:
    """Open the TIFF structure of `path`; None when it is no TIFF, or one that cannot be parsed."""
    try:
        with path.open("rb") as handle:
            if handle.read(4) not in _MAGIC:
                return None
        tiff = tifffile.TiffFile(path)
    except _BROKEN:
        return None
    try:
        if len(tiff.pages):
            return tiff
    except _BROKEN:
        pass
    tiff.close()
    return None


def tiled_pages(tiff: tifffile.TiffFile) -> list[tifffile.TiffPage]:
    """The tiled images among the top-level directories, in file order; a list cut short by damage ends early."""
    pages = []
    try:
        for index in range(len(tiff.pages)):
            page = tiff.pages.get(index)
            if isinstance(page, tifffile.TiffPage) and page.is_tiled:
                pages.append(page)
    except _BROKEN:
        return pages
    return pages


def page_of_size(pages: list[tifffile.TiffPage], size: tuple[int, int]) -> tifffile.TiffPage | None:
    """The one page of that (width, height); None when there is none, or more than one."""
    hits = [page for page in pages if (page.imagewidth, page.imagelength) == size]
    return hits[0] if len(hits) == 1 else None


def read_facts(tiff: tifffile.TiffFile, size_l0: tuple[int, int]) -> TiffFacts:
    """Read pixel format and pixel size of the page that has the slide's full size."""
    page = next((page for page in tiled_pages(tiff) if (page.imagewidth, page.imagelength) == size_l0), None)
    if page is None:
        return TiffFacts()
    mpp_tags, doubt = _mpp_of_tags(page)
    return TiffFacts(
        refusal=_refusal(page),
        mpp_tags=mpp_tags,
        mpp_ome=_mpp_of_ome(tiff, size_l0),
        warnings=_notices(page) + ((doubt,) if doubt else ()),
    )


def ome_levels(tiff: tifffile.TiffFile, size_l0: tuple[int, int]) -> list[tifffile.TiffPage]:
    """The levels of an OME pyramid in SubIFDs, largest first; empty unless it is tiled, interleaved 8-bit RGB."""
    if not tiff.is_ome:
        return []
    try:
        base = page_of_size(tiled_pages(tiff), size_l0)
        if base is None or not base.pages:
            return []
        below = [page for page in base.pages if isinstance(page, tifffile.TiffPage)]
    except _BROKEN:
        return []
    levels = [base, *sorted(below, key=lambda page: -page.imagewidth)]
    return levels if all(is_rgb8(page) and page.is_tiled for page in levels) else []


def is_rgb8(page: tifffile.TiffPage) -> bool:
    """Whether the page holds three interleaved 8-bit samples, as RGB or as YCbCr."""
    return (
        page.samplesperpixel == 3
        and page.bitspersample == 8
        and page.sampleformat == 1
        and page.planarconfig == 1
        and page.photometric in (2, 6)
    )


def why_not_a_slide(path: Path) -> str | None:
    """A better reason than "unsupported", where the file's beginning tells one."""
    try:
        with path.open("rb") as handle:
            if not handle.read(1):
                return "the file is empty"
    except OSError as error:
        return error.strerror or str(error)
    tiff = open_tiff(path)
    if tiff is None:
        return None
    with tiff:
        if not tiled_pages(tiff):
            return "it is a TIFF in strips, not in tiles; convert it, e.g. with 'vips tiffsave --tile --pyramid'"
    return None


def _refusal(page: tifffile.TiffPage) -> str | None:
    bits, kind = page.bitspersample, page.sampleformat
    if kind != 1:
        name = {2: "signed integers", 3: "floating-point numbers"}.get(kind, "numbers of an unusual kind")
        return f"its pixels are {bits}-bit {name}; convert it to 8-bit RGB"
    if bits > 16:
        return f"its pixels have {bits} bits; convert it to 8-bit RGB"
    if bits > 8 and page.samplesperpixel == 1:
        # OpenSlide 4.0 shows black rows in lower levels of such files without an error.
        return f"its pixels are {bits}-bit grey, which OpenSlide misreads; convert it to 8 bits"
    if page.samplesperpixel > 4:
        return f"its pixels have {page.samplesperpixel} channels; convert it to 8-bit RGB"
    return None


def _notices(page: tifffile.TiffPage) -> tuple[str, ...]:
    notices = []
    if page.bitspersample > 8:
        notices.append(f"{page.bitspersample}-bit pixels are scaled to 8 bits")
    if page.photometric in (0, 1):
        notices.append("grey pixels are repeated as red, green and blue")
    return tuple(notices)


def _mpp_of_tags(page: tifffile.TiffPage) -> tuple[Pair | None, str]:
    """The pixel size of XResolution, YResolution and ResolutionUnit, or None and what is wrong with them."""
    pair = []
    unit = _RESOLUTION_UNIT_UM.get(int(page.tags.valueof(296, default=2)))
    for code in (282, 283):
        value = page.tags.valueof(code)
        per_unit = value[0] / value[1] if isinstance(value, tuple) and value[1] else 0.0
        pair.append(unit / per_unit if unit and per_unit > 0 else math.nan)
    if any(math.isnan(mpp) for mpp in pair):
        return None, ""
    if not all(TAG_RANGE_UM[0] <= mpp <= TAG_RANGE_UM[1] for mpp in pair):
        return None, f"TIFF tags give a pixel size of {pair[0]:.4g} x {pair[1]:.4g} µm, which is not believed"
    return (pair[0], pair[1]), ""


def _mpp_of_ome(tiff: tifffile.TiffFile, size_l0: tuple[int, int]) -> Pair | None:
    """PhysicalSizeX and PhysicalSizeY of the OME image that has the slide's full size."""
    try:
        root = ElementTree.fromstring(tiff.ome_metadata or "<none/>")
    except ElementTree.ParseError:
        return None
    for pixels in root.iter():
        if not pixels.tag.endswith("Pixels") or (pixels.get("SizeX"), pixels.get("SizeY")) != tuple(map(str, size_l0)):
            continue
        pair = [_micrometres(pixels, axis) for axis in "XY"]
        if pair[0] is not None and pair[1] is not None:
            return pair[0], pair[1]
    return None


def _micrometres(pixels: ElementTree.Element, axis: str) -> float | None:
    unit = _UNIT_UM.get(pixels.get(f"PhysicalSize{axis}Unit", "µm"))
    try:
        value = float(pixels.get(f"PhysicalSize{axis}", ""))
    except ValueError:
        return None
    return value * unit if unit and math.isfinite(value) and value > 0 else None
