"""Painted thumbnails at 8 µm/px whose tissue is known; each stands for slides that simple thresholds get wrong."""

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from tiling.grid import TissueSpec
from tiling.tissue import TissueMap, find_tissue, glass_colour, map_tissue

Rgb = NDArray[np.uint8]
Mask = NDArray[np.bool_]
MPP = 8.0
GLASS = (243, 241, 244)
HE = [(225, 150, 195), (140, 90, 160)]  # stroma, nuclei
FAINT_HE = [(238, 224, 234), (222, 210, 228)]
IHC = [(214, 218, 228), (130, 85, 60)]  # pale haematoxylin, DAB
BLUE_IHC = [(190, 200, 222), (105, 120, 170)]  # haematoxylin only


def glass(shape: tuple[int, int] = (300, 400), colour: tuple[int, int, int] = GLASS) -> Rgb:
    """Glass with sensor noise and 3 % shading towards a corner."""
    rng = np.random.default_rng(1)
    shade = 1 - 0.03 * np.add.outer(np.linspace(0, 0.5, shape[0]), np.linspace(0, 0.5, shape[1]))
    noise = rng.normal(0, 1.0, (*shape, 1)) + rng.normal(0, 0.4, (*shape, 3))
    return (np.array(colour) * shade[..., None] + noise).clip(0, 255).astype(np.uint8)


def disc(shape: tuple[int, int] = (300, 400), centre: tuple[int, int] = (140, 150), radius: int = 80) -> Mask:
    rows, columns = np.ogrid[: shape[0], : shape[1]]
    return np.asarray((columns - centre[0]) ** 2 + (rows - centre[1]) ** 2 < radius**2)


def paint(rgb: Rgb, where: Mask, colours: list[tuple[int, int, int]], seed: int = 2) -> Rgb:
    """Fill `where` with cells: two colours mixed at random from pixel to pixel."""
    share = cv2.GaussianBlur(np.random.default_rng(seed).random(where.shape), (0, 0), 0.7)[..., None]
    share = np.clip((share - 0.5) * 2.5 + 0.4, 0, 1)
    tissue = np.array(colours[0]) * (1 - share) + np.array(colours[1]) * share
    out = rgb.copy()
    out[where] = tissue[where].astype(np.uint8)
    return out


def stroke(rgb: Rgb, colour: tuple[int, int, int], points: list[tuple[int, int]], width: int = 60) -> tuple[Rgb, Mask]:
    """A felt pen's line: nearly one colour, soft at the edge. Width in pixels of 8 µm."""
    drawn = np.zeros(rgb.shape[:2], np.uint8)
    cv2.polylines(drawn, [np.array(points, np.int32)], False, 255, width)
    opacity = cv2.GaussianBlur(drawn, (0, 0), 1.5)[..., None] / 255 * 0.97
    return (rgb * (1 - opacity) + np.array(colour) * opacity).astype(np.uint8), drawn > 0


def overlap(found: Mask, truth: Mask) -> float:
    return float((found & truth).sum() / (found | truth).sum())


def stray(found: Mask, truth: Mask) -> Mask:
    """What was found more than two pixels away from the truth."""
    return np.asarray(found & ~cv2.dilate(truth.astype(np.uint8), np.ones((5, 5), np.uint8)).astype(bool))


def mapped(rgb: Rgb, spec: TissueSpec | None = None) -> TissueMap:
    return map_tissue(rgb, spec or TissueSpec(), mpp=MPP)


@pytest.mark.parametrize(
    ("colours", "background"),
    [
        (HE, GLASS),
        (FAINT_HE, GLASS),
        (IHC, GLASS),
        (BLUE_IHC, GLASS),
        (HE, (255, 255, 255)),
        (HE, (236, 228, 212)),  # yellow mounting medium
        (HE, (205, 207, 210)),  # a dim lamp
    ],
)
def test_stained_tissue_is_told_from_glass(
    colours: list[tuple[int, int, int]], background: tuple[int, int, int]
) -> None:
    scale = np.array(background) / np.array(GLASS)
    dyed = [tuple(int(v) for v in np.array(colour) * scale) for colour in colours]
    found = mapped(paint(glass(colour=background), disc(), dyed))  # type: ignore[arg-type]
    assert overlap(found.tissue, disc()) > 0.95
    assert not found.pen.any()
    assert not found.missing.any()


@pytest.mark.parametrize("colour", [(255, 255, 255), GLASS, (236, 228, 212), (190, 190, 190)])
def test_a_blank_slide_has_no_tissue(colour: tuple[int, int, int]) -> None:
    assert not mapped(glass(colour=colour)).tissue.any()


@pytest.mark.parametrize("colours", [HE, FAINT_HE, IHC, BLUE_IHC])
def test_a_slide_full_of_tissue_is_all_tissue(colours: list[tuple[int, int, int]]) -> None:
    everywhere = np.ones((300, 400), bool)
    assert mapped(paint(glass(), everywhere, colours)).tissue.mean() > 0.99


@pytest.mark.parametrize(
    "colour",
    [(35, 65, 170), (60, 110, 200), (30, 125, 75), (90, 190, 120), (205, 30, 45), (22, 20, 26), (50, 50, 55)],
)
def test_pen_on_glass_is_left_out_and_tissue_stays(colour: tuple[int, int, int]) -> None:
    drawn, ink = stroke(paint(glass(), disc(), HE), colour, [(300, 30), (340, 150), (310, 280)], width=40)
    found = mapped(drawn)
    assert not stray(found.tissue, disc()).any()
    assert overlap(found.tissue, disc()) > 0.95
    assert (found.pen | found.missing)[ink].mean() > 0.98


