"""What every MIL method is: MILModel (bags in, MILOutput out) and Objective (what its training minimises)."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from wsi_mil.bags import BagBatch, full_precision, spread
from wsi_mil.errors import ConfigError
from wsi_mil.heatmap import ScoreColumn
from wsi_mil.settings import holds_its_ranges

ScoreKind = Literal["probability", "attention", "contribution"]


@dataclass(frozen=True, kw_only=True)
class MILOutput:
    """The one answer of every method. What a method does not define is None.

    logits: (b, k).  offsets: (b + 1,) of the batch that was answered.  attention_logits, attention: (total, m), m
    branches, classes or heads; each column of `attention` is the softmax of its logits within a bag and sums to 1.
    instance_logits: (total, k), what the head says of a tile alone.  bag_embedding: (b, m, h).
    auxiliary: the method's own tensors, for its objective.
    """

    logits: Tensor
    offsets: Tensor
    attention_logits: Tensor | None = None
    attention: Tensor | None = None
    instance_logits: Tensor | None = None
    bag_embedding: Tensor | None = None
    auxiliary: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where training is, and the randomness of this step."""

    step: int
    total_steps: int
    generator: torch.Generator

    @property
    def fraction(self) -> float:
        """Share of training that is done, in [0, 1)."""
        return self.step / max(self.total_steps, 1)


class StoredScores(NamedTuple):
    """One column of scores that is kept for the heatmaps; `index` is what `instance_scores` takes for it."""

    name: str
    kind: ScoreKind
    label: str | None
    index: int | None  # type: ignore[assignment]  # hides tuple.index, which nobody needs here

    @property
    def column(self) -> ScoreColumn:
        """The description that stands in the file of scores."""
        return ScoreColumn(name=self.name, kind=self.kind, label=self.label)


class Criterion(nn.Module, ABC):
    """The bag loss that a task prescribes; class weights are inside."""

    @abstractmethod
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean loss. logits: (b, k).  target: (b,) class indices. Returns a scalar, computed in fp32."""

    def weight_of(self, target: Tensor) -> Tensor:
        """(b,) the factor of each bag's loss, for methods that compare logits and target in a way of their own."""
        weights = self._buffers.get("weights")
        return torch.ones(len(target), device=target.device) if weights is None else weights[target]


