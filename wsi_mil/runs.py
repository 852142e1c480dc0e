"""RunDir: the only place that spells a file name inside a run, and reads and writes its files. Loads no torch."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import pandas as pd
import yaml

from tiling.atomic import write_text
from wsi_mil.errors import RunError
from wsi_mil.heatmap import TileScores
from wsi_mil.score_files import read_scores, write_scores

__all__ = [
    "FoldKey",
    "RunDir",
    "Selection",
    "prediction_numbers",
    "read_scores",
    "write_frame",
    "write_scores",
]

_KEY = re.compile(r"r(\d+)_f(\d+)_s(\d+)")
_NUMBERED = ("repeat", "fold", "seed")
_SAME_RESULT_ANYWHERE = ("table", "slides", "bags", "train.cache", "train.tensorboard")
"""Where things lie and how they are watched: a moved study is still the same run."""


class FoldKey(NamedTuple):
    """Which model of a method: repeat of the folds, fold, seed of the training. str() is its folder name."""

    repeat: int
    fold: int
    seed: int

    def __str__(self) -> str:
        return f"r{self.repeat}_f{self.fold}_s{self.seed}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The key of a folder name. Raises ValueError when it is none."""
        match = _KEY.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no fold key such as r0_f1_s0")
        return cls(*map(int, match.groups()))


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which epoch's model was kept, and who decided."""

    epoch: int
    """Counted from 1."""
    chosen_by: str
    """"validation loss", or "fixed number of epochs" with the reason after a colon."""
    metric: str | None
    value: float | None
    epochs_run: int


