"""What a bag says about itself, and what must be equal in all bags of a study. Pure: no file is opened here."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from wsi_mil.errors import StoreError

SCHEMA_VERSION = 1
NO_SLIDE = "no slide"
"""`mpp_source` of bags that were not made from slides; their pixel sizes mean nothing."""
_FOOTPRINT_TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True)
class BagHeader:
    """Everything about a bag except its rows. Pairs are (x, y); `_l0` is level-0 pixels."""

    slide_id: str
    slide_fingerprint: str
    mpp: tuple[float, float]
    """Microns per level-0 pixel."""
    mpp_source: str
    mpp_effective: tuple[float, float]
    """Microns that a pixel of a tile really spans on this slide."""
    level0_size: tuple[int, int]
    bounds_l0: tuple[int, int, int, int]
    """x, y, width, height of the scanned area."""
    tile_px: int
    tile_um: float
    """The wished footprint, tile_px times the wished mpp: equal on every slide of a study."""
    tile_size_l0: tuple[int, int]
    stride_l0: tuple[int, int]
    origin_l0: tuple[int, int]
    encoder: str
    weights_sha256: str
    transform_digest: str
    precision: str
    params_digest: str
    """Digest over the grid and everything else that the features depend on."""
    icc_profile: bool
    n: int
    dim: int
    transform: str = ""
    """In words: what happened to a tile before the encoder saw it."""
    licence: str = ""
    """Licence of the encoder's weights."""
    pathology: bool = False
    """The encoder was trained on pathology images."""
    contract_breach: tuple[str, ...] = ()
    """Departures from the encoder's declared contract that the user accepted."""
    tiles: str = ""
    """The wish of the grid (TileSpec) as JSON; empty where it is not known, as in imported bags."""

    @property
    def contract(self) -> dict[str, str | int | float]:
        """What must be equal in all bags of a study."""
        return {
            "encoder": self.encoder,
            "weights_sha256": self.weights_sha256,
            "transform_digest": self.transform_digest,
            "dim": self.dim,
            "tile_px": self.tile_px,
            "tile_um": self.tile_um,
        }


def check_one_contract(headers: Iterable[BagHeader]) -> None:
    """Refuse to mix bags of different encoders, weights, transforms or footprints.

    Raises StoreError that names the bags which differ from the majority, and in what.
    """
    headers = list(headers)
    counts: dict[str, int] = {}
    for header in headers:
        counts[_contract_key(header)] = counts.get(_contract_key(header), 0) + 1
    if len(counts) < 2:
        return
    usual_key = max(counts, key=lambda key: counts[key])
    usual = next(header for header in headers if _contract_key(header) == usual_key)
    odd = [f"{header.slide_id} ({text})" for header in headers if (text := _differences(header, usual))]
    if not odd:
        return
    shown = "; ".join(odd[:10]) + (f"; and {len(odd) - 10} more" if len(odd) > 10 else "")
    raise StoreError(
        f"{len(odd)} of {len(headers)} bags were made otherwise than the rest: {shown}. Bags of different contracts "
        "are never mixed. Encode these slides again with the settings of the rest, or leave them out."
    )


def attributes_of(header: BagHeader) -> dict[str, Any]:
    """The header as attributes of a file."""
    return {
        "kind": "bag",
        "schema_version": SCHEMA_VERSION,
        "slide_id": header.slide_id,
        "slide_fingerprint": header.slide_fingerprint,
        "mpp_x": header.mpp[0],
        "mpp_y": header.mpp[1],
        "mpp_source": header.mpp_source,
        "mpp_effective": header.mpp_effective,
        "level0_width": header.level0_size[0],
        "level0_height": header.level0_size[1],
        "bounds_x": header.bounds_l0[0],
        "bounds_y": header.bounds_l0[1],
        "bounds_width": header.bounds_l0[2],
        "bounds_height": header.bounds_l0[3],
        "tile_px": header.tile_px,
        "tile_um": header.tile_um,
        "tile_size_l0": header.tile_size_l0,
        "stride_l0": header.stride_l0,
        "origin_l0": header.origin_l0,
        "encoder": header.encoder,
        "weights_sha256": header.weights_sha256,
        "transform_digest": header.transform_digest,
        "transform": header.transform,
        "precision": header.precision,
        "params_digest": header.params_digest,
        "icc_profile": header.icc_profile,
        "licence": header.licence,
        "pathology": header.pathology,
        "contract_breach": json.dumps(list(header.contract_breach)),
        "tiles": header.tiles,
    }


def header_from(attributes: Mapping[str, Any]) -> BagHeader:
    """The header back from a file's attributes."""

    def text(key: str) -> str:
        return str(attributes[key])

    def number(key: str) -> int:
        return int(attributes[key])

    def pair(key: str) -> tuple[int, int]:
        return int(attributes[key][0]), int(attributes[key][1])

    mpp_x, mpp_y = (float(value) for value in attributes["mpp_effective"])
    return BagHeader(
        slide_id=text("slide_id"),
        slide_fingerprint=text("slide_fingerprint"),
        mpp=(float(attributes["mpp_x"]), float(attributes["mpp_y"])),
        mpp_source=text("mpp_source"),
        mpp_effective=(mpp_x, mpp_y),
        level0_size=(number("level0_width"), number("level0_height")),
        bounds_l0=(number("bounds_x"), number("bounds_y"), number("bounds_width"), number("bounds_height")),
        tile_px=number("tile_px"),
        tile_um=float(attributes["tile_um"]),
        tile_size_l0=pair("tile_size_l0"),
        stride_l0=pair("stride_l0"),
        origin_l0=pair("origin_l0"),
        encoder=text("encoder"),
        weights_sha256=text("weights_sha256"),
        transform_digest=text("transform_digest"),
        transform=text("transform"),
        precision=text("precision"),
        params_digest=text("params_digest"),
        icc_profile=bool(attributes["icc_profile"]),
        n=number("n"),
        dim=number("dim"),
        licence=text("licence"),
        pathology=bool(attributes["pathology"]),
        contract_breach=tuple(json.loads(text("contract_breach"))),
        tiles=str(attributes.get("tiles", "")),
    )


def _contract_key(header: BagHeader) -> str:
    return json.dumps(header.contract, sort_keys=True)


def _differences(header: BagHeader, usual: BagHeader) -> str:
    ours, theirs = header.contract, usual.contract
    odd = [key for key in ours if key != "tile_um" and ours[key] != theirs[key]]
    parts = [f"{key} {ours[key]}, the rest {theirs[key]}" for key in odd]
    if abs(header.tile_um - usual.tile_um) > _FOOTPRINT_TOLERANCE * usual.tile_um:
        parts.append(f"tile_um {header.tile_um:g}, the rest {usual.tile_um:g}")
    return ", ".join(parts)
