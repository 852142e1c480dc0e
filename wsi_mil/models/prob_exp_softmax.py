"""Tiles weigh by the exponential of their probability: y = sum p e^p / sum e^p. Wang et al. 2019, arXiv:1810.09050,
table 1.

See `_probability` for the reference code and what differs. dy/dp_n = (1 + p_n - y) e^p_n / sum e^p. No weight is more
than e times another, so this is near the mean.
"""

from torch import Tensor

from wsi_mil.models._probability import ProbabilityPooling, weighted_log_odds


class ProbExpSoftmax(ProbabilityPooling):
    """Mean of the tiles' probabilities, weighted by e^p. The parameters are those of `ProbabilityPooling`."""

    summary = "tile probabilities weighted by their exponential (exponential softmax)"

    def pool(self, instance_logits: Tensor, attention_logits: Tensor | None, offsets: Tensor) -> Tensor:
        """Weights e^p."""
        return weighted_log_odds(instance_logits, instance_logits.sigmoid(), offsets)
