"""Public fault reports on slide reading and discovery, each made anew from its recipe (names as in the fault list)."""

import os
import shutil
import stat
import struct
from pathlib import Path

import cv2
import numpy as np
import pytest
import tifffile

from tiling.discovery import find_slides
from tiling.errors import SlideError
from tiling.grid import ReadPlan
from tiling.slide import Slide, read_header

SERIES = Path(__file__).parents[1] / "data" / "slides" / "series1"


def place_of(rgb: np.ndarray, size_l0: tuple[int, int]) -> np.ndarray:
    """Level-0 (x, y) that the mean colour of a piece of a colour-coded slide decodes to."""
    return (rgb.reshape(-1, 3).mean(axis=0)[[0, 2]] - 110) / 120 * size_l0


def plan(slide: Slide, tile_size_l0: tuple[int, int], tile_px: int = 224) -> ReadPlan:
    return ReadPlan(
        level=0,
        level_downsample=(1.0, 1.0),
        tile_size_l0=tile_size_l0,
        stride_l0=tile_size_l0,
        origin_l0=(0, 0),
        grid_size=(1, 1),
        tile_px=tile_px,
        mpp_effective=(0.5, 0.5),
    )


def test_io_04_tiny_differences_between_the_axes_are_kept_and_accepted(tmp_path, make_pyramid, tissue_rgb):
    path = make_pyramid(tmp_path / "near_equal.tif", tissue_rgb(1536, 1152), mpp=(0.24253, 0.24265))
    with Slide(path) as slide:
        assert slide.mpp == pytest.approx((0.24253, 0.24265), rel=1e-4)
        assert slide.info.warnings == ()


def test_io_04_a_slide_of_unequal_axes_shows_the_same_tissue_as_the_square_one(tmp_path, make_pyramid, tissue_rgb):
    rgb = tissue_rgb(1024, 768, blobs=12)
    square = make_pyramid(tmp_path / "square.tif", rgb, mpp=0.5)
    stretched = cv2.resize(rgb, (2048, 768), interpolation=cv2.INTER_LINEAR)
    wide = make_pyramid(tmp_path / "x0.25_y0.50.tif", stretched, mpp=(0.25, 0.5))
    with Slide(square) as one, Slide(wide) as other:
        assert other.mpp == pytest.approx((0.25, 0.5))
        assert one.thumbnail(mpp=8.0).shape == other.thumbnail(mpp=8.0).shape
        same = one.read_tile(300, 200, plan(one, (224, 224))).astype(int)
        tile = other.read_tile(600, 200, plan(other, (448, 224)))
    assert np.abs(tile - same).mean() < 6
    assert np.abs(tile - np.roll(same, 8, axis=1)).mean() > 12


def test_io_06_one_bad_tile_fails_alone_and_names_its_place(tmp_path, make_pyramid, tissue_rgb):
    path = make_pyramid(tmp_path / "one_bad_jpeg_tile.tif", tissue_rgb(1536, 1152))
    with tifffile.TiffFile(path) as tiff:
        offset, count = tiff.pages[0].dataoffsets[7], tiff.pages[0].databytecounts[7]
    data = bytearray(path.read_bytes())
    data[offset : offset + count] = bytes(count)
    path.write_bytes(data)
    with Slide(path) as slide:
        places = [(x, y) for y in range(0, 1152, 128) for x in range(0, 1536, 128)]
        reasons = {place: why_not(slide, place) for place in places}
    failed = {place: reason for place, reason in reasons.items() if reason}
    assert list(failed) == [(256, 256), (384, 256), (256, 384), (384, 384)]
    assert all(f"level-0 position {place} cannot be read" in reason for place, reason in failed.items())


def why_not(slide: Slide, place: tuple[int, int]) -> str | None:
    try:
        slide.read_tile(*place, plan(slide, (128, 128)))
    except SlideError as error:
        return str(error)
    return None


