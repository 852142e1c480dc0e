"""Reading the state dicts of published code: prefixes stripped, every key accounted for."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wsi_mil.errors import ConfigError

_CONTAINERS = ("model", "state_dict")
_PREFIXES = ("module.", "model.", "spatial_mil.")
"""What DataParallel and Lightning modules put in front of names; the last is PSA-MIL's."""
_Model = TypeVar("_Model", bound=nn.Module)


class OfficialWeights:
    """Tensors by official name. What is taken is counted, so that `load` can refuse keys that nobody took."""

    def __init__(self, method: str, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = ()) -> None:
        self.method = method
        self._tensors = {name: _tensor(method, name, v) for name, v in _unpack(method, state_dict, ignore).items()}
        self._taken: set[str] = set()

    def __contains__(self, pattern: str) -> bool:
        """Whether there is a tensor of this name, or of this form ("mlp.*")."""
        return any(fnmatch(name, pattern) for name in self._tensors)

    def take(self, name: str) -> Tensor:
        """The tensor of this name. Raises ConfigError when it is missing."""
        if name not in self._tensors:
            raise ConfigError(
                f"{self.method}: the published weights have no {name!r}; they have {', '.join(sorted(self._tensors))}"
            )
        self._taken.add(name)
        return self._tensors[name]

    def linear(self, ours: str, official: str, *, bias: bool = True) -> dict[str, Tensor]:
        """Weight, and bias unless there is none, of a Linear or LayerNorm layer, under our name."""
        names = ("weight", "bias") if bias else ("weight",)
        return {f"{ours}.{name}": self.take(f"{official}.{name}") for name in names}

    def load(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Fill `model` and set it to eval mode: in fp64 when any weight is, otherwise in fp32, halves too.

        Raises ConfigError when keys are left, or weights do not fit.
        """
        left = sorted(set(self._tensors) - self._taken)
        if left:
            raise ConfigError(
                f"{self.method}: no place for the published weights {', '.join(left)}. "
                f"Name those that are not needed in ignore=(...)."
            )
        if any(tensor.dtype == torch.float64 for tensor in tensors.values()):
            model.double()
        try:
            model.load_state_dict(dict(tensors), strict=True)
        except RuntimeError as error:
            raise ConfigError(f"{self.method}: the published weights do not fit: {error}") from error
        model.eval()


def _unpack(method: str, state_dict: Mapping[str, Any], ignore: Sequence[str]) -> dict[str, Any]:
    """Take the state dict out of a checkpoint, leave out what is to be ignored, and strip what wrappers put in front of
    all the other names. ignore: patterns of names as they are, or without what wrappers put in front.
    """
    for container in _CONTAINERS:
        if isinstance(state_dict.get(container), Mapping):
            state_dict = state_dict[container]
            break
    if not state_dict:
        raise ConfigError(f"{method}: the state dict is empty")
    names = {
        name: value
        for name, value in state_dict.items()
        if not any(fnmatch(form, pattern) for form in (name, _bare(name)) for pattern in ignore)
    }
    return _stripped(names)


def _stripped(names: dict[str, Any]) -> dict[str, Any]:
    for prefix in _PREFIXES:
        if names and all(name.startswith(prefix) for name in names):
            return _stripped({name.removeprefix(prefix): value for name, value in names.items()})
    return names


def _bare(name: str) -> str:
    """A name without anything that wrappers put in front of it."""
    while name.startswith(_PREFIXES):
        name = name.split(".", 1)[1]
    return name


def _tensor(method: str, name: str, value: Any) -> Tensor:
    """Raises ConfigError for a value that is no tensor, such as a whole state dict under a name of its own."""
    try:
        return torch.as_tensor(value)
    except (RuntimeError, TypeError, ValueError):
        raise ConfigError(
            f"{method}: {name!r} holds a {type(value).__name__}, not a tensor. Give the state dict itself, or a "
            f"checkpoint that holds it under {' or '.join(map(repr, _CONTAINERS))}; name what is not needed in "
            f"ignore=(...)."
        ) from None


def linear_head(cls: type[_Model], weights: OfficialWeights, **parameters: Any) -> _Model:
    """A pooling method whose only layer is `head`, from W (k, d) and b (k,)."""
    tensors = {"head.weight": weights.take("W"), "head.bias": weights.take("b")}
    n_outputs, in_dim = tensors["head.weight"].shape
    model = cls(in_dim=in_dim, n_outputs=n_outputs, **parameters)
    weights.load(model, tensors)
    return model
