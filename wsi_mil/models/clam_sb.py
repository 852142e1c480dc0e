"""CLAM with a single attention branch. Lu et al., Nature Biomedical Engineering 2021, arXiv:2004.09666.

One column of attention, one embedding, one linear head; the instance classifiers of all classes rank tiles by it.
Reference code: mahmoodlab/CLAM@53e2409, `CLAM_SB`. Objective and differences: the first lines of `_clam`.
"""

from torch import Tensor

from wsi_mil.models._clam import Clam
from wsi_mil.models._official import OfficialWeights


class ClamSb(Clam):
    """One attention for all classes, and instance classifiers that learn from its extremes.

    in_dim: width of the features.  n_outputs: number of classes.  gated: multiply tanh by a sigmoid gate.
    hidden: width of the first layer.  attention_dim: width of the attention, 256 (small) or 384 (big) as published.
    dropout: on the output of the first layer; if it is above 0, the attention has dropout of 0.25 inside.
    """

    summary = "one attention branch and clustering of its extreme tiles (CLAM-SB)"

    def _bag_logits(self, embedding: Tensor) -> Tensor:
        logits: Tensor = self.head(embedding[:, 0])
        return logits

    @classmethod
    def _head_tensors(cls, weights: OfficialWeights, n_outputs: int) -> dict[str, Tensor]:
        return weights.linear("head", "classifiers")
