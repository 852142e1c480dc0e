"""Rectified attention: weights relu(s) / sum relu(s) in place of a softmax, so that most tiles count for nothing.

After rectified linear attention (ReLA), Zhang et al., EMNLP 2021, arXiv:2104.07012; there weights are normalised by an
RMS norm, here by their sum within the bag, so that they stay a distribution whatever the number of tiles. A bag with no
score above 0 gets equal weights. Works by turning scores into log relu(s); the softmax of that is the formula.
"""

import torch
from torch import Tensor

from wsi_mil.bags import BagBatch, full_precision, split
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import MILModel, MILOutput, Objective, Progress, Regulariser
from wsi_mil.models._scores import ScoreChange


class RectifiedAttention(Regulariser):
    """Makes attention sparse: tiles with scores of 0 or less have weight 0.

    inner: the method's objective.
    """

    summary = "attention with exact zeros: ReLU in place of exp"
    paper = "after Zhang et al., EMNLP 2021, arXiv:2104.07012"

    def __init__(self, inner: Objective) -> None:
        super().__init__(inner)

    def change(self, model: MILModel) -> MILModel:
        """The same model with rectified scores. Raises ConfigError when it has no gated attention."""
        return _Rectify().install(model)

    def check(self, model: MILModel) -> None:
        """Raises ConfigError for a model that `change` did not make."""
        if not any(isinstance(part, _Rectify) for part in model.modules()):
            raise ConfigError("rectified_attention: build model and objective together (wsi_mil.methods)")

    def terms(self, output: MILOutput, progress: Progress) -> dict[str, Tensor]:
        """None of its own."""
        return {}


class _Rectify(ScoreChange):
    name = "rectified_attention"

    def forward(self, logits: Tensor, batch: BagBatch) -> Tensor:
        logits = full_precision(logits)
        bounds = torch.finfo(logits.dtype)
        changed = []
        for rows in split(logits, batch.offsets):
            positive = rows > 0
            logs = torch.where(positive, rows.clamp(min=bounds.tiny).log(), bounds.min)
            changed.append(torch.where(positive.any(dim=0), logs, 0))
        return torch.cat(changed)
