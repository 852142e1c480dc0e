"""Tiles weigh by their probability: y = sum p^2 / sum p. Wang et al. 2019, arXiv:1810.09050, table 1.

See `_probability` for the reference code and what differs. dy/dp_n = (2 p_n - y) / sum p: in a positive bag tiles above
y / 2 rise and the others fall.
"""

from torch import Tensor
from torch.nn import functional as F

from wsi_mil.models._probability import ProbabilityPooling, weighted_log_odds


class ProbLinearSoftmax(ProbabilityPooling):
    """Mean of the tiles' probabilities, weighted by themselves. The parameters are those of `ProbabilityPooling`."""

    summary = "tile probabilities weighted by themselves (linear softmax)"

    def pool(self, instance_logits: Tensor, attention_logits: Tensor | None, offsets: Tensor) -> Tensor:
        """Weights p."""
        return weighted_log_odds(instance_logits, F.logsigmoid(instance_logits), offsets)