class MILModel(nn.Module, ABC):
    """A MIL method: bags in, MILOutput out. Knows no labels, files, devices or global randomness.

    Subclasses are final, live in one file with their objective, and say what they are in the class variables. Those
    that depend on the parameters (`score_kinds`, `random_in_training`, `order_matters` ...) may be set anew in
    `__init__`. Every parameter of the constructor is kept as an attribute of the same name.
    """

    summary: ClassVar[str]
    """One line for `wsi-mil list models`."""
    family: ClassVar[str]
    """pooling, attention, max-pooling ..."""
    paper: ClassVar[str]
    """Authors, venue and year, arXiv number."""
    score_kinds: tuple[ScoreKind, ...]
    """What `instance_scores` can answer; the first one is drawn by default."""
    random_in_training: bool = False
    """Whether the answer depends on the generator in training mode."""
    attention_parts: tuple[str, ...] = ()
    """Names of the parts of attention that can be looked at alone (branches, heads); each has equally many columns."""
    attention_of_classes: bool = False
    """Whether each output has a column of attention of its own; then the predicted class's is the one that counts."""
    order_matters: bool = False
    uses_positions: bool = False
    """Whether the answer depends on where tiles lie (`grid_xy`, `slide_index`)."""
    min_tiles: ClassVar[int] = 1
    loops_over_bags: bool = False
    first_layer: ClassVar[str] = "features"
    """Name of the module whose first linear layer reads the tiles' features, and nothing else does."""
    binary_outputs: ClassVar[Literal[1, 2]] = 2
    """Width of the head for a task with two classes."""
    classes_only: ClassVar[bool] = False
    """Whether head or objective makes sense of classes only; then ordinal, regression, survival and several targets
    are refused."""

    in_dim: int
    n_outputs: int

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        holds_its_ranges(cls)

    def __init__(self, *, in_dim: int, n_outputs: int) -> None:
        super().__init__()
        self.in_dim = in_dim
        self.n_outputs = n_outputs

    @abstractmethod
    def forward(self, batch: BagBatch, *, generator: torch.Generator | None = None) -> MILOutput:
        """Answer for each bag.

        `generator` feeds what is random in training; without one nothing is drawn and the answer is the one without
        dropout, masks and noise. In eval mode nothing is random.
        """

    @property
    def core(self) -> "MILModel":
        """The model that objectives ask; one that is wrapped around another names the inner one."""
        return self

    def objective(self, criterion: Criterion) -> "Objective":
        """What training minimises; the bag loss alone unless the method says otherwise."""
        return BagObjective(criterion)

    @classmethod
    def from_official(
        cls, state_dict: Mapping[str, Any], *, ignore: Sequence[str] = (), **what_the_shapes_do_not_tell: Any
    ) -> Self:
        """The model with published weights, in eval mode.

        state_dict: a state dict, or a checkpoint that holds one under 'model' or 'state_dict'.  ignore: key patterns
        ("feature_extractor*") to leave out.  The rest are constructor parameters that shapes do not tell.
        Raises ConfigError on a key that does not map or is missing.
        """
        raise ConfigError(f"{cls.__name__}: there is no published code, so there are no published weights to read")

    def instance_scores(self, output: MILOutput, kind: ScoreKind, index: int | None = None) -> Tensor:
        """One score a tile, (total,): the one door to a heatmap.

        kind: one of `score_kinds`.  index: the class (probability, contribution) or the part of attention.
        None takes the predicted class of each bag, or the mean over all attention columns.
        Raises ValueError for a kind or an index that the method does not have.
        """
        if not isinstance(output, MILOutput) or not isinstance(kind, str):
            given = f"{type(output).__name__} and {type(kind).__name__}"
            raise TypeError(f"instance_scores takes the model's MILOutput and a kind such as 'attention', not {given}")
        if kind not in self.score_kinds:
            raise ValueError(f"{type(self).__name__} has no {kind!r} scores, only {', '.join(self.score_kinds)}")
        if kind == "attention":
            return self._attention_scores(output, index)
        logits = full_precision(output.logits)
        if kind == "probability":
            columns, predicted = self._instance_probabilities(output), logits
        else:
            columns, predicted = self._instance_contributions(output), logits
        if self.n_outputs == 1:
            columns = torch.cat([1 - columns if kind == "probability" else -columns, columns], dim=1)
            predicted = torch.cat([-predicted, predicted], dim=1)
        if index is None:
            return columns.gather(1, spread(predicted.argmax(dim=1), output.offsets)[:, None])[:, 0]
        if not 0 <= index < columns.shape[1]:
            raise ValueError(f"{type(self).__name__} has classes 0 to {columns.shape[1] - 1}, not {index}")
        return columns[:, index]

    def score_columns(self, task_classes: Sequence[str]) -> list[StoredScores]:
        """Every column of scores worth keeping for the heatmaps; the first is the method's own way of pointing.

        task_classes: names of the classes in the task's order. With two classes the positive one is the second, and
        it comes first here; with more, the first column speaks of the predicted class of each bag.
        """
        found: list[StoredScores] = []
        for kind in self.score_kinds:
            if kind == "attention":
                found.append(StoredScores(kind, kind, None, None))
                if self.attention_of_classes and self.n_outputs > 1:
                    found += [StoredScores(f"{kind}:{name}", kind, name, i) for i, name in enumerate(task_classes)]
                elif len(self.attention_parts) > 1:
                    found += [StoredScores(f"{kind}:{p}", kind, None, i) for i, p in enumerate(self.attention_parts)]
                continue
            classes = [StoredScores(f"{kind}:{label}", kind, label, i) for i, label in enumerate(task_classes)]
            if len(task_classes) > 2:
                classes = [StoredScores(kind, kind, None, None), *classes]
            else:
                classes = classes[::-1][: self.n_outputs]
            found += classes
        return found

    def score_columns_of_outputs(self, names: Sequence[str]) -> list[StoredScores]:
        """The columns of scores that speak of a head without classes; may be none.

        names: of the outputs (a number, hazards of intervals, several targets). No output is "predicted", so each has
        its own column, and probabilities are left out: a tile's hazard means nothing by itself.
        """
        found: list[StoredScores] = []
        for kind in self.score_kinds:
            if kind == "attention" and not self.attention_of_classes:
                found.append(StoredScores(kind, kind, None, None))
                if len(self.attention_parts) > 1:
                    found += [StoredScores(f"{kind}:{p}", kind, None, i) for i, p in enumerate(self.attention_parts)]
            elif kind == "attention":
                found += [StoredScores(f"{kind}:{name}", kind, name, i) for i, name in enumerate(names)]
            elif kind == "contribution":
                first = 1 if self.n_outputs == 1 else 0  # of one output, column 0 is its negative
                found += [StoredScores(f"{kind}:{name}", kind, name, first + i) for i, name in enumerate(names)]
        return found

    def _attention_scores(self, output: MILOutput, index: int | None) -> Tensor:
        """(total,) the mean over all columns of attention (of classes: the predicted one's), or of one part."""
        if output.attention is None:
            raise ValueError(f"{type(self).__name__} declares attention scores, but its output has none")
        if index is None and self.attention_of_classes:
            predicted = spread(full_precision(output.logits).argmax(dim=1), output.offsets)
            of_classes = output.attention.reshape(len(output.attention), self.n_outputs, -1).mean(dim=2)
            return of_classes.gather(1, predicted[:, None])[:, 0]
        if index is None:
            return output.attention.mean(dim=1)
        n_parts = max(len(self.attention_parts), 1)
        if not 0 <= index < n_parts:
            raise ValueError(f"{type(self).__name__} has parts of attention 0 to {n_parts - 1}, not {index}")
        return output.attention.reshape(len(output.attention), n_parts, -1)[:, index].mean(dim=1)

    def _instance_probabilities(self, output: MILOutput) -> Tensor:
        """(total, k) what the head says of each tile, as probabilities in fp32."""
        logits = full_precision(instance_logits_of(self, output))
        return logits.sigmoid() if self.n_outputs == 1 else logits.softmax(dim=1)

    def _instance_contributions(self, output: MILOutput) -> Tensor:
        """(total, k) shares that sum to the bag's logits: a_n (w_c . h_n + b_c), a the mean over attention columns, or
        the class's own column.
        """
        if self.attention_of_classes and output.attention is not None:
            weights = output.attention
        else:
            weights = self._attention_scores(output, None)[:, None]
        return weights * full_precision(instance_logits_of(self, output))


