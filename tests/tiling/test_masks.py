"""The user's mask in its several forms says the same; one of another slide is refused."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray

from tiling.masks import MaskError, digest_of_mask, load_mask
from tiling.readers.header import SlideInfo

SHAPE = (60, 80)
INFO = SlideInfo(
    slide_id="s",
    fingerprint="f",
    vendor="v",
    size_l0=(1600, 1200),
    mpp=(0.5, 0.5),
    mpp_source="metadata",
    bounds_l0=(0, 0, 1600, 1200),
    level_downsamples=((1.0, 1.0),),
)
TRUTH = np.zeros(SHAPE, bool)
TRUTH[10:40, 20:60] = True
TRUTH[20:30, 30:40] = False
OUTLINE = [[400, 200], [1200, 200], [1200, 800], [400, 800], [400, 200]]
HOLE = [[600, 400], [800, 400], [800, 600], [600, 600], [600, 400]]


def close(found: NDArray[np.bool_], truth: NDArray[np.bool_] = TRUTH) -> bool:
    """Equal but for the pixels on the outline: both the inner and the outer edge may fall either way."""
    changed = cv2.morphologyEx(truth.astype(np.uint8), cv2.MORPH_GRADIENT, np.ones((3, 3), np.uint8)) > 0
    return bool((found == truth)[~changed].all() and abs(int(found.sum()) - int(truth.sum())) < 0.12 * truth.sum())


def save(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("factor", [1, 5, 20])
@pytest.mark.parametrize("suffix", [".png", ".TIF"])
def test_a_picture_of_any_size_shows_the_whole_slide(tmp_path: Path, factor: int, suffix: str) -> None:
    large = np.kron(TRUTH, np.ones((factor, factor))).astype(np.uint8) * 3
    path = tmp_path / f"mask{suffix}"
    if suffix == ".png":
        path.write_bytes(cv2.imencode(".png", large)[1].tobytes())
    else:
        tifffile.imwrite(path, large)
    np.testing.assert_array_equal(load_mask(path, INFO, SHAPE), TRUTH)


def test_a_small_picture_is_enlarged(tmp_path: Path) -> None:
    (tmp_path / "m.png").write_bytes(cv2.imencode(".png", TRUTH[::10, ::10].astype(np.uint8))[1].tobytes())
    np.testing.assert_array_equal(load_mask(tmp_path / "m.png", INFO, SHAPE), TRUTH)


def test_opacity_is_no_tissue(tmp_path: Path) -> None:
    bgra = np.zeros((*SHAPE, 4), np.uint8)
    bgra[..., 3] = 255
    bgra[TRUTH, 1] = 255
    (tmp_path / "m.png").write_bytes(cv2.imencode(".png", bgra)[1].tobytes())
    np.testing.assert_array_equal(load_mask(tmp_path / "m.png", INFO, SHAPE), TRUTH)


def test_a_pyramid_is_read_at_a_level_that_suffices(tmp_path: Path) -> None:
    large = np.kron(TRUTH, np.ones((16, 16))).astype(np.uint8)
    with tifffile.TiffWriter(tmp_path / "m.tif") as writer:
        writer.write(large, tile=(64, 64), subifds=1)
        writer.write(large[::8, ::8], tile=(64, 64), subfiletype=1)
    np.testing.assert_array_equal(load_mask(tmp_path / "m.tif", INFO, SHAPE), TRUTH)


POLYGON = {"type": "Polygon", "coordinates": [OUTLINE, HOLE]}
FEATURE = {"type": "Feature", "properties": {}, "geometry": POLYGON}


@pytest.mark.parametrize(
    "content",
    [
        POLYGON,
        FEATURE,
        [FEATURE],
        {"type": "FeatureCollection", "features": [FEATURE]},
        {"type": "MultiPolygon", "coordinates": [POLYGON["coordinates"]]},
        {"type": "GeometryCollection", "geometries": [POLYGON]},
        {"type": "Polygon", "coordinates": [[[x, y, 0] for x, y in ring] for ring in (OUTLINE, HOLE)]},
        [FEATURE, {"type": "Feature", "properties": None, "geometry": {"type": "Point", "coordinates": [1, 2]}}],
    ],
)
def test_polygons_with_holes_in_every_wrapping(tmp_path: Path, content: Any) -> None:
    assert close(load_mask(save(tmp_path / "m.geojson", content), INFO, SHAPE))


def test_an_island_in_a_hole_and_overlapping_polygons_are_tissue(tmp_path: Path) -> None:
    island = {"type": "Polygon", "coordinates": [[[640, 440], [760, 440], [760, 560], [640, 560], [640, 440]]]}
    content = {"type": "GeometryCollection", "geometries": [POLYGON, island, island, POLYGON]}
    truth = TRUTH.copy()
    truth[22:28, 32:38] = True
    found = load_mask(save(tmp_path / "m.geojson", content), INFO, SHAPE)
    assert found[25, 35]
    assert close(found, truth)


def test_qupath_counts_from_the_corner_of_the_bounds(tmp_path: Path) -> None:
    info = SlideInfo(**{**INFO.__dict__, "bounds_l0": (200, 100, 1400, 1100)})
    moved = [[[x - 200, y - 100] for x, y in ring] for ring in (OUTLINE, HOLE)]
    qupath = {
        "type": "Feature",
        "properties": {"objectType": "annotation"},
        "geometry": {"type": "Polygon", "coordinates": moved},
    }
    assert close(load_mask(save(tmp_path / "q.geojson", qupath), info, SHAPE))
    assert close(load_mask(save(tmp_path / "plain.geojson", FEATURE), info, SHAPE))


def test_another_slides_mask_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.png").write_bytes(cv2.imencode(".png", np.ones((100, 100), np.uint8))[1].tobytes())
    with pytest.raises(
        MaskError, match=r"m.png is 100 x 100, the slide 1600 x 1200: their aspect ratios differ by 25%"
    ):
        load_mask(tmp_path / "m.png", INFO, SHAPE)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.png", b"not a picture", "cannot be read"),
        ("m.tif", b"not a picture", "cannot be read"),
        ("m.jpg", b"", "zeros are not zero"),
        ("m.geojson", b"{", "is not GeoJSON"),
        ("m.geojson", b'{"a": 1}', "is not GeoJSON"),
        ("m.geojson", b'{"type": "FeatureCollection", "features": []}', "holds no polygon"),
        ("m.geojson", b'{"type": "Polygon", "coordinates": [[[9e5, 9e5], [9.1e5, 9e5], [9e5, 9.1e5]]]}',
         "outside the slide"),
    ],
)  # fmt: skip
def test_a_mask_that_says_nothing_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MaskError, match=message):
        load_mask(tmp_path / name, INFO, SHAPE)


def test_a_mask_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MaskError, match="does not exist"):
        load_mask(tmp_path / "m.png", INFO, SHAPE)
    with pytest.raises(MaskError, match="does not exist"):
        digest_of_mask(tmp_path / "m.png", INFO)
    assert digest_of_mask(None, INFO) == ""
