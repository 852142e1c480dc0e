"""Tiles weigh by learned attention, one for each class: y = sum w p, w = softmax(v_c . h_n). Wang et al. 2019,
arXiv:1810.09050, table 1.

See `_probability` for the reference code and what differs. dy / d(attention logit) = w_n (p_n - y): in a negative bag
attention flees from tiles of high p, so p may stay high there. Look at p and w apart; both are scores.
"""

from typing import Any

from torch import Tensor, nn

from wsi_mil.bags import full_precision
from wsi_mil.models._base import ScoreKind
from wsi_mil.models._probability import Prior, ProbabilityPooling, weighted_log_odds
from wsi_mil.settings import Count, Rate


class ProbAttention(ProbabilityPooling):
    """Mean of the tiles' probabilities, weighted by attention. The parameters are those of `ProbabilityPooling`."""

    summary = "tile probabilities weighted by learned attention for each class"
    score_kinds: tuple[ScoreKind, ...] = ("probability", "attention")

    def __init__(
        self, *, in_dim: int, n_outputs: int, hidden: Count | None = 256, prior: Prior = 0.05, dropout: Rate = 0.0
    ) -> None:
        shared: dict[str, Any] = {"hidden": hidden, "prior": prior, "dropout": dropout}
        super().__init__(in_dim=in_dim, n_outputs=n_outputs, **shared)
        self.attention = nn.Linear(hidden or in_dim, n_outputs)
        self.attention_parts = tuple(f"class{c}" for c in range(n_outputs))
        self.attention_of_classes = n_outputs > 1

    def attend(self, hidden: Tensor) -> Tensor:
        """hidden: (total, h). Returns (total, k)."""
        logits: Tensor = self.attention(hidden)
        return logits

    def pool(self, instance_logits: Tensor, attention_logits: Tensor | None, offsets: Tensor) -> Tensor:
        """Weights w."""
        if attention_logits is None:
            raise ValueError("prob_attention pools with attention logits")
        return weighted_log_odds(instance_logits, full_precision(attention_logits), offsets)
