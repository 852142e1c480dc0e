"""From a slide to its tiles: find the tissue, lay the grid, keep what holds tissue."""

from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiling.errors import NoTissue
from tiling.geometry import full_grid, plan_read, tissue_fractions
from tiling.grid import TileGrid, TileSpec
from tiling.masks import digest_of_mask, load_mask
from tiling.slide import Slide, SlideInfo
from tiling.tissue import TissueMap, map_tissue

_SLACK = 1e-6
"""A fully covered tile may sum to 0.9999999; it still meets min_tissue = 1."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a slide shows from afar."""

    slide: SlideInfo
    thumbnail_rgb: NDArray[np.uint8]
    ground: TissueMap
    mask_digest: str = ""
    """SHA-256 of the user's mask file; empty where the mask is our own."""


def tile_slide(slide: Slide, spec: TileSpec, *, mask_path: Path | None = None) -> TileGrid:
    """Return the tiles of a slide that hold tissue. Nothing is written.

    Raises SlideError where the slide cannot answer the wish, SlideTooSmall where no tile fits, NoTissue where none
    holds enough tissue.
    """
    plan_read(slide.info, spec)  # refuses in no time what a thumbnail would be made for in vain
    return select_tiles(survey_slide(slide, spec, mask_path=mask_path), spec)


def survey_slide(slide: Slide, spec: TileSpec, *, mask_path: Path | None = None) -> Survey:
    """Read the thumbnail and find the tissue on it, or take the user's mask in its place."""
    thumbnail = slide.thumbnail(mpp=max(spec.tissue.mpp, *slide.info.mpp))
    if mask_path is None:
        mpp = sqrt(pixel_um2(slide.info, thumbnail.shape[:2]))
        return Survey(slide=slide.info, thumbnail_rgb=thumbnail, ground=map_tissue(thumbnail, spec.tissue, mpp=mpp))
    mask = load_mask(mask_path, slide.info, thumbnail.shape[:2])
    nothing = np.zeros_like(mask)
    note = "" if mask.any() else f"the mask {mask_path.name} marks nothing"
    ground = TissueMap(tissue=mask, pen=nothing, missing=nothing, note=note)
    return Survey(
        slide=slide.info, thumbnail_rgb=thumbnail, ground=ground, mask_digest=digest_of_mask(mask_path, slide.info)
    )


def select_tiles(survey: Survey, spec: TileSpec) -> TileGrid:
    """Lay the grid over the survey and keep the tiles with enough tissue. Pure; raises as `tile_slide` does."""
    info, mask = survey.slide, survey.ground.tissue
    plan = plan_read(info, spec)
    fractions = tissue_fractions(mask, info, plan)
    keep = fractions >= spec.min_tissue - _SLACK
    if not keep.any():
        raise NoTissue(_why_none(survey, spec, most=float(fractions.max())))
    return TileGrid(
        slide=info,
        spec=spec,
        plan=plan,
        grid_xy=full_grid(plan)[keep],
        tissue_fraction=fractions[keep],
        tissue_mm2=tissue_mm2(survey),
        mask_digest=survey.mask_digest,
    )


def tissue_mm2(survey: Survey) -> float:
    """Area of the tissue on the slide."""
    mask = survey.ground.tissue
    return float(mask.sum() * pixel_um2(survey.slide, (mask.shape[0], mask.shape[1])) / 1e6)


def pixel_um2(info: SlideInfo, shape: tuple[int, ...]) -> float:
    """Area on the slide of one pixel of a picture of the whole slide with `shape` (rows, columns)."""
    return info.size_l0[0] * info.mpp[0] / shape[1] * info.size_l0[1] * info.mpp[1] / shape[0]


def _why_none(survey: Survey, spec: TileSpec, *, most: float) -> str:
    slide_id, ground = survey.slide.slide_id, survey.ground
    cure = "Look at its QC picture; give a mask in the cohort's column 'mask' if there is tissue."
    if ground.note:
        return f"{slide_id}: no tissue: {ground.note}. {cure}"
    if not ground.tissue.any():
        pen = f" ({ground.pen.mean():.0%} of the slide is taken for pen)" if ground.pen.any() else ""
        return f"{slide_id}: no tissue found{pen}. {cure}"
    return (
        f"{slide_id}: {tissue_mm2(survey):.2f} mm² of tissue, but no tile of {spec.tile_px} px at {spec.mpp:g} µm/px "
        f"holds the least fraction {spec.min_tissue:g}; the best has {most:.2f}. Lower min_tissue or use smaller tiles."
    )
