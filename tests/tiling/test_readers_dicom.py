import struct
from pathlib import Path

import pytest

from tiling.readers.dicom import DicomError, read_instance, series_files

SLIDE = "1.2.840.10008.5.1.4.1.1.77.1.6"
EXPLICIT, IMPLICIT, DEFLATED = "1.2.840.10008.1.2.1", "1.2.840.10008.1.2", "1.2.840.10008.1.2.1.99"
UNDEFINED = 0xFFFFFFFF


def explicit(group: int, element: int, kind: bytes, value: bytes, *, length: int | None = None) -> bytes:
    value += b" " * (len(value) % 2)
    size = len(value) if length is None else length
    if kind in (b"SQ", b"UN", b"OB"):
        return struct.pack("<HH2sHI", group, element, kind, 0, size) + value
    return struct.pack("<HH2sH", group, element, kind, size) + value


def implicit(group: int, element: int, value: bytes, *, length: int | None = None) -> bytes:
    value += b" " * (len(value) % 2)
    return struct.pack("<HHI", group, element, len(value) if length is None else length) + value


def item(content: bytes, *, length: int | None = None) -> bytes:
    return struct.pack("<HHI", 0xFFFE, 0xE000, len(content) if length is None else length) + content


END_OF_ITEM = struct.pack("<HHI", 0xFFFE, 0xE00D, 0)
END_OF_SEQUENCE = struct.pack("<HHI", 0xFFFE, 0xE0DD, 0)


def write(path: Path, data_set: bytes, *, syntax: str = EXPLICIT, sop_class: str = SLIDE) -> Path:
    meta = explicit(2, 2, b"UI", sop_class.encode()) + explicit(2, 0x10, b"UI", syntax.encode())
    path.write_bytes(bytes(128) + b"DICM" + meta + data_set)
    return path


def plain(series: str, image_type: bytes = b"ORIGINAL\\PRIMARY\\VOLUME\\NONE") -> bytes:
    return explicit(8, 8, b"CS", image_type) + explicit(0x20, 0xE, b"UI", series.encode())


def test_the_series_of_a_plain_file(tmp_path):
    instance = read_instance(write(tmp_path / "a.dcm", plain("1.2.3")))
    assert (instance.series, instance.is_slide_image, instance.is_volume) == ("1.2.3", True, True)


def test_a_label_is_no_volume_and_another_class_no_slide(tmp_path):
    assert not read_instance(write(tmp_path / "a.dcm", plain("1.2.3", b"ORIGINAL\\PRIMARY\\LABEL\\NONE"))).is_volume
    assert not read_instance(write(tmp_path / "b.dcm", plain("1.2.3"), sop_class="1.2.840.1")).is_slide_image


def test_implicit_files_are_read(tmp_path):
    nested = implicit(0x40, 1, b"x") + implicit(0x20, 0xE, b"9.9.9")
    sequence = implicit(8, 0x1115, item(nested, length=UNDEFINED) + END_OF_ITEM + END_OF_SEQUENCE, length=UNDEFINED)
    path = write(tmp_path / "a.dcm", sequence + implicit(0x20, 0xE, b"1.2.4"), syntax=IMPLICIT)
    assert read_instance(path).series == "1.2.4"


def test_sequences_of_any_length_are_passed_over(tmp_path):
    inner = explicit(0x20, 0xE, b"UI", b"9.9.9")
    known = explicit(8, 0x1111, b"SQ", item(inner))
    deep = explicit(8, 0x1114, b"SQ", item(inner) + END_OF_SEQUENCE, length=UNDEFINED)
    content = item(deep + inner, length=UNDEFINED) + END_OF_ITEM + item(inner) + END_OF_SEQUENCE
    unknown = explicit(8, 0x1115, b"SQ", content, length=UNDEFINED)
    path = write(tmp_path / "a.dcm", known + unknown + plain("1.2.5"))
    assert read_instance(path).series == "1.2.5"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "preamble"),
        (bytes(200), "preamble"),
        (bytes(128) + b"DICM", "cut off"),
        (bytes(128) + b"DICM" + plain("1.2.3")[:-3], "cut off"),
        (bytes(128) + b"DICM" + explicit(0x28, 2, b"US", b"\3\0"), "SeriesInstanceUID"),
    ],
)
def test_what_is_no_dicom_says_why(tmp_path, content, reason):
    path = tmp_path / "a.dcm"
    path.write_bytes(content)
    with pytest.raises(DicomError, match=reason):
        read_instance(path)


def test_an_unsupported_syntax_says_so(tmp_path):
    with pytest.raises(DicomError, match="not supported"):
        read_instance(write(tmp_path / "a.dcm", plain("1.2.3"), syntax=DEFLATED))


def test_the_files_of_a_series_are_those_beside_it(tmp_path):
    for name, series in (("b", "1.2"), ("a", "1.2"), ("c", "1.3")):
        write(tmp_path / f"{name}.dcm", plain(series))
    (tmp_path / "notes.txt").write_text("x")
    assert [path.name for path in series_files(tmp_path / "b.dcm")] == ["a.dcm", "b.dcm"]
    assert series_files(tmp_path / "notes.txt") == [tmp_path / "notes.txt"]


def test_a_real_series_is_read():
    folder = Path(__file__).parents[1] / "data" / "slides" / "series1"
    assert [path.name for path in series_files(folder / "level1.dcm")] == ["level0.dcm", "level1.dcm"]
    assert read_instance(folder / "level0.dcm").is_slide_image
