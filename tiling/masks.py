"""The user's own mask of a slide, in place of the one that is found: a picture, or polygons in GeoJSON.

A picture (PNG, TIFF, BMP; any size) shows the whole slide; what is not zero is tissue. Polygons are in level-0 pixels,
in the frame that `tiling.geojson` tells.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import tifffile
from numpy.typing import NDArray

from tiling.errors import UserError
from tiling.geojson import polygons_of
from tiling.readers.header import SlideInfo

_ASPECT_TOLERANCE = 0.02
_SUBPIXEL_BITS = 8
_PICTURES = (".png", ".tif", ".tiff", ".btf", ".bmp")
_POLYGONS = (".geojson", ".json")


class MaskError(UserError):
    """A mask cannot be read, or belongs to another slide."""

    outcome = "bad mask"


def load_mask(path: Path, info: SlideInfo, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """(rows, columns) of `shape`, over the whole slide: what the mask at `path` calls tissue. Raises MaskError."""
    suffix = _existing(path, info).suffix.lower()
    if suffix in _POLYGONS:
        return _mask_from_polygons(path, info, shape)
    if suffix in _PICTURES:
        return _mask_from_picture(path, info, shape)
    raise MaskError(
        f"{info.slide_id}: the mask {path.name} is none of {', '.join(_PICTURES + _POLYGONS)}. "
        "A JPEG cannot be one: its zeros are not zero. Save it as PNG."
    )


def digest_of_mask(path: Path | None, info: SlideInfo) -> str:
    """SHA-256 of a mask file's bytes, so that a changed mask makes a new grid; empty for None. Raises MaskError."""
    return "" if path is None else hashlib.sha256(_existing(path, info).read_bytes()).hexdigest()


def _existing(path: Path, info: SlideInfo) -> Path:
    if not path.is_file():
        raise MaskError(f"{info.slide_id}: the mask {path} does not exist. Correct the cohort's column 'mask'.")
    return path


def _mask_from_picture(path: Path, info: SlideInfo, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    marked = _read_picture(path, info, shape)
    rows, columns = marked.shape
    ratio = (columns / rows) / (info.size_l0[0] / info.size_l0[1])
    if abs(ratio - 1) > _ASPECT_TOLERANCE:
        raise MaskError(
            f"{info.slide_id}: the mask {path.name} is {columns} x {rows}, the slide {info.size_l0[0]} x "
            f"{info.size_l0[1]}: their aspect ratios differ by {abs(ratio - 1):.0%} (2% allowed). "
            "A mask shows the whole slide; is it another slide's?"
        )
    enlarged = rows < shape[0] or columns < shape[1]
    how = cv2.INTER_NEAREST if enlarged else cv2.INTER_AREA
    return np.asarray(cv2.resize(marked.astype(np.float32), (shape[1], shape[0]), interpolation=how) >= 0.5)


def _read_picture(path: Path, info: SlideInfo, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """(rows, columns) where any colour is not zero; of a pyramid, the smallest level not below `shape`."""
    picture: Any = None
    try:
        if path.suffix.lower() in (".tif", ".tiff", ".btf"):
            with tifffile.TiffFile(path) as file:
                levels = [level for level in file.series[0].levels if level.shape[0] >= shape[0]]
                picture = (levels or [file.series[0]])[-1].asarray()
        else:
            picture = cv2.imdecode(np.frombuffer(path.read_bytes(), np.uint8), cv2.IMREAD_UNCHANGED)
    except (OSError, ValueError, IndexError, cv2.error, tifffile.TiffFileError) as error:
        raise MaskError(f"{info.slide_id}: the mask {path.name} cannot be read: {error}.") from error
    if picture is None or picture.ndim not in (2, 3):
        raise MaskError(f"{info.slide_id}: the mask {path.name} cannot be read as one picture. Save it as a grey PNG.")
    if picture.ndim == 2:
        return np.asarray(picture != 0)
    colours = picture.shape[2] - (picture.shape[2] in (2, 4))  # opacity says nothing about tissue
    return np.asarray((picture[..., :colours] != 0).any(axis=2))


def _mask_from_polygons(path: Path, info: SlideInfo, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    try:
        polygons = polygons_of(json.loads(path.read_text(encoding="utf-8-sig")), bounds_l0=info.bounds_l0)
    except ValueError as error:
        raise MaskError(f"{info.slide_id}: the mask {path.name} is not GeoJSON: {error}.") from error
    if not polygons:
        raise MaskError(f"{info.slide_id}: the mask {path.name} holds no polygon. Only Polygon and MultiPolygon count.")
    scale = np.array([shape[1] / info.size_l0[0], shape[0] / info.size_l0[1]])
    mask = np.zeros((shape[0], shape[1]), np.uint8)
    for rings in polygons:
        one = np.zeros_like(mask)
        points = [_fixed_point(ring * scale) for ring in rings]
        cv2.fillPoly(one, points, 1, lineType=cv2.LINE_8, shift=_SUBPIXEL_BITS)  # even-odd: later rings are holes
        mask |= one
    if not mask.any():
        raise MaskError(
            f"{info.slide_id}: the polygons of {path.name} lie outside the slide or are smaller than a mask pixel. "
            "Coordinates are level-0 pixels."
        )
    return mask.astype(bool)


def _fixed_point(ring: NDArray[np.float64]) -> NDArray[np.int32]:
    """OpenCV's frame has pixel centres at whole numbers, ours at halves; the fraction goes into the low bits."""
    return np.asarray(np.round((ring - 0.5) * 2**_SUBPIXEL_BITS), np.int32)
