"""Opens any timm network by name: `timm:<name>`, `timm:hf-hub:<owner/name>` or `timm:local-dir:<folder>`.

Transform, input size, normalisation and pooling come from the network's own data configuration. Its crop is not
taken over: an evaluation crop throws away the rim of the tile, so the whole tile is resized instead.
"""

import logging
from pathlib import Path
from typing import Any, Literal, cast

import timm
import torch
from timm.data.config import resolve_model_data_config
from torch import nn

from wsi_mil.encoders._base import Declaration, Encoder, Transform
from wsi_mil.encoders._weights import digest, load_strictly, read_state_dict
from wsi_mil.errors import ConfigError

PREFIX = "timm:"
_log = logging.getLogger(__name__)


def open_timm(name: str, *, weights: Path | None, device: str, input_px: int | None = None) -> Encoder:
    """Open `timm:...` with weights from a file, or from timm's hub. Raises ConfigError with the reason and the cure."""
    timm_name = name.removeprefix(PREFIX)
    size = {"img_size": input_px} if input_px and _takes_img_size(timm_name) else {}
    module = create(timm_name, pretrained=weights is None, arguments=size)
    if weights is not None:
        load_strictly(module, read_state_dict(weights), what=f"{weights.name} for {name}")
    config = resolve_model_data_config(module)  # type: ignore[no-untyped-call]
    fixed = bool(module.pretrained_cfg.get("fixed_input_size"))  # type: ignore[operator, union-attr]
    transform = Transform(
        mean=config["mean"],
        std=config["std"],
        input_px=input_px or (int(config["input_size"][-1]) if fixed else None),
        interpolation=interpolation(config["interpolation"]),
    )
    ready = _ready(module, device)
    return Encoder(
        name=_shown_name(timm_name),
        module=ready,
        transform=transform,
        dim=_dim(ready, transform.input_px or int(config["input_size"][-1])),
        output="pooled",
        mpp=(),
        tile_px=None,
        weights_sha256=digest(ready),
        licence=str(_config(module).get("license") or "not stated by timm"),
        gated=False,
        pathology=False,
        label="a timm network without a declared contract; whether it knows pathology is for you to say",
    )


def open_declared(name: str, declared: Declaration, *, weights: Path | None, device: str) -> Encoder:
    """Build a declared encoder and load its weights: from `weights`, from the package, or from timm's hub."""
    module = create(declared.architecture, pretrained=False, arguments=dict(declared.arguments))
    file = weights or declared.bundled
    if file is not None:
        load_strictly(module, read_state_dict(file), what=f"{file.name} for {name}")
    else:
        load_strictly(module, _from_hub(name, declared), what=f"{declared.hub_id} for {name}")
    ready = _ready(module, device)
    return Encoder(
        name=name,
        module=ready,
        transform=declared.transform,
        dim=declared.dim,
        output=declared.output,
        mpp=declared.mpp,
        tile_px=declared.tile_px,
        weights_sha256=digest(ready),
        licence=declared.licence,
        gated=declared.gated,
        pathology=declared.pathology,
        label=declared.label,
    )


def create(timm_name: str, *, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    """A timm network without classifier. Raises ConfigError for an unknown name, and when weights cannot be had."""
    try:
        module = timm.create_model(timm_name, pretrained=pretrained, **{"num_classes": 0, **arguments})
    except Exception as error:
        raise ConfigError(_why_not(timm_name, error, pretrained=pretrained)) from error
    return module


def interpolation(name: str) -> Literal["bilinear", "bicubic"]:
    """timm's word for it as ours; what we do not have, such as lanczos, becomes bicubic, and that is recorded."""
    return "bilinear" if name == "bilinear" else "bicubic"


def _ready(module: nn.Module, device: str) -> nn.Module:
    module = module.eval().requires_grad_(False)
    return module.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _dim(module: nn.Module, side: int) -> int:
    with torch.inference_mode():
        shape = module(torch.zeros(1, 3, side, side, device=next(module.parameters()).device)).shape
    if len(shape) != 2:
        raise ConfigError(f"this network gives {tuple(shape)} instead of one vector a tile. Choose one that pools.")
    return int(shape[1])


def _takes_img_size(timm_name: str) -> bool:
    """Whether the network is built for one input size: a vision transformer and its kin."""
    source = timm_name.partition(":")[0]
    if source in ("hf-hub", "hf_hub", "local-dir"):
        return False
    config = timm.get_pretrained_cfg(timm_name, allow_unregistered=True)
    return bool(config and config.fixed_input_size)


def _config(module: nn.Module) -> dict[str, Any]:
    return cast(dict[str, Any], module.pretrained_cfg)


def _shown_name(timm_name: str) -> str:
    """The name that stands in bags: a local folder is named without the path that leads to it."""
    source, _, rest = timm_name.partition(":")
    return f"{PREFIX}local-dir:{Path(rest).name}" if source == "local-dir" else f"{PREFIX}{timm_name}"


def _from_hub(name: str, declared: Declaration) -> dict[str, torch.Tensor]:
    from timm.models import load_state_dict_from_hf

    try:
        return cast(dict[str, torch.Tensor], load_state_dict_from_hf(str(declared.hub_id), weights_only=True))
    except Exception as error:
        gate = f" Access must be asked for there first ({declared.licence})." if declared.gated else ""
        raise ConfigError(
            f"encoder {name}: its weights could not be fetched from {declared.hub_id} ({_short(error)}).{gate} Without "
            "a network give --weights FILE."
        ) from error


def _why_not(timm_name: str, error: Exception, *, pretrained: bool) -> str:
    bare = timm_name.rpartition(":")[2]
    if ":" not in timm_name and not timm.is_model(bare.partition(".")[0]):
        near = timm.list_models(f"*{bare.partition('.')[0][:8]}*")[:5]
        return f"timm:{timm_name}: timm has no such network. Near: {', '.join(near) or 'none'}."
    cure = " Without a network give --weights FILE or timm:local-dir:FOLDER." if pretrained else ""
    return f"timm:{timm_name}: could not be opened ({_short(error)}).{cure}"


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
