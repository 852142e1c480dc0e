"""The laws that every MIL method obeys, shipped, so that a user's own method can be held to them.

A law is a function of a Subject that raises when it is broken. Traits of the method decide which ones apply.
"""

import inspect
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from wsi_mil.bags import Bag, BagBatch, pack, segment_sum, split
from wsi_mil.models._base import MILModel, MILOutput, Objective, Progress, Regulariser
from wsi_mil.tasks import class_task

IN_DIM = 32
"""Width of the features that methods are tried on."""
_LABEL_WORDS = {"label", "labels", "target", "targets", "y", "instance_labels", "tile_labels"}


class LawError(Exception):
    """Says what a method did that the law forbids."""


@dataclass(frozen=True, kw_only=True)
class LawResult:
    """Whether a method obeys one law."""

    name: str
    passed: bool
    message: str
    """Why it is broken, why it does not apply, or what was shown."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The method under test: its class, parameters, and what wraps its objective."""

    cls: type[MILModel]
    params: Mapping[str, Any] = field(default_factory=dict)
    wrap: Callable[[Objective], Objective] | None = None

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of the head that are tried: two classes and three."""
        return self.cls.binary_outputs, 3

    def model(self, n_outputs: int = 3, *, seed: int = 0, training: bool = False) -> MILModel:
        """A fresh model whose parameters are moved a little, so that no initial zero hides a fault."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.cls(in_dim=IN_DIM, n_outputs=n_outputs, **self.params)
            if self.wrap is not None:
                model = _changed(model, self.wrap)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model.train(training)

    def loss(self, model: MILModel, batch: BagBatch, *, seed: int = 0) -> Tensor:
        """The sum of all terms of one training step; the bags' classes go round."""
        classes = ("a", "b", "c")[: 3 if model.n_outputs == 3 else 2]
        task = class_task("law", classes)
        objective = model.objective(task.criterion(model.n_outputs))
        objective = self.wrap(objective) if self.wrap else objective
        target = torch.arange(len(batch)) % len(classes)
        terms = objective.loss(model, batch, target, Progress(step=0, total_steps=10, generator=seeded(seed)))
        return torch.stack(list(terms.values())).sum()

    def batch(self, *lengths: int) -> BagBatch:
        """Bags of these lengths, or of a few unequal ones, none below the method's least."""
        return pack([make_bag(max(n, self.cls.min_tiles), seed=i) for i, n in enumerate(lengths or (17, 5, 12))])


def _changed(model: MILModel, wrap: Callable[[Objective], Objective]) -> MILModel:
    """The model as the plug-in that `wrap` makes wants it."""
    task = class_task("law", ("a", "b", "c")[: max(model.n_outputs, 2)])
    plug_in = wrap(model.objective(task.criterion(model.n_outputs)))
    return plug_in.change(model) if isinstance(plug_in, Regulariser) else model


def seeded(seed: int) -> torch.Generator:
    """A generator on the CPU."""
    return torch.Generator().manual_seed(seed)


