"""Synthetic slides for every room's tests: drawn here, never stored, so no test needs a file from elsewhere."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray

Rgb = NDArray[np.uint8]


def _coded_rgb(width: int, height: int, *, dithered: bool = False) -> Rgb:
    """A picture whose colour tells the place: R = 110 + 120 x / width, G = 70, B = 110 + 120 y / height.

    Dithered, the mean over an area is right to a small part of a colour step, so it tells the place much finer.
    """
    rng = np.random.default_rng(0)
    rgb = np.full((height, width, 3), 70, np.uint8)
    rounding = rng.random((2, height, width)) if dithered else np.full((2, 1, 1), 0.5)
    rgb[..., 0] = np.floor(110 + 120 * ((np.arange(width) + 0.5) / width)[None] + rounding[0])
    rgb[..., 2] = np.floor(110 + 120 * ((np.arange(height) + 0.5) / height)[:, None] + rounding[1])
    return rgb


def _tissue_rgb(width: int, height: int, *, seed: int = 0, blobs: int = 6) -> Rgb:
    """White glass with drawn pieces of pink and violet tissue that have a fine structure."""
    rng = np.random.default_rng(seed)
    rgb = np.full((height, width, 3), 244, np.uint8)
    mask = np.zeros((height, width), np.uint8)
    for _ in range(blobs):
        centre = (int(rng.uniform(0.2, 0.8) * width), int(rng.uniform(0.2, 0.8) * height))
        axes = (max(1, int(rng.uniform(0.12, 0.25) * width)), max(1, int(rng.uniform(0.12, 0.25) * height)))
        cv2.ellipse(mask, centre, axes, rng.uniform(0, 180), 0, 360, 1, -1)
    noise = cv2.GaussianBlur(rng.normal(0, 60, (height, width)).astype(np.float32), (0, 0), 2.0)
    tissue = np.stack([205 + noise, 130 + 2 * noise, 190 + noise], axis=-1)
    rgb[mask > 0] = tissue.clip(0, 255).astype(np.uint8)[mask > 0]
    return rgb


def _description(vendor: str, size: tuple[int, int], mpp: float, objective: float | None) -> str | None:
    if vendor != "aperio":
        return None
    facts = "".join([f"|AppMag = {objective:g}" if objective else "", f"|MPP = {mpp}" if mpp else ""])
    return (
        f"Aperio Image Library v11.2.1\r\n{size[0]}x{size[1]} [0,0 {size[0]}x{size[1]}] (256x256) JPEG/RGB Q=90{facts}"
    )


def _write_pyramid(
    path: Path,
    rgb: NDArray[Any],
    *,
    mpp: float | tuple[float, float] | None = 0.5,
    levels: Sequence[float] = (1, 4),
    tile: int = 256,
    photometric: str = "ycbcr",
    compression: str | None = "jpeg",
    quality: int = 90,
    subsampling: tuple[int, int] = (2, 2),
    vendor: str = "generic-tiff",
    objective: float | None = None,
    bigtiff: bool = False,
    level_sizes: Sequence[tuple[int, int]] | None = None,
    **options: Any,
) -> Path:
    """Write a tiled pyramid and return its path.

    rgb: (h, w, 3) of level 0, or any array that tifffile writes. mpp: microns per pixel, a pair for (x, y), None for
    a file that does not say. levels: downsample of each level, its size floored as scanners do; or `level_sizes`
    exactly. photometric: "ycbcr" or "rgb". vendor: "generic-tiff" (pixel size in the tags) or "aperio" (in the
    description, with the objective). Further options go to tifffile's writer.
    """
    height, width = rgb.shape[:2]
    sizes = level_sizes or [(max(1, int(width / d)), max(1, int(height / d))) for d in levels]
    pair = (mpp, mpp) if isinstance(mpp, int | float) else mpp
    path.parent.mkdir(parents=True, exist_ok=True)
    common: dict[str, Any] = {"tile": (tile, tile), "photometric": photometric, "compression": compression}
    if compression == "jpeg":
        stored = {"outcolorspace": photometric.upper()}  # tifffile is given RGB and writes the tag of what it stored
        common |= {"photometric": "rgb", "subsampling": subsampling, "compressionargs": {"level": quality, **stored}}
    if pair and vendor != "aperio":
        common |= {"resolution": (1e4 / pair[0], 1e4 / pair[1]), "resolutionunit": "CENTIMETER"}
    with tifffile.TiffWriter(path, bigtiff=bigtiff) as tiff:
        for index, size in enumerate(sizes):
            data = rgb if size == (width, height) else cv2.resize(rgb, size, interpolation=cv2.INTER_AREA)
            text = _description(vendor, size, pair[0] if pair else 0.0, objective)
            extra = {"subfiletype": 1} if index and vendor != "aperio" else {}
            tiff.write(data, description=text, metadata=None, **common, **extra, **options)
    return path


@pytest.fixture(scope="session")
def make_pyramid() -> Callable[..., Path]:
    """The function that writes a synthetic slide: make_pyramid(path, rgb, mpp=0.5, levels=(1, 4), tile=256, ...)."""
    return _write_pyramid


@pytest.fixture(scope="session")
def coded_rgb() -> Callable[..., Rgb]:
    """The function that draws a picture whose colour tells the place: coded_rgb(width, height, dithered=False)."""
    return _coded_rgb


@pytest.fixture(scope="session")
def tissue_rgb() -> Callable[..., Rgb]:
    """The function that draws white glass with pieces of tissue: tissue_rgb(width, height, seed=0)."""
    return _tissue_rgb


def _write_study(
    folder: Path,
    *,
    patients: int = 24,
    slides_per_patient: int = 1,
    classes: Sequence[str] = ("normal", "tumour"),
    dim: int = 16,
    tiles: tuple[int, int] = (4, 12),
    signal: float = 3.0,
    seed: int = 0,
    **header: Any,
) -> tuple[Path, Path]:
    """Write bags and a cohort table (slide, patient, site, label); a third of a bag's tiles show its class."""
    from wsi_mil.store import BagHeader, write_bag

    facts: dict[str, Any] = {"mpp": (0.5, 0.5), "mpp_source": "metadata", "mpp_effective": (0.5, 0.5)}
    facts |= {"level0_size": (9000, 9000), "bounds_l0": (0, 0, 9000, 9000), "tile_px": 224, "tile_um": 112.0}
    facts |= {"tile_size_l0": (224, 224), "stride_l0": (224, 224), "origin_l0": (0, 0), "encoder": "synthetic"}
    facts |= {"weights_sha256": "00", "transform_digest": "00", "precision": "fp32", "params_digest": "00"}
    facts |= {"icc_profile": False, "n": 0, "dim": 0} | header
    rng = np.random.default_rng(seed)
    rows = ["slide,patient,site,label"]
    for patient in range(patients):
        for number in range(slides_per_patient):
            slide, n = f"s{patient:02}_{number}", int(rng.integers(*tiles))
            features = rng.normal(size=(n, dim)).astype(np.float32)
            features[: -(-n // 3), patient % len(classes)] += signal
            grid_xy = np.stack([np.arange(n) % 3, np.arange(n) // 3], axis=1)
            path = folder / "bags" / f"{slide}.h5"
            fixed = BagHeader(slide_id=slide, slide_fingerprint=f"of {slide}", **facts)
            write_bag(path, fixed, features=features, coords_l0=grid_xy * 224, grid_xy=grid_xy)
            rows.append(f"{slide},p{patient:02},site{patient // 2 % 3},{classes[patient % len(classes)]}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder / "labels.csv", folder / "bags"


@pytest.fixture(scope="session")
def make_study() -> Callable[..., tuple[Path, Path]]:
    """The function that writes synthetic bags and their table: make_study(folder, patients=24, ...) -> table, bags."""
    return _write_study
