import threading

import imagecodecs
import numpy as np
import pytest
import tifffile

from tiling.errors import SlideError
from tiling.readers import raw_tiff
from tiling.readers.raw_tiff import RawTiff, TileError
from tiling.slide import Slide


def used(slide: Slide, level: int = 0) -> bool:
    """Whether the fast path is what reads a level."""
    slide.read_rgb(0, 0, level=level, size_lv=(1, 1))
    return slide._trusted.get(level, False)


@pytest.mark.parametrize("photometric", ["rgb", "ycbcr"])
@pytest.mark.parametrize("subsampling", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize(("size", "tile"), [((1024, 768), 256), ((1037, 773), 256), ((255, 257), 128), ((513, 31), 64)])
def test_jpeg_tiles_are_the_pixels_of_openslide(
    tmp_path, make_pyramid, tissue_rgb, by_openslide, photometric, subsampling, size, tile
):
    options = {"photometric": photometric, "subsampling": subsampling, "tile": tile}
    path = make_pyramid(tmp_path / "a.tif", tissue_rgb(*size, blobs=12), levels=(1, 2), **options)
    with Slide(path) as slide:
        ours = [slide.read_rgb(0, 0, level=level, size_lv=slide.level_sizes[level]) for level in (0, 1)]
        assert used(slide, 0)
        assert used(slide, 1)
    by_openslide()
    with Slide(path) as slide:
        theirs = [slide.read_rgb(0, 0, level=level, size_lv=slide.level_sizes[level]) for level in (0, 1)]
        assert not used(slide)
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_array_equal(ours[1], theirs[1])


@pytest.mark.parametrize("level", [0, 1, 2])
def test_tiles_at_any_place_are_the_pixels_of_openslide(
    tmp_path, make_pyramid, tissue_rgb, by_openslide, plan_of, level
):
    path = make_pyramid(tmp_path / "a.tif", tissue_rgb(2048, 1536, blobs=12), levels=(1, 2, 4), vendor="aperio")
    places = [(0, 0), (1024, 512), (40, 96), (2000, 1500), (1920, 64), (-96, -32), (1204, 332)]
    with Slide(path) as slide:
        plan = plan_of(slide, level, (448, 448))
        ours = [slide.read_tile(x, y, plan) for x, y in places]
        assert used(slide, level)
    by_openslide()
    with Slide(path) as slide:
        for place, tile in zip(places, ours, strict=True):
            np.testing.assert_array_equal(tile, slide.read_tile(*place, plan))


def test_levels_whose_pixels_openslide_interpolates_differ_by_no_more_than_that(
    tmp_path, make_pyramid, tissue_rgb, by_openslide
):
    path = make_pyramid(tmp_path / "a.tif", tissue_rgb(1537, 1031, blobs=12), levels=(1, 4))
    window = {"level": 1, "size_lv": (100, 90)}
    with Slide(path) as slide:
        places = [(x * slide.level_downsamples[1][0], 4 * slide.level_downsamples[1][1]) for x in (0, 40, 201)]
        ours = [slide.read_rgb(*place, **window).astype(int) for place in places]
        assert used(slide, 1)
        whole = slide.read_rgb(0, 0, level=1, size_lv=slide.level_sizes[1])
    np.testing.assert_array_equal(ours[1], whole[4:94, 40:140])
    by_openslide()
    with Slide(path) as slide:
        for place, pixels in zip(places, ours, strict=True):
            difference = np.abs(pixels - slide.read_rgb(*place, **window))
            assert difference.max() <= 255 * 2 * 0.125
            assert difference.mean() < 2.0


@pytest.mark.parametrize("compression", ["deflate", "lzw", None])
def test_lossless_tiles_are_the_pixels_that_were_written(tmp_path, make_pyramid, tissue_rgb, compression):
    rgb = tissue_rgb(700, 430)
    path = make_pyramid(tmp_path / "a.tif", rgb, compression=compression, photometric="rgb")
    with Slide(path) as slide:
        np.testing.assert_array_equal(slide.read_rgb(0, 0, level=0, size_lv=(700, 430)), rgb)
        assert used(slide)


def test_tables_that_the_tiles_share_are_used(tmp_path, tissue_rgb, by_openslide):
    path = tmp_path / "a.tif"
    write_with_shared_tables(path, tissue_rgb(512, 256))
    with Slide(path, default_mpp=0.5) as slide:
        ours = slide.read_rgb(0, 0, level=0, size_lv=(512, 256))
        assert used(slide)
    by_openslide()
    with Slide(path, default_mpp=0.5) as slide:
        np.testing.assert_array_equal(ours, slide.read_rgb(0, 0, level=0, size_lv=(512, 256)))


def write_with_shared_tables(path, rgb):
    """Write 256 px tiles whose quantisation and Huffman tables stand once in the JPEGTables tag."""
    streams, tables = [], b""
    for x in range(0, rgb.shape[1], 256):
        tile = np.ascontiguousarray(rgb[:256, x : x + 256])
        data = imagecodecs.jpeg8_encode(tile, level=80, colorspace="RGB", outcolorspace="YCBCR")
        kept, tables, at = b"\xff\xd8", b"", 2
        while data[at + 1] != 0xDA:
            end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
            if data[at + 1] in (0xDB, 0xC4):
                tables += data[at:end]
            else:
                kept += data[at:end]
            at = end
        streams.append(kept + data[at:])
    tables = b"\xff\xd8" + tables + b"\xff\xd9"
    with tifffile.TiffWriter(path) as tiff:
        tiff.write(
            iter(streams), shape=rgb.shape, dtype=np.uint8, tile=(256, 256), photometric="rgb", compression="jpeg",
            jpegtables=tables, subsampling=(2, 2), compressionargs={"outcolorspace": "YCBCR"}, metadata=None,
        )  # fmt: skip


def test_a_level_that_does_not_agree_is_left_to_openslide(
    tmp_path, make_pyramid, tissue_rgb, monkeypatch, by_openslide
):
    path = make_pyramid(tmp_path / "a.tif", tissue_rgb(600, 400))
    with monkeypatch.context() as patch:
        decode = raw_tiff._decode
        patch.setattr(raw_tiff, "_decode", lambda *given: decode(*given) // 2)
        with Slide(path) as slide:
            ours = slide.read_rgb(0, 0, level=0, size_lv=(600, 400))
            assert not used(slide)
    by_openslide()
    with Slide(path) as slide:
        np.testing.assert_array_equal(ours, slide.read_rgb(0, 0, level=0, size_lv=(600, 400)))


def test_two_pages_of_one_size_are_not_guessed_at(tmp_path, make_pyramid, tissue_rgb):
    path = make_pyramid(tmp_path / "a.tif", tissue_rgb(600, 400), level_sizes=[(600, 400), (150, 100), (150, 100)])
    with Slide(path) as slide:
        assert [used(slide, level) for level in range(len(slide.level_sizes))] == [True] + [False] * (
            len(slide.level_sizes) - 1
        )


@pytest.mark.parametrize("damage", ["zeros", "hole", "noise 1", "noise 2", "noise 3", "cut"])
def test_a_damaged_tile_is_refused_as_openslide_refuses_it(tmp_path, make_pyramid, tissue_rgb, damage, by_openslide):
    path = make_pyramid(tmp_path / "a.tif", tissue_rgb(1024, 768, blobs=20))
    with tifffile.TiffFile(path) as tiff:
        offset, count = tiff.pages[0].dataoffsets[6], tiff.pages[0].databytecounts[6]
    data = bytearray(path.read_bytes())
    middle = slice(offset + count // 2, offset + count // 2 + 800)
    if damage == "zeros":
        data[offset : offset + count] = bytes(count)
    elif damage == "hole":
        data[middle] = bytes(800)
    elif damage.startswith("noise"):
        data[middle] = np.random.default_rng(int(damage[-1])).bytes(800)
    else:
        data[offset + count // 2 : offset + count] = bytes(count - count // 2)
    path.write_bytes(data)
    for _ in range(2):
        with Slide(path) as slide:
            with pytest.raises(SlideError, match=r"level-0 position \(600, 300\)"):
                slide.read_rgb(600, 300, level=0, size_lv=(50, 50))
            assert slide.read_rgb(100, 100, level=0, size_lv=(50, 50)).shape == (50, 50, 3)
        by_openslide()


def test_the_cache_is_bounded_and_saves_decoding(tmp_path, make_pyramid, tissue_rgb, monkeypatch):
    path = make_pyramid(tmp_path / "a.tif", tissue_rgb(1024, 256), levels=(1,))
    decoded = []
    decode = raw_tiff._decode
    monkeypatch.setattr(raw_tiff, "_decode", lambda *given: decoded.append(given[1]) or decode(*given))
    tiff = tifffile.TiffFile(path)
    raw = RawTiff(tiff, [tiff.pages[0]])
    for _ in range(3):
        raw.window(0, 100, 0, size_lv=(300, 200))
    assert decoded == [0, 1]
    monkeypatch.setattr(raw_tiff, "CACHE_BYTES", 2 * 256 * 256 * 3)
    raw.window(0, 0, 0, size_lv=(1024, 256))
    assert len(raw._cache) == 2
    assert raw._cached_bytes == 2 * 256 * 256 * 3
    raw.close()


def test_a_tile_that_the_file_lacks_is_an_error(tmp_path, make_pyramid, tissue_rgb):
    path = make_pyramid(tmp_path / "a.tif", tissue_rgb(512, 256), levels=(1,))
    with tifffile.TiffFile(path) as tiff:
        raw = RawTiff(tiff, [tiff.pages[0]])
        raw._index[0] = ([0, *tiff.pages[0].dataoffsets[1:]], [0, *tiff.pages[0].databytecounts[1:]])
        with pytest.raises(TileError, match="missing"):
            raw.window(0, 0, 0, size_lv=(10, 10))


def test_threads_share_one_slide(tmp_path, make_pyramid, tissue_rgb, plan_of):
    path = make_pyramid(tmp_path / "a.tif", tissue_rgb(1500, 1100, blobs=20))
    rng = np.random.default_rng(0)
    places = [(int(rng.integers(-100, 1500)), int(rng.integers(-100, 1100))) for _ in range(60)]
    with Slide(path) as slide:
        plan = plan_of(slide, 0, (300, 300))
        expected = [slide.read_tile(*place, plan) for place in places]
    with Slide(path) as slide:
        found: dict[int, np.ndarray] = {}

        def work(part: int) -> None:
            for index in range(part, len(places), 3):
                found[index] = slide.read_tile(*places[index], plan)

        threads = [threading.Thread(target=work, args=(part,)) for part in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index, tile in enumerate(expected):
            np.testing.assert_array_equal(found[index], tile)