class Objective(nn.Module, ABC):
    """What training minimises. Its state (teachers, queues, per-bag memory keyed by id) is part of the checkpoint."""

    needs_both_classes: bool = False
    tiles_per_bag: int | None = None
    per_bag_state: bool = False
    init_from: str | None = None
    """Name of the method whose trained model this one starts from."""

    @abstractmethod
    def loss(self, model: MILModel, batch: BagBatch, target: Tensor, progress: Progress) -> dict[str, Tensor]:
        """Named terms, already weighted; training minimises their sum.

        target: (b,) class indices; or (b, w) numbers of any other task, NaN where unknown, which only the criterion
        understands.
        """

    def parameter_groups(self, model: MILModel) -> Iterable[dict[str, Any]]:
        """What the optimiser gets: all parameters of model and objective in one group unless the method differs."""
        return [{"params": [p for p in (*model.parameters(), *self.parameters()) if p.requires_grad]}]

    def optimizer(self, model: MILModel, *, lr: float, weight_decay: float) -> torch.optim.Optimizer | None:
        """The method's own optimiser over its `parameter_groups`; None lets training take AdamW.

        Training multiplies the learning rate that each group starts with by its schedule.
        """
        return None

    def start_from(self, model: MILModel, baseline: MILModel) -> None:
        """Take over what `baseline`, the trained model of the method that `init_from` names, has learned. Called once,
        before the first step, and only when `init_from` is set.

        Raises NotImplementedError for a method that starts from no other one, ConfigError when the two do not fit.
        """
        raise NotImplementedError(f"{type(self).__name__} starts from no other model")

    def after_optimizer_step(self, model: MILModel, batch: BagBatch, lr: float) -> None:
        """Called after each optimiser step, for moving averages and the like."""


