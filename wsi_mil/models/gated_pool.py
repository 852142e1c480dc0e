"""Gated pooling: the bag itself decides how much maximum and how much mean. Lee, Gallagher and Tu, AISTATS 2016,
arXiv:1509.08985.

f = a max + (1 - a) mean with a = sigmoid(w . s + c). Adapted: in the paper s are the values of a region of fixed size;
a bag has none, so s is [mean; maximum; standard deviation] of its tiles. a is 0.5 at the start. No published code is
loaded.
"""

from typing import Any

from torch import Tensor, nn

from wsi_mil.models._channels import ChannelPooling, at_maximum, summary
from wsi_mil.settings import Count, Rate


class GatedPool(ChannelPooling):
    """A mixture of maximum and mean that depends on the bag.

    in_dim: width of the features.  n_outputs: width of the head.  per_channel: a gate for each channel instead of one.
    hidden, feature_layer, dropout: as `ChannelPooling`.
    """

    summary = "mixture of maximum and mean by a gate that sees the bag"
    paper = "Lee, Gallagher and Tu, AISTATS 2016, arXiv:1509.08985"

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        per_channel: bool = False,
        hidden: Count | None = None,
        feature_layer: bool = True,
        dropout: Rate = 0.0,
    ) -> None:
        shared: dict[str, Any] = {"hidden": hidden, "feature_layer": feature_layer, "dropout": dropout}
        super().__init__(in_dim=in_dim, n_outputs=n_outputs, **shared)
        self.per_channel = per_channel
        self.gate = nn.Linear(3 * self.hidden, self.hidden if per_channel else 1)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def pool(self, rows: Tensor) -> Tensor:
        """rows: (n, h). Returns (h,)."""
        a = self._gate(rows)
        return a * rows.amax(dim=0) + (1 - a) * rows.mean(dim=0)

    def shares(self, rows: Tensor, pooled: Tensor) -> Tensor:
        """(n, h)."""
        a = self._gate(rows)
        return (a * at_maximum(rows) + (1 - a) / len(rows)) * rows

    def _gate(self, rows: Tensor) -> Tensor:
        a: Tensor = self.gate(summary(rows)).sigmoid()
        return a
