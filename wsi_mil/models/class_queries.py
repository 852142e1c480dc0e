"""Class queries: a learned query for each class looks at the tiles, and one shared vector reads them all. After INTR,
Paul et al., ICLR 2024, arXiv:2311.04157 (a DETR decoder); Imageomics/INTR@69b8a69.

Per layer: queries look at each other, then at the tiles, then pass a feed-forward; each with a residual and LayerNorm
after it, as in DETR. logit_c = w . z_c with one w for all classes: a class is present when its query found something.

Adapted, since the published model reads an image backbone and is not loaded here (no vectors, no `from_official`):
- No encoder among the tiles (its cost goes with their square) and no positional encoding: order does not matter.
- The queries are the tokens themselves; DETR starts from zeros and adds the queries to keys and queries.
- Linear and LayerNorm in front; no dropout inside, only on their output.
- Keys and values are never made for each tile; the algebra is exact.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wsi_mil.bags import BagBatch
from wsi_mil.models._attention import Looked, Projection, check_heads, head_values, in_heads, look
from wsi_mil.models._base import MILModel, MILOutput
from wsi_mil.settings import Count, Rate


class ClassQueries(MILModel):
    """A query for each class and a shared vector that says whether it found something.

    in_dim: width of the features.  n_outputs: number of queries, one a class.  hidden: width of the layer in front and
    of the decoder.  heads: of each attention.  depth: decoder layers.  dropout: on the output of the layer in front.
    """

    summary = "a learned query for each class looks at the tiles (INTR)"
    family = "transformer"
    paper = "Paul et al., ICLR 2024, arXiv:2311.04157"
    score_kinds = ("attention",)

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        hidden: Count = 256,
        heads: Count = 8,
        depth: Count = 2,
        dropout: Rate = 0.1,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        check_heads("class_queries", hidden, heads)
        self.hidden = hidden
        self.heads = heads
        self.depth = depth
        self.dropout = dropout
        self.random_in_training = dropout > 0
        self.attention_parts = tuple(f"class{c}" for c in range(n_outputs))
        self.attention_of_classes = n_outputs > 1
        self.features = Projection(in_dim, hidden, dropout=dropout)
        self.queries = nn.Parameter(torch.randn(n_outputs, hidden))
        self.layers = nn.ModuleList(_DecoderLayer(hidden, heads) for _ in range(depth))
        self.head = nn.Linear(hidden, 1)

    def forward(
        self, batch: BagBatch, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> MILOutput:
        """Answer for each bag. forced_mask: (total, hidden) bool, the units that dropout zeroes."""
        tiles = self.features(batch.features, generator=generator, forced_mask=forced_mask)
        found = self.queries.expand(len(batch), -1, -1)
        for layer in self.layers:
            found, seen = cast(tuple[Tensor, Looked], layer(found, tiles, batch.offsets))
        return MILOutput(
            logits=self.head(found)[:, :, 0],
            offsets=batch.offsets,
            attention_logits=seen.logits,
            attention=seen.attention,
            bag_embedding=found,
        )


class _DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mine = nn.Linear(width, 3 * width)
        self.mine_out = nn.Linear(width, width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.forward_layers = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))

    def forward(self, queries: Tensor, tiles: Tensor, offsets: Tensor) -> tuple[Tensor, Looked]:
        """queries: (b, k, h).  tiles: (total, h). Returns (b, k, h), and what the queries saw of the tiles."""
        q, k, v = (in_heads(part, self.heads).transpose(1, 2) for part in self.mine(queries).chunk(3, dim=2))
        among = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        queries = self.norms[0](queries + self.mine_out(among))
        scale = (queries.shape[2] // self.heads) ** -0.5
        seen = look(self.query(queries), tiles, offsets, key=self.key, heads=self.heads, scale=scale)
        queries = self.norms[1](queries + self.out(head_values(seen.means, self.value, heads=self.heads)))
        return self.norms[2](queries + self.forward_layers(queries)), seen
