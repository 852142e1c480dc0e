"""MethodSpec: which MIL method, with which settings, objective and regularisers; build() makes it real."""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wsi_mil.bags import Bag, pack
from wsi_mil.errors import ConfigError, UserError
from wsi_mil.fitting.datasets import check_batches
from wsi_mil.lookup import find_model, find_regulariser
from wsi_mil.models._base import BagObjective, MILModel, Objective, Progress, StoredScores
from wsi_mil.settings import typed
from wsi_mil.tasks import Task

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_GIVEN_BY_US = ("in_dim", "n_outputs", "criterion", "inner")
_REHEARSED_TILES = 12


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """One method of a study."""

    name: str
    """A listed method, or the path of a file that holds one."""
    label: str | None = None
    """How the method is called in files and figures; made of name and regularisers when not given."""
    params: dict[str, Any] = field(default_factory=dict)
    """Settings of the model."""
    objective: dict[str, Any] = field(default_factory=dict)
    """Settings of the model's own objective."""
    regularisers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name of a regulariser -> its settings."""
    train: dict[str, Any] = field(default_factory=dict)
    """Training settings (epochs, lr ...) that hold for this method alone."""

    @property
    def shown(self) -> str:
        """The label, resolved."""
        stem = Path(self.name).stem if self.name.endswith(".py") else self.name
        return self.label or "+".join([stem, *self.regularisers])

    def files_sha256(self) -> dict[str, str]:
        """The digest of each file of the user's own that makes the method, by the file's path.

        Raises ConfigError when one is gone.
        """
        files = [name for name in (self.name, *self.regularisers) if name.endswith(".py")]
        gone = [name for name in files if not Path(name).is_file()]
        if gone:
            raise ConfigError(f"method {self.shown}: {', '.join(gone)}: no such file.")
        return {name: hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in files}

    def as_config(self) -> dict[str, Any]:
        """What stands in config.yaml."""
        return {"label": self.shown} | {k: v for k, v in asdict(self).items() if k != "label"}


def parse_method(text: str) -> MethodSpec:
    """The method that a word such as `abmil`, `abmil+aem` or `path/my_method.py+aem` stands for."""
    path, dot_py, rest = text.rpartition(".py")
    name, *regularisers = rest.split("+") if dot_py else text.split("+")
    name = path + dot_py + name if dot_py else name
    if not name or not all(regularisers) or any(c in text for c in "{}[]:,"):
        raise ConfigError(
            f"methods: {text!r} is no method. Write a name with regularisers behind it (abmil+aem), "
            f"or a mapping with the keys {', '.join(MethodSpec.__dataclass_fields__)}."
        )
    twice = sorted({word for word in regularisers if regularisers.count(word) > 1})
    if twice:
        raise ConfigError(f"methods: {text!r} names {', '.join(twice)} twice; a regulariser acts once.")
    return MethodSpec(name=name, regularisers={word: {} for word in regularisers})


def resolve_methods(methods: Sequence[str | MethodSpec] | str) -> tuple[MethodSpec, ...]:
    """All methods as specs, names and settings checked, labels unique. Raises ConfigError."""
    given = [methods] if isinstance(methods, str) else methods
    specs = [_with_whole_path(parse_method(m) if isinstance(m, str) else m) for m in given]
    if not specs:
        raise ConfigError("methods: none is given. Name at least one, for example [mean_pool, abmil].")
    labels = Counter(spec.shown.lower() for spec in specs)
    twice = sorted(label for label, count in labels.items() if count > 1)
    if twice:
        raise ConfigError(f"methods: {', '.join(twice)} is listed twice. Give each its own label.")
    return tuple(_checked(spec) for spec in specs)


def build(
    spec: MethodSpec, *, in_dim: int, task: Task, seed: int, class_weights: Tensor | None = None
) -> tuple[MILModel, Objective]:
    """A fresh model and its objective. The same seed gives the same weights, whatever ran before; global randomness
    is left as it was.
    """
    model_class = find_model(spec.name)
    n_outputs = task.n_outputs(model_class)
    criterion = task.criterion(n_outputs, class_weights)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = model_class(in_dim=in_dim, n_outputs=n_outputs, **spec.params)
        plug_ins = [(find_regulariser(name), params) for name, params in spec.regularisers.items()]
        for plug_in, params in plug_ins:  # all before the objective, which may copy the model
            model = plug_in(BagObjective(criterion), **params).change(model)
        objective = model.objective(criterion, **spec.objective)
        for plug_in, params in plug_ins:
            objective = plug_in(objective, **params)
    return model, objective


def rehearse(spec: MethodSpec, *, in_dim: int, task: Task, bags_per_step: int) -> None:
    """Take a loss on small made-up bags, as at the start of training and near its end, when nothing warms up any more,
    so that a method that cannot work fails before the long run.

    Raises ConfigError with the method's own words.
    """
    try:
        _check_kind(find_model(spec.name).classes_only, task)
        model, objective = build(spec, in_dim=in_dim, task=task, seed=0)
        check_batches(bags_per_step=bags_per_step, n_classes=len(task.classes), objective=objective)
        generator = torch.Generator().manual_seed(0)
        tiles = max(_REHEARSED_TILES, model.min_tiles)
        bags = [_made_up(f"bag{i}", tiles, in_dim, generator) for i in range(max(2, len(task.classes)))]
        values = np.arange(len(bags), dtype=np.float64)[:, None].repeat(task.n_values, axis=1)
        target = task.tensor(values % 2 if len(bags) == 2 else values)
        for step in (0, 9):
            progress = Progress(step=step, total_steps=10, generator=generator)
            terms = objective.train().loss(model.train(), pack(bags), target, progress)
            loss = torch.stack(list(terms.values())).sum()
            if not loss.isfinite():
                raise ConfigError("its loss is not finite on made-up bags; look at its params and objective.")
            loss.backward()  # type: ignore[no-untyped-call]
    except UserError as error:
        raise ConfigError(f"method {spec.shown}: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"method {spec.shown} fails on its first step ({type(error).__name__}: {error}). "
            f"`wsi-mil check` on the method's file says which law it breaks; check its params and regularisers."
        ) from error


def score_columns(model: MILModel, task: Task) -> list[StoredScores]:
    """The columns of tile scores that are kept of a model trained for a task; the first is how it points."""
    if task.is_of_classes:
        return model.score_columns(task.classes)
    return model.score_columns_of_outputs(task.output_names(model.n_outputs))


def _check_kind(classes_only: bool, task: Task) -> None:
    if classes_only and not task.is_of_classes:
        raise ConfigError(
            f"it learns one target of classes; {task.target} is of kind {task.kind}. Take another method, such as "
            f'abmil, or one of `wsi-mil list models` without the mark "classes only".'
        )


def _with_whole_path(spec: MethodSpec) -> MethodSpec:
    """A user's own files by their whole paths, so that the run can be gone on with and predicted from in any folder."""
    return replace(
        spec,
        name=_whole(spec.name),
        regularisers={_whole(name): params for name, params in spec.regularisers.items()},
        label=spec.shown,
    )


