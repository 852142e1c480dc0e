"""What CLAM-SB and CLAM-MB share: layers, instance loss, published names. Lu et al., Nature BME 2021, arXiv:2004.09666.

h = ReLU(W x), gated attention, a bag head, and two-way instance classifiers, one a class. The instance loss takes the
B tiles of greatest attention as positive and the B of least as negative for the classifier of the bag's class; with
`subtyping` the B of greatest attention are negative for every other class, and the sum is divided by the number of
classes. Loss = 0.7 bag + 0.3 instance. The instance loss chooses tiles by attention but sends it no gradient.
Reference code: mahmoodlab/CLAM@53e2409, `CLAM_SB` and `CLAM_MB`.

Of the published settings, those of the documented commands are the defaults here: smooth top-1 SVM as instance loss
and dropout 0.25 (they also have lr 2e-4 and a class-balanced sampler). instance_loss="cross_entropy" is the other form.
Differs on purpose:
- The published code fails on bags with fewer than B tiles; here B is then the size of the bag. With fewer than 2 B
  tiles some are both positive and negative, as published; overlap="none" takes half of the bag at most on either side.
- Tiles are ranked by attention logits. Their order is that of the softmax, in which small values can underflow.
- Several bags in one step are averaged; the published code has one.
- The bag loss is the task's cross-entropy; the SVM form of the bag loss is not offered.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wsi_mil.bags import BagBatch, full_precision, segment_softmax, segment_weighted_sum, split
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import Criterion, MILModel, MILOutput, Objective, Progress
from wsi_mil.models._layers import Dropout, FeatureLayer, GatedAttention
from wsi_mil.models._official import OfficialWeights
from wsi_mil.settings import Count, Range, Rate

GATE_DROPOUT = 0.25
"""Dropout inside the attention, whenever there is any dropout."""
SVM_MARGIN, SVM_TEMPERATURE, SVM_LARGE = 1.0, 1.0, 1000.0
"""Settings of the published smooth SVM; a score that leads by log(1000) is compared without smoothing."""

InstanceLoss = Literal["svm", "cross_entropy"]


class Clam(MILModel):
    """Both forms of CLAM; they differ in the columns of attention and in the embedding that the head reads.

    in_dim: width of the features.  n_outputs: number of classes.  gated: multiply tanh by a sigmoid gate.
    hidden: width of the first layer.  attention_dim: width of the attention, 256 (small) or 384 (big) as published.
    dropout: on the output of the first layer; if it is above 0, the attention has dropout of 0.25 inside.
    """

    paper = "Lu et al., Nature Biomedical Engineering 2021, arXiv:2004.09666"
    family = "attention"
    score_kinds = ("attention", "contribution")
    classes_only = True

    def __init__(
        self,
        *,
        in_dim: int,
        n_outputs: int,
        gated: bool = True,
        hidden: Count = 512,
        attention_dim: Count = 256,
        dropout: Rate = 0.25,
    ) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        if n_outputs < 2:
            raise ConfigError(f"{type(self).__name__}: n_outputs={n_outputs}; it needs an output a class, at least two")
        self.gated = gated
        self.hidden = hidden
        self.attention_dim = attention_dim
        self.dropout = dropout
        self.random_in_training = dropout > 0
        columns = n_outputs if self.attention_of_classes else 1
        if self.attention_of_classes:
            self.attention_parts = tuple(f"class{c}" for c in range(columns))
        self.features = FeatureLayer(in_dim, hidden, bias=True)
        self.drop = Dropout(dropout)
        gate_dropout = GATE_DROPOUT if dropout > 0 else 0.0
        self.attention = GatedAttention(hidden, attention_dim, columns=columns, gated=gated, dropout=gate_dropout)
        self.head = nn.Linear(hidden, n_outputs)
        self.instance_classifiers = nn.Linear(hidden, 2 * n_outputs)

    def forward(
        self,
        batch: BagBatch,
        *,
        generator: torch.Generator | None = None,
        forced_mask: Tensor | None = None,
        forced_gate_mask: Tensor | None = None,
    ) -> MILOutput:
        """Answer for each bag.

        forced_mask: (total, hidden) bool, the units of the first layer that dropout zeroes.  forced_gate_mask:
        (total, 2 * attention_dim) bool, those of tanh and then of the gate.
        `auxiliary["instance_classes"]` is (total, k, 2): each class's instance classifier, negative first.
        """
        hidden = self.drop(self.features(batch.features), generator=generator, forced_mask=forced_mask)
        attention_logits = self.attention(hidden, generator=generator, forced_mask=forced_gate_mask)
        attention = segment_softmax(attention_logits, batch.offsets)
        embedding = segment_weighted_sum(attention, hidden, batch.offsets)
        return MILOutput(
            logits=self._bag_logits(embedding),
            offsets=batch.offsets,
            attention_logits=attention_logits,
            attention=attention,
            instance_logits=self.head(hidden),
            bag_embedding=embedding,
            auxiliary={"instance_classes": self.instance_classifiers(hidden).unflatten(1, (self.n_outputs, 2))},
        )

    def objective(
        self,
        criterion: Criterion,
        *,
        bag_weight: Annotated[float, Range(0, 1, without_low=True)] = 0.7,
        instance_loss: InstanceLoss = "svm",
        k_sample: Count = 8,
        subtyping: bool = False,
        overlap: Literal["both", "none"] = "both",
    ) -> "ClamObjective":
        """The bag's loss and the instances'.

        bag_weight: of the bag's loss; the instances' has the rest to 1.  instance_loss: smooth top-1 SVM or
        cross-entropy.  k_sample: B.  subtyping: the classes exclude each other.  overlap: whether a tile of a small
        bag may be positive and negative at once.
        """
        return ClamObjective(
            criterion,
            bag_weight=bag_weight,
            instance_loss=instance_loss,
            k_sample=k_sample,
            subtyping=subtyping,
            overlap=overlap,
        )

    @abstractmethod
    def _bag_logits(self, embedding: Tensor) -> Tensor:
        """(b, k) from the embedding, (b, m, h)."""

    @classmethod
    @abstractmethod
    def _head_tensors(cls, weights: OfficialWeights, n_outputs: int) -> dict[str, Tensor]:
        """The head's tensors under our names."""

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """Weights of `CLAM_SB` or `CLAM_MB`. Dropout is not in the weights; keys of the SVM loss are left out."""
        weights = OfficialWeights(cls.__name__, state_dict, ignore=(*ignore, "instance_loss_fn.*"))
        n_outputs = 0
        while f"instance_classifiers.{n_outputs}.*" in weights:
            n_outputs += 1
        if not n_outputs:
            raise ConfigError(
                f"{cls.__name__}: the published weights have no instance_classifiers.*, which tell how many classes "
                f"there are. The bag's answer does not need them: add zeros for each class c, "
                f"instance_classifiers.c.weight (2, hidden) and instance_classifiers.c.bias (2)."
            )
        tensors = weights.linear("features.linear", "attention_net.0") | _attention_tensors(weights)
        for name in ("weight", "bias"):
            parts = [weights.take(f"instance_classifiers.{c}.{name}") for c in range(n_outputs)]
            if len({part.shape[1:] for part in parts}) > 1:
                raise ConfigError(f"{cls.__name__}: the instance_classifiers.*.{name} are not of one shape")
            tensors[f"instance_classifiers.{name}"] = torch.cat(parts)
        tensors |= cls._head_tensors(weights, n_outputs)
        hidden, in_dim = tensors["features.linear.weight"].shape
        model = cls(
            in_dim=in_dim,
            n_outputs=n_outputs,
            gated="attention.gate.weight" in tensors,
            hidden=hidden,
            attention_dim=len(tensors["attention.tanh.weight"]),
            **what_the_shapes_do_not_tell,
        )
        weights.load(model, tensors)
        return model


