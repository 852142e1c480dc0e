"""Slides composed from real tissue: islands on glass, in half of them a lesion in the shape of a real outline.

Each site draws on source tiles that no other site uses, so folds that keep sites whole share no source tile between
training, validation and test.
"""

import csv
import io
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path

import cv2
import numpy as np
import tifffile
from numpy.typing import NDArray
from shapely import affinity
from shapely.geometry import Polygon, mapping
from shapely.geometry.base import BaseGeometry
from shapely.ops import unary_union

from tiling.atomic import atomic_path, remove_leftovers, write_text
from wsi_mil.demo.textures import lay, smooth_noise
from wsi_mil.progress import progress

MPP = 0.5
LESION = "TUM"
TISSUES = ("NORM", "STR", "MUS", "MUC", "LYM", "ADI")
"""Debris and background are left out: many of their tiles carry the colours of the data set's stain normalisation."""
_COARSE = 16
"""Level-0 pixels per cell of the maps on which shapes are drawn."""


@dataclass(frozen=True, kw_only=True)
class DemoSlide:
    """What is drawn on one slide."""

    site: int
    case: int
    lesion: bool
    side_px: int
    seed: int

    @property
    def patient(self) -> str:
        """One patient a slide."""
        return f"site{self.site + 1}_case{self.case + 1:02d}"

    @property
    def relative_path(self) -> Path:
        """Below the folder of slides."""
        return Path(f"site{self.site + 1}") / f"case{self.case + 1:02d}.tif"


