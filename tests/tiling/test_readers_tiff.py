import logging

import numpy as np
import pytest
import tifffile

from tiling.errors import SlideError
from tiling.readers.tiff import why_not_a_slide
from tiling.slide import read_header


def write(path, *, rgb=None, **options):
    data = np.full((300, 400, 3), 200, np.uint8) if rgb is None else rgb
    with tifffile.TiffWriter(path) as tiff:
        tiff.write(data, **({"tile": (128, 128), "photometric": "rgb", "metadata": None} | options))
    return path


@pytest.mark.parametrize(
    ("resolution", "unit", "mpp"),
    [
        ((20_000, 40_000), "CENTIMETER", (0.5, 0.25)),
        ((50_800, 50_800), "INCH", (0.5, 0.5)),
        ((2_000, 2_000), "CENTIMETER", (5.0, 5.0)),
    ],
)
def test_tags_that_make_sense_give_the_pixel_size(tmp_path, resolution, unit, mpp):
    header = read_header(write(tmp_path / "a.tif", resolution=resolution, resolutionunit=unit))
    assert header.mpp_tags == pytest.approx(mpp)
    assert header.mpp_metadata is None
    assert header.warnings == ()


@pytest.mark.parametrize("dpi", [1, 72, 96, 300, 600])
def test_the_resolution_that_software_writes_by_default_is_not_believed(tmp_path, dpi):
    header = read_header(write(tmp_path / "a.tif", resolution=(dpi, dpi), resolutionunit="INCH"))
    assert header.mpp_tags is None
    assert f"{25400 / dpi:.4g}" in header.warnings[0]


def test_a_resolution_without_unit_is_no_pixel_size(tmp_path):
    header = read_header(write(tmp_path / "a.tif", resolution=(20_000, 20_000), resolutionunit="NONE"))
    assert (header.mpp_tags, header.mpp_metadata) == (None, None)


@pytest.mark.parametrize(("unit", "size"), [("µm", 0.25), ("nm", 250.0), ("mm", 0.00025)])
def test_ome_gives_the_pixel_size_in_its_unit(tmp_path, unit, size):
    path = tmp_path / "a.ome.tif"
    metadata = {"axes": "YXS", "PhysicalSizeX": size, "PhysicalSizeXUnit": unit, "PhysicalSizeY": 2 * size}
    metadata["PhysicalSizeYUnit"] = unit
    tifffile.imwrite(path, np.zeros((300, 400, 3), np.uint8), ome=True, tile=(128, 128), metadata=metadata)
    assert read_header(path).mpp_metadata == pytest.approx((0.25, 0.5))


@pytest.mark.parametrize(
    ("dtype", "reason"), [("float32", "floating-point"), ("int16", "signed"), ("uint32", "32 bits")]
)
def test_pixels_that_cannot_be_shown_are_refused_with_a_reason(tmp_path, dtype, reason):
    path = write(tmp_path / "a.tif", rgb=np.zeros((300, 400, 3), dtype))
    with pytest.raises(SlideError, match=rf"a\.tif.*{reason}.*convert"):
        read_header(path)


def test_many_channels_are_refused_with_a_reason(tmp_path):
    options = {"photometric": "minisblack", "planarconfig": "contig"}
    path = write(tmp_path / "a.tif", rgb=np.zeros((300, 400, 7), np.uint8), **options)
    with pytest.raises(SlideError, match="7 channels"):
        read_header(path)


def test_what_is_scaled_or_repeated_is_said(tmp_path):
    deep = read_header(write(tmp_path / "a.tif", rgb=np.zeros((300, 400, 3), np.uint16)))
    grey = read_header(write(tmp_path / "b.tif", rgb=np.zeros((300, 400), np.uint8), photometric="minisblack"))
    assert "16-bit" in deep.warnings[0]
    assert "grey" in grey.warnings[0]


def test_a_tiff_in_strips_is_refused_with_the_cure(tmp_path):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.zeros((300, 400, 3), np.uint8), photometric="rgb")
    with pytest.raises(SlideError, match=r"strips.*convert"):
        read_header(path)


@pytest.mark.parametrize("content", [b"", b"II*\0", b"II*\0\x08\0\0\0", b"no slide at all", b"MM\0+" + bytes(200)])
def test_what_is_no_slide_is_a_slide_error(tmp_path, content):
    path = tmp_path / "a.svs"
    path.write_bytes(content)
    with pytest.raises(SlideError, match=r"a\.svs: cannot be opened"):
        read_header(path)


def test_a_missing_file_is_a_slide_error(tmp_path):
    with pytest.raises(SlideError, match="no such file"):
        read_header(tmp_path / "gone.svs")


def test_a_file_that_may_not_be_read_says_so(tmp_path, monkeypatch):
    path = tmp_path / "a.svs"
    path.write_bytes(b"II*\0")

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", denied)
    assert why_not_a_slide(path) == "Permission denied"


def test_what_the_parser_remarks_on_damage_reaches_no_listener_of_all_loggers(tmp_path):
    path = tmp_path / "a.tif"
    path.write_bytes(b"II*\0\0\0\0\0cut")
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger().addHandler(handler)
    try:
        assert why_not_a_slide(path) is None
    finally:
        logging.getLogger().removeHandler(handler)
    assert records == []
