import copy
import multiprocessing
import os
import pickle
import shutil

import cv2
import imagecodecs
import numpy as np
import pytest
import tifffile

from tiling.errors import MissingPixelSize, SlideError
from tiling.slide import Slide, read_header

ODD = (523, 389)


def place_of(rgb: np.ndarray, size_l0: tuple[int, int]) -> np.ndarray:
    """Level-0 (x, y) of the middle of a piece of a colour-coded picture."""
    return (rgb.reshape(-1, 3).mean(axis=0)[[0, 2]] - 5) / 240 * size_l0


@pytest.fixture(scope="module")
def coded(tmp_path_factory, make_pyramid):
    """A lossless slide whose colour tells the place; its size is odd and its level sizes are floored."""
    rng = np.random.default_rng(0)
    rgb = np.full((ODD[1], ODD[0], 3), 70, np.uint8)
    rgb[..., 0] = np.floor(5 + 240 * (np.arange(ODD[0]) + 0.5) / ODD[0] + rng.random((ODD[1], ODD[0])))
    rgb[..., 2] = np.floor(5 + 240 * (np.arange(ODD[1])[:, None] + 0.5) / ODD[1] + rng.random((ODD[1], ODD[0])))
    options = {"levels": (1, 2, 4, 16), "tile": 64, "compression": "deflate", "photometric": "rgb"}
    return make_pyramid(tmp_path_factory.mktemp("coded") / "coded.tif", rgb, **options)


@pytest.fixture(params=["fast", "openslide"])
def either_way(request, by_openslide):
    """Run a test with the fast path and without it."""
    if request.param == "openslide":
        by_openslide()


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("part", [(0, 0), (0.31, 0.62), (0.87, 0.12), (0.5, 0.84)])
def test_a_read_at_any_level_shows_the_level_0_place(coded, level, part):
    with Slide(coded) as slide:
        x_l0, y_l0 = int(part[0] * ODD[0]), int(part[1] * ODD[1])
        size_lv = tuple(max(2, int(size * 0.12)) for size in slide.level_sizes[level])
        downsample = np.array(slide.level_downsamples[level])
        found = place_of(slide.read_rgb(x_l0, y_l0, level=level, size_lv=size_lv), ODD)
        wanted = np.array([x_l0, y_l0]) + downsample * size_lv / 2
        assert np.all(np.abs(found - wanted) <= 0.5 * downsample + 1.0)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_tile_shows_its_own_ground_to_a_fraction_of_a_level_pixel(coded, plan_of, level):
    with Slide(coded) as slide:
        for x_l0, y_l0 in [(0, 0), (1, 3), (101, 102), (222, 110), (323, 199)]:
            tile = slide.read_tile(x_l0, y_l0, plan_of(slide, level, (200, 190), 50))
            assert tile.shape == (50, 50, 3)
            assert np.abs(place_of(tile, ODD) - (x_l0 + 100, y_l0 + 95)).max() < 0.8


def test_level_downsamples_are_the_true_ratio_of_each_axis(coded):
    with Slide(coded) as slide:
        assert slide.level_sizes == (ODD, (261, 194), (130, 97), (32, 24))
        assert slide.level_downsamples[2] == (523 / 130, 389 / 97)


def test_a_tile_is_the_area_mean_of_exactly_its_level_pixels(tmp_path, make_pyramid, plan_of):
    rgb = np.random.default_rng(0).integers(0, 256, (700, 900, 3), dtype=np.uint8)
    path = make_pyramid(tmp_path / "a.tif", rgb, levels=(1,), compression=None, photometric="rgb")
    with Slide(path) as slide:
        np.testing.assert_array_equal(slide.read_tile(33, 57, plan_of(slide, 0, (224, 224))), rgb[57:281, 33:257])
        expected = cv2.resize(rgb[57:505, 33:481], (224, 224), interpolation=cv2.INTER_AREA)
        np.testing.assert_array_equal(slide.read_tile(33, 57, plan_of(slide, 0, (448, 448))), expected)


