"""What a slide file says about itself, and the decision which pixel size to believe. Pure: no file is opened here."""

import math
from dataclasses import dataclass
from pathlib import Path

from tiling.errors import MissingPixelSize, SlideError

Pair = tuple[float, float]

METADATA_TOLERANCE = 0.05
"""Two statements about the pixel size that differ by more are flagged."""
OBJECTIVE_TOLERANCE = 0.25
"""The chosen pixel size may differ by this much from what the objective power says."""
OBJECTIVE_UM = 10.0
"""Microns per pixel times objective power of the usual scanner: 40x is 0.25, 20x is 0.5."""


@dataclass(frozen=True, kw_only=True)
class PixelSize:
    """Microns per level-0 pixel as (x, y), who said so, and what else was said."""

    mpp: Pair
    source: str
    """One of "cohort", "metadata", "tags", "user"."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SlideHeader:
    """What the file says, before anybody decides on a pixel size. All pairs are (x, y)."""

    slide_id: str
    path: Path
    vendor: str
    size_l0: tuple[int, int]
    level_sizes: tuple[tuple[int, int], ...]
    level_downsamples: tuple[Pair, ...]
    """Level-0 size over level size, for each axis of each level; never rounded."""
    mpp_metadata: Pair | None
    mpp_tags: Pair | None
    objective_power: float | None
    bounds_l0: tuple[int, int, int, int]
    """x, y, width, height of the scanned part; the whole slide when the file names none."""
    icc_profile: bool
    fingerprint: str
    file_tile_size: tuple[int, int] | None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SlideInfo:
    """Header facts and the decided pixel size: what grids, bags and viewers keep of a slide."""

    slide_id: str
    fingerprint: str
    vendor: str
    size_l0: tuple[int, int]
    mpp: Pair
    mpp_source: str
    bounds_l0: tuple[int, int, int, int]
    level_downsamples: tuple[Pair, ...]
    objective_power: float | None = None
    icc_profile: bool = False
    file_tile_size: tuple[int, int] | None = None
    warnings: tuple[str, ...] = ()


def as_pair(mpp: float | Pair) -> Pair:
    """One number for both axes, or a pair as it is."""
    return (float(mpp), float(mpp)) if isinstance(mpp, int | float) else (float(mpp[0]), float(mpp[1]))


def choose_mpp(
    header: SlideHeader, *, cohort_mpp: float | Pair | None = None, default_mpp: float | Pair | None = None
) -> PixelSize:
    """Pick the pixel size: the cohort's word, then metadata, then TIFF tags, then the user's default.

    What the other sources and the objective power say is compared with the choice, and a disagreement becomes a
    warning. Raises MissingPixelSize when nobody says anything, SlideError when a given number is no pixel size.
    """
    said = {
        "cohort": _given(header, cohort_mpp, "the cohort's slide_mpp"),
        "metadata": header.mpp_metadata,
        "tags": header.mpp_tags,
        "user": _given(header, default_mpp, "--slide-mpp"),
    }
    source, mpp = next(((name, value) for name, value in said.items() if value is not None), ("", None))
    if mpp is None:
        raise MissingPixelSize(_cure(header))
    others = [(name, said[name]) for name in ("metadata", "tags") if name != source]
    warnings = [
        f"pixel size {_text(mpp)} µm ({source}) differs from {_text(other)} µm ({name})"
        for name, other in others
        if other is not None and _apart(mpp, other) > METADATA_TOLERANCE
    ]
    return PixelSize(mpp=mpp, source=source, warnings=tuple(warnings) + _objective_warnings(header, mpp, source))


def decide(header: SlideHeader, pixel_size: PixelSize) -> SlideInfo:
    """The record that outlives the open file."""
    return SlideInfo(
        slide_id=header.slide_id,
        fingerprint=header.fingerprint,
        vendor=header.vendor,
        size_l0=header.size_l0,
        mpp=pixel_size.mpp,
        mpp_source=pixel_size.source,
        bounds_l0=header.bounds_l0,
        level_downsamples=header.level_downsamples,
        objective_power=header.objective_power,
        icc_profile=header.icc_profile,
        file_tile_size=header.file_tile_size,
        warnings=header.warnings + pixel_size.warnings,
    )


def _objective_warnings(header: SlideHeader, mpp: Pair, source: str) -> tuple[str, ...]:
    if not header.objective_power:
        return ()
    expected = OBJECTIVE_UM / header.objective_power
    if _apart(mpp, (expected, expected)) <= OBJECTIVE_TOLERANCE:
        return ()
    power = f"{header.objective_power:g}x"
    return (f"pixel size {_text(mpp)} µm ({source}) does not fit the {power} objective (about {expected:g} µm)",)


def _given(header: SlideHeader, mpp: float | Pair | None, where: str) -> Pair | None:
    if mpp is None:
        return None
    pair = as_pair(mpp)
    if not all(math.isfinite(value) and value > 0 for value in pair):
        raise SlideError(
            f"{header.path.name}: {where} is {_text(pair)}. It must be a positive number of microns per pixel."
        )
    return pair


def _cure(header: SlideHeader) -> str:
    seen = "".join(f" ({warning})" for warning in header.warnings if "pixel size" in warning)
    return (
        f"{header.path.name}: no microns per pixel in the file{seen}. Give it in the cohort table, column 'slide_mpp', "
        f"or in fixes.csv, or with --slide-mpp for all slides without one."
    )


def _apart(mpp: Pair, other: Pair) -> float:
    return max(abs(a - b) / b for a, b in zip(mpp, other, strict=True))


def _text(mpp: Pair) -> str:
    return f"{mpp[0]:.4g}" if f"{mpp[0]:.4g}" == f"{mpp[1]:.4g}" else f"{mpp[0]:.4g} x {mpp[1]:.4g}"
