"""Latent attention: each tile is written in the words of a learned codebook, then the mean is taken. Lee et al. 2024,
arXiv:2405.17428 (NV-Embed).

O_n = softmax(h_n L^T / sqrt(width of a head)) L with r learned latents L as keys and values, an MLP (GELU) on each
O_n, the mean over tiles, a linear head. O(n r).

Adapted: written from the abstract and the equation above, no published code is loaded (no vectors, no
`from_official`). Linear and LayerNorm in front. The head is linear and the mean comes last, so what the head says of a
tile's words, divided by n, is that tile's share of the logit.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wsi_mil.bags import BagBatch, full_precision, segment_mean, spread
from wsi_mil.errors import ConfigError
from wsi_mil.models._attention import Projection, check_heads, in_heads
from wsi_mil.models._base import MILModel, MILOutput, instance_logits_of
from wsi_mil.settings import Count, Positive, Rate


class LatentAttention(MILModel):
    """Tiles attend to a learned codebook; the mean of what they find is read by a linear head.

    in_dim: width of the features.  n_outputs: width of the head.  hidden: width of the layer in front and of the
    codebook.  latents: r, entries of the codebook.  heads: of the attention.  mlp_ratio: width of the MLP in multiples
    of `hidden`.  dropout: on the output of the layer in front.
    """

    summary = "tiles attend to a learned codebook, then their mean (latent attention, NV-Embed)"
    family = "additive"
    paper = "Lee et al. 2024, arXiv:2405.17428"
    score_kinds = ("contribution", "probability")

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        hidden: Count = 256,
        latents: Count = 128,
        heads: Count = 8,
        mlp_ratio: Positive = 1.0,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        check_heads("latent_attention", hidden, heads)
        inner = int(hidden * mlp_ratio)
        if inner < 1:
            raise ConfigError(f"latent_attention: mlp_ratio={mlp_ratio} leaves no unit of hidden={hidden}; give more")
        self.hidden = hidden
        self.latents = latents
        self.heads = heads
        self.mlp_ratio = mlp_ratio
        self.dropout = dropout
        self.random_in_training = dropout > 0
        self.features = Projection(in_dim, hidden, dropout=dropout)
        self.codebook = nn.Parameter(torch.randn(latents, hidden))
        self.mlp = nn.Sequential(nn.Linear(hidden, inner), nn.GELU(), nn.Linear(inner, hidden))
        self.head = nn.Linear(hidden, n_outputs)

    def forward(
        self, batch: BagBatch, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> MILOutput:
        """Answer for each bag. forced_mask: (total, hidden) bool, the units that dropout zeroes."""
        tiles = self.features(batch.features, generator=generator, forced_mask=forced_mask)
        words = self.mlp(self._in_words(tiles))
        embedding = segment_mean(words, batch.offsets)
        return MILOutput(
            logits=self.head(embedding),
            offsets=batch.offsets,
            instance_logits=self.head(words),
            bag_embedding=embedding[:, None],
        )

    def _in_words(self, tiles: Tensor) -> Tensor:
        """(total, h) each tile as a mixture of the codebook's entries, for each head; n-by-r weights are not kept."""
        queries, words = (in_heads(rows, self.heads).transpose(0, 1)[None] for rows in (tiles, self.codebook))
        words = words.to(queries)
        return F.scaled_dot_product_attention(queries, words, words)[0].transpose(0, 1).flatten(1)

    def _instance_contributions(self, output: MILOutput) -> Tensor:
        """(total, k) the n-th part of what the head says of each tile; they sum to the bag's logits."""
        lengths = spread(output.offsets.diff(), output.offsets)
        return full_precision(instance_logits_of(self, output)) / lengths[:, None]
