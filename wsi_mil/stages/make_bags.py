"""Slides from outside -> bags, exactly as the models of a bundle were trained. A part of `wsi-mil predict`."""

from dataclasses import replace
from pathlib import Path

from wsi_mil.bundle import Bundle
from wsi_mil.cohort import CohortSpec
from wsi_mil.encoders import EncodeSpec, open_encoder
from wsi_mil.errors import ConfigError
from wsi_mil.outcomes import Failure
from wsi_mil.stages.encode import encode
from wsi_mil.stages.tile import tile
from wsi_mil.transfer.ensembles import Source


def encoder_for(source: Source, wish: EncodeSpec, *, slides: Path, out: Path) -> EncodeSpec:
    """How the encoder of a bundle is opened on this machine, found out before anything is written.

    wish: device, file of weights and, where the bundle's own name does not do here, `encoder`. Raises ConfigError when
    the models do not say how slides are made into bags, or what is opened is another encoder.
    """
    bundle = source.bundle
    if bundle is None:
        raise ConfigError(
            f"{source.path} is a run, which scores bags: tile and encode these slides as in its config.yaml and give "
            f"the folder of bags. Or make a bundle of it (wsi-mil export-bundle {source.path} --out BUNDLE): that one "
            f"takes slides."
        )
    tiles, facts = bundle.tiles, bundle.facts["encoder"]
    if tiles is None:
        raise ConfigError(
            f"{bundle.path} does not know how its training slides were tiled. Give a folder of bags, or export the "
            f"bundle again with --grids, the folder that `wsi-mil tile` made."
        )
    if out.resolve().is_relative_to(slides.resolve()):
        raise ConfigError(f"out is {out}, inside the slides' folder {slides}. Nothing is written there; name another.")
    name = wish.encoder or facts["name"]
    spec = replace(
        wish,
        encoder=name,
        input_px=facts["input_px"] if name.startswith("timm:") else None,
        precision=facts["precision"],
    )
    opened = open_encoder(name, weights=spec.weights, device="cpu", input_px=spec.input_px)
    contract = facts["contract"]
    found = {
        "encoder": opened.name,
        "weights_sha256": opened.weights_sha256,
        "transform_digest": opened.transform_digest(tiles.tile_px),
        "dim": opened.dim,
    }
    other = [f"{key} {value}, the bundle's {contract[key]}" for key, value in found.items() if value != contract[key]]
    if other:
        raise ConfigError(
            f"encoder {name} is not the one that the models were trained with: {'; '.join(other)}. Give the same "
            f"weights (--weights FILE), or the bundle's encoder by another name (--encoder)."
        )
    breaches = opened.breaches(tile_px=tiles.tile_px, mpp=tiles.mpp) if facts["contract_breach"] else {}
    return replace(spec, accept_contract_breach=tuple(sorted(breaches)))


def make_bags(
    bundle: Bundle,
    slides: Path,
    *,
    out: Path,
    table: Path | None,
    cohort: CohortSpec,
    encoding: EncodeSpec,
    workers: int,
) -> tuple[Path | None, list[Failure]]:
    """Tile into out/grids and encode into out/bags; what is there already is kept.

    Returns the folder of bags, None where no slide gave one, and the slides that failed, each once.
    """
    assert bundle.tiles is not None
    tiled = tile(slides, out=out / "grids", table=table, cohort=cohort, tiles=bundle.tiles, workers=workers)
    encoded = encode(slides, grids=tiled.out, out=out / "bags", table=table, cohort=cohort, encoding=encoding)
    failed = {failure.item: failure for failure in (*tiled.failures, *encoded.failures)}
    return encoded.out if encoded.done or encoded.reused else None, list(failed.values())