class RunDir:
    """Everything that one run wrote. Paths are computed, files are read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.environment_path = self.path / "environment.json"
        self.folds_path = self.path / "folds.csv"
        self.cohort_path = self.path / "cohort.csv"
        self.predictions_path = self.path / "predictions.csv"
        self.metrics_path = self.path / "metrics.json"
        self.report_path = self.path / "report.html"
        self.reviews_dir = self.path / "reviews"

    def exists(self) -> bool:
        """Whether the folder holds a run, finished or not."""
        return self.config_path.is_file()

    def is_finished(self) -> bool:
        """Whether the run's predictions are written."""
        return self.predictions_path.is_file()

    def config(self) -> dict[str, Any]:
        """The resolved configuration. Raises RunError when the folder holds no run."""
        if not self.exists():
            raise RunError(
                f"{self.path} holds no run: there is no {self.config_path.name} in it. "
                f"Give the folder that `wsi-mil crossval`, `train` or `predict` wrote (their --out)."
            )
        config = yaml.safe_load(self.config_path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise RunError(f"{self.config_path} holds no mapping; restore it or start anew.")
        return config

    def environment(self) -> dict[str, Any]:
        """Versions, device and threads of the process that wrote the run."""
        return dict(json.loads(self._text(self.environment_path)))

    def cohort(self) -> pd.DataFrame:
        """One row a slide, all text: slide, patient, site, target, path, annotation, mpp_x, mpp_y, status, tiles."""
        return self._frame(self.cohort_path)

    def folds(self) -> pd.DataFrame:
        """Columns repeat, fold (whole numbers), patient, part (train, validation, test)."""
        return _numbered(self._frame(self.folds_path))

    def predictions(self) -> pd.DataFrame:
        """Test rows of every method and model: ids are text, logits and probabilities numbers."""
        return prediction_numbers(self._frame(self.predictions_path))

    def methods(self) -> list[str]:
        """Labels of the methods, in the order of the configuration."""
        return [str(method["label"]) for method in self.config()["methods"]]

    def keys(self, method: str) -> list[FoldKey]:
        """The finished models of a method; of a run that only predicts, the keys of its scores."""
        models = self.path / "models" / method
        if models.is_dir():
            return sorted(k for k in _keys_in(models) if self.selection_path(method, k).is_file())
        return sorted(_keys_in(self.path / "instance_scores" / method))

    def model_dir(self, method: str, key: FoldKey) -> Path:
        """Folder of one model."""
        return self.path / "models" / method / str(key)

    def checkpoint_path(self, method: str, key: FoldKey) -> Path:
        """The chosen model's weights, readable without executing code."""
        return self.model_dir(method, key) / "checkpoint.ckpt"

    def resume_path(self, method: str, key: FoldKey) -> Path:
        """State of a training that is under way; removed when the model is finished."""
        return self.model_dir(method, key) / "resume.ckpt"

    def log_path(self, method: str, key: FoldKey) -> Path:
        """One row an epoch."""
        return self.model_dir(method, key) / "log.csv"

    def validation_path(self, method: str, key: FoldKey) -> Path:
        """Predictions of the validation part, in the columns of predictions.csv."""
        return self.model_dir(method, key) / "validation.csv"

    def test_path(self, method: str, key: FoldKey) -> Path:
        """Predictions of the test part: this model's share of predictions.csv."""
        return self.model_dir(method, key) / "test.csv"

    def selection_path(self, method: str, key: FoldKey) -> Path:
        """Which epoch was kept. It is written last: a model with this file is finished."""
        return self.model_dir(method, key) / "selection.json"

    def log(self, method: str, key: FoldKey) -> pd.DataFrame:
        """One row an epoch, numbers; what was not measured is NaN."""
        return self._frame(self.log_path(method, key)).replace("", "nan").astype(float)

    def validation(self, method: str, key: FoldKey) -> pd.DataFrame:
        """Predictions of the validation part; no rows where it was merged into training."""
        return prediction_numbers(self._frame(self.validation_path(method, key)))

    def test(self, method: str, key: FoldKey) -> pd.DataFrame:
        """Predictions of the test part by this one model."""
        return prediction_numbers(self._frame(self.test_path(method, key)))

    def selection(self, method: str, key: FoldKey) -> Selection:
        """Which epoch's model was kept."""
        return Selection(**json.loads(self._text(self.selection_path(method, key))))

    def scores_path(self, method: str, key: FoldKey, slide_id: str) -> Path:
        """Tile scores of one slide by one model."""
        return self.path / "instance_scores" / method / str(key) / f"{slide_id}.h5"

    def scores(self, method: str, key: FoldKey, slide_id: str) -> TileScores:
        """Read the tile scores of one slide. Raises RunError when this model did not score it."""
        path = self.scores_path(method, key, slide_id)
        if not path.is_file():
            there = ", ".join(map(str, self.score_keys(method, slide_id))) or "none"
            raise RunError(f"{path} does not exist: model {method} {key} did not score it. Models that did: {there}.")
        return read_scores(path)

    def score_keys(self, method: str, slide_id: str) -> list[FoldKey]:
        """The models of a method that scored this slide; in cross-validation those that did not train on it."""
        folder = self.path / "instance_scores" / method
        return sorted(k for k in _keys_in(folder) if self.scores_path(method, k, slide_id).is_file())

    def write_scores(self, method: str, key: FoldKey, scores: TileScores) -> None:
        """Store the tile scores of one slide."""
        write_scores(self.scores_path(method, key, scores.slide_id), scores)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Store the resolved configuration."""
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=120)
        write_text(self.config_path, text)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Store versions, device and threads."""
        write_text(self.environment_path, json.dumps(dict(environment), indent=2) + "\n")

    def write_selection(self, method: str, key: FoldKey, selection: Selection) -> None:
        """Store which epoch was kept, and with it the mark that the model is finished."""
        write_text(self.selection_path(method, key), json.dumps(asdict(selection), indent=2) + "\n")

    def claim(self, config: Mapping[str, Any]) -> bool:
        """Take the folder for the run of `config`; True when the same run was begun here earlier and goes on.

        Raises RunError when the folder holds another run, naming the settings that differ, or foreign files.
        """
        if self.exists():
            differences = _differences(self.config(), config)
            if differences:
                raise RunError(
                    f"{self.path} holds another run. Different (there -> asked for now): {'; '.join(differences)}. "
                    f"Give another --out, or remove that folder yourself if it is not needed."
                )
            return True
        if self.path.exists() and any(not p.name.startswith(".") for p in self.path.iterdir()):
            raise RunError(f"{self.path} is not empty and holds no run of wsi-mil. Give another --out.")
        self.write_config(config)
        return False

    def _text(self, path: Path) -> str:
        if not path.is_file():
            raise RunError(f"{path} does not exist. The run is not finished: give the same command again to go on.")
        return path.read_text(encoding="utf-8")

    def _frame(self, path: Path) -> pd.DataFrame:
        if not path.is_file():
            raise RunError(f"{path} does not exist. The run is not finished: give the same command again to go on.")
        return pd.read_csv(path, dtype=str, keep_default_na=False, na_filter=False, encoding="utf-8")


def write_frame(path: Path, frame: pd.DataFrame) -> None:
    """Write a table as UTF-8 CSV; floats with as many digits as it takes to read the same number back."""
    write_text(path, frame.to_csv(index=False, lineterminator="\n"))


def prediction_numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """A table of predictions read as text, with its numbers as numbers."""
    numbers = [name for name in frame.columns if name.startswith(("logit_", "prob_"))]
    return _numbered(frame).astype(dict.fromkeys(numbers, float))


def _numbered(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.astype({name: int for name in _NUMBERED if name in frame.columns})


def _keys_in(folder: Path) -> list[FoldKey]:
    names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    return [FoldKey.parse(name) for name in names if _KEY.fullmatch(name)]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        parts = [_flat(inner, f"{prefix}.{name}" if prefix else str(name)) for name, inner in value.items()]
        return {name: leaf for part in parts for name, leaf in part.items()}
    return {prefix: value}


def _differences(there: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    asked = yaml.safe_load(yaml.safe_dump(dict(asked)))
    old, new = _flat(there), _flat(asked)
    names = [n for n in dict.fromkeys([*old, *new]) if n not in _SAME_RESULT_ANYWHERE and old.get(n) != new.get(n)]
    return [f"{name}: {old.get(name)!r} -> {new.get(name)!r}" for name in names]
