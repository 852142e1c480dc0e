"""AEM: attention-entropy maximisation. Zhang et al., MICCAI 2025, arXiv:2406.15303.

Adds lambda_t * sum_n a_n log a_n, the negative entropy (natural logarithm) of the attention within each bag. Several
columns of attention (heads, classes, branches) are averaged, as the published code does for heads and classes; bags
of one step are averaged too (the published code has one bag a step).
Reference code: dazhangyu123/AEM@4a928a8, and @42c8dbe for top_k.

Where published code and paper differ, and what is taken here:
- The paper lets lambda fall along a cosine, the released code keeps it constant: schedule="cosine" ends at
  `end_weight` (0; the paper does not say) and "constant" is the default.
- top_k: the released expression renormalises the k greatest probabilities, NaN when one underflows. The softmax of
  the k greatest logits is the same number and always finite.
Differs on purpose: for ACMIL the term sees the masked attention, as its other terms do; hidden tiles count as p = 0.
The range of the term is [-log n, 0]: it is not divided by log n.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from wsi_mil.bags import full_precision, no_autocast, split
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import MILModel, MILOutput, Objective, Progress, Regulariser
from wsi_mil.settings import Count, Weight


class Aem(Regulariser):
    """Keeps attention from collapsing onto few tiles.

    inner: the objective it is added to.  weight: lambda at the start; published values lie between 0.001 and 0.2.
    schedule: constant, or falling along a cosine to `end_weight`.  top_k: only the k tiles of greatest attention.
    """

    summary = "attention-entropy maximisation (AEM), for every method with attention"
    paper = "Zhang et al., MICCAI 2025, arXiv:2406.15303"

    def __init__(
        self,
        inner: Objective,
        *,
        weight: Weight = 0.1,
        schedule: Literal["constant", "cosine"] = "constant",
        end_weight: Weight = 0.0,
        top_k: Count | None = None,
    ) -> None:
        super().__init__(inner)
        if schedule not in ("constant", "cosine"):
            raise ConfigError(f"aem: schedule is constant or cosine, not {schedule!r}")
        self.weight = weight
        self.schedule = schedule
        self.end_weight = end_weight
        self.top_k = top_k

    def check(self, model: MILModel) -> None:
        """Raises ConfigError for a method without attention."""
        if "attention" not in model.score_kinds:
            raise ConfigError(
                f"aem needs attention, and {type(model).__name__} has none; it scores tiles by "
                f"{', '.join(model.score_kinds)}. Use aem with a method such as abmil or acmil."
            )

    def weight_at(self, progress: Progress) -> float:
        """Lambda at this step."""
        if self.schedule == "constant":
            return self.weight
        return self.end_weight + 0.5 * (self.weight - self.end_weight) * (1 + math.cos(math.pi * progress.fraction))

    def terms(self, output: MILOutput, progress: Progress) -> dict[str, Tensor]:
        """The term aem, weighted; a plain zero when its weight is zero."""
        if output.attention_logits is None:
            raise ConfigError("aem needs attention_logits, and the model's output has none")
        weight = self.weight_at(progress)
        if weight == 0:
            return {"aem": output.logits.new_zeros((), dtype=torch.float32)}
        return {"aem": weight * negative_entropy(output.attention_logits, output.offsets, top_k=self.top_k)}


def negative_entropy(attention_logits: Tensor, offsets: Tensor, *, top_k: int | None = None) -> Tensor:
    """Mean over bags and columns of sum_n p_n log p_n, p the softmax within a bag; between -log n and 0.

    attention_logits: (total, m).  top_k: of the k greatest logits of each bag and column alone.
    """
    with no_autocast(attention_logits):
        each = []
        for rows in split(full_precision(attention_logits), offsets):
            kept = rows if top_k is None else rows.topk(min(top_k, len(rows)), dim=0).values
            log_p = kept.log_softmax(dim=0)
            p = log_p.exp()
            each.append((p * torch.where(p > 0, log_p, 0)).sum(dim=0).mean())
        return torch.stack(each).mean()
