"""GeM: the generalised mean of each channel, with a learned exponent. Radenović, Tolias and Chum, TPAMI 2019,
arXiv:1711.02512, eq. 3.

f = (mean of max(x, eps)^p)^(1/p): the mean at p = 1, the maximum as p grows. Reference: the closed form (vector
`instance_pooling`, gem_*). Differs on purpose: p = 1 + softplus(rho) stays at least 1, 3 at the start; sums are made of
logarithms; features need to be non-negative, which the first layer (ReLU) provides: without it negative values count
as 1e-6.
"""

from typing import Any

from wsi_mil.models._power_mean import Exponent, PowerMean
from wsi_mil.settings import Count, Rate


class Gem(PowerMean):
    """The generalised mean of each channel, with one exponent.

    in_dim: width of the features.  n_outputs: width of the head.  p: the exponent at the start, at least 1.  hidden,
    feature_layer, dropout: as `ChannelPooling`.
    """

    summary = "generalised mean with a learned exponent (GeM)"
    paper = "Radenović et al., TPAMI 2019, arXiv:1711.02512"

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        p: Exponent = 3.0,
        hidden: Count | None = None,
        feature_layer: bool = True,
        dropout: Rate = 0.0,
    ) -> None:
        shared: dict[str, Any] = {"hidden": hidden, "feature_layer": feature_layer, "dropout": dropout}
        super().__init__(in_dim=in_dim, n_outputs=n_outputs, groups=1, p=p, **shared)