def _whole(name: str) -> str:
    return str(Path(name).resolve()) if name.endswith(".py") else name


def _checked(spec: MethodSpec) -> MethodSpec:
    if not _LABEL.fullmatch(spec.shown):
        raise ConfigError(
            f"methods: the label {spec.shown!r} cannot be a folder's name. Allowed are letters, digits and . _ + -"
        )
    where = f"method {spec.shown}"
    model_class = find_model(spec.name)
    return replace(
        spec,
        params=typed(model_class, spec.params, where=f"{where}, params", without=_GIVEN_BY_US),
        objective=typed(model_class.objective, spec.objective, where=f"{where}, objective", without=_GIVEN_BY_US),
        regularisers={
            name: typed(
                find_regulariser(name), params or {}, where=f"{where}, regulariser {name}", without=_GIVEN_BY_US
            )
            for name, params in spec.regularisers.items()
        },
    )


def _made_up(name: str, tiles: int, in_dim: int, generator: torch.Generator) -> Bag:
    grid_xy = torch.stack([torch.arange(tiles) % 4, torch.arange(tiles) // 4], dim=1)
    return Bag(
        features=torch.randn(tiles, in_dim, generator=generator),
        coords_l0=grid_xy * 448,
        grid_xy=grid_xy,
        slide_index=torch.zeros(tiles, dtype=torch.int64),
        slide_ids=(name,),
        id=name,
    )
