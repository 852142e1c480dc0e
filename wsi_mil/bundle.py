"""A bundle: trained models with all that another hospital needs to use them, in one folder. It holds no code.

bundle.json            what it is, how to make bags for it, how it decides, and the digest of every other file; `method`
                       is what the run was asked for, and each of `models` has its own, with what a search chose
models/<key>.safetensors   weights of each model
training.safetensors   where the training slides lie (means and quantiles, no single slide), for domain shift
patients.json          only when asked for: salted hashes of the training patients, slides and fingerprints
model_card.md          the same for people
"""

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from tiling.atomic import atomic_folder, write_bytes
from tiling.grid import TileSpec, TissueSpec
from wsi_mil.errors import StoreError
from wsi_mil.methods import MethodSpec, build
from wsi_mil.models._base import MILModel
from wsi_mil.runs import FoldKey, Selection
from wsi_mil.tasks import Task
from wsi_mil.transfer.domain_shift import Training, from_arrays, to_arrays

SCHEMA_VERSION = 2
_CONTENTS, _CARD, _TRAINING, _PATIENTS = "bundle.json", "model_card.md", "training.safetensors", "patients.json"
_NEEDED = ("version", "method", "task", "in_dim", "models", "encoder", "tiles", "training", "files")
_COPY_AGAIN = "Copy the whole bundle again from where it came from."
Kind = Literal["patient", "slide", "fingerprint"]


@dataclass(frozen=True, kw_only=True)
class Known:
    """Salted hashes of those a model was trained on: they flag, they do not name."""

    salt: str
    hashes: frozenset[str]

    @classmethod
    def of(cls, salt: str, names: Mapping[Kind, Iterable[str]]) -> "Known":
        """The hashes of some names."""
        return cls(salt=salt, hashes=frozenset(_hashed(salt, kind, n) for kind, found in names.items() for n in found))

    def holds(self, kind: Kind, name: str) -> bool:
        """Whether this name is among them."""
        return _hashed(self.salt, kind, name) in self.hashes


