"""Mixed pooling: a learned mixture of maximum and mean. Lee, Gallagher and Tu, AISTATS 2016, arXiv:1509.08985.

f = a max + (1 - a) mean of each channel, a in (0, 1), 0.5 at the start. Reference: the closed form (vector
`instance_pooling`, mixed_a0.25). Differs on purpose: a is a sigmoid, so it stays in (0, 1); equal maxima share the
gradient.
"""

from typing import Any

import torch
from torch import Tensor, nn

from wsi_mil.models._channels import ChannelPooling, at_maximum
from wsi_mil.settings import Count, Rate, Share


class MixedPool(ChannelPooling):
    """A learned mixture of maximum and mean.

    in_dim: width of the features.  n_outputs: width of the head.  mix: the share of the maximum at the start.
    per_channel: a share for each channel instead of one.  hidden, feature_layer, dropout: as `ChannelPooling`.
    """

    summary = "learned mixture of maximum and mean of each channel"
    paper = "Lee, Gallagher and Tu, AISTATS 2016, arXiv:1509.08985"

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        mix: Share = 0.5,
        per_channel: bool = False,
        hidden: Count | None = None,
        feature_layer: bool = True,
        dropout: Rate = 0.0,
    ) -> None:
        shared: dict[str, Any] = {"hidden": hidden, "feature_layer": feature_layer, "dropout": dropout}
        super().__init__(in_dim=in_dim, n_outputs=n_outputs, **shared)
        self.mix = mix
        self.per_channel = per_channel
        start = torch.tensor(mix, dtype=torch.float64).logit().float()
        self.mix_logit = nn.Parameter(start.repeat(self.hidden if per_channel else 1))

    def pool(self, rows: Tensor) -> Tensor:
        """rows: (n, h). Returns (h,)."""
        a = self.mix_logit.sigmoid()
        return a * rows.amax(dim=0) + (1 - a) * rows.mean(dim=0)

    def shares(self, rows: Tensor, pooled: Tensor) -> Tensor:
        """(n, h)."""
        a = self.mix_logit.sigmoid()
        return (a * at_maximum(rows) + (1 - a) / len(rows)) * rows
