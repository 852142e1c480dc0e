"""Tree pooling: gates merge several poolings pairwise up a binary tree. Lee, Gallagher and Tu, AISTATS 2016,
arXiv:1509.08985.

Adapted: the paper's leaves are learned filters over a fixed grid, which an unordered bag does not have. Here the leaves
are maximum, mean of the top 1 %, log-mean-exp and mean of each channel; ((maximum, top), (log-mean-exp, mean)) are
merged by three gates a = sigmoid(w . s + c), f = a left + (1 - a) right, that see [mean; maximum; standard deviation]
of the bag. Gates are 0.5 at the start. No published code is loaded.
"""

import math
from typing import Annotated, Any

from torch import Tensor, nn
from torch.nn import functional as F

from wsi_mil.models._channels import ChannelPooling, at_maximum, inverse_softplus, log_mean_exp, slack, summary
from wsi_mil.settings import Count, Positive, Range, Rate


class TreePool(ChannelPooling):
    """Maximum, top mean, log-mean-exp and mean, merged by gates that see the bag.

    in_dim: width of the features.  n_outputs: width of the head.  top: share of the tiles in the top mean, at least
    one.  sharpness: r of the log-mean-exp at the start; it is learned.  per_channel: gates for each channel instead of
    one.  hidden, feature_layer, dropout: as `ChannelPooling`.
    """

    summary = "maximum, top mean, log-mean-exp and mean merged by gates (tree pooling)"
    paper = "Lee, Gallagher and Tu, AISTATS 2016, arXiv:1509.08985"

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        top: Annotated[float, Range(0, 1, without_low=True)] = 0.01,
        sharpness: Positive = 1.0,
        per_channel: bool = False,
        hidden: Count | None = None,
        feature_layer: bool = True,
        dropout: Rate = 0.0,
    ) -> None:
        shared: dict[str, Any] = {"hidden": hidden, "feature_layer": feature_layer, "dropout": dropout}
        super().__init__(in_dim=in_dim, n_outputs=n_outputs, **shared)
        self.top = top
        self.sharpness = sharpness
        self.per_channel = per_channel
        self.rho = nn.Parameter(inverse_softplus(sharpness))
        self.gates = nn.Linear(3 * self.hidden, 3 * (self.hidden if per_channel else 1))
        nn.init.zeros_(self.gates.weight)
        nn.init.zeros_(self.gates.bias)

    def pool(self, rows: Tensor) -> Tensor:
        """rows: (n, h). Returns (h,)."""
        top = rows.topk(self._k(rows), dim=0).values.mean(dim=0)
        return self._merge(rows, rows.amax(dim=0), top, log_mean_exp(rows, F.softplus(self.rho)), rows.mean(dim=0))

    def shares(self, rows: Tensor, pooled: Tensor) -> Tensor:
        """(n, h)."""
        sharpness = F.softplus(self.rho)
        soft = (rows * sharpness).softmax(dim=0) * log_mean_exp(rows, sharpness)
        return self._merge(rows, at_maximum(rows) * rows, self._at_top(rows) * rows, soft, rows / len(rows))

    def _merge(self, rows: Tensor, *leaves: Tensor) -> Tensor:
        gates: Tensor = self.gates(summary(rows)).sigmoid()
        root, left, right = gates.chunk(3)
        left_node = left * leaves[0] + (1 - left) * leaves[1]
        return root * left_node + (1 - root) * (right * leaves[2] + (1 - right) * leaves[3])

    def _k(self, rows: Tensor) -> int:
        return max(1, math.ceil(self.top * len(rows)))

    def _at_top(self, rows: Tensor) -> Tensor:
        """Weights (n, h) of the top mean; tiles that are equal at the border share what is left."""
        k = self._k(rows)
        border = rows.topk(k, dim=0).values[-1]
        near = slack(rows)
        above, at = (rows > border + near).to(rows), ((rows - border).abs() <= near).to(rows)
        return (above + at * (k - above.sum(dim=0)) / at.sum(dim=0)) / k
