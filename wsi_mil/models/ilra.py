"""ILRA-MIL: iterative low-rank attention. Xiang et al., ICLR 2023, OpenReview 01KmhBsEPFO.

Blocks in which r learned latents attend to the tiles and the tiles attend back to the latents, gated, so that the cost
is linear in the tiles; then learned seeds attend to the tiles ("non-local pooling") and a Linear layer decides.
Reference code: lingxitong/MIL_BASELINE@69bab20, `ILRA`.

Differs on purpose:
- One pooling seed. The code makes as many as there are latents (its `topk`), and more than one breaks its loss.
- `layer_norm` is on, as in MIL-Lab; MIL_BASELINE has it off. `latents` is 64, as in MIL-Lab; MIL_BASELINE has 1, which
  makes the tiles' attention to the latents a constant. The projections are doubled as in both (own, then attention's).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from wsi_mil.bags import BagBatch, full_precision, no_autocast, segment_softmax, split
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import MILModel, MILOutput
from wsi_mil.models._official import OfficialWeights
from wsi_mil.models._recompute import LONG, row_by_row
from wsi_mil.settings import Count


class Ilra(MILModel):
    """Latents that read the tiles and are read by them, then attention pooling.

    in_dim: width of the features.  n_outputs: width of the head.  hidden: width of the blocks, a multiple of `heads`.
    blocks: number of gated blocks.  latents: r, rank of the blocks.  layer_norm: within blocks and pooling.
    """

    summary = "low-rank attention between tiles and latents (ILRA-MIL)"
    family = "transformer, linear"
    paper = "Xiang et al., ICLR 2023, OpenReview 01KmhBsEPFO"
    score_kinds = ("attention",)

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        hidden: Count = 256,
        heads: Count = 8,
        blocks: Count = 2,
        latents: Count = 64,
        layer_norm: bool = True,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        if hidden % heads:
            raise ConfigError(f"ilra: hidden={hidden} does not split into {heads} heads; give a multiple")
        self.hidden = hidden
        self.heads = heads
        self.blocks = blocks
        self.latents = latents
        self.layer_norm = layer_norm
        self.attention_parts = tuple(f"head{i}" for i in range(heads))
        widths = [in_dim, *[hidden] * (blocks - 1)]
        self.layers = nn.ModuleList(
            _Block(width, hidden, heads, latents=latents, layer_norm=layer_norm) for width in widths
        )
        self.seed = nn.Parameter(torch.empty(1, hidden))
        _xavier(self.seed)
        self.pool = _Attend(hidden, hidden, hidden, heads, gated=False, layer_norm=layer_norm)
        self.head = nn.Linear(hidden, n_outputs)
        nn.init.xavier_normal_(self.head.weight)

    def forward(self, batch: BagBatch, *, generator: torch.Generator | None = None) -> MILOutput:
        """Answer for each bag. Above 20,000 tiles the tiles' own layers are computed again for the gradient."""
        tiles = batch.features
        for layer in self.layers:
            tiles = layer(tiles, batch.offsets)
        bag = self.pool.gather(self.seed, tiles, batch.offsets)
        attention_logits = self.pool.logits(self.seed, tiles)
        return MILOutput(
            logits=self.head(bag[:, 0]),
            offsets=batch.offsets,
            attention_logits=attention_logits,
            attention=segment_softmax(attention_logits, batch.offsets),
            bag_embedding=bag,
            auxiliary={"tiles": tiles},
        )

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights of MIL_BASELINE's `ILRA` with one seed. The number of heads (8 as published) is not in the weights.

        Raises ConfigError for several pooling seeds, whose published output is no row of logits.
        """
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        seed = weights.take("pooling.S")[0]
        if len(seed) > 1:
            raise ConfigError(f"ilra: the published weights have {len(seed)} pooling seeds; one is supported")
        tensors = {"seed": seed}
        blocks = 0
        while blocks == 0 or f"gab_blocks.{blocks}.*" in weights:
            official, ours = f"gab_blocks.{blocks}", f"layers.{blocks}"
            tensors[f"{ours}.latents"] = weights.take(f"{official}.latent")[0]
            tensors |= _attend_tensors(weights, f"{ours}.forth", f"{official}.project_forward", gated=True)
            tensors |= _attend_tensors(weights, f"{ours}.back", f"{official}.project_backward", gated=True)
            blocks += 1
        tensors |= _attend_tensors(weights, "pool", "pooling.mha", gated=False) | weights.linear("head", "classifier")
        latents, hidden = tensors["layers.0.latents"].shape
        model = cls(
            in_dim=tensors["layers.0.forth.own_key.weight"].shape[1],
            n_outputs=len(tensors["head.weight"]),
            hidden=hidden,
            blocks=blocks,
            latents=latents,
            layer_norm="pooling.mha.ln?.*" in weights,
            **what_the_shapes_do_not_tell,
        )
        weights.load(model, tensors)
        return model


class _Block(nn.Module):
    """Latents read the tiles, tiles read the latents."""

    def __init__(self, in_dim: int, hidden: int, heads: int, *, latents: int, layer_norm: bool) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.empty(latents, hidden))
        _xavier(self.latents)
        self.forth = _Attend(hidden, in_dim, hidden, heads, gated=True, layer_norm=layer_norm)
        self.back = _Attend(in_dim, hidden, hidden, heads, gated=True, layer_norm=layer_norm)

    def forward(self, tiles: Tensor, offsets: Tensor) -> Tensor:
        """tiles: (total, d). Returns (total, h)."""
        read = self.forth.gather(self.latents, tiles, offsets)
        return self.back.scatter(tiles, read, offsets)


class _Attend(nn.Module):
    """Multi-head attention with doubled projections, residual on the projected query, and an optional gate."""

    def __init__(self, query_dim: int, key_dim: int, hidden: int, heads: int, *, gated: bool, layer_norm: bool) -> None:
        super().__init__()
        self.heads = heads
        self.own_query = nn.Linear(query_dim, hidden)
        self.own_key = nn.Linear(key_dim, hidden)
        self.own_value = nn.Linear(key_dim, hidden)
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm0 = nn.LayerNorm(hidden) if layer_norm else nn.Identity()
        self.feed = nn.Linear(hidden, hidden)
        self.norm1 = nn.LayerNorm(hidden) if layer_norm else nn.Identity()
        self.gate = nn.Linear(query_dim, hidden) if gated else None
        self._start()

    def _start(self) -> None:
        """Published first weights: Xavier-normal matrices; query, key and value are three parts of a uniform one."""
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_normal_(layer.weight)
        for layer in (self.query, self.key, self.value):
            nn.init.xavier_uniform_(layer.weight, gain=math.sqrt(0.5))
        for layer in (self.query, self.key, self.value, self.out):
            nn.init.zeros_(layer.bias)

    def gather(self, queries: Tensor, tiles: Tensor, offsets: Tensor) -> Tensor:
        """The same few queries read each bag's tiles. queries: (r, q).  tiles: (total, d). Returns (b, r, h)."""
        own = self.own_query(queries)
        query = self.query(own)
        key, value = row_by_row(self._pairs, tiles, learned=self._learned_of_pairs()).chunk(2, dim=1)
        pairs = zip(split(key, offsets), split(value, offsets), strict=True)
        mixed = torch.stack([self._read(query, keys, values) for keys, values in pairs])
        return self._finish(own, mixed, queries)

    def scatter(self, tiles: Tensor, latents: Tensor, offsets: Tensor) -> Tensor:
        """Each tile reads the few latents of its bag. tiles: (total, q).  latents: (b, r, h). Returns (total, h)."""
        key, value = self._pairs(latents).chunk(2, dim=-1)
        if len(tiles) > LONG:
            triples = zip(split(tiles, offsets), key, value, strict=True)
            return torch.cat([self._scatter_long(*triple) for triple in triples])
        own = self.own_query(tiles)
        triples = zip(split(self.query(own), offsets), key, value, strict=True)
        return self._finish(own, torch.cat([self._read(*triple) for triple in triples]), tiles)

    def _scatter_long(self, tiles: Tensor, key: Tensor, value: Tensor) -> Tensor:
        def answer(rows: Tensor) -> Tensor:
            own = self.own_query(rows)
            return self._finish(own, self._read(self.query(own), key, value), rows)

        theirs = {id(part) for part in self._learned_of_pairs()}
        others = [part for part in self.parameters() if id(part) not in theirs]
        return row_by_row(answer, tiles, learned=[*others, key, value])

    def _learned_of_pairs(self) -> list[nn.Parameter]:
        return [part for layer in (self.own_key, self.own_value, self.key, self.value) for part in layer.parameters()]

    def _pairs(self, tiles: Tensor) -> Tensor:
        return torch.cat([self.key(self.own_key(tiles)), self.value(self.own_value(tiles))], dim=-1)

    def logits(self, query: Tensor, tiles: Tensor) -> Tensor:
        """(total, heads) what one query, (1, q), says of each tile before the softmax."""
        asked = self.query(self.own_query(query))

        def scores(rows: Tensor) -> Tensor:
            key = self.key(self.own_key(rows))
            with no_autocast(rows):
                first, second = (full_precision(x).reshape(len(x), self.heads, -1) for x in (asked, key))
                found: Tensor = (first * second).sum(dim=-1) / second.shape[-1] ** 0.5
                return found

        return row_by_row(scores, tiles, learned=[*self.own_key.parameters(), *self.key.parameters(), asked])

    def _read(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(m, h), (n, h), (n, h) -> (m, h), in blocks that are never held together."""
        with no_autocast(query):
            heads = (full_precision(x).reshape(1, len(x), self.heads, -1) for x in (query, key, value))
            q, k, v = (x.transpose(1, 2) for x in heads)
            return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(query), -1)

    def _finish(self, own: Tensor, mixed: Tensor, raw: Tensor) -> Tensor:
        attended = self.norm0(own + self.out(mixed))
        attended = self.norm1(attended + self.feed(attended).relu())
        if self.gate is not None:
            attended = attended * nn.functional.silu(self.gate(raw))
        finished: Tensor = attended
        return finished


def _xavier(rows: nn.Parameter) -> None:
    with torch.no_grad():
        nn.init.xavier_uniform_(rows[None])  # the published tensors have a leading axis, which counts for the spread


def _attend_tensors(weights: OfficialWeights, ours: str, official: str, *, gated: bool) -> dict[str, Tensor]:
    names = {"own_query": "fc_q", "own_key": "fc_k", "own_value": "fc_v", "feed": "fc_o"}
    if f"{official}.ln?.*" in weights:
        names |= {"norm0": "ln0", "norm1": "ln1"}
    if gated:
        names["gate"] = "gate.0"
    names["out"] = "multihead_attn.out_proj"
    tensors: dict[str, Tensor] = {}
    for name, key in names.items():
        tensors |= weights.linear(f"{ours}.{name}", f"{official}.{key}")
    for kind in ("weight", "bias"):
        thirds = weights.take(f"{official}.multihead_attn.in_proj_{kind}").chunk(3)
        tensors |= {f"{ours}.{name}.{kind}": part for name, part in zip(("query", "key", "value"), thirds, strict=True)}
    return tensors
