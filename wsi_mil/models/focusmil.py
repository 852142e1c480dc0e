"""FocusMIL: max pooling over instances behind a variational information bottleneck. Liu et al. 2024, arXiv:2408.09449.

Per tile: Linear-ReLU-Linear, then mean mu and log-variance of a latent z = mu + exp(log_var / 2) eps, a linear head
s = w . z + c, and the bag's logit is the greatest s of its tiles. loss = CE(bag) + beta KL(q(z|x) || N(0, I)), with
KL = (mu^2 + exp(log_var) - log_var - 1) / 2 for each latent dimension. In eval mode z = mu.

No official code could be read. The layer layout follows third-party derivatives of the authors' script; the formulas
are checked against closed-form vectors of our own (`focusmil_derivative_arch`, `focusmil_reference_NOT_OFFICIAL`).
`from_official` reads the names of those two.

Differs on purpose:
- Logits are pooled. One derivative pools sigmoid(s) and then applies the sigmoid cross-entropy once more, so that its
  loss cannot fall below 0.31 (positive) and 0.69 (negative).
- The KL is averaged within each bag, then over bags, so that large bags do not dominate; the derivatives average over
  all tiles of the mini-batch: kl_average="flat". Over latent dimensions it is the mean, as in the derivatives; the
  textbook's sum is kl_reduction="sum".
- The log-variance is clamped to [-10, 10].
- The method is binary by construction. With three or more classes each class has its own maximum and the loss is the
  softmax cross-entropy of these maxima. A class that means "nothing found" (normal) has no tile that witnesses it;
  there the maximum only says which tile looks most normal.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from wsi_mil.bags import BagBatch, full_precision, segment_max, segment_mean
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import Criterion, MILModel, MILOutput, Objective, Progress
from wsi_mil.models._layers import normal
from wsi_mil.models._official import OfficialWeights
from wsi_mil.settings import Count, Positive, Weight

LOG_VAR_LIMIT = 10.0


class FocusMil(MILModel):
    """A probability for each tile, and the greatest one for the bag.

    Published mini-batches hold three bags.

    in_dim: width of the features.  n_outputs: width of the head, 1 for two classes.  hidden: widths of the encoder,
    ReLU between them and none after the last; () for no encoder.  latent_dim: width of z (35 on CAMELYON16, 24 on
    CAMELYON17).
    """

    summary = "maximum of tile probabilities behind an information bottleneck (FocusMIL)"
    family = "max-pooling"
    paper = "Liu et al. 2024, arXiv:2408.09449"
    score_kinds = ("probability",)
    random_in_training = True
    binary_outputs = 1

    def __init__(
        self, *, in_dim: int, n_outputs: int, hidden: tuple[Count, ...] = (128, 200), latent_dim: Count = 35
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.hidden = tuple(hidden)
        self.latent_dim = latent_dim
        layers: list[nn.Module] = []
        width = in_dim
        for next_width in self.hidden:
            layers += [nn.Linear(width, next_width), nn.ReLU()]
            width = next_width
        self.encoder = nn.Sequential(*layers[:-1])
        self.mean = nn.Linear(width, latent_dim)
        self.log_var = nn.Linear(width, latent_dim)
        self.head = nn.Linear(latent_dim, n_outputs)

    def forward(
        self, batch: BagBatch, *, generator: torch.Generator | None = None, eps: Tensor | None = None
    ) -> MILOutput:
        """Answer for each bag. eps: (total, latent_dim), the noise; if given it is used in either mode."""
        encoded = self.encoder(batch.features)
        mean = full_precision(self.mean(encoded))
        log_var = full_precision(self.log_var(encoded)).clamp(-LOG_VAR_LIMIT, LOG_VAR_LIMIT)
        if eps is None and self.training and generator is not None:
            eps = normal(tuple(mean.shape), generator, mean)
        latent = mean if eps is None else mean + (0.5 * log_var).exp() * eps
        instance_logits = full_precision(self.head(latent))
        logits, witness = segment_max(instance_logits, batch.offsets)
        return MILOutput(
            logits=logits,
            offsets=batch.offsets,
            instance_logits=instance_logits,
            auxiliary={"mean": mean, "log_var": log_var, "latent": latent, "witness": witness},
        )

    def objective(
        self,
        criterion: Criterion,
        *,
        bag_weight: Positive = 1.0,
        kl_weight: Weight = 0.01,
        kl_reduction: Literal["mean", "sum"] = "mean",
        kl_average: Literal["bag", "flat"] = "bag",
    ) -> "FocusMilObjective":
        """CE and KL.

        bag_weight, kl_weight: 1 and 0.01 on CAMELYON16; 100 and 1 on CAMELYON17.  kl_reduction: over latent
        dimensions.  kl_average: within each bag and then over bags, or over all tiles of the step.
        """
        return FocusMilObjective(
            criterion, bag_weight=bag_weight, kl_weight=kl_weight, kl_reduction=kl_reduction, kl_average=kl_average
        )

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights by the names of our closed-form vectors; no published code exists.

        Either w_fc1_weight, w_fc1_bias, w_fc2_*, w_mu_*, w_lv_*, w_head_* (with or without w_), or, for a method
        without encoder, Wm, bm, Wv, bv, wc, bc.
        """
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        if "[Wb]m" in weights:
            names = {"mean": ("Wm", "bm"), "log_var": ("Wv", "bv"), "head": ("wc", "bc")}
        else:
            prefix = "w_" if "w_mu_*" in weights else ""
            n_layers = next(n for n in count() if f"{prefix}fc{n + 1}_*" not in weights)
            ours = {f"encoder.{2 * i}": f"fc{i + 1}" for i in range(n_layers)}
            ours |= {"mean": "mu", "log_var": "lv", "head": "head"}
            names = {name: (f"{prefix}{theirs}_weight", f"{prefix}{theirs}_bias") for name, theirs in ours.items()}
        tensors: dict[str, Tensor] = {}
        for name, (weight, bias) in names.items():
            tensors |= {f"{name}.weight": weights.take(weight), f"{name}.bias": weights.take(bias)}
        hidden = tuple(len(tensors[f"{name}.weight"]) for name in names if name.startswith("encoder"))
        model = cls(
            in_dim=next(iter(tensors.values())).shape[1],
            n_outputs=len(tensors["head.weight"]),
            hidden=hidden,
            latent_dim=len(tensors["mean.weight"]),
            **what_the_shapes_do_not_tell,
        )
        weights.load(model, tensors)
        return model


