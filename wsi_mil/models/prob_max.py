"""The bag's probability is the greatest of its tiles': y = max p. Wang et al. 2019, arXiv:1810.09050, table 1.

See `_probability` for the reference code and what differs. The gradient reaches one tile a class and bag. With two
classes it is the same as `max_pool` with one output; with more each class is on its own here.
"""

from torch import Tensor

from wsi_mil.bags import segment_max
from wsi_mil.models._probability import ProbabilityPooling


class ProbMax(ProbabilityPooling):
    """Maximum of the tiles' probabilities. The parameters are those of `ProbabilityPooling`."""

    summary = "maximum of tile probabilities"

    def pool(self, instance_logits: Tensor, attention_logits: Tensor | None, offsets: Tensor) -> Tensor:
        """The greatest logit is that of the greatest probability."""
        return segment_max(instance_logits, offsets)[0]
