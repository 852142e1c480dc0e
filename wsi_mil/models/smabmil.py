"""SmABMIL: attention-based MIL whose scores are smooth over the slide. Castro-Macias et al., NeurIPS 2024,
arXiv:2410.03276.

Attention w . act(V h) with the Sm operator (see `_spatial`) at one place: on the features (early; they are also what is
pooled), on the hidden scores before the activation (mid), or on the scores (late).
Reference code: Franblueee/torchmil@a49f95d, `torchmil.models.SmABMIL`.

Where published code and paper differ, and what is taken here:
- The code's iterative mode has the smoothing coefficient the wrong way round, 1 - alpha in place of alpha. The paper's
  is taken; `legacy_torchmil_alpha=True` gives the code's, which `from_official` takes: its weights were trained so.
Differs on purpose:
- Several classes: a Linear head with one output a class; the code has one logit only.
- The graph is that of the tile grid (`radius` in grid steps); slides of one patient are never joined; lone tiles stay.
- `hidden` (none by default, as published) puts a Linear layer without bias and ReLU in front.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm as with_spectral_norm

from wsi_mil.bags import BagBatch, segment_softmax, segment_weighted_sum
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import MILModel, MILOutput
from wsi_mil.models._layers import FeatureLayer
from wsi_mil.models._official import OfficialWeights
from wsi_mil.models._spatial import Radius, Smoothing, adjacency
from wsi_mil.settings import Count, Rate

_NORMED = {"early": ("tanh", "weights"), "mid": ("weights",), "late": ()}


class Smabmil(MILModel):
    """Attention pooling with scores or features smoothed over neighbouring tiles.

    in_dim: width of the features.  n_outputs: width of the head.  where: what is smoothed.  alpha: strength in [0, 1);
    None learns it.  mode, steps, legacy_torchmil_alpha: of the operator.  radius: how many grid steps neighbours lie
    apart at most (1.5: all eight).  attention_dim: width of the attention.  activation: within the attention.
    spectral_norm: bound the layers behind the smoothing.  hidden: width of a first layer; None for none.
    """

    summary = "attention pooling, smooth over neighbouring tiles (SmABMIL)"
    family = "attention, spatial"
    paper = "Castro-Macias et al., NeurIPS 2024, arXiv:2410.03276"
    score_kinds = ("attention", "contribution")
    uses_positions = True
    binary_outputs = 1

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        where: Literal["early", "mid", "late"] = "late",
        alpha: Rate | None = None,
        mode: Literal["iterative", "exact"] = "iterative",
        steps: Count = 10,
        radius: Radius = 1.5,
        attention_dim: Count = 128,
        activation: Literal["tanh", "relu", "gelu"] = "tanh",
        spectral_norm: bool = False,
        hidden: Count | None = None,
        legacy_torchmil_alpha: bool = False,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        if where not in _NORMED or activation not in ("tanh", "relu", "gelu"):
            raise ConfigError(
                f"smabmil: where={where!r}, activation={activation!r}; where is early, mid or late, and the activation "
                f"tanh, relu or gelu"
            )
        self.where = where
        self.alpha = alpha
        self.mode = mode
        self.steps = steps
        self.radius = radius
        self.attention_dim = attention_dim
        self.activation = activation
        self.spectral_norm = spectral_norm
        self.hidden = hidden
        self.legacy_torchmil_alpha = legacy_torchmil_alpha
        width = hidden or in_dim
        self.features = FeatureLayer(in_dim, hidden) if hidden else nn.Identity()
        self.tanh = nn.Linear(width, attention_dim)
        self.weights = nn.Linear(attention_dim, 1, bias=False)
        for name in _NORMED[where] if spectral_norm else ():
            with_spectral_norm(getattr(self, name))
        self.smooth = Smoothing(alpha=alpha, mode=mode, steps=steps, legacy_torchmil_alpha=legacy_torchmil_alpha)
        self.head = nn.Linear(width, n_outputs)

    def forward(
        self,
        batch: BagBatch,
        *,
        generator: torch.Generator | None = None,
        forced_adjacency: Tensor | None = None,
    ) -> MILOutput:
        """Answer for each bag. forced_adjacency: (total, total) normalised weights in place of the grid's."""
        weights = adjacency(batch, self.radius) if forced_adjacency is None else forced_adjacency
        hidden = self.features(batch.features)
        if self.where == "early":
            hidden = self.smooth(hidden, weights, batch.offsets)
        mixed = self.tanh(hidden)
        if self.where == "mid":
            mixed = self.smooth(mixed, weights, batch.offsets)
        attention_logits = self.weights(_activate(self.activation, mixed))
        if self.where == "late":
            attention_logits = self.smooth(attention_logits, weights, batch.offsets)
        attention = segment_softmax(attention_logits, batch.offsets)
        embedding = segment_weighted_sum(attention, hidden, batch.offsets)
        return MILOutput(
            logits=self.head(embedding[:, 0]),
            offsets=batch.offsets,
            attention_logits=attention_logits,
            attention=attention,
            instance_logits=self.head(hidden),
            bag_embedding=embedding,
        )

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights of torchmil's `SmABMIL`.

        Where it smooths, its mode, its steps, its activation and a fixed alpha are not in the weights. A learned
        coefficient and spectral norms are. The iteration mixes as it did in training, with
        legacy_torchmil_alpha=True.
        """
        settings: dict[str, Any] = {"legacy_torchmil_alpha": True} | what_the_shapes_do_not_tell
        second_name_of_head = ("classifier.weight", "classifier.bias")  # in later releases, beside the first one
        weights = OfficialWeights(cls.__name__, state_dict, ignore=(*ignore, *second_name_of_head))
        normed = [name for name in ("proj1", "proj2") if f"pool.{name}.parametrizations.*" in weights]
        tensors = {"tanh.bias": weights.take("pool.proj1.bias")} | weights.linear("head", "last_layer")
        for ours, official in (("tanh", "proj1"), ("weights", "proj2")):
            keys = ["weight"]
            if official in normed:
                keys = [f"parametrizations.weight.{key}" for key in ("original", "0._u", "0._v")]
            tensors |= {f"{ours}.{key}": weights.take(f"pool.{official}.{key}") for key in keys}
        if "pool.sm.sm.coef" in weights:
            tensors["smooth.coefficient"] = weights.take("pool.sm.sm.coef")
        elif what_the_shapes_do_not_tell.get("alpha") is None:
            raise ConfigError(
                "smabmil: the published weights have no learned coefficient, pool.sm.sm.coef; give the fixed alpha=..."
            )
        model = cls(
            in_dim=tensors["head.weight"].shape[1],
            n_outputs=len(tensors["head.weight"]),
            attention_dim=len(tensors["tanh.bias"]),
            spectral_norm=bool(normed),
            **settings,
        )
        weights.load(model, tensors)
        return model


def _activate(name: str, values: Tensor) -> Tensor:
    if name == "gelu":
        return nn.functional.gelu(values)
    return values.tanh() if name == "tanh" else values.relu()
