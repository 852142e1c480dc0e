"""SearchSpec: which settings are searched inside each training part. Loads no optuna, so that a command parses fast."""

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wsi_mil.errors import ConfigError

_PLACES = ("train", "params", "objective", "regularisers")
_OF_TRAINING = ("lr", "weight_decay", "epochs", "bags_per_step", "accumulate", "tile_cap", "schedule", "clip_norm")
"""The rest of TrainSpec says who chooses or where it runs, which no loss can judge."""


@dataclass(frozen=True, kw_only=True)
class SearchSpec:
    """Settings that are searched anew for each model, on inner folds of the part that it trains on."""

    trials: int = 0
    """Settings tried for each model; 0 searches nothing."""
    space: dict[str, Any] = field(default_factory=dict)
    """Setting -> choices, or low, high and perhaps log: {train.lr: {low: 1e-5, high: 1e-3, log: true}, params.hidden:
    [128, 512]}."""
    inner_folds: int = 3
    """Folds of the training part; a trial's figure is the mean of its losses on them."""

    def check(self) -> None:
        """Raise ConfigError for a search that cannot be made."""
        if self.trials < 0 or self.inner_folds < 2:
            raise ConfigError("search: trials must be 0 or more, inner_folds 2 or more.")
        if not self.trials:
            if self.space:
                raise ConfigError("search.space is given, but search.trials is 0. Say how many settings are tried.")
            return
        if not self.space:
            raise ConfigError("search.space is empty. Name what is searched, such as {train.lr: [1e-4, 1e-3]}.")
        for name, wished in self.space.items():
            check_range(name, wished)
        if importlib.util.find_spec("optuna") is None:
            raise ConfigError("search needs optuna, which is not installed: pip install 'wsi-mil[hpo]'")


def check_range(name: str, wished: Any) -> None:
    """Raise ConfigError unless this is a setting with choices or bounds."""
    if name.split(".")[0] not in _PLACES or len(name.split(".")) < 2:
        raise ConfigError(f"search.space: {name!r} is no setting. Begin with {', '.join(p + '.' for p in _PLACES)}")
    if name.startswith("train.") and name.removeprefix("train.") not in _OF_TRAINING:
        raise ConfigError(
            f"search.space: {name!r} cannot be searched. Of training there are {', '.join(_OF_TRAINING)}."
        )
    if isinstance(wished, list) and wished:
        return
    sound = isinstance(wished, Mapping) and {"low", "high"} <= set(wished) <= {"low", "high", "log"}
    numbers = [wished["low"], wished["high"]] if sound else []
    if not sound or not all(_is_finite(as_number(n)) for n in numbers):
        raise ConfigError(f"search.space: {name} is {wished!r}; give choices [a, b] or {{low: a, high: b, log: true}}.")
    low, high = map(as_number, numbers)
    if not low < high or (wished.get("log") and not low > 0):
        raise ConfigError(
            f"search.space: {name} goes from {low} to {high}; low must be below high, and above 0 for log."
        )


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def as_number(value: Any) -> Any:
    """A number of a YAML file, which takes 1e-4 for a text; anything else as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
