"""The Sm operator for any method: features (early) or attention scores (late) made smooth over neighbouring tiles.
Castro-Macias et al., NeurIPS 2024, arXiv:2410.03276. The operator, its equations and differences: see
`wsi_mil/models/_spatial.py`. SmABMIL, the method of the paper, is `smabmil`.
"""

from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from wsi_mil.bags import BagBatch
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import MILModel, MILOutput, Objective, Progress, Regulariser
from wsi_mil.models._scores import ScoreChange, add_part
from wsi_mil.models._spatial import Radius, Smoothing, adjacency
from wsi_mil.settings import Count, Rate


class Sm(Regulariser):
    """Smooths what a method sees, or its attention scores.

    inner: the method's objective.  where: early works with every method, late with those built on gated attention.
    alpha: strength in [0, 1); None learns it, from 0.5.  mode, steps, legacy_torchmil_alpha: of the operator.
    radius: how many grid steps neighbours lie apart at most (1.5: all eight).
    """

    summary = "features or attention smooth over neighbouring tiles (Sm operator)"
    paper = "Castro-Macias et al., NeurIPS 2024, arXiv:2410.03276"

    def __init__(
        self,
        inner: Objective,
        *,
        where: Literal["early", "late"] = "early",
        alpha: Rate | None = None,
        mode: Literal["iterative", "exact"] = "iterative",
        steps: Count = 10,
        radius: Radius = 1.5,
        legacy_torchmil_alpha: bool = False,
    ) -> None:
        super().__init__(inner)
        if where not in ("early", "late"):
            raise ConfigError(f"sm: where={where!r}; it is early (features) or late (attention scores)")
        self.where, self.alpha, self.mode, self.steps, self.radius = where, alpha, mode, steps, radius
        self.legacy_torchmil_alpha = legacy_torchmil_alpha

    def change(self, model: MILModel) -> MILModel:
        """The same model with the operator inside. Raises ConfigError for late without gated attention."""
        smooth = Smoothing(
            alpha=self.alpha, mode=self.mode, steps=self.steps, legacy_torchmil_alpha=self.legacy_torchmil_alpha
        )
        if self.where == "late":
            _SmoothScores(smooth, self.radius).install(model)
        else:
            _SmoothFeatures(smooth, self.radius).install(model)
        model.uses_positions = True
        return model

    def check(self, model: MILModel) -> None:
        """Raises ConfigError for a model that `change` did not make."""
        if not any(isinstance(part, _SmoothScores | _SmoothFeatures) for part in model.modules()):
            raise ConfigError("sm: the model is not smoothed; build model and objective together (wsi_mil.methods)")

    def terms(self, output: MILOutput, progress: Progress) -> dict[str, Tensor]:
        """None of its own."""
        return {}


class _SmoothScores(ScoreChange):
    name = "sm"

    def __init__(self, smooth: Smoothing, radius: float) -> None:
        super().__init__()
        self.smooth, self.radius = smooth, radius

    def forward(self, logits: Tensor, batch: BagBatch) -> Tensor:
        smoothed: Tensor = self.smooth(logits, adjacency(batch, self.radius), batch.offsets)
        return smoothed


class _SmoothFeatures(nn.Module):
    def __init__(self, smooth: Smoothing, radius: float) -> None:
        super().__init__()
        self.smooth, self.radius = smooth, radius

    def install(self, model: MILModel) -> None:
        add_part(model, "sm", self)
        model.register_forward_pre_hook(self._begin)

    def _begin(self, _model: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return self(arguments[0]), *arguments[1:]

    def forward(self, batch: BagBatch) -> BagBatch:
        return replace(batch, features=self.smooth(batch.features, adjacency(batch, self.radius), batch.offsets))
