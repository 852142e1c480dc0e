"""CLAM with an attention branch for each class. Lu et al., Nature Biomedical Engineering 2021, arXiv:2004.09666.

One column of attention, one embedding and one linear head of one output for each class; a
class's instance classifier ranks tiles by its own column.
Reference code: mahmoodlab/CLAM@53e2409, `CLAM_MB`. Objective and differences: the first lines of `_clam`.
"""

import torch
from torch import Tensor

from wsi_mil.models._clam import Clam
from wsi_mil.models._official import OfficialWeights


class ClamMb(Clam):
    """An attention for each class, and instance classifiers that learn from its extremes.

    in_dim: width of the features.  n_outputs: number of classes.  gated: multiply tanh by a sigmoid gate.
    hidden: width of the first layer.  attention_dim: width of the attention, 256 (small) or 384 (big) as published.
    dropout: on the output of the first layer; if it is above 0, the attention has dropout of 0.25 inside.
    """

    summary = "one attention branch a class and clustering of its extreme tiles (CLAM-MB)"
    attention_of_classes = True

    def _bag_logits(self, embedding: Tensor) -> Tensor:
        return (embedding * self.head.weight).sum(dim=2) + self.head.bias

    @classmethod
    def _head_tensors(cls, weights: OfficialWeights, n_outputs: int) -> dict[str, Tensor]:
        return {
            f"head.{name}": torch.cat([weights.take(f"classifiers.{c}.{name}") for c in range(n_outputs)])
            for name in ("weight", "bias")
        }