def test_a_tile_of_a_level_with_a_broken_downsample_is_the_area_mean(coded, plan_of):
    with Slide(coded) as slide, tifffile.TiffFile(coded) as tiff:
        level = tiff.pages[2].asarray().astype(float)
        dx, dy = slide.level_downsamples[2]
        tile = slide.read_tile(31, 23, plan_of(slide, 2, (450, 350), 50))
    weights = []
    for start, length, downsample, n in ((23, 350, dy, level.shape[0]), (31, 450, dx, level.shape[1])):
        edges = np.linspace(start / downsample, (start + length) / downsample, 51)[:, None]
        low, high = np.maximum(edges[:-1], np.arange(n)), np.minimum(edges[1:], np.arange(n) + 1)
        weights.append(np.maximum(0, high - low) / np.diff(edges, axis=0))
    expected = np.einsum("iy,jx,yxc->ijc", weights[0], weights[1], level, optimize=True)
    assert np.abs(tile - expected).max() <= 0.51


@pytest.mark.usefixtures("either_way")
def test_outside_the_slide_is_white(coded, plan_of):
    with Slide(coded) as slide:
        corner = slide.read_rgb(-10, -20, level=0, size_lv=(50, 60))
        assert corner[:20].min() == 255
        assert corner[:, :10].min() == 255
        np.testing.assert_array_equal(corner[20:, 10:], slide.read_rgb(0, 0, level=0, size_lv=(40, 40)))
        assert slide.read_rgb(5000, 0, level=0, size_lv=(8, 8)).min() == 255
        tile = slide.read_tile(ODD[0] - 100, ODD[1] - 50, plan_of(slide, 0, (200, 200), 200))
        assert tile[50:].min() == tile[:, 100:].min() == 255
        assert tile[:50, :100, 1].max() == 70


@pytest.mark.usefixtures("either_way")
def test_the_far_edges_have_neither_black_nor_white(coded):
    with Slide(coded) as slide:
        for level, (width, height) in enumerate(slide.level_sizes):
            dx, dy = slide.level_downsamples[level]
            edge = slide.read_rgb((width - 4) * dx, (height - 4) * dy, level=level, size_lv=(4, 4)).astype(int)
            assert np.abs(edge[..., 1] - 70).max() <= 1
            assert edge[..., 0].min() > 245 - 5 * dx * 240 / ODD[0] - 1
            assert edge[..., 2].min() > 245 - 5 * dy * 240 / ODD[1] - 1


