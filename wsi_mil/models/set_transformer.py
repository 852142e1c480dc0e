"""Set Transformer: attention blocks over a set, then pooling by learned seeds. Lee et al., ICML 2019, arXiv:1810.00825.

MAB(Q, K): q = W_q Q, k = W_k K, v = W_v K; O = q + softmax(q k^T / sqrt(width)) v for each head, side by side;
O + relu(W_o O). SAB(X) = MAB(X, X). ISAB(X) = MAB(X, MAB(I, X)) with m learned points I: linear in n. PMA(X) =
MAB(S, X) with learned seeds S (eqs. 6 to 11).
Reference code: juho-lee/set_transformer@73432c6. As there: the scale is that of the full width, not of a head's; the
residual is the projected query; there is no output projection and no feed-forward in front of PMA.

Differs on purpose, for whole slides:
- Linear and LayerNorm in front (hidden=None for none); dropout of 0.1 acts on their output. The published
  `SetTransformer` has none, the classifier of point clouds 0.5 in front of the pooling and behind it.
- LayerNorm in the blocks is on (norm=False is the published default); no SAB after PMA, as in the classifier of point
  clouds (`SetTransformer` has two: decoder_depth=2), because on one seed it is a feed-forward and its keys get no
  gradient.
- With several seeds one linear layer reads them side by side; per_class=True gives each class a seed and a row of its
  own; the published head reads each seed with the same layer.
- Full attention between tiles (block="sab") is refused above 8,192 tiles.
- Keys and values of MAB(I, X) and of PMA are never made for each tile; the algebra is exact.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wsi_mil.bags import BagBatch
from wsi_mil.errors import ConfigError
from wsi_mil.models._attention import (
    Looked,
    Projection,
    check_heads,
    head_tensors,
    head_values,
    in_heads,
    look,
)
from wsi_mil.models._base import MILModel, MILOutput
from wsi_mil.models._official import OfficialWeights
from wsi_mil.settings import Amount, Count, Rate

MAX_TILES_OF_SAB = 8192
"""Full self-attention takes time with the square of the tiles; longer bags are refused."""


class SetTransformer(MILModel):
    """Tiles exchange what they know through a few learned points, then a learned seed pools them.

    in_dim: width of the features.  n_outputs: width of the head.  hidden: width of the layer in front and of all
    blocks; None for no layer in front, with blocks as wide as `width`.  width: of the blocks when there is no layer in
    front.  heads: of each block.  depth: blocks before the pooling.  block: "isab", linear in the number of tiles, or
    "sab", quadratic.  inducing: learned points of an ISAB.  seeds: learned seeds of the pooling.  per_class: one seed a
    class.  decoder_depth: SABs between seeds after the pooling.  norm: LayerNorm in the blocks.  dropout: on the output
    of the layer in front.
    """

    summary = "tiles exchange through learned points, then a learned seed pools (Set Transformer)"
    family = "transformer"
    paper = "Lee et al., ICML 2019, arXiv:1810.00825"
    score_kinds = ("attention",)

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        hidden: Count | None = 256,
        width: Count | None = None,
        heads: Count = 4,
        depth: Amount = 2,
        block: Literal["isab", "sab"] = "isab",
        inducing: Count = 32,
        seeds: Count = 1,
        per_class: bool = False,
        decoder_depth: Amount = 0,
        norm: bool = True,
        dropout: Rate = 0.1,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.hidden = hidden
        self.width = width or hidden or in_dim
        self.heads = heads
        self.depth = depth
        self.block = block
        self.inducing = inducing
        self.seeds = seeds
        self.per_class = per_class
        self.decoder_depth = decoder_depth
        self.norm = norm
        self.dropout = dropout
        _check(self)
        n_seeds = n_outputs if per_class else seeds
        self.random_in_training = dropout > 0
        parts, word = (n_seeds, "class" if per_class else "seed") if n_seeds > 1 else (heads, "head")
        self.attention_parts = tuple(f"{word}{i}" for i in range(parts))
        self.attention_of_classes = per_class and n_outputs > 1
        self.features = Projection(in_dim, hidden, dropout=dropout)
        widths = [hidden or in_dim] + [self.width] * depth
        self.encoder = nn.ModuleList(
            _Isab(before, self.width, heads, inducing=inducing, norm=norm)
            if block == "isab"
            else Mab(before, before, self.width, heads, norm=norm)
            for before in widths[:-1]
        )
        self.seed = nn.Parameter(torch.empty(n_seeds, self.width))
        _xavier(self.seed)
        self.pooling = Mab(self.width, widths[-1], self.width, heads, norm=norm)
        self.decoder = nn.ModuleList(
            Mab(self.width, self.width, self.width, heads, norm=norm) for _ in range(decoder_depth)
        )
        if n_seeds == 1:
            for between_seeds in cast(list[Mab], list(self.decoder)):
                between_seeds.key.requires_grad_(False)  # one key has weight 1 whatever it is
        self.head = nn.Linear(self.width if per_class else n_seeds * self.width, n_outputs)

    def forward(
        self, batch: BagBatch, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> MILOutput:
        """Answer for each bag. forced_mask: (total, hidden) bool, the units that dropout zeroes."""
        lengths, offsets = batch.lengths, batch.offsets
        tiles = self.features(batch.features, generator=generator, forced_mask=forced_mask)
        for module in self.encoder:
            if isinstance(module, _Isab):
                tiles = module(tiles, offsets, lengths)
            else:
                _refuse_long(batch)
                tiles = cast(Mab, module).between(tiles, tiles, lengths, lengths)
        embedding, seen = self.pooling.pool(self.seed, tiles, offsets)
        for module in self.decoder:
            n_seeds = [embedding.shape[1]] * len(embedding)
            flat = embedding.flatten(0, 1)
            embedding = cast(Mab, module).between(flat, flat, n_seeds, n_seeds).reshape(embedding.shape)
        if self.per_class:
            logits = torch.einsum("bkh,kh->bk", embedding.to(self.head.weight), self.head.weight) + self.head.bias
        else:
            logits = self.head(embedding.flatten(1))
        return MILOutput(
            logits=logits,
            offsets=offsets,
            attention_logits=seen.logits,
            attention=seen.attention,
            bag_embedding=embedding,
            auxiliary={"tiles": tiles},
        )

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights of the published `SetTransformer` (enc.*, dec.*), or of its blocks by the names isab, pma and sab.

        Blocks have no head: `bag_embedding` is what they give (b, seeds, width), and so are the logits, flattened;
        n_outputs asks for a head of zeros instead. heads (4) and dropout are not in the weights.
        """
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        encoder, pooling, decoder, head = _blocks(weights)
        tensors: dict[str, Tensor] = {}
        for i, name in enumerate(encoder):
            if f"{name}.mab0.*" in weights:
                tensors[f"encoder.{i}.points"] = weights.take(f"{name}.I")[0]
                tensors |= _mab(weights, f"encoder.{i}.gather", f"{name}.mab0")
                tensors |= _mab(weights, f"encoder.{i}.give", f"{name}.mab1")
            else:
                tensors |= _mab(weights, f"encoder.{i}", f"{name}.mab")
        tensors["seed"] = weights.take(f"{pooling}.S")[0]
        tensors |= _mab(weights, "pooling", f"{pooling}.mab")
        for i, name in enumerate(decoder):
            tensors |= _mab(weights, f"decoder.{i}", f"{name}.mab")
        (seeds, width), isab = tensors["seed"].shape, "encoder.0.points" in tensors
        n_outputs = what_the_shapes_do_not_tell.pop("n_outputs", None)
        tensors |= _head(weights, head, seeds, width, n_outputs)
        first = "encoder.0.gather.key" if isab else "encoder.0.query" if encoder else "pooling.key"
        settings: dict[str, Any] = {"hidden": None, "width": width, "dropout": 0.0, "seeds": seeds}
        settings |= {"depth": len(encoder), "decoder_depth": len(decoder), "norm": "pooling.norm0.weight" in tensors}
        settings |= {"block": "isab" if isab or not encoder else "sab"}
        settings |= {"inducing": len(tensors["encoder.0.points"])} if isab else {}
        model = cls(
            in_dim=tensors[f"{first}.weight"].shape[1],
            n_outputs=len(tensors["head.weight"]),
            **(settings | what_the_shapes_do_not_tell),
        )
        weights.load(model, tensors)
        return model