@dataclass(frozen=True, kw_only=True, eq=False)
class Bundle:
    """A bundle that was read, with every file as it was exported."""

    path: Path
    facts: Mapping[str, Any]
    """What stands in bundle.json."""
    training: Training
    known: Known | None

    @property
    def label(self) -> str:
        """What its method is called."""
        return str(self.facts["method"]["label"])

    @property
    def digest(self) -> str:
        """Over all of its content."""
        return str(self.facts["digest"])

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What each model predicts. They differ in what each learnt from its own training part."""
        return tuple(Task.from_config(model["task"]) for model in self.facts["models"])

    @property
    def tiles(self) -> TileSpec | None:
        """How slides must be tiled; None where the training bags did not tell."""
        return None if self.facts["tiles"] is None else tile_spec(self.facts["tiles"])

    @property
    def methods(self) -> tuple[MethodSpec, ...]:
        """How each model is built. They differ where a search chose settings for each."""
        return tuple(MethodSpec(**model["method"]) for model in self.facts["models"])

    @property
    def selections(self) -> tuple[Selection, ...]:
        """How each model was chosen and where it cuts, in the order of `models`."""
        return tuple(Selection(**model["selection"]) for model in self.facts["models"])

    def models(self, device: torch.device) -> tuple[MILModel, ...]:
        """The models in evaluation mode. Raises StoreError when the weights do not fit the method of this version."""
        found = []
        for one, method, task in zip(self.facts["models"], self.methods, self.tasks, strict=True):
            try:
                model, _ = build(method, in_dim=self.facts["in_dim"], task=task, seed=0)
                model.load_state_dict(load_tensors((self.path / _weights(one["name"])).read_bytes()))
            except (RuntimeError, TypeError) as error:
                raise StoreError(
                    f"{self.path}: the weights do not fit method {method.name} of this version of wsi-mil ({error}). "
                    f"{_other(self.facts)}"
                ) from error
            found.append(model.to(device).eval())
        return tuple(found)


def is_bundle(path: Path) -> bool:
    """Whether the folder holds a bundle, whole or not."""
    return (path / _CONTENTS).is_file()


def open_bundle(path: Path) -> Bundle:
    """Read a bundle and compare every file with its digest. Raises StoreError for what is missing, damaged or newer."""
    facts = _read_json(path / _CONTENTS)
    if facts.get("kind") != "bundle" or facts.get("schema_version") != SCHEMA_VERSION:
        raise StoreError(
            f"{path / _CONTENTS}: kind {facts.get('kind')!r}, schema {facts.get('schema_version')!r}; this version of "
            f"wsi-mil reads bundles of schema {SCHEMA_VERSION}. Export it again with this version, or use the one that "
            f"wrote it."
        )
    if facts.get("digest") != _digest(facts) or not set(_NEEDED) <= set(facts):
        raise StoreError(f"{path / _CONTENTS} was changed after it was written. {_COPY_AGAIN}")
    names = {_CARD, _TRAINING, *(_weights(model["name"]) for model in facts["models"])}
    if set(facts["files"]) - {_PATIENTS} != names:
        raise StoreError(f"{path / _CONTENTS} lists other files than a bundle has. {_COPY_AGAIN}")
    contents = {name: _checked(path, name, digest) for name, digest in facts["files"].items()}
    patients = json.loads(contents[_PATIENTS]) if _PATIENTS in contents else None
    bundle = Bundle(
        path=path,
        facts=facts,
        training=from_arrays(load_arrays(contents[_TRAINING])),
        known=Known(salt=patients["salt"], hashes=frozenset(patients["hashes"])) if patients else None,
    )
    try:
        _ = bundle.tiles, bundle.tasks, bundle.methods, bundle.selections
    except (TypeError, KeyError, ValueError) as error:
        raise StoreError(
            f"{path}: this version of wsi-mil does not know a setting in it ({error}). {_other(facts)}"
        ) from error
    return bundle


def write_bundle(
    path: Path,
    facts: Mapping[str, Any],
    *,
    weights: Mapping[str, Mapping[str, torch.Tensor]],
    training: Training,
    known: Known | None,
    card: str,
) -> bool:
    """Write a bundle as a whole or not at all; False when exactly this one is there already.

    weights: name of each model in `facts["models"]` -> its tensors. Raises StoreError when something else is there.
    """
    # own memory for each tensor: the format refuses two names for one
    own = {name: {k: t.cpu().clone() for k, t in tensors.items()} for name, tensors in weights.items()}
    files = {_weights(name): save_tensors(tensors) for name, tensors in own.items()}
    files |= {_TRAINING: save_arrays(to_arrays(training)), _CARD: card.encode()}
    if known is not None:
        text = json.dumps({"salt": known.salt, "hashes": sorted(known.hashes)}, indent=1)
        files[_PATIENTS] = text.encode()
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    whole = {"kind": "bundle", "schema_version": SCHEMA_VERSION, **facts, "files": digests}
    whole["digest"] = _digest(whole)
    if path.exists():
        if is_bundle(path) and open_bundle(path).digest == whole["digest"]:
            return False
        raise StoreError(f"{path} exists and is not this bundle. Give another --out, or remove it yourself.")
    with atomic_folder(path) as folder:
        for name, data in files.items():
            write_bytes(folder / name, data)
        write_bytes(folder / _CONTENTS, (json.dumps(whole, indent=2, ensure_ascii=False) + "\n").encode())
    return True


def card_path(path: Path) -> Path:
    """Where the model card of a bundle lies."""
    return path / _CARD


def tile_spec(config: Mapping[str, Any]) -> TileSpec:
    """The spec of which `config` holds the fields."""
    return TileSpec(**{**config, "tissue": TissueSpec(**config["tissue"])})


def _weights(model: str) -> str:
    return f"models/{FoldKey.parse(model)}.safetensors"


def _other(facts: Mapping[str, Any]) -> str:
    return f"The bundle was written by version {facts['version']}: use that one."


def _hashed(salt: str, kind: Kind, name: str) -> str:
    return hmac.new(salt.encode(), f"{kind}:{name}".encode(), hashlib.sha256).hexdigest()[:24]


def _digest(facts: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in facts.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, ensure_ascii=False).encode()).hexdigest()


def _checked(path: Path, name: str, digest: str) -> bytes:
    try:
        data = (path / name).read_bytes()
    except OSError as error:
        raise StoreError(f"{path / name} cannot be read ({error.strerror}). {_COPY_AGAIN}") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise StoreError(f"{path / name} is not the file that was exported: its digest differs. {_COPY_AGAIN}")
    return data


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read ({error}). {_COPY_AGAIN}") from error
    if not isinstance(found, dict):
        raise StoreError(f"{path} holds no mapping. {_COPY_AGAIN}")
    return found
