"""DSMIL: dual-stream MIL. Li, Li and Eliceiri, CVPR 2021, arXiv:2011.08939.

First stream: a linear score c_n of each tile and class; the bag's is the maximum, reached by the critical tile m.
Second stream: q = tanh(W ReLU(W x)), attention_n = softmax over tiles of q_n . q_m / sqrt(width of q), for each class;
the embeddings of all classes go through one convolution to the bag's logits, so each logit sees every embedding.
Loss = half of either stream's. Reference code: binli123/dsmil-wsi@80465ed (BCE), dazhangyu123/AEM@4a928a8 (CE).

Where the two published codes differ, and what is taken here:
- binli123 has a binary cross-entropy for each class and their mean (loss="bce"), AEM and ACMIL have the softmax
  cross-entropy (loss="ce"). The classes of a task exclude each other, so "ce" is the default; with one output, the
  published form for two classes, both are the same number.
- binli123 predicts by the second stream, AEM by the mean of both streams' probabilities: prediction="bag" or "mean".
- q has two layers and tanh in binli123 (nonlinear=True), one linear layer in AEM, whose two layers, where it has them,
  differ in width: query_hidden.
Differs on purpose:
- Class weights multiply a bag's loss in the "bce" form too.
- `hidden` puts a first layer with ReLU in front of everything; off unless asked for.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wsi_mil.bags import (
    BagBatch,
    full_precision,
    no_autocast,
    segment_max,
    segment_softmax,
    segment_weighted_sum,
    split,
)
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import Criterion, MILModel, MILOutput, Objective, Progress, ScoreKind, refuse_numbers
from wsi_mil.models._layers import Dropout, FeatureLayer
from wsi_mil.models._official import OfficialWeights
from wsi_mil.settings import Count, Rate, Share


class Dsmil(MILModel):
    """A maximum over tiles, and attention by likeness to the tile that reached it.

    in_dim: width of the features.  n_outputs: width of the head, 1 for two classes.  nonlinear: two layers and tanh
    for q, or one linear layer.  query_dim: width of q.  query_hidden: width of the first of its two layers; None takes
    that of q.  value_layer: a linear layer with ReLU for the values, which are the features otherwise.
    value_dropout: in front of that layer.  hidden: width of a first layer; None for none.  prediction: by the attention
    stream, or by the mean of both streams' probabilities.
    """

    summary = "maximum over tiles and attention by likeness to it (DSMIL)"
    family = "attention"
    paper = "Li et al., CVPR 2021, arXiv:2011.08939"
    score_kinds: tuple[ScoreKind, ...] = ("attention", "probability", "contribution")
    attention_of_classes = True
    binary_outputs = 1

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        nonlinear: bool = True,
        query_dim: Count = 128,
        query_hidden: Count | None = None,
        value_layer: bool = False,
        value_dropout: Rate = 0.0,
        hidden: Count | None = None,
        prediction: Literal["bag", "mean"] = "bag",
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        if prediction not in ("bag", "mean"):
            raise ConfigError(f"dsmil: prediction is bag or mean, not {prediction!r}")
        self.nonlinear = nonlinear
        self.query_dim = query_dim
        self.query_hidden = query_hidden
        self.value_layer = value_layer
        self.value_dropout = value_dropout
        self.hidden = hidden
        self.prediction = prediction
        self.random_in_training = value_layer and value_dropout > 0
        self.attention_parts = tuple(f"class{c}" for c in range(n_outputs))
        if prediction == "mean":
            self.score_kinds = ("attention", "probability")
        width = hidden or in_dim
        self.features = FeatureLayer(in_dim, hidden, bias=True) if hidden else nn.Identity()
        self.instance_head = nn.Linear(width, n_outputs)
        query: list[nn.Module] = [nn.Linear(width, query_dim)]
        if nonlinear:
            inner = query_hidden or query_dim
            query = [nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, query_dim), nn.Tanh()]
        self.query = nn.Sequential(*query)
        self.drop = Dropout(value_dropout)
        self.value = FeatureLayer(width, width, bias=True) if value_layer else nn.Identity()
        self.head = nn.Conv1d(n_outputs, n_outputs, kernel_size=width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv1d):
                nn.init.orthogonal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self, batch: BagBatch, *, generator: torch.Generator | None = None, forced_mask: Tensor | None = None
    ) -> MILOutput:
        """Answer for each bag. forced_mask: (total, h) bool, what dropout zeroes in front of the value layer.

        `auxiliary`: bag_logits and max_logits of the two streams, critical (b, k) rows of the packed batch, and values.
        """
        hidden = self.features(batch.features)
        scores = self.instance_head(hidden)
        max_logits, critical = segment_max(scores, batch.offsets)
        queries = self.query(hidden)
        attention_logits = self._likeness(queries, critical, batch.offsets)
        attention = segment_softmax(attention_logits, batch.offsets)
        values = hidden
        if self.value_layer:
            values = self.value(self.drop(hidden, generator=generator, forced_mask=forced_mask))
        embedding = segment_weighted_sum(attention, values, batch.offsets)
        bag_logits = self.head(embedding)[:, :, 0]
        return MILOutput(
            logits=bag_logits if self.prediction == "bag" else mean_of_streams(bag_logits, max_logits),
            offsets=batch.offsets,
            attention_logits=attention_logits,
            attention=attention,
            instance_logits=scores,
            bag_embedding=embedding,
            auxiliary={"bag_logits": bag_logits, "max_logits": max_logits, "critical": critical, "values": values},
        )

    def objective(
        self, criterion: Criterion, *, loss: Literal["ce", "bce"] = "ce", max_weight: Share = 0.5
    ) -> "DsmilObjective":
        """Both streams' losses.

        loss: the task's cross-entropy, or the mean over classes of binary cross-entropies.  max_weight: of the first
        stream; the second has the rest to 1.
        """
        return DsmilObjective(criterion, form=loss, max_weight=max_weight, prediction=self.prediction)

    def _likeness(self, queries: Tensor, critical: Tensor, offsets: Tensor) -> Tensor:
        """(total, k) scaled products of each tile's query with that of the critical tile of each class."""
        with no_autocast(queries):
            queries = full_precision(queries)
            asked = queries[critical] / self.query_dim**0.5
            pairs = zip(split(queries, offsets), asked, strict=True)
            return torch.cat([rows @ critical_rows.T for rows, critical_rows in pairs])

    def _instance_contributions(self, output: MILOutput) -> Tensor:
        """(total, k) shares that sum to the bag's logits: sum over classes j of a_nj (w_kj . v_n), and of the bias."""
        attention = output.attention
        if attention is None:
            raise ValueError("Dsmil: its output has no attention")
        values, weight = full_precision(output.auxiliary["values"]), self.head.weight.to(attention)
        of_embeddings = F.linear(values, weight.flatten(0, 1)).reshape(-1, self.n_outputs, self.n_outputs)
        of_tiles = torch.einsum("nkj,nj->nk", of_embeddings, attention)
        bias = attention.new_zeros(self.n_outputs) if self.head.bias is None else self.head.bias.to(attention)
        return of_tiles + attention.mean(dim=1, keepdim=True) * bias

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights of `MILNet`, of either code.

        Checkpoints with a CNN inside also hold i_classifier.feature_extractor.*: leave them out by `ignore`.
        Dropout and prediction are not in the weights.
        """
        weights = OfficialWeights(cls.__name__, state_dict, ignore=ignore)
        first = "i_classifier.fc" if "i_classifier.fc.[wb]*" in weights else "i_classifier.fc.0"
        tensors = weights.linear("instance_head", first)
        nonlinear = "b_classifier.q.0.*" in weights
        layers = {"query.0": "q.0", "query.2": "q.2"} if nonlinear else {"query.0": "q"}
        value_layer = "b_classifier.v.1.*" in weights
        if value_layer:
            layers["value.linear"] = "v.1"
        for ours, official in (layers | {"head": "fcc"}).items():
            tensors |= weights.linear(ours, f"b_classifier.{official}")
        n_outputs, in_dim = tensors["instance_head.weight"].shape
        model = cls(
            in_dim=in_dim,
            n_outputs=n_outputs,
            nonlinear=nonlinear,
            query_dim=len(tensors["query.2.weight" if nonlinear else "query.0.weight"]),
            query_hidden=len(tensors["query.0.weight"]) if nonlinear else None,
            value_layer=value_layer,
            **what_the_shapes_do_not_tell,
        )
        weights.load(model, tensors)
        return model


class DsmilObjective(Objective):
    """The losses of both streams, weighted."""

    def __init__(
        self,
        criterion: Criterion,
        *,
        form: Literal["ce", "bce"],
        max_weight: float,
        prediction: Literal["bag", "mean"] = "bag",
    ) -> None:
        super().__init__()
        if form not in ("ce", "bce"):
            raise ConfigError(f"dsmil: loss={form!r}; it is ce or bce")
        self.criterion = criterion
        self.form = form
        self.max_weight = max_weight
        self.prediction = prediction

    def loss(self, model: MILModel, batch: BagBatch, target: Tensor, progress: Progress) -> dict[str, Tensor]:
        """The terms bag and max, each weighted."""
        if self.form == "bce" or self.prediction == "mean":
            refuse_numbers(target, what=f"dsmil: loss {self.form}, prediction {self.prediction}")
        streams = model(batch, generator=progress.generator).auxiliary
        return {
            "bag": (1 - self.max_weight) * self._of_stream(streams["bag_logits"], target),
            "max": self.max_weight * self._of_stream(streams["max_logits"], target),
        }

    def _of_stream(self, logits: Tensor, target: Tensor) -> Tensor:
        if self.form == "ce":
            loss: Tensor = self.criterion(logits, target)
            return loss
        logits = full_precision(logits)
        k = logits.shape[1]
        wanted = target[:, None].to(logits) if k == 1 else F.one_hot(target, k).to(logits)
        each = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").mean(dim=1)
        return (each * self.criterion.weight_of(target).to(each)).mean()


def mean_of_streams(bag_logits: Tensor, max_logits: Tensor) -> Tensor:
    """Logits whose probabilities are the mean of both streams' probabilities. Both (b, k); sigmoid when k is 1."""
    streams = torch.stack([full_precision(bag_logits), full_precision(max_logits)])
    if streams.shape[2] > 1:
        return streams.log_softmax(dim=2).logsumexp(dim=0)
    return F.logsigmoid(streams).logsumexp(dim=0) - F.logsigmoid(-streams).logsumexp(dim=0)