class Mab(nn.Module):
    """Multihead attention block: queries (of width d_q) look at keys (of width d_k)."""

    def __init__(self, query_dim: int, key_dim: int, width: int, heads: int, *, norm: bool) -> None:
        super().__init__()
        self.heads = heads
        self.scale = width**-0.5
        self.query = nn.Linear(query_dim, width)
        self.key = nn.Linear(key_dim, width)
        self.value = nn.Linear(key_dim, width)
        self.out = nn.Linear(width, width)
        self.norm0 = nn.LayerNorm(width) if norm else nn.Identity()
        self.norm1 = nn.LayerNorm(width) if norm else nn.Identity()

    def pool(self, queries: Tensor, tiles: Tensor, offsets: Tensor) -> tuple[Tensor, Looked]:
        """queries: (m, d_q).  tiles: (total, d_k). Returns (b, m, width), and what the queries saw."""
        projected = self.query(queries)
        seen = look(projected, tiles, offsets, key=self.key, heads=self.heads, scale=self.scale)
        return self._finish(projected, head_values(seen.means, self.value, heads=self.heads)), seen

    def between(self, queries: Tensor, keys: Tensor, n_queries: Sequence[int], n_keys: Sequence[int]) -> Tensor:
        """Packed queries (total, d_q) look at the packed keys of the same bag. Returns (total, width)."""
        projected = self.query(queries)
        attended = [
            F.scaled_dot_product_attention(q, k, v, scale=self.scale)[0].transpose(0, 1).flatten(1)
            for q, k, v in zip(
                self._in_heads(projected, n_queries),
                self._in_heads(self.key(keys), n_keys),
                self._in_heads(self.value(keys), n_keys),
                strict=True,
            )
        ]
        return self._finish(projected, torch.cat(attended))

    def _in_heads(self, rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """For each bag (1, heads, n, width of a head)."""
        return [part.transpose(0, 1)[None] for part in torch.split(in_heads(rows, self.heads), list(sizes))]

    def _finish(self, projected: Tensor, attended: Tensor) -> Tensor:
        hidden = self.norm0(projected + attended)
        finished: Tensor = self.norm1(hidden + self.out(hidden).relu())
        return finished


class _Isab(nn.Module):
    """Learned points gather from the tiles, then the tiles look at the points."""

    def __init__(self, in_dim: int, width: int, heads: int, *, inducing: int, norm: bool) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.empty(inducing, width))
        _xavier(self.points)
        self.gather = Mab(width, in_dim, width, heads, norm=norm)
        self.give = Mab(in_dim, width, width, heads, norm=norm)

    def forward(self, tiles: Tensor, offsets: Tensor, lengths: Sequence[int]) -> Tensor:
        """tiles: (total, d). Returns (total, width)."""
        gathered, _ = self.gather.pool(self.points, tiles, offsets)
        return self.give.between(tiles, gathered.flatten(0, 1), lengths, [gathered.shape[1]] * len(lengths))