@pytest.mark.parametrize("mpp", [0.5, 0.9, 4.0, 8.0, 30.0])
def test_a_thumbnail_is_the_whole_slide_at_that_pixel_size(coded, mpp):
    with Slide(coded) as slide:
        thumbnail = slide.thumbnail(mpp=mpp)
    height, width = thumbnail.shape[:2]
    assert (width, height) == tuple(max(1, round(size * 0.5 / mpp)) for size in ODD)
    half = thumbnail[:, : width // 2]
    assert np.abs(place_of(thumbnail, ODD) - np.array(ODD) / 2).max() < 0.8
    assert abs(place_of(half, ODD)[0] - ODD[0] * (width // 2) / width / 2) < 0.8


def test_a_thumbnail_is_not_made_from_a_level_that_is_too_coarse(tmp_path, make_pyramid):
    rgb = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    options = {"compression": "deflate", "photometric": "rgb"}
    with Slide(make_pyramid(tmp_path / "a.tif", rgb, levels=(1, 4), **options)) as slide:
        expected = cv2.resize(rgb, (200, 150), interpolation=cv2.INTER_AREA)
        assert np.abs(slide.thumbnail(mpp=1.0).astype(int) - expected).max() <= 1


def test_a_thumbnail_in_blocks_is_the_thumbnail_in_one(coded, monkeypatch):
    with Slide(coded) as slide:
        whole = slide.thumbnail(mpp=1.3).astype(int)
        monkeypatch.setattr("tiling.slide._BLOCK_LV", 100)
        assert np.abs(slide.thumbnail(mpp=1.3) - whole).max() <= 1


def test_a_single_level_giant_gets_its_thumbnail_in_bounded_memory(tmp_path):
    path = tmp_path / "giant.tif"
    shape = (13_600, 13_900, 3)
    tile = imagecodecs.jpeg8_encode(np.full((256, 256, 3), 250, np.uint8), colorspace="RGB", outcolorspace="YCBCR")
    options = {"tile": (256, 256), "photometric": "rgb", "compression": "jpeg", "metadata": None}
    options |= {"resolution": (20_000, 20_000), "resolutionunit": "CENTIMETER"}
    tifffile.imwrite(path, (tile for _ in range(54 * 55)), shape=shape, dtype=np.uint8, **options)
    with Slide(path) as slide:
        largest = []
        window = slide._window
        slide._window = lambda *given: largest.append(given[3]) or window(*given)
        thumbnail = slide.thumbnail(mpp=32.0)
    assert thumbnail.shape == (212, 217, 3)
    assert np.abs(thumbnail.astype(int) - 250).max() <= 1
    assert max(width * height for width, height in largest) <= 2100 * 2100


def test_a_wish_finer_than_the_slide_gives_a_thumbnail_of_level_0(coded):
    with Slide(coded) as slide:
        assert slide.thumbnail(mpp=0.1).shape == (ODD[1], ODD[0], 3)


@pytest.mark.usefixtures("either_way")
def test_after_an_error_healthy_places_still_read(tmp_path, make_pyramid, tissue_rgb):
    rgb = tissue_rgb(1024, 768, blobs=12)
    path = make_pyramid(tmp_path / "bad.tif", rgb)
    healthy = make_pyramid(tmp_path / "healthy.tif", rgb)
    with tifffile.TiffFile(path) as tiff:
        offset, count = tiff.pages[0].dataoffsets[5], tiff.pages[0].databytecounts[5]
    data = bytearray(path.read_bytes())
    data[offset : offset + count] = bytes(count)
    path.write_bytes(data)
    with Slide(path) as slide, Slide(healthy) as other:
        for _ in range(2):
            with pytest.raises(SlideError, match=r"bad\.tif: 64 x 64 .* level-0 position \(300, 300\)"):
                slide.read_rgb(300, 300, level=0, size_lv=(64, 64))
            for x, y in [(0, 0), (600, 100), (300, 600)]:
                expected = other.read_rgb(x, y, level=0, size_lv=(64, 64))
                np.testing.assert_array_equal(slide.read_rgb(x, y, level=0, size_lv=(64, 64)), expected)


def test_a_pickled_slide_reads_the_same(coded):
    with Slide(coded, slide_id="mine", cohort_mpp=0.3) as slide:
        expected = slide.read_rgb(150, 100, level=1, size_lv=(30, 20))
        again = pickle.loads(pickle.dumps(slide))
        assert (again.info, again.path, again.level_sizes) == (slide.info, slide.path, slide.level_sizes)
        np.testing.assert_array_equal(again.read_rgb(150, 100, level=1, size_lv=(30, 20)), expected)
        again.close()
        with copy.copy(slide) as twin:
            np.testing.assert_array_equal(twin.read_rgb(150, 100, level=1, size_lv=(30, 20)), expected)


def test_a_closed_slide_opens_again_by_itself(coded):
    slide = Slide(coded)
    slide.close()
    slide.close()
    assert slide.read_rgb(0, 0, level=0, size_lv=(5, 5)).shape == (5, 5, 3)
    slide.close()


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_slide_goes_to_another_process(coded, start):
    with Slide(coded) as slide:
        expected = slide.read_rgb(100, 100, level=0, size_lv=(64, 64)).tobytes()
        context = multiprocessing.get_context(start)
        queue = context.SimpleQueue()
        process = context.Process(target=send_pixels, args=(slide, queue))
        process.start()
        assert queue.get() == (expected, True)
        process.join()
        assert slide.read_rgb(100, 100, level=0, size_lv=(64, 64)).tobytes() == expected


def send_pixels(slide, queue):
    pixels = slide.read_rgb(100, 100, level=0, size_lv=(64, 64)).tobytes()
    queue.put((pixels, slide._opened.pid == os.getpid()))


def test_the_header_tells_what_the_file_says(tmp_path, make_pyramid, tissue_rgb):
    path = make_pyramid(tmp_path / "S01.v2.0.svs", tissue_rgb(600, 500), vendor="aperio", mpp=0.2527, objective=40)
    header = read_header(path)
    assert (header.slide_id, header.path, header.vendor) == ("S01.v2.0", path, "aperio")
    assert (header.size_l0, header.level_sizes) == ((600, 500), ((600, 500), (150, 125)))
    assert (header.mpp_metadata, header.mpp_tags, header.objective_power) == ((0.2527, 0.2527), None, 40.0)
    assert (header.bounds_l0, header.icc_profile, header.file_tile_size) == ((0, 0, 600, 500), False, (256, 256))
    assert read_header(path, slide_id="mine").slide_id == "mine"


def test_a_profile_is_seen(tmp_path, make_pyramid, tissue_rgb):
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    with Slide(make_pyramid(tmp_path / "a.tif", tissue_rgb(300, 300), iccprofile=profile)) as slide:
        assert slide.info.icc_profile


def test_a_slide_without_pixel_size_needs_one(tmp_path, make_pyramid, tissue_rgb):
    path = make_pyramid(tmp_path / "a.tif", tissue_rgb(300, 300), mpp=None)
    with pytest.raises(MissingPixelSize, match=r"a\.tif.*slide_mpp"):
        Slide(path)
    with Slide(path, default_mpp=0.25) as slide:
        assert (slide.mpp, slide.info.mpp_source) == ((0.25, 0.25), "user")
    with Slide(path, cohort_mpp=(0.25, 0.26), default_mpp=1.0) as slide:
        assert (slide.mpp, slide.info.mpp_source) == ((0.25, 0.26), "cohort")


def test_the_fingerprint_knows_the_file_whatever_its_name(tmp_path, make_pyramid, tissue_rgb):
    path = make_pyramid(tmp_path / "a.tif", tissue_rgb(600, 500))
    known = read_header(path).fingerprint
    assert len(known) == 32
    assert read_header(shutil.copy(path, tmp_path / "b.tiff")).fingerprint == known
    other = make_pyramid(tmp_path / "c.tif", tissue_rgb(600, 500, seed=1))
    assert read_header(other).fingerprint != known
    with path.open("ab") as handle:
        handle.write(b"\0")
    assert read_header(path).fingerprint != known


def test_an_associated_picture_is_rgb_and_an_unknown_one_is_none(tmp_path, tissue_rgb):
    path = tmp_path / "a.svs"
    with tifffile.TiffWriter(path) as tiff:
        text = "Aperio Image Library v11.2.1\r\n600x500 [0,0 600x500] (256x256) JPEG/RGB Q=90|MPP = 0.5"
        tiff.write(tissue_rgb(600, 500), tile=(256, 256), compression="jpeg", description=text, metadata=None)
        tiff.write(tissue_rgb(60, 50), compression="jpeg", rowsperstrip=50, description=text, metadata=None)
    with Slide(path) as slide:
        picture = slide.associated_image("thumbnail")
        assert picture.shape == (50, 60, 3)
        assert slide.associated_image("label") is None


def test_a_level_that_does_not_exist_is_a_mistake_of_the_caller(coded):
    with Slide(coded) as slide, pytest.raises(IndexError):
        slide.read_rgb(0, 0, level=-1, size_lv=(5, 5))
