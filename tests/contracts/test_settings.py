"""Every number that can be set of a method or a plug-in carries its range, and training works at the ends of it."""

import inspect
import math
import re
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch

from wsi_mil.bags import pack
from wsi_mil.contracts import IN_DIM, make_bag, seeded
from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model, find_regulariser, model_names, regulariser_names
from wsi_mil.methods import MethodSpec, build, resolve_methods
from wsi_mil.models._base import Progress
from wsi_mil.settings import Range
from wsi_mil.tasks import class_task

GIVEN = {"self", "in_dim", "n_outputs", "criterion", "inner"}
TASK = class_task("label", ("no", "yes"))
PARTNERS = {"attention_diversity": "acmil"}
"""What plug-ins are tried with; abmil where none stands here."""
LITTLE = 1e-6
"""How far from an end that is not allowed itself."""
REFUSED_AT_AN_END = {
    "hidden": "heads|channels",
    "max_tiles": "max_tiles=1",
    "mlp_ratio": "mlp_ratio=1e-06",
    "width": "hidden=256",
}
"""Settings whose least number does not go with the other defaults, and what the refusal speaks of."""


@dataclass(frozen=True)
class Setting:
    """A setting of a method, its objective or a plug-in that is a number, or a tuple of numbers."""

    method: str
    place: str
    plug_in: str
    name: str
    kind: Any
    default: Any

    def __str__(self):
        return "-".join(filter(None, (self.method, self.place, self.plug_in, self.name)))

    def spec(self, value):
        """The method with this value, and all else as it comes."""
        given = {self.name: value}
        return MethodSpec(name=self.method, **{self.place: {self.plug_in: given} if self.plug_in else given})

    def of(self, number):
        """`number` as a value of this setting: itself, or a tuple of it."""
        for part in (self.kind, *get_args(self.kind)):
            if get_origin(part) is tuple:
                return [number for item in get_args(part) if item is not Ellipsis]
        return number


def numbers(kind, limits=None):
    """(int or float, its Range or None) of every number within a type."""
    if kind in (int, float):
        return [(kind, limits)]
    parts = get_args(kind)
    if get_origin(kind) is Annotated:
        return numbers(parts[0], next((extra for extra in parts[1:] if isinstance(extra, Range)), None))
    return [found for part in parts for found in numbers(part)] if get_origin(kind) in (Union, UnionType, tuple) else []


def settings(function, method, place, plug_in=""):
    hints = get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    parameters = inspect.signature(function).parameters.items()
    found = [Setting(method, place, plug_in, n, hints[n], p.default) for n, p in parameters if n not in GIVEN]
    return [setting for setting in found if numbers(setting.kind)]


SETTINGS = [
    *(found for name in model_names() for found in settings(find_model(name), name, "params")),
    *(found for name in model_names() for found in settings(find_model(name).objective, name, "objective")),
    *(
        found
        for name in regulariser_names()
        for found in settings(find_regulariser(name), PARTNERS.get(name, "abmil"), "regularisers", name)
    ),
]


def ends(setting):
    """The numbers at both ends of the range, where it has ends; beside an end that is not allowed."""
    found = []
    for number, limits in numbers(setting.kind):
        if limits is not None and math.isfinite(limits.low):
            found.append(number(limits.low) + (LITTLE if limits.without_low else 0))
        if limits is not None and math.isfinite(limits.high):
            found.append(number(limits.high) - (LITTLE if limits.without_high else 0))
    return dict.fromkeys(found)


def two_steps(spec):
    """One early and one late in training, so that what warms up is seen too; every term and gradient is finite."""
    model, objective = build(spec, in_dim=IN_DIM, task=TASK, seed=0)
    batch = pack([make_bag(n, seed=n) for n in (12, 7)])
    groups = objective.parameter_groups(model.train())
    optimizer = objective.train().optimizer(model, lr=1e-3, weight_decay=1e-4) or torch.optim.AdamW(groups, lr=1e-3)
    for step in (0, 9):
        progress = Progress(step=step, total_steps=10, generator=seeded(step))
        terms = objective.loss(model, batch, torch.tensor([0, 1]), progress)
        assert all(term.isfinite() for term in terms.values()), terms
        optimizer.zero_grad()
        torch.stack(list(terms.values())).sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        objective.after_optimizer_step(model, batch, 1e-3)


def refusal(spec):
    """The words with which a method refuses its settings; none when it trains."""
    try:
        two_steps(spec)  # not `rehearse`, which makes a ConfigError of every failure
    except ConfigError as error:
        return str(error)
    return ""


def test_every_number_carries_its_range():
    assert len(SETTINGS) > 200
    assert [str(setting) for setting in SETTINGS if any(limits is None for _, limits in numbers(setting.kind))] == []


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_defaults_lie_inside_and_wild_numbers_outside(setting):
    resolve_methods([setting.spec(setting.default)])
    for number, limits in numbers(setting.kind):
        wild = [number(value) for value, end in ((-1e9, limits.low), (1e9, limits.high)) if math.isfinite(end)]
        for value in (math.nan, math.inf, *wild):
            with pytest.raises(ConfigError, match=rf"{setting.name} is .*; it must be "):
                resolve_methods([setting.spec(setting.of(value))])


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.name.endswith("dropout")], ids=str)
def test_dropping_everything_is_refused(setting):
    with pytest.raises(ConfigError, match=r"dropout is 1\.0; it must be .*at least 0 and below 1"):
        resolve_methods([setting.spec(1.0)])


@pytest.mark.parametrize(("setting", "end"), [(s, end) for s in SETTINGS for end in ends(s)], ids=str)
def test_training_works_at_the_ends_of_a_range_or_is_refused_by_the_method(setting, end):
    (spec,) = resolve_methods([setting.spec(setting.of(end))])
    said = refusal(spec)
    assert not said or re.search(REFUSED_AT_AN_END.get(setting.name, "no refusal is meant"), said), said
