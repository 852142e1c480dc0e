"""What laws compare: answers and their tensors. Each raises LawError with the name of what differs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wsi_mil.bags import BagBatch
from wsi_mil.laws.subject import LawError
from wsi_mil.models._base import MILModel, MILOutput


@torch.no_grad()
def answer_of(model: MILModel, batch: BagBatch) -> MILOutput:
    """What a model says without a generator; LawError for anything but a MILOutput."""
    output = model(batch)
    if not isinstance(output, MILOutput):
        raise LawError(f"forward gives {type(output).__name__}, not MILOutput")
    return output


def per_tile(model: MILModel, output: MILOutput) -> dict[str, Tensor]:
    """Everything that has one row a tile."""
    found = {
        "attention_logits": output.attention_logits,
        "attention": output.attention,
        "instance_logits": output.instance_logits,
    }
    tensors = {name: values for name, values in found.items() if values is not None}
    return tensors | {f"{kind} scores": model.instance_scores(output, kind, 0) for kind in model.score_kinds}


def tensors_of(output: MILOutput) -> list[Tensor]:
    """All that an output holds."""
    found = [output.logits, output.attention, output.instance_logits, output.bag_embedding]
    return [values for values in (*found, *output.auxiliary.values()) if values is not None]


def are_same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def are_same_state(one: Any, other: Any) -> bool:
    """Whether two state dicts hold the same, bit for bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(are_same_state(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_same_state, one, other))
    return bool(one == other)


def spans(batch: BagBatch) -> list[tuple[int, int]]:
    """(first row, number of tiles) of each bag."""
    return list(zip(batch.offsets[:-1].tolist(), batch.lengths, strict=True))


def must_have_shape(name: str, values: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse another shape."""
    if tuple(values.shape) != shape:
        raise LawError(f"{name} is {tuple(values.shape)}, not {shape}")


def must_be_finite(name: str, values: Tensor) -> None:
    """Refuse infinities and NaN."""
    if not values.isfinite().all():
        raise LawError(f"{name} is not finite")


def must_equal(name: str, values: Tensor, wanted: Tensor) -> None:
    """Refuse another bit."""
    if not torch.equal(values, wanted):
        raise LawError(f"{name}: not the same, bit for bit")


def must_be_close(name: str, values: Tensor, wanted: Tensor, *, tolerance: float = 1e-4) -> None:
    """Refuse what is off by more than the tolerance, relative and absolute."""
    must_have_shape(name, values, tuple(wanted.shape))
    must_be_finite(name, values)
    if not is_close(values, wanted, tolerance=tolerance):
        raise LawError(f"{name}: off by {(values.float() - wanted.float()).abs().max().item():.3g}")


def is_close(values: Tensor, wanted: Tensor, *, tolerance: float = 1e-4) -> bool:
    """Whether two tensors of one shape agree within the tolerance, relative and absolute."""
    return torch.allclose(values.float(), wanted.float(), rtol=tolerance, atol=tolerance)
