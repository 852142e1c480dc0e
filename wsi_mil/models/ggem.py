"""GGeM: the generalised mean with an exponent for each group of channels. Ko et al. 2022, arXiv:2212.04114.

As `gem`, with groups of neighbouring channels that share an exponent; 16 (or 12) groups as published, of sizes that
differ by one at most where they do not divide the width. No published code is loaded.
"""

from typing import Any

from wsi_mil.models._power_mean import Exponent, PowerMean
from wsi_mil.settings import Count, Rate


class Ggem(PowerMean):
    """The generalised mean of each channel, with an exponent for each group of channels.

    in_dim: width of the features.  n_outputs: width of the head.  groups: number of groups.  p: the exponents at the
    start, at least 1.  hidden, feature_layer, dropout: as `ChannelPooling`.
    """

    summary = "generalised mean with an exponent for each group of channels (GGeM)"
    paper = "Ko et al. 2022, arXiv:2212.04114"

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        groups: Count = 16,
        p: Exponent = 3.0,
        hidden: Count | None = None,
        feature_layer: bool = True,
        dropout: Rate = 0.0,
    ) -> None:
        shared: dict[str, Any] = {"hidden": hidden, "feature_layer": feature_layer, "dropout": dropout}
        super().__init__(in_dim=in_dim, n_outputs=n_outputs, groups=groups, p=p, **shared)
        self.groups = groups
