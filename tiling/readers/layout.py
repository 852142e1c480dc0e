"""From what OpenSlide and the TIFF's tags say to one header, and the fast reader where there is one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

import tifffile

from tiling.discovery import slide_id_of
from tiling.errors import SlideError
from tiling.readers.fingerprint import fingerprint
from tiling.readers.header import Pair, SlideHeader
from tiling.readers.raw_tiff import RawTiff
from tiling.readers.tiff import TiffFacts, ome_levels, page_of_size, read_facts, tiled_pages

Sizes = tuple[tuple[int, int], ...]

METADATA_RANGE_UM = (0.01, 1000.0)
"""Metadata outside are taken for a missing pixel size; 0 is what some writers put for unknown."""
_RAW_VENDORS = ("generic-tiff", "aperio")
"""Formats whose levels are plain grids of tiles, one directory a level."""


@dataclass(frozen=True, kw_only=True)
class TiffLayout:
    """What the TIFF structure adds to OpenSlide's view."""

    raw: RawTiff | None
    facts: TiffFacts = field(default_factory=TiffFacts)
    vendor: str | None = None
    """Another vendor than OpenSlide's, for pyramids that OpenSlide does not see."""
    level_sizes: Sizes | None = None


def tiff_layout(tiff: tifffile.TiffFile, vendor: str, level_sizes: Sizes) -> TiffLayout:
    """Read the facts and choose the pages of each level; the file is closed when no page can be read directly."""
    try:
        facts = read_facts(tiff, level_sizes[0])
        below = ome_levels(tiff, level_sizes[0]) if len(level_sizes) == 1 else []
        if below:
            raw = RawTiff(tiff, below)
            if all(raw.can_read(level) for level in range(len(below))):
                sizes = tuple((page.imagewidth, page.imagelength) for page in below)
                return TiffLayout(raw=raw, facts=facts, vendor="ome-tiff", level_sizes=sizes)
        if vendor in _RAW_VENDORS:
            tiled = tiled_pages(tiff)
            raw = RawTiff(tiff, [page_of_size(tiled, size) for size in level_sizes])
            if any(raw.can_read(level) for level in range(len(level_sizes))):
                return TiffLayout(raw=raw, facts=facts)
    except BaseException:
        tiff.close()
        raise
    tiff.close()
    return TiffLayout(raw=None, facts=facts)


def header_of(
    properties: Mapping[str, str], level_sizes: Sizes, path: Path, *, layout: TiffLayout, slide_id: str | None
) -> SlideHeader:
    """Put the header together. Raises SlideError when the pixels cannot be shown as 8-bit RGB."""
    facts = layout.facts
    if facts.refusal:
        raise SlideError(f"{path.name}: cannot be used: {facts.refusal}.")
    vendor = properties.get("openslide.vendor", "")
    sizes = layout.level_sizes or level_sizes
    width, height = sizes[0]
    mpp, doubts = (None, ()) if vendor == "generic-tiff" else _metadata_mpp(properties)
    return SlideHeader(
        slide_id=slide_id_of(PurePath(path.name)) if slide_id is None else slide_id,
        path=path,
        vendor=layout.vendor or vendor,
        size_l0=(width, height),
        level_sizes=sizes,
        level_downsamples=tuple((width / w, height / h) for w, h in sizes),
        mpp_metadata=mpp or facts.mpp_ome,
        mpp_tags=facts.mpp_tags,
        objective_power=_positive(properties.get("openslide.objective-power")),
        bounds_l0=_bounds(properties, width, height),
        icc_profile=int(properties.get("openslide.icc-size") or 0) > 0,
        fingerprint=fingerprint(path, properties, sizes),
        file_tile_size=_file_tile_size(properties),
        warnings=facts.warnings + doubts,
    )


def _metadata_mpp(properties: Mapping[str, str]) -> tuple[Pair | None, tuple[str, ...]]:
    """Microns per pixel of the scanner's own metadata, and what is doubtful about them."""
    pair = [_positive(properties.get(f"openslide.mpp-{axis}")) for axis in "xy"]
    x, y = pair
    if x is None and y is None:
        return None, ()
    both = (x or y or 0.0, y or x or 0.0)
    if not all(METADATA_RANGE_UM[0] <= mpp <= METADATA_RANGE_UM[1] for mpp in both):
        return None, (f"metadata give a pixel size of {both[0]:.4g} x {both[1]:.4g} µm, which is not believed",)
    if x is None or y is None:
        return both, ("metadata give the pixel size of one axis only; it is used for both",)
    return both, ()


def _positive(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def _bounds(properties: Mapping[str, str], width: int, height: int) -> tuple[int, int, int, int]:
    """The scanned part, cut to the slide; the whole slide when the file names none."""
    try:
        x, y, w, h = (int(properties[f"openslide.bounds-{name}"]) for name in ("x", "y", "width", "height"))
    except (KeyError, ValueError):
        return (0, 0, width, height)
    x, y = min(max(0, x), width - 1), min(max(0, y), height - 1)
    return (x, y, min(w, width - x), min(h, height - y)) if w > 0 and h > 0 else (0, 0, width, height)


def _file_tile_size(properties: Mapping[str, str]) -> tuple[int, int] | None:
    try:
        return (int(properties["openslide.level[0].tile-width"]), int(properties["openslide.level[0].tile-height"]))
    except (KeyError, ValueError):
        return None
