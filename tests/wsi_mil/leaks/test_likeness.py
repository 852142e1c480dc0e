"""Copies are found however they were made, and different slides are not accused: rates on drawn and on real tissue."""

from importlib.resources import files

import cv2
import numpy as np
import pytest

from tiling.grid import TissueSpec
from tiling.tissue import find_tissue
from wsi_mil.demo.textures import smooth_noise
from wsi_mil.leaks.likeness import (
    NEAR_BITS,
    PICTURE_BITS,
    bag_signature,
    picture_bits,
    picture_pairs,
    signature_pairs,
    twin_share,
)

STAIN = np.array([0.18, 0.62, 0.30], np.float32)
GLASS = 242


def draw(seed, *, side=200, outline=None):
    """Optical density (h, w): a ragged piece of tissue whose structure has all sizes from an organ's to a gland's."""
    rng = np.random.default_rng(seed)
    width, height = (int(side * f) for f in rng.uniform(0.85, 1.15, 2))
    y, x = np.mgrid[0:height, 0:width]
    if outline is None:
        cx, cy = rng.uniform(0.4, 0.6) * width, rng.uniform(0.4, 0.6) * height
        rx, ry = rng.uniform(0.25, 0.4) * width, rng.uniform(0.25, 0.4) * height
        field = 1 - np.hypot((x - cx) / rx, (y - cy) / ry) + 0.1 * smooth_noise((width, height), side // 12, rng)
    else:
        field = outline - np.hypot(x / width - 0.5, y / height - 0.5)
    structure = sum(0.2 * smooth_noise((width, height), int(side * size), rng) for size in (0.3, 0.15, 0.08, 0.04))
    return np.where(field > 0, np.clip(0.7 + structure, 0.15, 2), 0).astype(np.float32)


def shown(density, *, stain=STAIN, glass=GLASS):
    return np.clip(np.round(glass * 10 ** -(density[..., None] * stain)), 0, 255).astype(np.uint8)


def bits(rgb):
    return picture_bits(rgb, find_tissue(np.ascontiguousarray(rgb), TissueSpec(), mpp=8))


def moved(density, *, shift, degrees):
    height, width = density.shape
    matrix = cv2.getRotationMatrix2D((width / 2, height / 2), degrees, 1)
    matrix[:, 2] += shift
    return cv2.warpAffine(density, matrix, (width, height))


def saved(rgb, quality):
    return cv2.imdecode(cv2.imencode(".jpg", rgb, [cv2.IMWRITE_JPEG_QUALITY, quality])[1], cv2.IMREAD_COLOR)


COPIES = {
    "saved again": lambda d: saved(shown(d), 75),
    "turned": lambda d: np.rot90(shown(d)),
    "upside down": lambda d: np.rot90(shown(d), 2),
    "mirrored": lambda d: shown(d)[:, ::-1],
    "mirrored and turned": lambda d: np.rot90(shown(d)[:, ::-1], 3),
    "half as large": lambda d: shown(cv2.resize(d, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA)),
    "brighter": lambda d: shown(d, glass=252),
    "moved": lambda d: shown(moved(d, shift=(5, -4), degrees=0)),
    "scanned again": lambda d: saved(shown(moved(d, shift=(4, 3), degrees=2), stain=STAIN * [0.9, 1.1, 1.2]), 85),
    "scanned again, turned": lambda d: shown(np.rot90(moved(d, shift=(-4, 3), degrees=-2)), stain=STAIN * 1.2),
}
DRAWN = [draw(seed) for seed in range(40)]


def apart(one, other):
    return {(i, j): distance for i, j, distance in picture_pairs(np.stack([one, other]), most=PICTURE_BITS)}[0, 1]


@pytest.fixture(scope="module")
def known():
    """Bits of 40 slides."""
    return np.stack([bits(shown(density)) for density in DRAWN])


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_is_found(known, copy):
    distances = [apart(before, bits(COPIES[copy](d))) for before, d in zip(known, DRAWN, strict=True)]
    assert np.mean(np.array(distances) <= NEAR_BITS) >= 0.95


@pytest.mark.parametrize("copy", ["turned", "upside down", "mirrored", "mirrored and turned"])
def test_a_picture_turned_or_mirrored_is_the_same_picture(copy):
    # a square picture on the hash's own grid, so nothing is resampled on the way
    rng = np.random.default_rng(5)
    rgb = np.repeat(rng.integers(60, 200, (32, 32, 1)), 3, axis=-1).astype(np.uint8)
    turn = {"turned": np.rot90, "upside down": lambda a: np.rot90(a, 2), "mirrored": np.fliplr}
    turned = turn.get(copy, lambda a: np.rot90(np.fliplr(a), 3))(rgb)
    everywhere = np.ones((32, 32), bool)
    assert apart(picture_bits(rgb, everywhere), picture_bits(np.ascontiguousarray(turned), everywhere)) <= 2


def test_different_slides_are_not_accused(known):
    """780 pairs; and as many whose outline is the same round one, as cores of a tissue array have."""
    assert picture_pairs(known) == []
    cores = [bits(shown(draw(seed, outline=0.35))) for seed in range(100, 140)]
    assert picture_pairs(np.stack(cores), most=NEAR_BITS + 25) == []  # the outline makes no two of them alike


def test_real_tissue_is_told_apart_and_its_copies_are_found():
    folder = files("wsi_mil.demo") / "data" / "crc_tiles"
    paths = sorted(path for path in folder.iterdir() if path.name.endswith(".jpg"))
    tiles = [cv2.imdecode(np.frombuffer(path.read_bytes(), np.uint8), cv2.IMREAD_COLOR) for path in paths]
    everywhere = np.ones(tiles[0].shape[:2], bool)
    known = np.stack([picture_bits(tile, everywhere) for tile in tiles])
    assert len(known) > 50
    assert picture_pairs(known) == []
    copies = np.stack([picture_bits(saved(np.rot90(tile), 60), everywhere) for tile in tiles])
    found = {(i, j) for i, j, _ in picture_pairs(np.concatenate([known, copies]))}
    assert found == {(i, len(known) + i) for i in range(len(known))}


def test_glass_does_not_count():
    density = DRAWN[0]
    wide = np.pad(density, ((300, 40), (10, 500)))
    assert apart(bits(shown(density)), bits(shown(wide))) == 0
    tissue = find_tissue(shown(wide), TissueSpec(), mpp=8)
    tissue[20:25, 20:25] = True  # a piece of dust, far away
    assert apart(picture_bits(shown(wide), tissue), bits(shown(density))) < 30


def test_a_picture_that_shows_too_little_is_not_compared():
    rgb = shown(np.full((64, 64), 0.5, np.float32))
    everywhere = np.ones((64, 64), bool)
    assert picture_bits(rgb, np.zeros_like(everywhere)) is None
    assert picture_bits(rgb, everywhere) is None  # one colour all over
    middle = np.zeros(DRAWN[0].shape, bool)
    middle[80:96, 70:110] = True
    assert picture_bits(shown(DRAWN[0]), middle) is not None
    middle[95] = False
    assert picture_bits(shown(DRAWN[0]), middle) is None


def test_pairs_are_the_same_whatever_the_size_of_a_block(monkeypatch):
    known = np.random.default_rng(0).random((30, PICTURE_BITS)) < 0.5
    whole = picture_pairs(known, most=110)
    assert len(whole) > 3
    assert all(i < j for i, j, _ in whole)
    assert [distance for *_, distance in whole] == sorted(distance for *_, distance in whole)
    monkeypatch.setattr("wsi_mil.leaks.likeness._BLOCK", 7)
    assert picture_pairs(known, most=110) == whole


def bag(seed, *, n=200, d=48):
    """Tiles about a dozen kinds of tissue, with a mean far from 0 as encoders have."""
    rng = np.random.default_rng(seed)
    kinds = np.random.default_rng(1000).normal(size=(12, d))
    return (5 + kinds[rng.integers(12, size=n)] + 0.5 * rng.normal(size=(n, d))).astype(np.float32)


BAGS = [bag(seed) for seed in range(30)]


def shuffled(features, seed=0):
    return features[np.random.default_rng(seed).permutation(len(features))]


@pytest.mark.parametrize(
    ("copy", "share"),
    [
        (shuffled, 1.0),
        (lambda f: f.astype(np.float16).astype(np.float32), 1.0),
        (lambda f: shuffled(f) * (1 + 1e-3 * np.random.default_rng(1).normal(size=f.shape)).astype(np.float32), 1.0),
        (lambda f: shuffled(f)[: len(f) // 2], 1.0),
        (lambda f: np.concatenate([shuffled(f)[: len(f) // 2], bag(99, n=len(f) // 2)]), 0.5),
    ],
    ids=["in another order", "half precision", "another machine", "half of them", "half of them among others"],
)
def test_a_bag_is_found_again(copy, share):
    copies = [copy(features) for features in BAGS]
    signatures = np.stack([bag_signature(features) for features in (*BAGS, *copies)])
    found = set(signature_pairs(signatures))
    assert {(i, len(BAGS) + i) for i in range(len(BAGS))} <= found
    for features, again in zip(BAGS, copies, strict=True):
        measured, count = twin_share([features, again])
        assert measured == pytest.approx(share, abs=0.01)
        assert count >= 95


def test_different_bags_of_the_same_tissue_are_not_accused():
    signatures = np.stack([bag_signature(features) for features in BAGS])
    assert len(signature_pairs(signatures)) <= 0.01 * 30 * 29 / 2  # what is compared tile by tile in vain
    assert max(twin_share([one, other])[0] for one in BAGS[:8] for other in BAGS[8:16]) == 0


def test_blank_tiles_that_all_slides_have_are_no_evidence():
    blank = np.zeros((40, 48), np.float32)
    with_blank = [np.concatenate([features, blank]) for features in BAGS]
    assert twin_share(with_blank[:2]) == (0.0, 200)
    assert twin_share([blank, blank]) == (0.0, 0)
    assert len(signature_pairs(np.stack([bag_signature(features) for features in with_blank]))) <= 4


def test_few_twins_show_in_the_share():
    mixed = np.concatenate([BAGS[0][:30], BAGS[1][:70]])
    assert twin_share([mixed, BAGS[0]]) == (0.3, 100)
    assert twin_share([BAGS[0], mixed]) == (0.3, 100)


def test_numbers_are_no_features_of_one_slide():
    """One feature, as many values as tiles: everything has a twin everywhere, so nothing is evidence."""
    rng = np.random.default_rng(0)
    one, other = (rng.normal(size=(2000, 1)).astype(np.float32) for _ in range(2))
    share, count = twin_share([one, other])
    assert count < 16 or share < 0.95


def test_large_bags_are_compared_block_by_block(monkeypatch):
    whole = twin_share([BAGS[0], shuffled(BAGS[0])])
    monkeypatch.setattr("wsi_mil.leaks.likeness._BLOCK", 17)
    assert twin_share([BAGS[0], shuffled(BAGS[0])]) == whole == (1.0, 200)
