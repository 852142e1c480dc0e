"""The bag's probability is the mean of its tiles': y = mean p. Wang et al. 2019, arXiv:1810.09050, table 1.

See `_probability` for the reference code and what differs. dy/dp_n = 1 / n: every tile learns, and a small lesion is
diluted.
"""

import torch
from torch import Tensor

from wsi_mil.models._probability import ProbabilityPooling, weighted_log_odds


class ProbMean(ProbabilityPooling):
    """Mean of the tiles' probabilities. The parameters are those of `ProbabilityPooling`."""

    summary = "mean of tile probabilities"

    def pool(self, instance_logits: Tensor, attention_logits: Tensor | None, offsets: Tensor) -> Tensor:
        """Equal weights."""
        return weighted_log_odds(instance_logits, torch.zeros_like(instance_logits), offsets)