def plan_cohort(*, n_slides: int, n_sites: int, side_px: int, seed: int) -> list[DemoSlide]:
    """Slides in turn over sites, half of each site's with a lesion. Raises ValueError when sites cannot be balanced."""
    if n_slides % (2 * n_sites):
        raise ValueError(f"{n_slides} slides cannot be half with a lesion at each of {n_sites} sites")
    return [
        DemoSlide(
            site=i % n_sites,
            case=i // n_sites,
            lesion=(i // n_sites) % 2 == 0,
            side_px=side_px,
            seed=seed * 10_000 + i,
        )
        for i in range(n_slides)
    ]


def compose_cohort(out: Path, plan: list[DemoSlide], *, n_sites: int, workers: int = 2) -> Path:
    """Write `slides/<site>/<case>.tif`, `annotations/<patient>.geojson` and `labels.csv` below `out`.

    A slide that is already there is kept; slides are written atomically, so what is there is whole. Returns labels.csv.
    """
    remove_leftovers(out)
    missing = [slide for slide in plan if not slide_path(out, slide).exists()]
    if missing:
        context = get_context("spawn")
        with progress("compose", len(missing)) as bar, ProcessPoolExecutor(workers, mp_context=context) as pool:
            for future in [pool.submit(compose_slide, out, slide, n_sites) for slide in missing]:
                future.result()
                bar.advance()
    rows = io.StringIO()
    table = csv.writer(rows, lineterminator="\n")
    table.writerow(["slide", "patient", "site", "label", "annotation"])
    for slide in plan:
        label = "tumour" if slide.lesion else "normal"
        annotation = f"annotations/{slide.patient}.geojson" if slide.lesion else ""
        name = slide.relative_path.as_posix()
        table.writerow([name, slide.patient, f"site{slide.site + 1}", label, annotation])
    write_text(out / "labels.csv", rows.getvalue())
    return out / "labels.csv"


def slide_path(out: Path, slide: DemoSlide) -> Path:
    """Where the slide lies below `out`."""
    return out / "slides" / slide.relative_path


def compose_slide(out: Path, slide: DemoSlide, n_sites: int) -> None:
    """Draw one slide and its annotation; the slide comes last, so a slide that is there has its annotation."""
    rng = np.random.default_rng(slide.seed)
    image, lesion = draw(slide, source_tiles(slide.site, n_sites), rng)
    if lesion is not None:
        feature = {
            "type": "Feature",
            "geometry": mapping(lesion),
            "properties": {"objectType": "annotation", "classification": {"name": "Tumor", "color": [200, 0, 0]}},
        }
        collection = {"type": "FeatureCollection", "features": [feature]}
        write_text(out / "annotations" / f"{slide.patient}.geojson", json.dumps(collection))
    write_pyramid(slide_path(out, slide), image, mpp=MPP)


def source_tiles(site: int, n_sites: int) -> dict[str, list[NDArray[np.uint8]]]:
    """The tiles of one site by tissue class: every n_sites-th tile of each class."""
    folder = files("wsi_mil.demo") / "data" / "crc_tiles"
    rows = list(csv.DictReader(io.StringIO((folder / "index.csv").read_text())))
    tiles: dict[str, list[NDArray[np.uint8]]] = {}
    for tissue in (LESION, *TISSUES):
        names = sorted(row["file"] for row in rows if row["tissue"] == tissue)[site::n_sites]
        decoded = [
            cv2.imdecode(np.frombuffer((folder / n).read_bytes(), np.uint8), cv2.IMREAD_COLOR_RGB) for n in names
        ]
        tiles[tissue] = [np.asarray(tile, np.uint8) for tile in decoded]
    return tiles


def draw(
    slide: DemoSlide, tiles: dict[str, list[NDArray[np.uint8]]], rng: np.random.Generator
) -> tuple[NDArray[np.uint8], BaseGeometry | None]:
    """The slide's pixels (h, w, 3) and, when it has one, its lesion in level-0 pixels.

    Slides without a lesion get the same shape filled with another tissue, so that a shape alone tells nothing.
    """
    width, height = (int(slide.side_px * f) for f in rng.uniform(0.92, 1.08, 2))
    size = (width, height)
    coarse = (size[0] // _COARSE + 1, size[1] // _COARSE + 1)
    islands = _islands(coarse, rng)
    zones = _zones(coarse, rng)
    shape = _place_outline(islands, rng)
    inside = _fill(shape, coarse)
    filling = LESION if slide.lesion else str(rng.choice(TISSUES[:5]))
    zones = np.where(inside, (LESION, *TISSUES).index(filling), zones)
    image = _render(size, islands, zones, tiles, rng)
    return image, _l0_from_coarse(shape) if slide.lesion else None


def _islands(coarse: tuple[int, int], rng: np.random.Generator) -> NDArray[np.bool_]:
    """(h, w) tissue on glass: one to three blobs with ragged edges, well inside the slide."""
    width, height = coarse
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    field = np.full((height, width), -9.0, np.float32)
    for _ in range(int(rng.integers(1, 4))):
        cx, cy = rng.uniform(0.32, 0.68) * width, rng.uniform(0.32, 0.68) * height
        rx, ry = rng.uniform(0.22, 0.36) * width, rng.uniform(0.22, 0.36) * height
        field = np.maximum(field, 1 - np.hypot((x - cx) / rx, (y - cy) / ry))
    ragged = field + 0.12 * smooth_noise(coarse, max(4, width // 14), rng)
    margin = max(2, width // 40)
    tissue = ragged > 0
    tissue[:margin], tissue[-margin:], tissue[:, :margin], tissue[:, -margin:] = False, False, False, False
    return tissue


def _zones(coarse: tuple[int, int], rng: np.random.Generator) -> NDArray[np.int64]:
    """(h, w) index into (LESION, *TISSUES): patches of tissue classes with wavy borders; never the lesion."""
    width, height = coarse
    n = 18
    seeds = rng.uniform((0, 0), (width, height), (n, 2))
    weights = np.array([0.24, 0.24, 0.18, 0.12, 0.12, 0.10])
    kinds = rng.choice(len(TISSUES), n, p=weights) + 1
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    wobble = width / 18
    x = x + wobble * smooth_noise(coarse, max(4, width // 10), rng)
    y = y + wobble * smooth_noise(coarse, max(4, width // 10), rng)
    distance = (x[..., None] - seeds[:, 0]) ** 2 + (y[..., None] - seeds[:, 1]) ** 2
    return np.asarray(kinds[distance.argmin(-1)], np.int64)


def _place_outline(islands: NDArray[np.bool_], rng: np.random.Generator) -> BaseGeometry:
    """A real lesion outline, scaled to 3 to 20 percent of the tissue and laid inside it, in coarse cells."""
    outlines = json.loads((files("wsi_mil.demo") / "data" / "lesions.json").read_text())
    tissue = _polygon_of(islands)
    rows, columns = np.nonzero(islands)
    while True:
        ring = Polygon(outlines[int(rng.integers(len(outlines)))]["ring"])
        wish = rng.uniform(0.04, 0.20) * tissue.area
        outline = affinity.scale(ring, *(2 * [float(np.sqrt(wish / ring.area))]))
        outline = affinity.rotate(outline, float(rng.uniform(0, 360)))
        pick = int(rng.integers(len(rows)))
        centre = outline.centroid
        placed = affinity.translate(outline, columns[pick] - centre.x, rows[pick] - centre.y).intersection(tissue)
        if placed.geom_type == "Polygon" and 0.03 <= placed.area / tissue.area <= 0.20 and placed.area > 0.8 * wish:
            return placed


def _polygon_of(mask: NDArray[np.bool_]) -> BaseGeometry:
    contours, _ = cv2.findContours(mask.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    rings = [Polygon(contour[:, 0]) for contour in contours if len(contour) > 3]
    return unary_union([ring.buffer(0) for ring in rings])


def _l0_from_coarse(shape: BaseGeometry) -> BaseGeometry:
    """Coarse coordinates are those of cell centres, so cell (0, 0) lies at (8, 8) on level-0 ground."""
    large = affinity.scale(shape, _COARSE, _COARSE, origin=(0, 0))
    return affinity.translate(large, _COARSE / 2, _COARSE / 2)


def _fill(shape: BaseGeometry, coarse: tuple[int, int]) -> NDArray[np.bool_]:
    mask = np.zeros((coarse[1], coarse[0]), np.uint8)
    cv2.fillPoly(mask, [np.round(np.asarray(shape.exterior.coords)).astype(np.int32)], 1)
    return mask.astype(bool)


def _render(
    size: tuple[int, int],
    islands: NDArray[np.bool_],
    zones: NDArray[np.int64],
    tiles: dict[str, list[NDArray[np.uint8]]],
    rng: np.random.Generator,
) -> NDArray[np.uint8]:
    """Mix the planes of the tissue classes by soft zone borders over near-white glass."""
    width, height = size
    glass = rng.uniform(238, 246, 3).astype(np.float32) + 1.2 * rng.standard_normal((height, width, 1)).astype(
        np.float32
    )
    image = np.zeros((height, width, 3), np.float32)
    weights = np.full((height, width, 1), 1e-6, np.float32)
    for index, tissue in enumerate((LESION, *TISSUES)):
        here = _enlarge(zones == index, size)
        if (here * _enlarge(islands, size)).max() > 0:
            image += here * lay(tiles[tissue], size, here[..., 0] > 0, rng)
            weights += here
    cover = _enlarge(islands, size)
    mixed = cover * image / weights + (1 - cover) * glass
    return np.clip(np.round(mixed), 0, 255).astype(np.uint8)


def _enlarge(mask: NDArray[np.bool_], size: tuple[int, int]) -> NDArray[np.float32]:
    """(height, width, 1) in [0, 1]: a coarse mask on level-0 ground; its border is soft over about 10 pixels."""
    width, height = size
    wide, high = mask.shape[1] * _COARSE, mask.shape[0] * _COARSE
    large = cv2.resize(mask.astype(np.float32), (wide, high), interpolation=cv2.INTER_LINEAR)[:height, :width]
    round_edge = cv2.GaussianBlur(large, (0, 0), _COARSE / 2)
    soft: NDArray[np.float32] = np.clip((round_edge - 0.5) * 2.5 + 0.5, 0, 1)
    return soft[..., None]


def write_pyramid(path: Path, image: NDArray[np.uint8], *, mpp: float, levels: int = 3, quality: int = 90) -> None:
    """Write a JPEG-tiled pyramid (each level half of the one before) with its pixel size in the resolution tags."""
    with atomic_path(path) as temporary, tifffile.TiffWriter(temporary, bigtiff=False) as tiff:
        for level in range(levels):
            if level:
                half = ((image.shape[1] + 1) // 2, (image.shape[0] + 1) // 2)
                image = np.asarray(cv2.resize(image, half, interpolation=cv2.INTER_AREA), np.uint8)
            tiff.write(
                image,
                tile=(256, 256),
                photometric="rgb",
                compression="jpeg",
                compressionargs={"level": quality},
                subfiletype=1 if level else 0,
                resolution=(1e4 / (mpp * 2**level), 1e4 / (mpp * 2**level)),
                resolutionunit="CENTIMETER",
                metadata=None,
                software="",
                datetime=None,
            )
