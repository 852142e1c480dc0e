"""Reference vectors, and the few steps that every parity test takes with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from wsi_mil.bags import Bag, BagBatch, pack
from wsi_mil.errors import ConfigError
from wsi_mil.methods import MethodSpec, build, resolve_methods
from wsi_mil.models._base import Criterion, MILModel, Objective, Progress
from wsi_mil.tasks import class_task

ORACLES = Path(__file__).parents[1] / "data" / "oracles"


class Vectors:
    """One file of reference vectors: arrays by name, weights and gradients by their prefix."""

    def __init__(self, name: str) -> None:
        with np.load(ORACLES / f"{name}.npz", allow_pickle=False) as arrays:
            numbers = {key: arrays[key] for key in arrays.files if arrays[key].dtype.kind != "U"}
            self.arrays = {key: torch.as_tensor(values) for key, values in numbers.items()}

    def __getitem__(self, key: str) -> Tensor:
        return self.arrays[key]

    def under(self, prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in self.arrays.items() if k.startswith(prefix)}


@pytest.fixture
def vectors() -> Callable[[str], Vectors]:
    return Vectors


@pytest.fixture
def batch_of() -> Callable[..., BagBatch]:
    def make(*features: Tensor) -> BagBatch:
        return pack([_bag(rows, f"bag{i}") for i, rows in enumerate(features)])

    return make


@pytest.fixture
def criterion() -> Callable[[int], Criterion]:
    def make(n_outputs: int) -> Criterion:
        classes = tuple("abcdefgh"[: max(n_outputs, 2)])
        return class_task("y", classes).criterion(n_outputs)

    return make


@pytest.fixture
def close() -> Callable[[Tensor, Tensor], None]:
    def check(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
        ours = ours.detach()
        torch.testing.assert_close(ours, theirs.to(ours.dtype).reshape(ours.shape), rtol=tolerance, atol=tolerance)

    return check


@pytest.fixture
def refused() -> Callable[..., None]:
    """Settings that a study refuses: out of the range that a signature says, or against the method's own rules."""

    def check(name: str, said: str = "", **settings: dict[str, Any]) -> None:
        def ask() -> None:
            (spec,) = resolve_methods([MethodSpec(name=name, **settings)])
            build(spec, in_dim=8, task=class_task("y", ("a", "b")), seed=0)

        with pytest.raises(ConfigError, match=said):
            ask()

    return check


@pytest.fixture
def terms_of() -> Callable[..., dict[str, Tensor]]:
    """The objective's terms for an answer with `forced` arguments; gradients are left in the model."""

    def run(
        objective: Objective, model: MILModel, batch: BagBatch, target: Tensor, **forced: Tensor
    ) -> dict[str, Tensor]:
        progress = Progress(step=0, total_steps=1, generator=torch.Generator().manual_seed(0))
        plain = model.forward
        model.forward = lambda batch, *, generator=None: plain(batch, generator=None, **forced)  # type: ignore
        terms = objective.loss(model, batch, target, progress)
        del model.forward
        torch.stack(list(terms.values())).sum().backward()
        return {name: value.detach() for name, value in terms.items()}

    return run


@pytest.fixture
def same_gradients(close: Callable[..., None]) -> Callable[[MILModel, MILModel], None]:
    """Compare our gradients with a model that was filled with the published ones, so that the names map once."""

    def check(model: MILModel, filled: MILModel) -> None:
        wanted = dict(filled.named_parameters())
        for name, parameter in model.named_parameters():
            ours = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            close(ours, wanted[name].detach())

    return check


def _bag(features: Tensor, name: str) -> Bag:
    n = len(features)
    nowhere = torch.zeros(n, 2, dtype=torch.int64)
    return Bag(
        features=features,
        coords_l0=nowhere,
        grid_xy=nowhere,
        slide_index=torch.zeros(n, dtype=torch.int64),
        slide_ids=(name,),
        id=name,
    )