def make_bag(n: int, *, seed: int) -> Bag:
    """A bag of n random tiles on a compact grid."""
    rows = torch.arange(n)
    grid_xy = torch.stack([rows % 4, rows // 4], dim=1)
    return Bag(
        features=torch.randn(n, IN_DIM, generator=seeded(seed)),
        coords_l0=grid_xy * 448,
        grid_xy=grid_xy,
        slide_index=torch.zeros(n, dtype=torch.int64),
        slide_ids=(f"slide{seed}",),
        id=f"bag{seed}",
    )


def is_well_formed(subject: Subject) -> str:
    """Every tensor of the output has the shape that MILOutput promises."""
    for k in subject.widths:
        batch = subject.batch()
        output = _answer(subject.model(k), batch)
        b, total = len(batch), len(batch.features)
        _shape("logits", output.logits, (b, k))
        _equal("offsets", output.offsets, batch.offsets)
        if (output.attention is None) != (output.attention_logits is None):
            raise LawError("attention and attention_logits are given both or not at all")
        if ("attention" in subject.model(k).score_kinds) and output.attention is None:
            raise LawError("score_kinds has attention, the output has none")
        if output.attention is not None and output.attention_logits is not None:
            m = output.attention.shape[-1]
            _shape("attention", output.attention, (total, m))
            _shape("attention_logits", output.attention_logits, (total, m))
        if output.instance_logits is not None:
            _shape("instance_logits", output.instance_logits, (total, k))
        if output.bag_embedding is not None and (output.bag_embedding.ndim != 3 or len(output.bag_embedding) != b):
            raise LawError(f"bag_embedding is {tuple(output.bag_embedding.shape)}, not (b={b}, m, h)")
    return "shapes are as promised"


def says_what_it_is(subject: Subject) -> str:
    """The class says what it is, and keeps the parameters of its constructor as attributes of the same name."""
    missing = [name for name in ("summary", "family", "paper", "score_kinds") if not getattr(subject.cls, name, None)]
    if missing:
        raise LawError(f"the class does not say {', '.join(missing)}")
    parameters = list(inspect.signature(subject.cls).parameters.values())
    loose = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    untyped = [p.name for p in parameters if p.annotation is inspect.Parameter.empty]
    if loose or untyped:
        raise LawError(f"parameters are keyword-only and typed; not so: {', '.join(loose + untyped)}")
    model = replace(subject, wrap=None).model()
    lost = [p.name for p in parameters if not hasattr(model, p.name)]
    given = {"in_dim": IN_DIM, "n_outputs": 3, **subject.params}
    lost += [name for name, value in given.items() if getattr(model, name, None) != value and name not in lost]
    if lost:
        raise LawError(f"not kept as attributes: {', '.join(lost)}")
    return f"{len(parameters)} parameters are kept"


def sees_no_label(subject: Subject) -> str:
    """No label can reach `forward`; what bags and slides are called changes nothing."""
    for name, parameter in list(inspect.signature(subject.cls.forward).parameters.items())[2:]:
        if name.lower() in _LABEL_WORDS:
            raise LawError(f"forward takes {name!r}")
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY or parameter.default is not None:
            raise LawError(f"forward's {name!r} must be keyword-only with the default None")
    batch, model = subject.batch(), subject.model()
    renamed = replace(batch, ids=("x", "y", "z"), slide_ids=(("p",), ("q",), ("r",)))
    _equal("logits under other names", _answer(model, renamed).logits, _answer(model, batch).logits)
    return "forward has no way in for a label"


def ignores_order(subject: Subject) -> str:
    """Tiles in another order: the same logits, and every score moves with its tile."""
    if subject.model().order_matters:
        return "does not apply: order_matters"
    batch, model = subject.batch(), subject.model()
    order = [start + torch.randperm(n, generator=seeded(3)) for start, n in _spans(batch)]
    shuffled = pack([bag.take(rows - rows.min()) for bag, rows in zip(batch.bags(), order, strict=True)])
    before, after = _answer(model, batch), _answer(model, shuffled)
    _close("logits of shuffled tiles", after.logits, before.logits)
    for name, values in _per_tile(model, before).items():
        _close(f"{name} of shuffled tiles", _per_tile(model, after)[name], values[torch.cat(order)])
    return "logits stay, scores move along"


def ignores_neighbours(subject: Subject) -> str:
    """What else is in the batch changes nothing, in eval mode and in training mode."""
    bag = make_bag(max(9, subject.cls.min_tiles), seed=5)
    wild = make_bag(max(21, subject.cls.min_tiles), seed=6)
    wild = replace(wild, features=torch.full_like(wild.features, 1e6))
    for training in (False, True):
        model = subject.model(training=training)
        alone = _answer(model, pack([bag]))
        for neighbours, place in (([bag, wild], 0), ([wild, bag], 1)):
            batch = pack(neighbours)
            together = _answer(model, batch)
            mode = "training" if training else "eval"
            _close(f"logits beside a wild bag ({mode} mode)", together.logits[place : place + 1], alone.logits)
            for name, values in _per_tile(model, together).items():
                mine = split(values, batch.offsets)[place]
                _close(f"{name} beside a wild bag ({mode} mode)", mine, _per_tile(model, alone)[name])
    return "a neighbour of 1e6 and another length changes nothing"


def takes_one_tile(subject: Subject) -> str:
    """A bag of one tile is answered and trained on; its attention is 1."""
    if subject.cls.min_tiles > 1:
        return f"does not apply: min_tiles is {subject.cls.min_tiles}"
    model = subject.model()
    output = _answer(model, subject.batch(1))
    _finite("logits", output.logits)
    if output.attention is not None:
        _close("attention of the only tile", output.attention, torch.ones_like(output.attention))
    _finite("loss", subject.loss(subject.model(training=True), subject.batch(1, 1)))
    return "one tile works"


def takes_few_tiles(subject: Subject) -> str:
    """Bags with fewer tiles than any top-k of the method are answered and trained on."""
    for n in (2, 3, 9, 10, 11):
        _finite(f"logits of {n} tiles", _answer(subject.model(), subject.batch(n)).logits)
        _finite(f"loss of {n} tiles", subject.loss(subject.model(training=True), subject.batch(n, n + 1)))
    return "2 to 11 tiles work"


def treats_equals_equally(subject: Subject) -> str:
    """Identical tiles have identical scores, and their bag is trained on."""
    bag = make_bag(max(7, subject.cls.min_tiles), seed=1)
    same = pack([replace(bag, features=bag.features[:1].expand(len(bag), -1).clone())])
    model = subject.model()
    output = _answer(model, same)
    _finite("logits", output.logits)
    if not (model.order_matters or model.uses_positions):
        for name, values in _per_tile(model, output).items():
            _close(f"{name} of identical tiles", values, values[:1].expand_as(values))
    _finite("loss", subject.loss(subject.model(training=True), same))
    return "identical tiles are equal"


def attention_sums_to_one(subject: Subject) -> str:
    """Each column of attention is a distribution over the tiles of a bag, in training too."""
    batch = subject.batch()
    for training in (False, True):
        output = subject.model(training=training)(batch, generator=seeded(0))
        if output.attention is None:
            return "does not apply: no attention"
        if (output.attention < 0).any():
            raise LawError("attention is negative")
        sums = segment_sum(output.attention, batch.offsets)
        _close("sum of attention", sums, torch.ones_like(sums), tolerance=1e-5)
        logits = split(output.attention_logits.float(), batch.offsets)
        _close("attention against its logits", output.attention, torch.cat([rows.softmax(0) for rows in logits]))
    return "sums are 1"


def scores_every_tile(subject: Subject) -> str:
    """`instance_scores` gives one finite number a tile, of the declared kinds only, with their meaning."""
    for k in subject.widths:
        batch, model = subject.batch(), subject.model(k)
        output = _answer(model, batch)
        for kind in ("probability", "attention", "contribution"):
            if kind not in model.score_kinds:
                _refuses(model, output, kind)
        columns = model.score_columns(("a", "b", "c")[: max(k, 2)])
        if not columns or len({column.name for column in columns}) < len(columns):
            raise LawError("score_columns has no column, or two of one name")
        for name, kind, _, index in columns:
            scores = model.instance_scores(output, kind, index)
            _shape(name, scores, (len(batch.features),))
            _finite(name, scores)
            if kind == "probability" and not ((scores >= 0) & (scores <= 1)).all():
                raise LawError(f"{name} is outside of [0, 1]")
            if kind == "attention":
                sums = segment_sum(scores, batch.offsets)
                _close(f"sum of {name}", sums, torch.ones_like(sums), tolerance=1e-5)
    return ", ".join(subject.model().score_kinds)


def contributions_sum_to_the_logit(subject: Subject) -> str:
    """Contributions of a bag's tiles sum to its logit, for each class."""
    for k in subject.widths:
        batch, model = subject.batch(), subject.model(k)
        if "contribution" not in model.score_kinds:
            return "does not apply: no contributions"
        output = _answer(model, batch)
        for column in range(k):
            scores = model.instance_scores(output, "contribution", 1 if k == 1 else column)
            sums = segment_sum(scores, batch.offsets)
            _close(f"sum of contributions to class {column}", sums, output.logits[:, column])
    return "sums are the logits"


def is_finite_in_half_precision(subject: Subject) -> str:
    """Under bf16 and fp16 autocast output, loss and gradients are finite, and attention stays in fp32."""
    for dtype in (torch.bfloat16, torch.float16):
        batch, model = subject.batch(17, 5, 300), subject.model(training=True)
        with torch.autocast("cpu", dtype=dtype):
            output = _answer(subject.model(), batch)
            loss = subject.loss(model, batch)
        if output.attention is not None and output.attention.dtype != torch.float32:
            raise LawError(f"attention is {output.attention.dtype} under {dtype} autocast, not fp32")
        _finite(f"logits under {dtype}", output.logits)
        _finite(f"loss under {dtype}", loss)
        for name, values in _per_tile(subject.model(), output).items():
            _finite(f"{name} under {dtype}", values)
        torch.autograd.backward(loss)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                _finite(f"gradient of {name} under {dtype}", parameter.grad)
    return "bf16 and fp16 are finite"


def is_fixed_in_eval(subject: Subject) -> str:
    """In eval mode nothing is random: bit for bit the same with any generator."""
    batch, model = subject.batch(), subject.model()
    outputs = [model(batch, generator=generator) for generator in (None, seeded(0), seeded(1))]
    for output in outputs[1:]:
        _equal("logits in eval mode", output.logits, outputs[0].logits)
        for name, values in _per_tile(model, output).items():
            _equal(f"{name} in eval mode", values, _per_tile(model, outputs[0])[name])
    return "bit for bit"


def draws_from_its_generator_only(subject: Subject) -> str:
    """In training the generator decides everything: same seed, same answer; the global random state is untouched."""
    batch, model = subject.batch(), subject.model(training=True)
    before = torch.random.get_rng_state()
    outputs = [_tensors(model(batch, generator=seeded(seed))) for seed in (0, 0, 1)]
    model(batch)
    if not torch.equal(before, torch.random.get_rng_state()):
        raise LawError("forward draws from the global random state instead of its generator")
    if not _same(outputs[0], outputs[1]):
        raise LawError("two generators of one seed give two answers in training mode")
    differs = not _same(outputs[0], outputs[2])
    if differs != model.random_in_training:
        said = "declares random_in_training" if model.random_in_training else "does not declare random_in_training"
        raise LawError(f"{said}, but another seed gives {'another' if differs else 'the same'} answer")
    return "random in training" if differs else "nothing is random"


def trains_every_parameter(subject: Subject) -> str:
    """Each trainable parameter gets a finite gradient from the objective; matrices get one that is not zero."""
    for k in subject.widths:
        model = subject.model(k, training=True)
        for seed in range(3):  # what one draw leaves out, another takes
            torch.autograd.backward(subject.loss(model, subject.batch(70, 5, 12, 8), seed=seed))
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                raise LawError(f"{name} gets no gradient")
            _finite(f"gradient of {name}", parameter.grad)
            if parameter.ndim > 1 and not parameter.grad.any():
                raise LawError(f"the gradient of {name} is zero everywhere")
    return f"{sum(p.requires_grad for p in subject.model().parameters())} tensors"


def survives_a_checkpoint(subject: Subject) -> str:
    """A state dict, written and read without pickled code, gives another instance the same answers."""
    batch, model, other = subject.batch(), subject.model(seed=0), subject.model(seed=1)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    _equal("logits after a checkpoint", _answer(other, batch).logits, _answer(model, batch).logits)
    return "round trip"


def resumes_where_it_stopped(subject: Subject) -> str:
    """Training that goes on in another instance, from the states of model, objective and optimiser, ends the same."""
    whole, first, second = (_Training(subject, seed) for seed in (0, 0, 1))
    whole.run(range(4))
    first.run(range(2))
    buffer = io.BytesIO()
    torch.save([part.state_dict() for part in first.parts], buffer)
    buffer.seek(0)
    for part, state in zip(second.parts, torch.load(buffer, weights_only=True), strict=True):
        part.load_state_dict(state)
    second.run(range(2, 4))
    for name, one, other in zip(("model", "objective"), whole.parts, second.parts, strict=False):
        if not _same_state(one.state_dict(), other.state_dict()):
            raise LawError(f"the {name} is another one after an interruption; all state belongs into its state dict")
    return "bit for bit"


LAWS: tuple[Callable[[Subject], str], ...] = (
    says_what_it_is,
    is_well_formed,
    sees_no_label,
    ignores_order,
    ignores_neighbours,
    takes_one_tile,
    takes_few_tiles,
    treats_equals_equally,
    attention_sums_to_one,
    scores_every_tile,
    contributions_sum_to_the_logit,
    is_finite_in_half_precision,
    is_fixed_in_eval,
    draws_from_its_generator_only,
    trains_every_parameter,
    survives_a_checkpoint,
    resumes_where_it_stopped,
)
"""All laws. The name of a law is its function's name in words."""


def law_name(law: Callable[[Subject], str]) -> str:
    """'ignores order' of `ignores_order`."""
    return law.__name__.replace("_", " ")


def check_law(law: Callable[[Subject], str], subject: Subject) -> LawResult:
    """Try one law. Whatever the method raises is its fault and becomes the message."""
    try:
        return LawResult(name=law_name(law), passed=True, message=law(subject))
    except LawError as broken:
        return LawResult(name=law_name(law), passed=False, message=str(broken))
    except Exception as error:
        return LawResult(name=law_name(law), passed=False, message=f"it raised {type(error).__name__}: {error}")


def check_model(
    cls: type[MILModel],
    *,
    params: Mapping[str, Any] | None = None,
    wrap: Callable[[Objective], Objective] | None = None,
) -> list[LawResult]:
    """Hold a method to every law. params: of its constructor.  wrap: puts a regulariser around its objective."""
    subject = Subject(cls=cls, params=params or {}, wrap=wrap)
    return [check_law(law, subject) for law in LAWS]


class _Training:
    """A model in training with its objective and optimiser; what is random in a step follows from its number."""

    def __init__(self, subject: Subject, seed: int) -> None:
        self.model = subject.model(subject.cls.binary_outputs, seed=seed, training=True)
        task = class_task("law", ("a", "b"))
        objective = self.model.objective(task.criterion(self.model.n_outputs))
        self.objective = (subject.wrap(objective) if subject.wrap else objective).train()
        own = self.objective.optimizer(self.model, lr=1e-2, weight_decay=1e-2)
        self.optimizer = own or torch.optim.AdamW(self.objective.parameter_groups(self.model), lr=1e-2)
        self.parts: tuple[Any, ...] = (self.model, self.objective, self.optimizer)
        self.bags = list(subject.batch(9, 5, 12, 8).bags())

    def run(self, steps: Iterable[int]) -> None:
        """Take these steps, two bags each."""
        for step in steps:
            batch = pack([self.bags[step % 4], self.bags[(step + 1) % 4]])
            progress = Progress(step=step, total_steps=4, generator=seeded(step))
            terms = self.objective.loss(self.model, batch, torch.tensor([step % 2, (step + 1) % 2]), progress)
            self.optimizer.zero_grad()
            torch.autograd.backward(torch.stack(list(terms.values())).sum())
            self.optimizer.step()
            self.objective.after_optimizer_step(self.model, batch, 1e-2)


def _same_state(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same_state(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same_state, one, other))
    return bool(one == other)


@torch.no_grad()
def _answer(model: MILModel, batch: BagBatch) -> MILOutput:
    output = model(batch)
    if not isinstance(output, MILOutput):
        raise LawError(f"forward gives {type(output).__name__}, not MILOutput")
    return output


def _per_tile(model: MILModel, output: MILOutput) -> dict[str, Tensor]:
    """Everything that has one row a tile."""
    found = {
        "attention_logits": output.attention_logits,
        "attention": output.attention,
        "instance_logits": output.instance_logits,
    }
    tensors = {name: values for name, values in found.items() if values is not None}
    return tensors | {f"{kind} scores": model.instance_scores(output, kind, 0) for kind in model.score_kinds}


def _tensors(output: MILOutput) -> list[Tensor]:
    found = [output.logits, output.attention, output.instance_logits, output.bag_embedding]
    return [values for values in (*found, *output.auxiliary.values()) if values is not None]


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _spans(batch: BagBatch) -> list[tuple[int, int]]:
    return list(zip(batch.offsets[:-1].tolist(), batch.lengths, strict=True))


def _shape(name: str, values: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(values.shape) != shape:
        raise LawError(f"{name} is {tuple(values.shape)}, not {shape}")


def _finite(name: str, values: Tensor) -> None:
    if not values.isfinite().all():
        raise LawError(f"{name} is not finite")


def _equal(name: str, values: Tensor, wanted: Tensor) -> None:
    if not torch.equal(values, wanted):
        raise LawError(f"{name}: not the same, bit for bit")


def _close(name: str, values: Tensor, wanted: Tensor, *, tolerance: float = 1e-4) -> None:
    _shape(name, values, tuple(wanted.shape))
    _finite(name, values)
    if not torch.allclose(values.float(), wanted.float(), rtol=tolerance, atol=tolerance):
        raise LawError(f"{name}: off by {(values.float() - wanted.float()).abs().max().item():.3g}")


def _refuses(model: MILModel, output: MILOutput, kind: Any) -> None:
    try:
        model.instance_scores(output, kind)
    except ValueError:
        return
    raise LawError(f"instance_scores answers {kind!r}, which score_kinds does not name")
