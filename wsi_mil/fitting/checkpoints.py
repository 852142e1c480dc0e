"""Trained models on disk: weights with all that is needed to build the model again. Read without executing code."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import torch

from tiling.atomic import write_bytes
from wsi_mil.errors import ConfigError, RunError
from wsi_mil.methods import MethodSpec, build
from wsi_mil.models._base import MILModel
from wsi_mil.tasks import Task

_SCHEMA = 2

State = dict[str, Any]


def save_state(path: Path, state: State) -> None:
    """Store tensors and plain values atomically; the same state gives the same bytes."""
    buffer = io.BytesIO()  # a file would carry its temporary name inside
    torch.save(state, buffer)
    write_bytes(path, buffer.getvalue())


def load_state(path: Path) -> State:
    """Read what `save_state` wrote. Raises RunError when it is damaged or would execute code."""
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # what torch raises on a damaged file depends on the damage
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(
            f"{path} cannot be read ({reason}). Remove it and give the command that made the run again."
        ) from error


def save_model(path: Path, model: MILModel, *, method: MethodSpec, task: Task) -> None:
    """Store a trained model. Equal models give equal bytes: the header is one text, since pickles of equal strings
    differ with their identity in memory.
    """
    header = {
        "kind": "mil_model",
        "schema_version": _SCHEMA,
        "method": {**method.as_config(), "train": {}},
        "task": task.as_config(),
        "files_sha256": method.files_sha256(),
        "in_dim": model.in_dim,
    }
    weights = {sys.intern(name): tensor.cpu() for name, tensor in model.state_dict().items()}
    save_state(path, {"header": json.dumps(header), "weights": weights})


def load_model(path: Path, device: torch.device) -> tuple[MILModel, Task]:
    """A trained model in eval mode, and its task. Raises RunError when the file is damaged or of another kind, or when
    a file of the user's own that makes the method is not the one it was trained with.
    """
    state, header, method, task = _opened(path)
    _check_own_files(path, method, header.get("files_sha256", {}))
    try:
        model, _ = build(method, in_dim=header["in_dim"], task=task, seed=0)
    except (ConfigError, TypeError) as error:  # a setting that is gone, or out of its range by now
        raise RunError(f"{path}: method {method.shown} cannot be built any more ({error}). Train it again.") from error
    try:
        model.load_state_dict(state["weights"])
    except RuntimeError as error:
        raise RunError(f"{path}: its weights do not fit method {method.name} ({error}).") from error
    return model.to(device).eval(), task


def _check_own_files(path: Path, method: MethodSpec, trained_with: dict[str, str]) -> None:
    try:
        now = method.files_sha256()
    except ConfigError as error:
        raise RunError(f"{path}: {error} Put it back where it was, or train again.") from error
    changed = [name for name, digest in now.items() if trained_with.get(name, digest) != digest]
    if changed:
        raise RunError(
            f"{path} was trained with another {', '.join(changed)} than the one there is now. Put the file back as it "
            f"was, or train again into another folder."
        )


def method_of(path: Path) -> MethodSpec:
    """The method of a trained model, with the settings that a search chose for it. Raises as `load_model` does."""
    return _opened(path)[2]


def _opened(path: Path) -> tuple[State, dict[str, Any], MethodSpec, Task]:
    state = load_state(path)
    try:
        header = json.loads(state.get("header", "{}"))
        if header.get("kind") != "mil_model" or header.get("schema_version") != _SCHEMA:
            raise ValueError("kind or schema_version")
        return state, header, MethodSpec(**header["method"]), Task.from_config(header["task"])
    except (ValueError, TypeError, KeyError) as error:
        raise RunError(
            f"{path} holds no trained model of this version of wsi-mil ({error}). Train it again."
        ) from error