def test_pen_across_tissue_takes_only_its_own_ground() -> None:
    drawn, ink = stroke(paint(glass(), disc(), HE), (35, 65, 170), [(20, 150), (260, 155)], width=24)
    found = mapped(drawn)
    assert not (found.tissue & ink).any()
    far = disc() & ~cv2.dilate(ink.astype(np.uint8), np.ones((13, 13))).astype(bool)
    assert found.tissue[far].mean() > 0.97


def test_pen_is_kept_on_request() -> None:
    drawn, ink = stroke(glass(), (30, 125, 75), [(300, 30), (340, 150), (310, 280)], width=40)
    found = mapped(drawn, TissueSpec(exclude_pen=False))
    assert not found.pen.any()
    assert found.tissue[ink].mean() > 0.98


@pytest.mark.parametrize(
    "colours",
    [HE, IHC, BLUE_IHC, [(70, 45, 40), (120, 75, 60)], [(40, 28, 25), (90, 65, 55)], [(190, 50, 70), (170, 40, 60)]],
)
def test_no_stain_is_taken_for_ink(colours: list[tuple[int, int, int]]) -> None:
    """Among them dense DAB, melanin and blood."""
    found = mapped(paint(glass(), disc(), colours))
    assert not found.pen.any()
    assert overlap(found.tissue, disc()) > 0.95


def test_black_borders_and_missing_areas_are_no_tissue() -> None:
    rgb = paint(glass(), disc(), HE)
    rgb[:, 350:] = 0
    rgb[:20] = 6
    rgb[240:280, 250:300] = 0
    found = mapped(rgb)
    assert not stray(found.tissue, disc()).any()
    assert found.missing[:, 350:].all()
    assert found.missing[240:280, 250:300].all()
    assert not found.pen.any()


def test_white_fill_is_not_taken_for_glass() -> None:
    rgb = np.full((300, 400, 3), 255, np.uint8)
    rgb[60:240, 40:300] = paint(glass(colour=(228, 222, 214)), disc(), HE)[60:240, 40:300]
    colour = glass_colour(rgb, mpp=MPP)
    assert colour is not None
    np.testing.assert_allclose(colour, (226, 220, 211), atol=4)
    assert overlap(mapped(rgb).tissue, disc() & (rgb.min(axis=2) < 215)) > 0.9


def test_dust_and_shadows_are_no_tissue() -> None:
    rgb = paint(glass(), disc(), HE)
    dark = disc(centre=(235, 130), radius=30) & ~disc()  # beside the tissue
    rgb[dark] = (rgb[dark] * 0.75).astype(np.uint8)  # out of focus, grey
    rgb[220:280, 300:306] = 90  # a hair, dark and thin
    found = mapped(rgb)
    assert not stray(found.tissue, disc()).any()


def test_fluorescence_is_named_and_not_tissue() -> None:
    rgb = np.zeros((300, 400, 3), np.uint8)
    rgb[..., 0] = np.random.default_rng(0).integers(0, 50, (300, 400))
    found = mapped(rgb)
    assert not found.tissue.any()
    assert "mostly black" in found.note


def test_a_small_piece_of_tissue_in_a_black_frame_is_no_fluorescence() -> None:
    rgb = np.zeros((300, 400, 3), np.uint8)
    inside = np.zeros((300, 400), bool)
    inside[100:200, 100:300] = True
    assert mapped(paint(rgb, inside, HE)).tissue[110:190, 110:290].all()


def test_a_grey_picture_has_tissue_by_its_density() -> None:
    rgb = paint(glass(), disc(), HE)
    grey = np.repeat(cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY)[..., None], 3, axis=2)
    assert overlap(mapped(grey).tissue, disc()) > 0.9


def test_small_pieces_go_and_small_holes_close() -> None:
    spec = TissueSpec(min_area_um2=10_000, max_hole_um2=10_000)
    pieces = disc() | disc(centre=(330, 60), radius=4) | disc(centre=(330, 200), radius=12)  # 3,200 and 29,000 µm²
    holes = disc(centre=(120, 130), radius=5) | disc(centre=(150, 180), radius=14)  # 5,000 and 39,000 µm²
    found = mapped(paint(glass(), pieces & ~holes, HE), spec).tissue
    assert not found[60, 330]
    assert found[200, 330]
    assert found[130, 120]
    assert not found[180, 150]


def test_the_mask_does_not_depend_on_the_thumbnails_resolution() -> None:
    fine = paint(glass((600, 800)), disc((600, 800), (280, 300), 160), HE)
    coarse = cv2.resize(fine, (400, 300), interpolation=cv2.INTER_AREA)
    at_4 = find_tissue(fine, TissueSpec(), mpp=4.0)
    at_8 = find_tissue(coarse, TissueSpec(), mpp=8.0)
    assert at_4.mean() == pytest.approx(at_8.mean(), rel=0.03)


def test_turning_the_slide_turns_the_mask() -> None:
    rgb, _ = stroke(paint(glass(), disc(), HE), (35, 65, 170), [(300, 30), (340, 150)], width=40)
    turned = find_tissue(np.ascontiguousarray(rgb[::-1, ::-1]), TissueSpec(), mpp=MPP)
    assert overlap(turned[::-1, ::-1], find_tissue(rgb, TissueSpec(), mpp=MPP)) > 0.995


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (3, 2), (9, 11)])
def test_tiny_pictures_do_not_crash(shape: tuple[int, int]) -> None:
    assert find_tissue(np.full((*shape, 3), HE[0], np.uint8), TissueSpec(), mpp=MPP).shape == shape
