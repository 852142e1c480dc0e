"""adaPool: a mixture of SoftPool and of a mean weighted by similarity to the mean. Stergiou and Poppe 2021,
arXiv:2111.00772.

eDSC: w_nd proportional to exp(DSC(x_nd, mean_d)), DSC(x, m) = 2 |x m| / (x^2 + m^2) for each channel (blind to the
sign); f = beta eDSC + (1 - beta) SoftPool. Reference: the closed form (vector `instance_pooling`, edsc_channelwise and
adapool_beta0.3), which follows the kernel of alexandrosstergiou/adaPool@8adddb1, a CUDA extension; not run.

Differs on purpose:
- The window is the whole bag; the published beta has one value for each place of a fixed picture, starts at random
  numbers clamped to [0, 1] and its 0/0 is hidden by nan_to_num. Here beta is one a channel, a sigmoid, 0.5 at the
  start, and 1e-8 stands in the denominator.
- The temperature of SoftPool is learned for each channel (see `softpool`).
Weights of eDSC are in [1, e]: it is near the mean in any long bag.
"""

from typing import Any

import torch
from torch import Tensor, nn

from wsi_mil.models._channels import ChannelPooling
from wsi_mil.settings import Count, Rate, Share


class AdaPool(ChannelPooling):
    """A learned mixture of SoftPool and of a mean weighted by similarity to the mean.

    in_dim: width of the features.  n_outputs: width of the head.  beta: the share of the similarity-weighted mean at
    the start.  learn_temperature: False keeps SoftPool's temperature at 1, as published.  hidden, feature_layer,
    dropout: as `ChannelPooling`.
    """

    summary = "mixture of SoftPool and a similarity-weighted mean (adaPool)"
    paper = "Stergiou and Poppe 2021, arXiv:2111.00772"

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        beta: Share = 0.5,
        learn_temperature: bool = True,
        hidden: Count | None = None,
        feature_layer: bool = True,
        dropout: Rate = 0.0,
    ) -> None:
        shared: dict[str, Any] = {"hidden": hidden, "feature_layer": feature_layer, "dropout": dropout}
        super().__init__(in_dim=in_dim, n_outputs=n_outputs, **shared)
        self.beta = beta
        self.learn_temperature = learn_temperature
        start = torch.tensor(beta, dtype=torch.float64).logit().float()
        self.beta_logit = nn.Parameter(start.repeat(self.hidden))
        self.log_temperature = nn.Parameter(torch.zeros(self.hidden), requires_grad=learn_temperature)

    def pool(self, rows: Tensor) -> Tensor:
        """rows: (n, h). Returns (h,)."""
        return self.shares(rows, rows).sum(dim=0)

    def shares(self, rows: Tensor, pooled: Tensor) -> Tensor:
        """(n, h)."""
        mean, beta = rows.mean(dim=0), self.beta_logit.sigmoid()
        similarity = 2 * (rows * mean).abs() / (rows.square() + mean.square() + 1e-8)
        soft = (rows / self.log_temperature.exp()).softmax(dim=0)
        return (beta * similarity.softmax(dim=0) + (1 - beta) * soft) * rows