def _xavier(rows: nn.Parameter) -> None:
    with torch.no_grad():
        nn.init.xavier_uniform_(rows[None])  # the published tensors have a leading axis, which counts for the spread


def _check(model: SetTransformer) -> None:
    if model.block not in ("isab", "sab"):
        raise ConfigError(f"set_transformer: block is {model.block!r}; it is isab or sab")
    if model.hidden is not None and model.width != model.hidden:
        raise ConfigError(f"set_transformer: width={model.width} is for hidden=null; here hidden={model.hidden} counts")
    if model.per_class and model.seeds != 1:
        raise ConfigError("set_transformer: per_class has one seed for each class; leave seeds away")
    check_heads("set_transformer", model.width, model.heads)


def _refuse_long(batch: BagBatch) -> None:
    longest = max(batch.lengths)
    if longest > MAX_TILES_OF_SAB:
        raise ConfigError(
            f"set_transformer: bag {batch.ids[batch.lengths.index(longest)]} has {longest} tiles; block=sab attends "
            f"from each tile to each, up to {MAX_TILES_OF_SAB}. Use block=isab, which is linear in the tiles."
        )


def _blocks(weights: OfficialWeights) -> tuple[list[str], str, list[str], str]:
    """Official names of the blocks before the pooling, of the pooling, of those after it, and of the head."""

    # places in the published Sequentials, more than any has: blocks stand among dropouts, so numbers have gaps
    numbered = [f"{stage}.{i}" for stage in ("enc", "dec") for i in range(16)]
    names = [name for name in ("isab", *numbered, "pma", "sab") if f"{name}.mab*" in weights]
    first_behind = [name for name in names if name.startswith(("dec", "pma"))]
    pooling = next((name for name in names if f"{name}.S" in weights), first_behind[0] if first_behind else "pma")
    place = names.index(pooling) if pooling in names else len(names)
    head = next((name for name in numbered if f"{name}.weight" in weights or f"{name}.bias" in weights), "head")
    return names[:place], pooling, names[place + 1 :], head


def _mab(weights: OfficialWeights, ours: str, official: str) -> dict[str, Tensor]:
    names = {"query": "fc_q", "key": "fc_k", "value": "fc_v", "out": "fc_o"}
    if f"{official}.ln?.*" in weights:
        names |= {"norm0": "ln0", "norm1": "ln1"}
    tensors: dict[str, Tensor] = {}
    for own, theirs in names.items():
        tensors |= weights.linear(f"{ours}.{own}", f"{official}.{theirs}")
    return tensors


def _head(weights: OfficialWeights, name: str, seeds: int, width: int, n_outputs: int | None) -> dict[str, Tensor]:
    """The published layer reads each seed alone: the same layer for all of them, side by side."""
    if f"{name}.*" not in weights or seeds == 1:
        return head_tensors(weights, seeds * width, n_outputs, name=name)
    weight, bias = weights.take(f"{name}.weight"), weights.take(f"{name}.bias")
    return {"head.weight": torch.kron(torch.eye(seeds).to(weight), weight), "head.bias": bias.repeat(seeds)}
