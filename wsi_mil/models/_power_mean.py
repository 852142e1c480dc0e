"""The power mean of each channel, with learned exponents: what gem and ggem share."""

from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wsi_mil.errors import ConfigError
from wsi_mil.models._channels import EPS, ChannelPooling, inverse_softplus
from wsi_mil.settings import Count, Range

Exponent = Annotated[float, Range(1)]
"""From 1, the mean; the maximum as it grows."""


class PowerMean(ChannelPooling):
    """(mean of max(x, eps)^p)^(1/p) of each channel, p = 1 + softplus(rho), one a group of channels."""

    group_of: Tensor

    def __init__(self, *, in_dim: int, n_outputs: int, groups: Count, p: Exponent, **shared: Any) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs, **shared)
        if groups > self.hidden:
            raise ConfigError(f"{type(self).__name__}: groups={groups}; at most one for each of {self.hidden} channels")
        self.p = p
        self.rho = nn.Parameter(inverse_softplus(p - 1).repeat(groups))
        self.register_buffer("group_of", torch.arange(self.hidden) * groups // self.hidden, persistent=False)

    def pool(self, rows: Tensor) -> Tensor:
        """rows: (n, h). Returns (h,)."""
        return power_mean(rows, 1 + F.softplus(self.rho)[self.group_of])

    def shares(self, rows: Tensor, pooled: Tensor) -> Tensor:
        """(n, h), in proportion to x^p."""
        return (rows.clamp_min(EPS).log() * (1 + F.softplus(self.rho)[self.group_of])).softmax(dim=0) * pooled


def power_mean(rows: Tensor, p: Tensor) -> Tensor:
    """(mean of max(x, eps)^p)^(1/p) over rows, from logarithms. rows: (n, h).  p: (h,) or scalar. Returns (h,)."""
    n = torch.tensor(float(len(rows)), dtype=rows.dtype, device=rows.device)
    return (((rows.clamp_min(EPS).log() * p).logsumexp(dim=0) - n.log()) / p).exp()
