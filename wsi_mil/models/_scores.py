"""Changes of attention scores before the softmax, for every method that is built on gated attention."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from wsi_mil.bags import BagBatch
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import MILModel
from wsi_mil.models._layers import GatedAttention


class ScoreChange(nn.Module, ABC):
    """A part of the model that alters what its gated attention says, knowing the bags. Copied with the model."""

    name: str
    """How it is called within the model, and in messages."""

    def __init__(self) -> None:
        super().__init__()
        self._batch: BagBatch | None = None

    @abstractmethod
    def forward(self, logits: Tensor, batch: BagBatch) -> Tensor:
        """logits: (total, m) attention logits. Returns the changed ones."""

    def install(self, model: MILModel) -> MILModel:
        """Put it between the model's gated attention and its softmax. Raises ConfigError when there is none."""
        found = [module for module in model.modules() if isinstance(module, GatedAttention)]
        if not found:
            raise ConfigError(
                f"{self.name} changes the scores of gated attention, and {type(model).__name__} has none; "
                f"use it with a method such as abmil, acmil or clam_sb"
            )
        add_part(model, self.name, self)
        model.register_forward_pre_hook(self._begin)
        for attention in found:
            attention.register_forward_hook(self._alter)
        model.register_forward_hook(self._end, always_call=True)
        return model

    def _begin(self, _model: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._batch = arguments[0]

    def _alter(self, _attention: nn.Module, _arguments: tuple[Any, ...], logits: Tensor) -> Tensor:
        if self._batch is None:
            return logits
        if len(logits) != len(self._batch.features):
            raise ConfigError(
                f"{self.name} needs a score for every tile; this method scores {len(logits)} rows of "
                f"{len(self._batch.features)} tiles"
            )
        changed: Tensor = self(logits, self._batch)
        return changed

    def _end(self, _model: nn.Module, _arguments: tuple[Any, ...], _output: Any) -> None:
        self._batch = None


def add_part(model: MILModel, name: str, part: nn.Module) -> None:
    """Make `part` a child of the model. Raises ConfigError when it has one of this name, or stands behind slots."""
    if model.core is not model:
        raise ConfigError(f"{name} needs tiles; name it before mammoth, or use mammoth's keep_slots=False before it")
    if name in dict(model.named_children()):
        raise ConfigError(f"{name} is there already; use it once")
    model.add_module(name, part)
