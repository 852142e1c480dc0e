"""Attention diversity: the mean cosine between the columns of attention (heads, branches, tokens, classes), to be kept
small so that they look at different tiles. The term of ACMIL (Zhang et al., ECCV 2024, arXiv:2311.07125) for any method
with several columns. It is 0 where no two columns share a tile, and 1 where they are equal.
"""

from torch import Tensor

from wsi_mil.errors import ConfigError
from wsi_mil.models._base import MILModel, MILOutput, Objective, Progress, Regulariser
from wsi_mil.models.acmil import branch_similarity
from wsi_mil.settings import Weight


class AttentionDiversity(Regulariser):
    """Keeps the columns of attention apart.

    inner: the objective it is added to.  weight: of the term; 0.1 to 1 are usual.
    """

    summary = "columns of attention kept apart (mean pairwise cosine), for methods with several"
    paper = "after Zhang et al., ECCV 2024, arXiv:2311.07125"

    def __init__(self, inner: Objective, *, weight: Weight = 0.1) -> None:
        super().__init__(inner)
        self.weight = weight

    def check(self, model: MILModel) -> None:
        """Raises ConfigError for a method without attention."""
        if "attention" not in model.score_kinds:
            raise ConfigError(
                f"attention_diversity needs attention, and {type(model).__name__} has none; "
                f"use it with a method of several branches or heads, such as acmil or abmil_mha"
            )

    def terms(self, output: MILOutput, progress: Progress) -> dict[str, Tensor]:
        """The term attention_diversity, weighted. Raises ConfigError when there is one column only."""
        if output.attention is None or output.attention.shape[1] < 2:
            raise ConfigError(
                "attention_diversity compares columns of attention, and this method has one; "
                "use it with a method of several branches or heads, such as acmil or abmil_mha"
            )
        similarity = branch_similarity(output.attention, output.offsets, output.attention.shape[1])
        return {"attention_diversity": self.weight * similarity}
