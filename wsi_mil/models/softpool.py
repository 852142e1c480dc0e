"""SoftPool: each channel is averaged by the softmax of its own values. Stergiou, Poppe and Kalliatakis, ICCV 2021,
arXiv:2101.00440.

f_d = sum softmax_n(x_nd / t_d) x_nd. Reference: the closed form (vector `instance_pooling`, softpool; t = 1); the
published code is a CUDA extension over fixed windows. Differs on purpose: the window is the whole bag, and t, one a
channel, is learned, because the softmax depends on the scale of the features. In long bags of small values it is near
the mean.
"""

from typing import Any

import torch
from torch import Tensor, nn

from wsi_mil.models._channels import ChannelPooling
from wsi_mil.settings import Count, Rate


class SoftPool(ChannelPooling):
    """Each channel is averaged by the softmax of its own values.

    in_dim: width of the features.  n_outputs: width of the head.  learn_temperature: False keeps t = 1, as published.
    hidden, feature_layer, dropout: as `ChannelPooling`.
    """

    summary = "each channel averaged by the softmax of its own values (SoftPool)"
    paper = "Stergiou et al., ICCV 2021, arXiv:2101.00440"

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        learn_temperature: bool = True,
        hidden: Count | None = None,
        feature_layer: bool = True,
        dropout: Rate = 0.0,
    ) -> None:
        shared: dict[str, Any] = {"hidden": hidden, "feature_layer": feature_layer, "dropout": dropout}
        super().__init__(in_dim=in_dim, n_outputs=n_outputs, **shared)
        self.learn_temperature = learn_temperature
        self.log_temperature = nn.Parameter(torch.zeros(self.hidden), requires_grad=learn_temperature)

    def pool(self, rows: Tensor) -> Tensor:
        """rows: (n, h). Returns (h,)."""
        return self.shares(rows, rows).sum(dim=0)

    def shares(self, rows: Tensor, pooled: Tensor) -> Tensor:
        """(n, h)."""
        return (rows / self.log_temperature.exp()).softmax(dim=0) * rows
