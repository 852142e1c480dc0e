"""What all bags of one encoding run share: the encoder, held against its contract before any slide is opened."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tiling.grid import TileGrid, TileSpec
from wsi_mil.bag_header import BagHeader
from wsi_mil.encoders import Encoder, EncodeSpec, choose_device, open_encoder
from wsi_mil.encoding import EncodedSlide
from wsi_mil.errors import ConfigError

_BREACHES = ("mpp", "tile_px")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all bags of one run share."""

    encoder: Encoder
    tiles: TileSpec
    precision: str
    breaches: tuple[str, ...]
    folder: Path = Path()

    def params_digest(self, grid: TileGrid) -> str:
        """Over everything that this slide's features depend on."""
        parts = [
            *(grid.spec.digest(), grid.slide.fingerprint, grid.slide.mpp, grid.mask_digest, asdict(grid.plan)),
            hashlib.sha256(np.ascontiguousarray(grid.grid_xy).tobytes()).hexdigest(),
            *(self.encoder.name, self.encoder.weights_sha256, self.encoder.dim, self.precision, self.breaches),
            self.encoder.transform_digest(grid.spec.tile_px),
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def path(self, slide_id: str) -> Path:
        """Where the bag of a slide goes."""
        return self.folder / f"{slide_id}.h5"


def check_spec(spec: EncodeSpec) -> None:
    """Raises ConfigError for numbers and names that cannot be."""
    unknown = [name for name in spec.accept_contract_breach if name not in _BREACHES]
    if unknown:
        raise ConfigError(f"--accept-contract-breach {', '.join(unknown)}: choose from {', '.join(_BREACHES)}.")
    for flag, value in (("--batch-size", spec.batch_size), ("--readers", spec.readers), ("--input-px", spec.input_px)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} is {value}; it must be 1 or more.")
    if not 0 <= spec.max_failed_tiles <= 1:
        raise ConfigError(f"--max-failed-tiles is {spec.max_failed_tiles}; it is a fraction from 0 to 1.")


def settle(spec: EncodeSpec, grids: Mapping[str, TileGrid]) -> Settings:
    """Open the encoder and hold its contract against the tiles, before any slide is opened."""
    tiles = _one_spec(grids)
    encoder = open_encoder(
        spec.encoder, weights=spec.weights, device=choose_device(spec.device), input_px=spec.input_px
    )
    found = encoder.breaches(tile_px=tiles.tile_px, mpp=tiles.mpp)
    refused = [name for name in found if name not in spec.accept_contract_breach]
    if refused:
        raise ConfigError(
            f"encoder {encoder.name}: {'; '.join(found[name] for name in refused)}. Tile at what it was trained at, "
            f"or go on with --accept-contract-breach {' '.join(sorted(refused))}; every bag will say so."
        )
    encoder.probe(tiles.tile_px)
    return Settings(
        encoder=encoder,
        tiles=tiles,
        precision=spec.precision,
        breaches=tuple(found[name] for name in sorted(found)),
    )


def make_folder(settings: Settings, *, out: Path, slides: Path) -> Path:
    """Where these bags go: the name carries the encoder and a digest of the settings."""
    encoder, tiles = settings.encoder, settings.tiles
    parts = [encoder.weights_sha256, encoder.transform_digest(tiles.tile_px), settings.precision, tiles.digest()]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]
    folder = out / f"bags_{_file_name(encoder.name)}_{digest}"
    if folder.resolve().is_relative_to(slides.resolve()):
        raise ConfigError(f"out is {out}, inside the slides' folder {slides}. Nothing is written there; name another.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _one_spec(grids: Mapping[str, TileGrid]) -> TileSpec:
    if not grids:
        raise ConfigError("there is no grid to encode. Run `wsi-mil tile` first, and look at its summary.")
    specs = {grid.spec.digest(): grid.spec for grid in grids.values()}
    if len(specs) > 1:
        raise ConfigError(
            f"the grids were made with {len(specs)} different settings. Tile all slides with the same ones."
        )
    return next(iter(specs.values()))


def header_of(encoded: EncodedSlide, settings: Settings) -> BagHeader:
    """What the bag of this slide says about itself."""
    grid, encoder = encoded.grid, settings.encoder
    slide, plan, spec = grid.slide, grid.plan, grid.spec
    return BagHeader(
        slide_id=encoded.slide_id,
        slide_fingerprint=slide.fingerprint,
        mpp=slide.mpp,
        mpp_source=slide.mpp_source,
        mpp_effective=plan.mpp_effective,
        level0_size=slide.size_l0,
        bounds_l0=slide.bounds_l0,
        tile_px=spec.tile_px,
        tile_um=spec.tile_px * spec.mpp,
        tile_size_l0=plan.tile_size_l0,
        stride_l0=plan.stride_l0,
        origin_l0=plan.origin_l0,
        encoder=encoder.name,
        weights_sha256=encoder.weights_sha256,
        transform_digest=encoder.transform_digest(spec.tile_px),
        transform=encoder.transform.describe(spec.tile_px),
        precision=settings.precision,
        params_digest=settings.params_digest(grid),
        icc_profile=slide.icc_profile,
        n=len(encoded.rows),
        dim=encoder.dim,
        licence=encoder.licence,
        pathology=encoder.pathology,
        contract_breach=settings.breaches,
        tiles=json.dumps(asdict(spec), sort_keys=True),
    )


def _file_name(encoder_name: str) -> str:
    """The encoder's name as a part of a folder's name, on every system."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in encoder_name)