@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
def test_io_06_a_file_that_was_cut_does_not_open(tmp_path, make_pyramid, tissue_rgb, part):
    path = make_pyramid(tmp_path / "cut.svs", tissue_rgb(1536, 1152), vendor="aperio", objective=20)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with pytest.raises(SlideError, match=r"cut\.svs: cannot be opened"):
        Slide(path, default_mpp=0.5)


def test_io_06_a_half_copied_level_opens_and_fails_where_the_copy_ended(tmp_path, make_pyramid, tissue_rgb):
    path = make_pyramid(tmp_path / "opens_then_fails.tif", tissue_rgb(1536, 1152))
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages[0]
        start, end = page.dataoffsets[13] + 100, page.dataoffsets[-1] + page.databytecounts[-1]
    data = path.read_bytes()
    path.write_bytes(data[:start] + bytes(end - start) + data[end:])
    with Slide(path) as slide:
        reasons = [why_not(slide, (256 * (i % 6), 256 * (i // 6))) for i in range(30)]
        assert [reason is None for reason in reasons] == [True] * 13 + [False] * 17
        assert slide.thumbnail(mpp=8.0).shape == (72, 96, 3)


def test_io_08_an_ome_pyramid_in_subifds_has_its_levels_and_pixel_size(tmp_path, tissue_rgb):
    path = tmp_path / "pyramid.ome.tif"
    rgb = tissue_rgb(1536, 1152)
    options = {"tile": (256, 256), "photometric": "rgb", "compression": "jpeg"}
    facts = {"axes": "YXS", "PhysicalSizeX": 0.5, "PhysicalSizeXUnit": "µm", "PhysicalSizeY": 0.5}
    with tifffile.TiffWriter(path, ome=True) as tiff:
        tiff.write(rgb, subifds=2, metadata=facts | {"PhysicalSizeYUnit": "µm"}, **options)
        for downsample in (2, 4):
            size = (1536 // downsample, 1152 // downsample)
            tiff.write(cv2.resize(rgb, size, interpolation=cv2.INTER_AREA), subfiletype=1, metadata=None, **options)
    with Slide(path) as slide:
        assert (slide.mpp, slide.info.mpp_source) == ((0.5, 0.5), "metadata")
        assert slide.level_sizes == ((1536, 1152), (768, 576), (384, 288))
        for level, downsample in enumerate((1, 2, 4)):
            shown = slide.read_rgb(0, 0, level=level, size_lv=slide.level_sizes[level]).astype(int)
            wanted = cv2.resize(rgb, slide.level_sizes[level], interpolation=cv2.INTER_AREA) if downsample > 1 else rgb
            assert np.abs(shown - wanted).mean() < 3


@pytest.fixture(scope="module")
def tissue(tissue_rgb):
    return tissue_rgb(768, 768)


def shown(path: Path) -> np.ndarray:
    with Slide(path) as slide:
        return slide.read_rgb(0, 0, level=0, size_lv=(768, 768)).astype(int)


def test_io_09_16_bits_are_scaled_to_8(tmp_path, make_pyramid, tissue):
    options = {"compression": "deflate", "photometric": "rgb"}
    deep = make_pyramid(tmp_path / "rgb16.tif", tissue.astype(np.uint16) * 257, **options)
    assert np.abs(shown(deep) - tissue).mean() < 3
    assert "16-bit" in read_header(deep).warnings[0]


def test_io_09_grey_is_repeated_with_a_notice(tmp_path, make_pyramid, tissue):
    grey = tissue.mean(axis=2).astype(np.uint8)
    path = make_pyramid(tmp_path / "gray.tif", grey, compression="deflate", photometric="minisblack")
    assert np.abs(shown(path) - tissue.mean(axis=2)[..., None]).mean() < 3
    assert any("grey" in warning for warning in read_header(path).warnings)


def test_io_09_16_bit_grey_is_refused_since_lower_levels_would_show_black_rows(tmp_path, make_pyramid, tissue):
    grey = tissue.mean(axis=2).astype(np.uint16) * 257
    path = make_pyramid(tmp_path / "gray16.tif", grey, compression="deflate", photometric="minisblack")
    with pytest.raises(SlideError, match="16-bit grey"):
        Slide(path)


def test_io_09_float_is_refused_with_a_reason(tmp_path, make_pyramid, tissue):
    options = {"compression": "deflate", "photometric": "rgb", "levels": (1,)}
    path = make_pyramid(tmp_path / "float32_rgb.tif", tissue.astype(np.float32), **options)
    with pytest.raises(SlideError, match="floating-point"):
        Slide(path)


def test_io_09_a_clear_background_is_white(tmp_path, make_pyramid, tissue):
    clear = tissue[..., 1] > 240
    rgba = np.dstack([np.where(clear[..., None], 0, tissue), np.where(clear, 0, 255)]).astype(np.uint8)
    options = {"compression": "deflate", "photometric": "rgb", "levels": (1,), "extrasamples": ["unassalpha"]}
    path = make_pyramid(tmp_path / "rgba_clear_background.tif", rgba, **options)
    assert 0.2 < clear.mean() < 0.9
    assert shown(path)[clear].min() == 255
    np.testing.assert_array_equal(shown(path)[~clear], tissue[~clear])


@pytest.mark.parametrize("name", ["bigtiff.tif", "bigtiff_named.btf", "bigtiff.SVS"])
def test_io_10_bigtiff_works_like_tiff(tmp_path, make_pyramid, tissue, name):
    path = make_pyramid(tmp_path / "slides" / name, tissue, bigtiff=True, mpp=0.5)
    assert [source.path for source in find_slides(tmp_path / "slides").sources] == [path]
    plain = make_pyramid(tmp_path / "plain.tif", tissue)
    np.testing.assert_array_equal(shown(path), shown(plain))


def test_io_11_a_dicom_series_is_one_slide_of_two_levels():
    discovery = find_slides(SERIES.parent)
    assert [source.slide_id for source in discovery.sources] == ["series1__level0"]
    with Slide(discovery.sources[0].path) as slide:
        assert slide.level_sizes == ((1536, 1152), (384, 288))
        assert (slide.mpp, slide.info.mpp_source) == ((0.5, 0.5), "metadata")
    assert read_header(SERIES / "level1.dcm").fingerprint == slide.info.fingerprint


def test_io_11_the_fingerprint_covers_every_file_of_the_series(tmp_path):
    shutil.copytree(SERIES, tmp_path / "copy")
    known = read_header(SERIES / "level0.dcm").fingerprint
    assert read_header(tmp_path / "copy" / "level0.dcm").fingerprint == known
    with (tmp_path / "copy" / "level1.dcm").open("ab") as handle:
        handle.write(struct.pack("<HH2sHI", 0xFFFC, 0xFFFC, b"OB", 0, 2) + b"\0\0")
    assert read_header(tmp_path / "copy" / "level0.dcm").fingerprint != known


@pytest.mark.parametrize("level", [0, 1, 2])
def test_geo_02_a_read_shows_its_level_0_place_to_within_a_level_pixel(tmp_path, make_pyramid, coded_rgb, level):
    size = (3083, 2315)
    options = {"levels": (1, 4, 16), "compression": "deflate", "photometric": "rgb"}
    path = make_pyramid(tmp_path / "odd.tif", coded_rgb(*size, dithered=True), **options)
    with Slide(path) as slide:
        dx, dy = slide.level_downsamples[level]
        assert (dx, dy) == (size[0] / slide.level_sizes[level][0], size[1] / slide.level_sizes[level][1])
        for x, y in [(0, 0), (1000, 700), (2040, 1900), (2900, 100)]:
            pixels = slide.read_rgb(x, y, level=level, size_lv=(int(160 / dx), int(160 / dy)))
            centre = np.array([x + int(160 / dx) * dx / 2, y + int(160 / dy) * dy / 2])
            assert np.abs(place_of(pixels, size) - centre).max() <= max(dx, dy, 4.0)


def test_vis_10_edge_tiles_have_exact_size_and_no_black_and_points_show_their_colour(tmp_path, make_pyramid, coded_rgb):
    size = (1537, 1031)
    options = {"levels": (1, 2, 4), "compression": "deflate", "photometric": "rgb"}
    with Slide(make_pyramid(tmp_path / "odd.tif", coded_rgb(*size), **options)) as slide:
        point = slide.read_rgb(1500, 1000, level=0, size_lv=(1, 1))
        assert np.abs(place_of(point, size) - (1500, 1000)).max() <= 7
        for level, (width, height) in enumerate(slide.level_sizes):
            left, top = (width - 1) // 254 * 254, (height - 1) // 254 * 254
            dx, dy = slide.level_downsamples[level]
            edge = slide.read_rgb(left * dx, top * dy, level=level, size_lv=(width - left, height - top))
            assert edge.shape == (height - top, width - left, 3)
            assert edge[..., 0].min() >= 110
            assert edge[..., 1].min() >= 69
            assert edge[..., 1].max() <= 71


def test_sto_04_names_with_dots_are_three_slides(tmp_path, make_pyramid, tissue_rgb):
    for name in ("S01.block1.tif", "S01.block2.tif", "S01.v2.0.svs"):
        make_pyramid(tmp_path / name, tissue_rgb(300, 300))
    sources = find_slides(tmp_path).sources
    assert [source.slide_id for source in sources] == ["S01.block1", "S01.block2", "S01.v2.0"]
    for source in sources:
        with Slide(source.path, default_mpp=0.5) as slide:
            assert slide.info.slide_id == source.slide_id


@pytest.mark.parametrize(
    "name",
    [
        "  leading and trailing  .tif",
        "-dash-first.tif",
        "O'Brien; rm -rf $HOME.tif",
        "Präparat 07 (копия).tif",
        "[glob]*?.tif",
        "切片 #1 %23 a&b.tif",
    ],
)
def test_cli_02_a_hostile_name_opens_and_stays_as_it_is(tmp_path, make_pyramid, tissue_rgb, name):
    path = make_pyramid(tmp_path / "slides" / name, tissue_rgb(300, 300))
    (source,) = find_slides(tmp_path / "slides").sources
    assert (source.slide_id, source.path) == (name.removesuffix(".tif"), path)
    with Slide(source.path) as slide:
        assert slide.thumbnail(mpp=8.0).shape == (19, 19, 3)


def test_cli_05_links_suffixes_and_hidden_files(tmp_path, make_pyramid, tissue_rgb):
    rgb = tissue_rgb(300, 300)
    slides = tmp_path / "slides"
    make_pyramid(slides / "UPPER.TIF", rgb)
    make_pyramid(slides / "Mixed.SvS", rgb, vendor="aperio")
    make_pyramid(tmp_path / "store" / "linked_slide.tif", rgb)
    (slides / "._UPPER.TIF").write_bytes(b"\0\5\26\7")
    for name, target in (("linked_slide.tif", "../store/linked_slide.tif"), ("linked_dir", "../store"), ("loop", ".")):
        (slides / name).symlink_to(target)
    (slides / "dangling.tif").symlink_to("nowhere.tif")
    discovery = find_slides(slides)
    assert [source.slide_id for source in discovery.sources] == ["Mixed", "UPPER", "linked_slide"]
    assert [name for name, _ in discovery.problems] == ["dangling.tif"]
    for source in discovery.sources:
        assert read_header(source.path).size_l0 == (300, 300)


def test_cli_06_nothing_is_written_beside_the_slides(tmp_path, make_pyramid, tissue_rgb):
    path = make_pyramid(tmp_path / "slides" / "a.tif", tissue_rgb(600, 400))
    path.chmod(stat.S_IRUSR)
    path.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        before = [(entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(path.parent)]
        with Slide(find_slides(path.parent).sources[0].path) as slide:
            slide.thumbnail(mpp=8.0)
            slide.read_tile(0, 0, plan(slide, (224, 224)))
        assert [(entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(path.parent)] == before
    finally:
        path.parent.chmod(stat.S_IRWXU)
