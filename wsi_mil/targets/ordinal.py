"""Classes with an order: continuation ratios.

Output i is the logit of "above class i, given that it is class i or above", so k classes need k - 1 outputs, and the
class probabilities follow by the chain rule (Fienberg 1980; as a network's head: Shi et al. 2023, CORN, which averages
over the conditional cases where this is the exact log-likelihood of each bag).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from wsi_mil.bags import full_precision
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import Criterion
from wsi_mil.targets.classes import ClassTarget, class_indices


@dataclass(frozen=True, kw_only=True)
class OrdinalTarget(ClassTarget):
    """Which of some ordered classes, from low to high."""

    @property
    def kind(self) -> str:
        """ordinal."""
        return "ordinal"

    def n_outputs(self, binary_outputs: int) -> int:
        """One a step between classes."""
        return len(self.classes) - 1

    def criterion(self, n_outputs: int, class_weights: Tensor | None = None) -> Criterion:
        """Negative log-likelihood of the continuation ratios."""
        self._check_width(n_outputs)
        return ContinuationRatio(torch.ones(len(self.classes)) if class_weights is None else class_weights)

    def class_logits(self, logits: Tensor) -> Tensor:
        """(n, classes) log-probabilities of the classes. logits: (n, classes - 1) of the steps."""
        self._check_width(logits.shape[1])
        logits = full_precision(logits)
        nothing = torch.zeros_like(logits[:, :1])
        reached = torch.cat([nothing, F.logsigmoid(logits).cumsum(dim=1)], dim=1)
        return reached + torch.cat([F.logsigmoid(-logits), nothing], dim=1)

    def output_names(self, n_outputs: int) -> tuple[str, ...]:
        """The steps."""
        return tuple(f"above {name}" for name in self.classes[:-1])

    def _check_width(self, n_outputs: int) -> None:
        if n_outputs != len(self.classes) - 1:
            raise ConfigError(
                f"{self.name}: a head of {n_outputs} outputs for {len(self.classes)} ordered classes; "
                f"it needs {len(self.classes) - 1}"
            )


class ContinuationRatio(Criterion):
    """-log p(class) by the chain of steps; each bag's loss times the weight of its class, then the mean over bags."""

    weights: Tensor

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.register_buffer("weights", weights.to(torch.float32))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean loss. logits: (b, classes - 1).  target: (b,) or (b, 1) class indices."""
        target = class_indices(target)
        logits = full_precision(logits)
        step = torch.arange(logits.shape[1], device=logits.device)
        above = (target[:, None] > step).to(logits)
        losses = F.binary_cross_entropy_with_logits(logits, above, reduction="none")
        losses = (losses * (target[:, None] >= step)).sum(dim=1)
        return (losses * self.weights.to(losses)[target]).mean()