class FocusMilObjective(Objective):
    """The bag's cross-entropy and the bottleneck's KL."""

    def __init__(
        self,
        criterion: Criterion,
        *,
        bag_weight: float,
        kl_weight: float,
        kl_reduction: Literal["mean", "sum"],
        kl_average: Literal["bag", "flat"],
    ) -> None:
        super().__init__()
        if kl_reduction not in ("mean", "sum") or kl_average not in ("bag", "flat"):
            raise ConfigError(
                f"focusmil: kl_reduction={kl_reduction!r}, kl_average={kl_average!r}; "
                f"the first is mean or sum, the second bag or flat"
            )
        self.criterion = criterion
        self.bag_weight = bag_weight
        self.kl_weight = kl_weight
        self.kl_reduction = kl_reduction
        self.kl_average = kl_average

    def loss(self, model: MILModel, batch: BagBatch, target: Tensor, progress: Progress) -> dict[str, Tensor]:
        """The terms bag and kl, each weighted."""
        output = model(batch, generator=progress.generator)
        divergence = kl_to_standard_normal(output.auxiliary["mean"], output.auxiliary["log_var"])
        each = divergence.mean(dim=1) if self.kl_reduction == "mean" else divergence.sum(dim=1)
        kl = each.mean() if self.kl_average == "flat" else segment_mean(each, output.offsets).mean()
        return {"bag": self.bag_weight * self.criterion(output.logits, target), "kl": self.kl_weight * kl}


def kl_to_standard_normal(mean: Tensor, log_var: Tensor) -> Tensor:
    """KL(N(mean, exp(log_var)) || N(0, 1)) of each element, at least 0; 0 where mean = log_var = 0."""
    return 0.5 * (mean.square() + log_var.exp() - log_var - 1)
