"""RunDir: the only place that spells a file name inside a run, and reads and writes its files. Loads no torch."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import pandas as pd
import yaml

from tiling.atomic import write_text
from wsi_mil.errors import RunError
from wsi_mil.heatmap import TileScores
from wsi_mil.results.reading import NUMBERED, numbered, read_config, read_frame, read_json
from wsi_mil.results.score_files import read_scores, write_scores
from wsi_mil.statistics.decisions import Threshold

__all__ = [
    "FoldKey",
    "RunDir",
    "Selection",
    "read_scores",
    "write_frame",
    "write_scores",
]

_KEY = re.compile(r"r(\d+)_f(\d+)_s(\d+)")
_FOLD_COLUMNS = ("repeat", "fold", "patient", "part")
_PREDICTION_COLUMNS = ("method", *NUMBERED, "patient", "slide", "target")
_SAME_RESULT_ANYWHERE = (
    *("table", "slides", "bags", "train.cache", "train.tensorboard", "train.checkpoint_seconds"),
    *("folds.file", "cohort.fixes", "cohort.counts", "cohort.warnings"),
)
"""Where things lie, how they are watched and what was told: a moved study is still the same run. What it is made of
stands in the digests of labels, bags and folds."""


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
    """Which epoch's model was kept, who decided, and where its decisions are cut."""

    epoch: int
    """Counted from 1."""
    chosen_by: str
    """"validation loss", or "fixed number of epochs" with the reason after a colon."""
    metric: str | None
    value: float | None
    epochs_run: int
    thresholds: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name of a binary target -> `value` and `source` of its Threshold."""
    calibration: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name of a target with classes -> the Calibrator that validation fitted."""
    search: dict[str, Any] | None = None
    """Trials of a search for settings inside the training part, and what it chose."""

    def cut(self, target: str) -> Threshold | None:
        """Where decisions on a target are cut; None where the run did not record it."""
        stored = self.thresholds.get(target)
        return Threshold(value=float(stored["value"]), source=str(stored["source"])) if stored else None


class RunDir:
    """Everything that one run wrote. Paths are computed, files are read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.environment_path = self.path / "environment.json"
        self.folds_path = self.path / "folds.csv"
        self.cohort_path = self.path / "cohort.csv"
        self.leakage_path = self.path / "leakage.json"
        self.balance_path = self.path / "balance.csv"
        self.predictions_path = self.path / "predictions.csv"
        self.domain_shift_path = self.path / "domain_shift.csv"
        self.metrics_path = self.path / "metrics.json"
        self.report_path = self.path / "report.html"
        self.salt_path = self.path / "pseudonym_salt.txt"
        self.tables_dir = self.path / "tables"
        self.heatmaps_dir = self.path / "heatmaps"
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
        return read_config(self.config_path)

    def environment(self) -> dict[str, Any]:
        """Versions, device and threads of the process that wrote the run."""
        return read_json(self.environment_path)

    def cohort(self, *needed: str) -> pd.DataFrame:
        """One row a slide, all text: slide, patient, site, target, path, annotation, mpp_x, mpp_y, status, tiles.

        Raises RunError without slide, patient and the `needed` ones.
        """
        return read_frame(self.cohort_path, ("slide", "patient", *needed))

    def folds(self) -> pd.DataFrame:
        """Columns repeat, fold (whole numbers), patient, part (train, validation, test)."""
        return numbered(read_frame(self.folds_path, _FOLD_COLUMNS), self.folds_path)

    def predictions(self) -> pd.DataFrame:
        """Test rows of every method and model: ids are text, logits and probabilities numbers."""
        return _predictions(self.predictions_path)

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

    def trials_path(self, method: str, key: FoldKey) -> Path:
        """Settings that a search tried inside the training part, one row a trial."""
        return self.model_dir(method, key) / "trials.csv"

    def tensorboard_dir(self, method: str, key: FoldKey) -> Path:
        """Curves of one training, when asked for."""
        return self.path / "tensorboard" / method / str(key)

    def validation_path(self, method: str, key: FoldKey) -> Path:
        """Predictions of the validation part, in the columns of predictions.csv."""
        return self.model_dir(method, key) / "validation.csv"

    def test_path(self, method: str, key: FoldKey) -> Path:
        """Predictions of the test part: this model's share of predictions.csv."""
        return self.model_dir(method, key) / "test.csv"

    def faithfulness_path(self, method: str, key: FoldKey) -> Path:
        """How far answers hang on the tiles that the model points at, of a few test bags; not every model has it."""
        return self.model_dir(method, key) / "faithfulness.csv"

    def selection_path(self, method: str, key: FoldKey) -> Path:
        """Which epoch was kept. It is written last: a model with this file is finished."""
        return self.model_dir(method, key) / "selection.json"

    def is_whole(self, method: str, key: FoldKey, slide_ids: Iterable[str]) -> bool:
        """Whether a model is finished and everything that it leaves is there, the scores of its test slides too."""
        files = (self.selection_path, self.checkpoint_path, self.validation_path, self.test_path)
        scores = (self.scores_path(method, key, slide_id) for slide_id in slide_ids)
        return all(path(method, key).is_file() for path in files) and all(path.is_file() for path in scores)

    def log(self, method: str, key: FoldKey) -> pd.DataFrame:
        """One row an epoch, numbers; what was not measured is NaN."""
        return read_frame(self.log_path(method, key), ("epoch",)).replace("", "nan").astype(float)

    def validation(self, method: str, key: FoldKey) -> pd.DataFrame:
        """Predictions of the validation part; no rows where it was merged into training."""
        return _predictions(self.validation_path(method, key))

    def test(self, method: str, key: FoldKey) -> pd.DataFrame:
        """Predictions of the test part by this one model."""
        return _predictions(self.test_path(method, key))

    def selection(self, method: str, key: FoldKey) -> Selection:
        """Which epoch's model was kept."""
        path = self.selection_path(method, key)
        try:
            return Selection(**read_json(path))
        except TypeError as error:
            raise RunError(f"{path} is damaged ({error}). Remove it and give the same command again.") from error

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


def write_frame(path: Path, frame: pd.DataFrame) -> None:
    """Write a table as UTF-8 CSV; floats with as many digits as it takes to read the same number back."""
    write_text(path, frame.to_csv(index=False, lineterminator="\n"))


def _predictions(path: Path) -> pd.DataFrame:
    return numbered(read_frame(path, _PREDICTION_COLUMNS), path)


def _keys_in(folder: Path) -> list[FoldKey]:
    names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    return [FoldKey.parse(name) for name in names if _KEY.fullmatch(name)]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, list) and value and all(isinstance(inner, Mapping) for inner in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        parts = [_flat(inner, f"{prefix}.{name}" if prefix else str(name)) for name, inner in value.items()]
        return {name: leaf for part in parts for name, leaf in part.items()}
    return {prefix: value}


def _differences(there: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    asked = yaml.safe_load(yaml.safe_dump(dict(asked)))
    old, new = _flat(there), _flat(asked)
    names = [name for name in dict.fromkeys([*old, *new]) if _counts(name) and old.get(name) != new.get(name)]
    return [f"{name}: {old.get(name)!r} -> {new.get(name)!r}" for name in names]


def _counts(name: str) -> bool:
    """Whether another value of this setting, of the run or of one method, makes another run."""
    name = re.sub(r"^methods\.\d+\.(?=train\.)", "", name)
    return not any(name == same or name.startswith(f"{same}.") for same in _SAME_RESULT_ANYWHERE)
