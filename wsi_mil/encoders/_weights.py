"""Weights into a timm network: read without executing code, matched key by key, digested."""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from wsi_mil.errors import ConfigError

_WRAPPERS = ("state_dict", "model", "teacher", "model_state_dict")
_PREFIXES = ("module.", "model.", "backbone.")


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Tensors by name from safetensors, or from a PyTorch file without executing what is pickled in it.

    Raises ConfigError when the file is missing, damaged, holds other objects than tensors, or no tensors.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such weights file. Give a .safetensors file or a PyTorch state dict.")
    try:
        safe = path.suffix == ".safetensors"
        content: Any = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the two readers raise a dozen kinds, and all mean that this is no file of tensors
        raise ConfigError(
            f"{path.name}: cannot be read as weights ({_first_line(error)}). Only tensors are read, code in the file "
            "is never executed. Save the state dict alone, best as .safetensors."
        ) from error
    return _plain(content, path)


def load_strictly(module: nn.Module, tensors: Mapping[str, Tensor], *, what: str) -> None:
    """Copy `tensors` into `module`; a classifier that the module lacks is left out, all else must match.

    Raises ConfigError that names what is missing, unexpected or of another shape; `module` is then unchanged.
    """
    wanted = module.state_dict()
    given = _without_classifier(module, dict(tensors), wanted)
    converted = _problems(given, wanted)
    if converted and (translate := _timm_filter(module)) is not None:
        try:
            other = _without_classifier(module, dict(translate(dict(given), module)), wanted)
        except Exception:  # a filter meets foreign keys: the plain comparison says it better
            other = given
        if not _problems(other, wanted):
            given, converted = other, ""
    if converted:
        raise ConfigError(f"{what}: these are weights of another architecture. {converted} Nothing was changed.")
    module.load_state_dict({key: value for key, value in given.items() if key in wanted}, strict=False)


def digest(module: nn.Module) -> str:
    """SHA-256 over names, types, shapes and bytes of every tensor of the module."""
    sha = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return sha.hexdigest()


def _plain(content: Any, path: Path) -> dict[str, Tensor]:
    for wrapper in _WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise ConfigError(f"{path.name}: holds {type(content).__name__}, not tensors by name. Save a state dict.")
    for prefix in _PREFIXES:
        if all(key.startswith(prefix) for key in content):
            content = {key.removeprefix(prefix): value for key, value in content.items()}
    return dict(content)


def _without_classifier(
    module: nn.Module, tensors: dict[str, Tensor], wanted: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    names = getattr(module, "pretrained_cfg", {}).get("classifier") or ()
    heads = tuple(f"{name}." for name in ((names,) if isinstance(names, str) else names))
    return {key: value for key, value in tensors.items() if key in wanted or not (heads and key.startswith(heads))}


def _problems(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    # a count of batches is no weight: older files, and converted ones, lack it
    missing = [key for key in wanted if key not in given and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in given if key not in wanted]
    unexpected.sort(key=lambda key: key.endswith("num_batches_tracked"))  # the telling ones first
    shapes = [
        f"{key} {tuple(given[key].shape)} instead of {tuple(wanted[key].shape)}"
        for key in wanted
        if key in given and given[key].shape != wanted[key].shape
    ]
    kinds = {"Missing": missing, "Unexpected": unexpected, "Other shape": shapes}
    return " ".join(f"{kind} ({len(items)}): {_shown(items)}." for kind, items in kinds.items() if items)


def _shown(items: list[str]) -> str:
    return ", ".join(items[:4]) + (" ..." if len(items) > 4 else "")


def _timm_filter(module: nn.Module) -> Any:
    """timm's own translation of original checkpoints for this family of networks, when there is one."""
    return getattr(sys.modules[type(module).__module__], "checkpoint_filter_fn", None)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