class ClamObjective(Objective):
    """The weighted losses of bag and instances."""

    def __init__(
        self,
        criterion: Criterion,
        *,
        bag_weight: float,
        instance_loss: InstanceLoss,
        k_sample: int,
        subtyping: bool,
        overlap: Literal["both", "none"],
    ) -> None:
        super().__init__()
        if instance_loss not in ("svm", "cross_entropy") or overlap not in ("both", "none"):
            raise ConfigError(
                f"clam: instance_loss={instance_loss!r}, overlap={overlap!r}; "
                f"the first is svm or cross_entropy, the second both or none"
            )
        self.criterion = criterion
        self.bag_weight = bag_weight
        self.instance_loss = instance_loss
        self.k_sample = k_sample
        self.subtyping = subtyping
        self.overlap = overlap

    def loss(self, model: MILModel, batch: BagBatch, target: Tensor, progress: Progress) -> dict[str, Tensor]:
        """The terms bag and instance, each weighted."""
        output = model(batch, generator=progress.generator)
        instance = self.instance_term(output, target)
        return {
            "bag": self.bag_weight * self.criterion(output.logits, target),
            "instance": (1 - self.bag_weight) * instance,
        }

    def instance_term(self, output: MILOutput, target: Tensor) -> Tensor:
        """Mean over bags of the instance loss, unweighted. target: (b,) class indices."""
        if output.attention_logits is None:
            raise ConfigError("clam needs attention_logits, and the model's output has none")
        bags = zip(
            split(output.attention_logits.detach(), output.offsets),
            split(full_precision(output.auxiliary["instance_classes"]), output.offsets),
            target.tolist(),
            strict=True,
        )
        return torch.stack([self._of_bag(ranking, logits, label) for ranking, logits, label in bags]).mean()

    def _of_bag(self, ranking: Tensor, logits: Tensor, label: int) -> Tensor:
        """ranking: (n, 1 or k) attention logits.  logits: (n, k, 2) of the instance classifiers."""
        n, n_classes = len(logits), logits.shape[1]
        k = min(self.k_sample, n if self.overlap == "both" else n // 2)
        if k == 0:
            return logits.sum() * 0
        losses = []
        for c in range(n_classes) if self.subtyping else [label]:
            column = ranking[:, c if ranking.shape[1] > 1 else 0]
            top = column.topk(k).indices
            if c == label:
                rows = torch.cat([top, column.topk(k, largest=False).indices])
                wanted = torch.arange(2 * k, device=rows.device).lt(k).long()
            else:
                rows, wanted = top, torch.zeros_like(top)
            losses.append(self._classify(logits[rows, c], wanted))
        return torch.stack(losses).sum() / (n_classes if self.subtyping else 1)

    def _classify(self, logits: Tensor, wanted: Tensor) -> Tensor:
        if self.instance_loss == "cross_entropy":
            return F.cross_entropy(logits, wanted)
        return smooth_top1_svm(logits, wanted)


def smooth_top1_svm(logits: Tensor, target: Tensor) -> Tensor:
    """Mean smooth top-1 SVM loss. Berrada et al., ICLR 2018, arXiv:1802.07595, with k = 1.

    log sum_j exp(s_j + 1[j != y] - s_y); without the smoothing, max_j (s_j + 1[j != y] - s_y), where the greatest
    logit leads the second by log(1000) or more, as in the published code. logits: (n, k).  target: (n,). Scalar.
    """
    margins = logits - logits.gather(1, target[:, None])
    margins = margins + SVM_MARGIN * (1 - F.one_hot(target, logits.shape[1]).to(logits))
    smooth = SVM_TEMPERATURE * (margins / SVM_TEMPERATURE).logsumexp(dim=1)
    best = logits.detach().topk(2, dim=1).values
    leads = best[:, 0] - best[:, 1] >= SVM_TEMPERATURE * math.log(SVM_LARGE)
    return torch.where(leads, margins.amax(dim=1), smooth).mean()


def _attention_tensors(weights: OfficialWeights) -> dict[str, Tensor]:
    """The attention's tensors; its place in the network and, without a gate, of its last layer depend on dropout."""
    place = "attention_net.2" if "attention_net.2.*" in weights else "attention_net.3"
    if f"{place}.module.*" in weights:
        last = "3" if f"{place}.module.3.*" in weights else "2"
        names = {"tanh": "module.0", "weights": f"module.{last}"}
    else:
        names = {"tanh": "attention_a.0", "gate": "attention_b.0", "weights": "attention_c"}
    tensors: dict[str, Tensor] = {}
    for ours, official in names.items():
        tensors |= weights.linear(f"attention.{ours}", f"{place}.{official}")
    return tensors