class BagObjective(Objective):
    """The bag loss and nothing else."""

    def __init__(self, criterion: Criterion) -> None:
        super().__init__()
        self.criterion = criterion

    def loss(self, model: MILModel, batch: BagBatch, target: Tensor, progress: Progress) -> dict[str, Tensor]:
        """The bag loss of one forward pass."""
        output = model(batch, generator=progress.generator)
        return {"bag": self.criterion(output.logits, target)}


class Regulariser(Objective):
    """Adds terms to another objective, computed on the same forward pass; it can be wrapped again.

    Subclasses are final, one a file in `wsi_mil/regularisers`; they give `check` and `terms`.
    """

    summary: ClassVar[str] = ""
    """One line for `wsi-mil list regularisers`; the docstring's first line says it too."""
    paper: ClassVar[str] = ""
    """Where it comes from, as for MILModel."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        holds_its_ranges(cls)

    def __init__(self, inner: Objective) -> None:
        super().__init__()
        self.inner = inner
        self.needs_both_classes = inner.needs_both_classes
        self.tiles_per_bag = inner.tiles_per_bag
        self.per_bag_state = inner.per_bag_state
        self.init_from = inner.init_from

    @abstractmethod
    def check(self, model: MILModel) -> None:
        """Raises ConfigError when this regulariser makes no sense on `model`. Called before the first step."""

    @abstractmethod
    def terms(self, output: MILOutput, progress: Progress) -> dict[str, Tensor]:
        """The additional terms, already weighted."""

    def change(self, model: MILModel) -> MILModel:
        """The model to train, keep and load: `model`, unless the plug-in alters or wraps it. Called once, before the
        objective is made.

        Raises ConfigError when the plug-in finds nothing to alter in `model`.
        """
        return model

    def loss(self, model: MILModel, batch: BagBatch, target: Tensor, progress: Progress) -> dict[str, Tensor]:
        """The inner objective's terms and these, on the last output that the inner objective asked of the model."""
        self.check(model)
        with recorded_outputs(model) as outputs:
            terms = self.inner.loss(model, batch, target, progress)
        return {**terms, **self.terms(outputs[-1], progress)}

    def parameter_groups(self, model: MILModel) -> Iterable[dict[str, Any]]:
        """The inner objective's."""
        self.check(model)
        return self.inner.parameter_groups(model)

    def optimizer(self, model: MILModel, *, lr: float, weight_decay: float) -> torch.optim.Optimizer | None:
        """The inner objective's. A plug-in with parameters of its own adds their group."""
        self.check(model)
        return self.inner.optimizer(model, lr=lr, weight_decay=weight_decay)

    def start_from(self, model: MILModel, baseline: MILModel) -> None:
        """The inner objective's."""
        self.inner.start_from(model, baseline)

    def after_optimizer_step(self, model: MILModel, batch: BagBatch, lr: float) -> None:
        """The inner objective's."""
        self.inner.after_optimizer_step(model, batch, lr)


@contextmanager
def recorded_outputs(model: MILModel) -> Iterator[list[MILOutput]]:
    """A list that receives what `model`, or the core of a wrapped one, answers within the block."""
    outputs: list[MILOutput] = []
    handle = model.core.register_forward_hook(lambda _model, _arguments, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


def refuse_numbers(target: Tensor, *, what: str) -> None:
    """Raises ConfigError unless `target` is class indices. what: the setting that makes sense of classes only."""
    if target.is_floating_point():
        raise ConfigError(f"{what}: it makes sense of one target with classes only; take another setting for this task")


def instance_logits_of(model: MILModel, output: MILOutput) -> Tensor:
    """The output's instance logits. Raises ValueError when a method that declares them left them out."""
    if output.instance_logits is None:
        raise ValueError(f"{type(model).__name__} declares scores of tiles, but its output has no instance_logits")
    return output.instance_logits
