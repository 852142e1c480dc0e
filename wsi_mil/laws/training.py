"""Laws about randomness, precision, gradients and state."""

import io
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from wsi_mil.bags import pack, segment_sum
from wsi_mil.laws.comparing import (
    answer_of,
    are_same,
    are_same_state,
    must_be_close,
    must_be_finite,
    must_equal,
    per_tile,
    tensors_of,
)
from wsi_mil.laws.subject import LawError, Subject, seeded
from wsi_mil.models._base import Progress


def is_finite_in_half_precision(subject: Subject) -> str:
    """Under bf16 and fp16 autocast output, loss and gradients are finite, and attention stays in fp32."""
    for dtype in (torch.bfloat16, torch.float16):
        batch, model = subject.batch(17, 5, 300), subject.model(training=True)
        with torch.autocast("cpu", dtype=dtype):
            output = answer_of(subject.model(), batch)
            loss = subject.loss(model, batch)
        if output.attention is not None and output.attention.dtype != torch.float32:
            raise LawError(f"attention is {output.attention.dtype} under {dtype} autocast, not fp32")
        if output.attention is not None:
            sums = segment_sum(output.attention, batch.offsets)
            must_be_close(f"sum of attention under {dtype}", sums, torch.ones_like(sums), tolerance=1e-5)
        must_be_finite(f"logits under {dtype}", output.logits)
        must_be_finite(f"loss under {dtype}", loss)
        for name, values in per_tile(subject.model(), output).items():
            must_be_finite(f"{name} under {dtype}", values)
        torch.autograd.backward(loss)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                must_be_finite(f"gradient of {name} under {dtype}", parameter.grad)
    return "bf16 and fp16 are finite"


def is_fixed_in_eval(subject: Subject) -> str:
    """In eval mode nothing is random: bit for bit the same with any generator; in training the same without one."""
    batch, model = subject.batch(), subject.model()
    outputs = [model(batch, generator=generator) for generator in (None, seeded(0), seeded(1))]
    for output in outputs[1:]:
        must_equal("logits in eval mode", output.logits, outputs[0].logits)
        for name, values in per_tile(model, output).items():
            must_equal(f"{name} in eval mode", values, per_tile(model, outputs[0])[name])
    undrawn = answer_of(subject.model(training=True), batch).logits
    must_be_close("logits in training without a generator", undrawn, outputs[0].logits)
    return "bit for bit"


def draws_from_its_generator_only(subject: Subject) -> str:
    """In training the generator decides everything: same seed, same answer; the global random state is untouched."""
    batch, model = subject.batch(), subject.model(training=True)
    before = torch.random.get_rng_state()
    outputs = [tensors_of(model(batch, generator=seeded(seed))) for seed in (0, 0, 1)]
    model(batch)
    if not torch.equal(before, torch.random.get_rng_state()):
        raise LawError("forward draws from the global random state instead of its generator")
    if not are_same(outputs[0], outputs[1]):
        raise LawError("two generators of one seed give two answers in training mode")
    differs = not are_same(outputs[0], outputs[2])
    if differs != model.random_in_training:
        said = "declares random_in_training" if model.random_in_training else "does not declare random_in_training"
        raise LawError(f"{said}, but another seed gives {'another' if differs else 'the same'} answer")
    return "random in training" if differs else "nothing is random"


def trains_every_parameter(subject: Subject) -> str:
    """Each trainable parameter gets a finite gradient from the objective; matrices get one that is not zero."""
    for k in subject.classes:
        model = subject.model(k, training=True)
        for seed in range(3):  # what one draw leaves out, another takes
            torch.autograd.backward(subject.loss(model, subject.batch(70, 5, 12, 8), seed=seed))
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                raise LawError(f"{name} gets no gradient")
            must_be_finite(f"gradient of {name}", parameter.grad)
            if parameter.ndim > 1 and not parameter.grad.any():
                raise LawError(f"the gradient of {name} is zero everywhere")
    return f"{sum(p.requires_grad for p in subject.model().parameters())} tensors"


def takes_a_step_of_one_class(subject: Subject) -> str:
    """The loss of bags that all are of one class is finite, whichever class it is; needs_both_classes is excused."""
    for k in subject.classes:
        if subject.objective(subject.model(k)).needs_both_classes:
            return "does not apply: needs_both_classes"
        for label in range(max(k, 2)):
            loss = subject.loss(subject.model(k, training=True), subject.batch(), target=torch.full((3,), label))
            must_be_finite(f"loss of bags of class {label} alone", loss)
    return "finite for each class"


def optimises_every_parameter(subject: Subject) -> str:
    """Each trainable parameter of model and objective is in one group of the optimiser, once."""
    model = subject.model(training=True)
    objective = subject.objective(model)
    trainable = [p for p in (*model.named_parameters(), *objective.named_parameters()) if p[1].requires_grad]
    given = Counter(id(p) for group in objective.parameter_groups(model) for p in group["params"])
    for name, parameter in trainable:
        if given[id(parameter)] != 1:
            raise LawError(f"{name} is in {given[id(parameter)]} groups of the optimiser, not in one")
    return f"{len(given)} tensors"


def survives_a_checkpoint(subject: Subject) -> str:
    """A state dict, written and read without pickled code, gives another instance the same answers."""
    batch, model, other = subject.batch(), subject.model(seed=0), subject.model(seed=1)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    read, written = answer_of(other, batch), answer_of(model, batch)
    must_equal("logits after a checkpoint", read.logits, written.logits)
    for name, values in per_tile(model, written).items():
        must_equal(f"{name} after a checkpoint", per_tile(other, read)[name], values)
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
        if not are_same_state(one.state_dict(), other.state_dict()):
            raise LawError(f"the {name} is another one after an interruption; all state belongs into its state dict")
    return "bit for bit"


class _Training:
    """A model in training with its objective and optimiser; what is random in a step follows from its number."""

    def __init__(self, subject: Subject, seed: int) -> None:
        self.model = subject.model(subject.cls.binary_outputs, seed=seed, training=True)
        self.objective = subject.objective(self.model)
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
