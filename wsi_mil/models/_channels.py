"""Poolings that treat each channel of the tiles on its own, then a linear head: what they share."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wsi_mil.bags import BagBatch, full_precision, no_autocast, split
from wsi_mil.models._base import MILModel, MILOutput
from wsi_mil.models._layers import Dropout, FeatureLayer, hidden_width
from wsi_mil.models._official import OfficialWeights
from wsi_mil.settings import Count, Rate

EPS = 1e-6


class ChannelPooling(MILModel):
    """Each channel is pooled over the tiles of a bag; subclasses say how.

    in_dim: width of the features.  n_outputs: width of the head.  hidden: width of the first layer; None takes the
    published one for `in_dim`.  feature_layer: False drops the first layer (Linear and ReLU).  dropout: on its output.
    """

    family = "pooling"
    score_kinds = ("contribution",)

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        hidden: Count | None = None,
        feature_layer: bool = True,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.hidden = (hidden or hidden_width(in_dim)) if feature_layer else in_dim
        self.feature_layer = feature_layer
        self.dropout = dropout
        self.random_in_training = dropout > 0
        self.features = FeatureLayer(in_dim, self.hidden) if feature_layer else nn.Identity()
        self.drop = Dropout(dropout)
        self.head = nn.Linear(self.hidden, n_outputs)

    @abstractmethod
    def pool(self, rows: Tensor) -> Tensor:
        """rows: (n, h) of one bag, in fp32 at least. Returns (h,)."""

    @abstractmethod
    def shares(self, rows: Tensor, pooled: Tensor) -> Tensor:
        """What each tile adds to each channel: (n, h), columns sum to `pooled`. Called without gradients."""

    def forward(
        self, batch: BagBatch, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> MILOutput:
        """Answer for each bag. forced_mask: (total, hidden) bool, the units that dropout zeroes."""
        hidden = self.drop(self.features(batch.features), generator=generator, forced_mask=forced_mask)
        with no_autocast(hidden):
            embedding = torch.stack([self.pool(full_precision(rows)) for rows in split(hidden, batch.offsets)])
            logits = self.head(embedding)
        return MILOutput(
            logits=logits,
            offsets=batch.offsets,
            bag_embedding=embedding[:, None],
            auxiliary={"hidden": hidden.detach()},
        )

    @torch.no_grad()
    def _instance_contributions(self, output: MILOutput) -> Tensor:
        """(total, k) what each tile adds to the logits. Worked out when first asked for; training never asks."""
        known = output.auxiliary
        if "contributions" not in known and output.bag_embedding is not None:
            with no_autocast(known["hidden"]):
                pairs = zip(split(known["hidden"], output.offsets), output.bag_embedding[:, 0], strict=True)
                known["contributions"] = torch.cat([self._parts(full_precision(rows), bag) for rows, bag in pairs])
        return known["contributions"]

    def _parts(self, rows: Tensor, pooled: Tensor) -> Tensor:
        """(n, k) of one bag."""
        return F.linear(self.shares(rows, pooled), self.head.weight, self.head.bias / len(rows))

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """A linear head on the pooled features, by the names W and b; other parameters are those of the constructor."""
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        head = {"head.weight": weights.take("W"), "head.bias": weights.take("b")}
        n_outputs, in_dim = head["head.weight"].shape
        model = cls(in_dim=in_dim, n_outputs=n_outputs, feature_layer=False, **what_the_shapes_do_not_tell)
        weights.load(model, model.state_dict() | head)
        return model


def inverse_softplus(value: float) -> Tensor:
    """x with softplus(x) = value, a scalar; -inf at 0."""
    wanted = torch.tensor(value, dtype=torch.float64)
    return (wanted + (-torch.expm1(-wanted)).log()).float()


def at_maximum(rows: Tensor) -> Tensor:
    """Weights (n, h) of the greatest value of each channel; equal ones (see `slack`) share it."""
    at = (rows >= rows.amax(dim=0) - slack(rows)).to(rows)
    return at / at.sum(dim=0)


def slack(rows: Tensor) -> Tensor:
    """Values that differ by no more count as equal: what rounding leaves between identical tiles, which a matrix
    product with several threads does not always treat alike."""
    return 64 * torch.finfo(rows.dtype).eps * rows.abs().amax()


def log_mean_exp(rows: Tensor, sharpness: Tensor) -> Tensor:
    """log(mean(exp(r x))) / r of each channel: between mean and maximum. rows: (n, h).  sharpness: (h,) or scalar."""
    n = torch.tensor(float(len(rows)), dtype=rows.dtype, device=rows.device)
    return ((rows * sharpness).logsumexp(dim=0) - n.log()) / sharpness


def summary(rows: Tensor) -> Tensor:
    """[mean; maximum; standard deviation] of the channels, (3h,): what a gate sees of a bag."""
    mean = rows.mean(dim=0)
    return torch.cat([mean, rows.amax(dim=0), ((rows - mean).square().mean(dim=0) + EPS).sqrt()])
