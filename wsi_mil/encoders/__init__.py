"""Encoders by name. A file here that does not start with `_` is one: the file's name is the name."""

import difflib
import importlib
from pathlib import Path

import torch

from wsi_mil.encoders._base import Declaration, Encoder, Transform
from wsi_mil.encoders._not_supported import NOT_SUPPORTED
from wsi_mil.encoders._spec import DEFAULT_ENCODER, EncodeSpec
from wsi_mil.errors import ConfigError
from wsi_mil.lookup import load_file

__all__ = [
    "DEFAULT_ENCODER",
    "NOT_SUPPORTED",
    "Declaration",
    "EncodeSpec",
    "Encoder",
    "Transform",
    "encoder_names",
    "find_declaration",
    "open_encoder",
]
_TIMM = "timm"


def encoder_names() -> list[str]:
    """Names of the declared encoders, sorted. Besides them, `timm:<name>` opens any timm network."""
    names = (path.stem for path in Path(__file__).parent.glob("*.py"))
    return sorted(name for name in names if not name.startswith("_") and name != _TIMM)


def find_declaration(name: str) -> Declaration:
    """The contract of a declared encoder, or of the user's own `path/my_encoder.py` that defines `ENCODER`.

    Raises ConfigError for unknown names, with the nearest ones, and for those that are not supported, with the reason.
    """
    if name.endswith(".py"):
        return _from_file(Path(name))
    key = name.lower().replace("-", "_")
    if key in encoder_names():
        declared: Declaration = importlib.import_module(f"wsi_mil.encoders.{key}").ENCODER
        return declared
    if key in NOT_SUPPORTED:
        raise ConfigError(f"encoder {name}: not supported: {NOT_SUPPORTED[key]}. Choose from {_listed()}.")
    near = difflib.get_close_matches(key, [*encoder_names(), *NOT_SUPPORTED], n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"encoder {name!r}: no such name.{meant} Choose from {_listed()}, or timm:<name> for any timm network."
    )


def open_encoder(
    name: str = DEFAULT_ENCODER, *, weights: Path | None = None, device: str = "cpu", input_px: int | None = None
) -> Encoder:
    """Open an encoder with its weights, ready for `encode_batch`.

    name: see `encoder_names`, or `timm:<name>`. weights: a file; timm's hub or the bundled file when not given.
    input_px: for `timm:` only. Raises ConfigError with the reason and the cure.
    """
    from wsi_mil.encoders.timm import PREFIX, open_declared, open_timm

    if name.startswith(PREFIX):
        return open_timm(name, weights=weights, device=device, input_px=input_px)
    declared = find_declaration(name)
    if input_px not in (None, declared.transform.input_px):
        raise ConfigError(f"encoder {name}: its contract says what it sees; input_px is for timm: encoders only.")
    canonical = Path(name).stem if name.endswith(".py") else name.lower().replace("-", "_")
    return open_declared(canonical, declared, weights=weights, device=device)


def choose_device(wish: str) -> str:
    """`auto`, `cpu` or `cuda` as the device to use. Raises ConfigError when a GPU is wished and none is there."""
    if wish == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wish == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: this machine shows no GPU to PyTorch. Use --device cpu or auto.")
    return wish


def _from_file(path: Path) -> Declaration:
    declared = getattr(load_file(path), "ENCODER", None)
    if not isinstance(declared, Declaration):
        raise ConfigError(f"{path}: defines no ENCODER = Declaration(...). See wsi_mil/encoders/uni.py for one.")
    return declared


def _listed() -> str:
    return ", ".join(encoder_names())


def encoder_lines() -> list[str]:
    """One line for each encoder that can be chosen, then for each that cannot, with the reason."""
    lines = []
    for name in encoder_names():
        declared = find_declaration(name)
        mpp = "/".join(f"{value:g}" for value in declared.mpp) or "any"
        default = " (default)" if name == DEFAULT_ENCODER else ""
        gate = ", gated" if declared.gated else ""
        lines.append(
            f"{name}{default}: {declared.label}; {declared.dim} features, {mpp} µm/px, tile "
            f"{declared.tile_px or 'any'} px; {declared.licence}{gate}"
        )
    lines.append(
        "timm:<name>: any timm network, with its own data configuration; also timm:hf-hub: and timm:local-dir:"
    )
    return lines + [f"not supported: {name}: {reason}" for name, reason in sorted(NOT_SUPPORTED.items())]
