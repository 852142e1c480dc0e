"""Attention anchor: ASMIL's stabilised attention for any method with attention. Ye et al., ICLR 2026, arXiv:2603.06658.

The term, its moving average, and where the published code departs from the paper: see `wsi_mil/models/_anchor.py`.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from wsi_mil.bags import BagBatch
from wsi_mil.errors import ConfigError
from wsi_mil.models._anchor import Anchor, Kind, Scaling
from wsi_mil.models._base import MILModel, MILOutput, Objective, Progress, Regulariser, recorded_outputs
from wsi_mil.settings import Amount, Positive, Share, Weight


class AttentionAnchor(Regulariser):
    """Pulls attention towards that of a slowly moving copy of the model.

    inner: the objective it is added to.  weight: of the term.  momentum: of the copy.  temperature: tau of the target.
    kind: a moving copy, the first weights, or equal attention.  scaling: the paper's sum over tiles or the published
    code's mean.  warm_up: steps in which the term is zero and a moving copy follows the model.
    """

    summary = "attention anchored to a slow copy of the model (ASMIL), for every method with attention"
    paper = "Ye et al., ICLR 2026, arXiv:2603.06658"

    def __init__(
        self,
        inner: Objective,
        *,
        weight: Weight = 0.1,
        momentum: Share = 0.999,
        temperature: Positive = 0.5,
        kind: Kind = "ema",
        scaling: Scaling = "sum",
        warm_up: Amount = 0,
    ) -> None:
        super().__init__(inner)
        self.anchor = Anchor(
            weight=weight,
            momentum=momentum,
            temperature=temperature,
            kind=kind,
            scaling=scaling,
            warm_up=warm_up,
        )

    def check(self, model: MILModel) -> None:
        """Raises ConfigError for a method without attention."""
        if "attention" not in model.score_kinds:
            raise ConfigError(
                f"anchor needs attention, and {type(model).__name__} has none; it scores tiles by "
                f"{', '.join(model.score_kinds)}. Use anchor with a method such as abmil or acmil."
            )

    def terms(self, output: MILOutput, progress: Progress) -> dict[str, Tensor]:
        """Nothing: the term needs the model and the bags, see `loss`."""
        return {}

    def loss(self, model: MILModel, batch: BagBatch, target: Tensor, progress: Progress) -> dict[str, Tensor]:
        """The inner objective's terms and the term anchor, on the last output that the inner one asked for."""
        self.check(model)
        slow = self.anchor.attention_logits(model, batch)
        with recorded_outputs(model) as outputs:
            terms = self.inner.loss(model, batch, target, progress)
        return {**terms, "anchor": self.anchor.term(outputs[-1], slow)}

    def parameter_groups(self, model: MILModel) -> Iterable[dict[str, Any]]:
        """The inner objective's; the copy is made here, before the first step."""
        self.anchor.start(model)
        return super().parameter_groups(model)

    def after_optimizer_step(self, model: MILModel, batch: BagBatch, lr: float) -> None:
        """Move the copy."""
        super().after_optimizer_step(model, batch, lr)
        self.anchor.update(model)
