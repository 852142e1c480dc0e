"""Which series a DICOM file belongs to: the few elements that tell it, read without the pixels.

PS3.10: 128 bytes, "DICM", group 0002 in explicit little endian, then the data set in the named transfer syntax.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_SLIDE_CLASS = "1.2.840.10008.5.1.4.1.1.77.1.6"
_IMPLICIT = "1.2.840.10008.1.2"
_BIG_ENDIAN = "1.2.840.10008.1.2.2"
_DEFLATED = "1.2.840.10008.1.2.1.99"
_LONG = {b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV"}
_UNDEFINED = 0xFFFFFFFF
_ITEM, _END_OF_ITEM, _END_OF_SEQUENCE = 0xFFFEE000, 0xFFFEE00D, 0xFFFEE0DD
_WANTED = {0x00020002: "sop_class", 0x00020010: "syntax", 0x00080008: "image_type", 0x0020000E: "series"}
_LAST = 0x0020000E
_MAX_VALUE = 4096


class DicomError(Exception):
    """The file is no DICOM file that can be read here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One DICOM file."""

    path: Path
    series: str
    """SeriesInstanceUID: the instances of one slide share it."""
    is_slide_image: bool
    """Whether its class is VL Whole Slide Microscopy."""
    is_volume: bool
    """Whether it is a level of the pyramid, not a label, overview or thumbnail."""


def read_instance(path: Path) -> Instance:
    """Read the series of a DICOM file. Raises DicomError, and OSError as the disk does."""
    found: dict[str, str] = {}
    with path.open("rb") as handle:
        if handle.read(132)[128:] != b"DICM":
            raise DicomError("it has no DICOM preamble")
        try:
            for tag, value in _elements(handle):
                if tag in _WANTED:
                    found[_WANTED[tag]] = value.rstrip(b"\0 ").decode("ascii", "replace")
                if tag >= _LAST:
                    break
        except (struct.error, EOFError) as error:
            raise DicomError("its header is cut off or damaged") from error
    if not found.get("series"):
        raise DicomError("it has no SeriesInstanceUID")
    return Instance(
        path=path,
        series=found["series"],
        is_slide_image=found.get("sop_class") == _SLIDE_CLASS,
        is_volume="VOLUME" in found.get("image_type", "VOLUME").split("\\"),
    )


def series_files(path: Path) -> list[Path]:
    """The files beside `path` (itself included) that belong to its series; only `path` when that cannot be told."""
    try:
        series = read_instance(path).series
    except DicomError:
        return [path]
    files = []
    for other in sorted(path.parent.iterdir()):
        try:
            if other.is_file() and read_instance(other).series == series:
                files.append(other)
        except (DicomError, OSError):
            continue
    return files


def _elements(handle: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (tag, value) of the top level in file order; values of sequences and long ones are empty."""
    explicit = True
    meta_over = False
    syntax = ""
    while True:
        place = handle.tell()
        group = _unpack(handle, "<H")
        if not meta_over and group != 0x0002:
            meta_over = True
            if syntax in (_BIG_ENDIAN, _DEFLATED):
                raise DicomError(f"its transfer syntax {syntax} is not supported")
            explicit = syntax != _IMPLICIT
        handle.seek(place)
        tag, length, value_type = _head(handle, explicit)
        if length == _UNDEFINED:
            _skip_sequence(handle, explicit and value_type != b"UN")
            yield tag, b""
            continue
        value = _read(handle, length) if length <= _MAX_VALUE else _skip(handle, length)
        if tag == 0x00020010:
            syntax = value.rstrip(b"\0 ").decode("ascii", "replace")
        yield tag, value


def _head(handle: BinaryIO, explicit: bool) -> tuple[int, int, bytes]:
    group, element = struct.unpack("<HH", _read(handle, 4))
    tag = group << 16 | element
    if not explicit or group == 0xFFFE:
        return tag, _unpack(handle, "<I"), b""
    value_type = _read(handle, 2)
    if value_type in _LONG:
        _read(handle, 2)
        return tag, _unpack(handle, "<I"), value_type
    return tag, _unpack(handle, "<H"), value_type


def _skip_sequence(handle: BinaryIO, explicit: bool) -> None:
    """Skip items up to the end of a sequence of undefined length."""
    while True:
        tag, length, _ = _head(handle, explicit)
        if tag == _END_OF_SEQUENCE:
            return
        if tag != _ITEM:
            raise DicomError("its header is cut off or damaged")
        if length == _UNDEFINED:
            _skip_item(handle, explicit)
        else:
            _skip(handle, length)


def _skip_item(handle: BinaryIO, explicit: bool) -> None:
    while True:
        tag, length, value_type = _head(handle, explicit)
        if tag == _END_OF_ITEM:
            return
        if length == _UNDEFINED:
            _skip_sequence(handle, explicit and value_type != b"UN")
        else:
            _skip(handle, length)


def _skip(handle: BinaryIO, length: int) -> bytes:
    handle.seek(length, 1)
    return b""


def _unpack(handle: BinaryIO, form: str) -> int:
    return int(struct.unpack(form, _read(handle, struct.calcsize(form)))[0])


def _read(handle: BinaryIO, length: int) -> bytes:
    data = handle.read(length)
    if len(data) != length:
        raise EOFError
    return data
