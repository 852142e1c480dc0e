"""Files of a run folder read as what they must be: what is damaged or edited is a RunError with its cure."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from wsi_mil.errors import RunError

_ANSWERS = ("logit_", "prob_", "calibrated_", "prediction", "risk", "survival_", "cut_")
NUMBERED = ("repeat", "fold", "seed")
GIVE_AGAIN = "Give the command that made the run again: it writes anew what can be made from the rest."


def read_text(path: Path) -> str:
    """A text file of the run. Raises RunError when it is not there or is no text."""
    if not path.is_file():
        raise RunError(f"{path} does not exist. The run is not finished: give the same command again to go on.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is damaged: it holds no text ({error.reason}). {_cure(path)}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises RunError when it is damaged."""
    try:
        found = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise RunError(f"{path} is damaged: it holds no JSON ({error}). {_cure(path)}") from error
    if not isinstance(found, dict):
        raise RunError(f"{path} is damaged: it holds no mapping. {_cure(path)}")
    return found


def read_config(path: Path) -> dict[str, Any]:
    """The configuration, with the parts that every reader leans on. Raises RunError when one is missing."""
    try:
        config = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise RunError(f"{path} is damaged: it holds no YAML ({where}). {_RESTORE}") from error
    if not isinstance(config, dict):
        raise RunError(f"{path} holds no mapping. {_RESTORE}")
    task, methods = config.get("task"), config.get("methods")
    sound = {
        "kind": config.get("kind") in ("crossval", "train", "predict"),
        "task": isinstance(task, dict) and {"target", "level", "classes", "kind", "targets"} <= set(task),
        "task.classes": isinstance(task, dict) and isinstance(task.get("classes"), list),
        "methods": isinstance(methods, list) and all(isinstance(m, dict) and "label" in m for m in methods),
    }
    wrong = [name for name, right in sound.items() if not right]
    if wrong:
        raise RunError(f"{path}: {', '.join(wrong)} missing or not as wsi-mil wrote it. {_RESTORE}")
    return config


def read_frame(path: Path, columns: Iterable[str]) -> pd.DataFrame:
    """A table, all text. Raises RunError when it is damaged or lacks one of `columns`."""
    text = read_text(path)  # so that the encoding is checked first
    try:
        if not text.strip():
            raise ValueError("it is empty")
        frame = pd.read_csv(path, dtype=str, keep_default_na=False, na_filter=False, encoding="utf-8")
    except ValueError as error:  # pandas' parser errors are ValueErrors
        raise RunError(f"{path} is damaged: {error}. {_cure(path)}") from error
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise RunError(f"{path} lacks {', '.join(missing)}; it has {', '.join(frame.columns)}. {_cure(path)}")
    return frame


def numbered(frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    """The same with repeat, fold and seed as whole numbers, and all that a model answers as numbers.

    Where several targets share the table, cells that a target does not use are NaN. Raises RunError for any other cell
    that is no number.
    """
    whole: dict[str, type] = {name: int for name in NUMBERED if name in frame.columns}
    real: dict[str, type] = {name: float for name in frame.columns if name.startswith(_ANSWERS)}
    if "target_name" in frame and frame["target_name"].nunique() > 1:
        frame = frame.assign(**{name: frame[name].replace("", "nan") for name in real})
    try:
        return frame.astype(whole | real)
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}. {_cure(path)}") from error


_RESTORE = "Restore the file, or begin anew with another --out."


def _cure(path: Path) -> str:
    """Files of one model are made anew when they are missing; the others at every start."""
    if path.suffix == ".yaml":
        return _RESTORE
    if path.parent.parent.parent.name == "models":
        return "Remove it and give the command that made the run again: the model is made anew, with the same bytes."
    return GIVE_AGAIN
