"""`wsi-mil export-bundle`: trained models of a run -> one folder that another hospital can use."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from tiling.grid import TileSpec
from tiling.store import read_grid
from wsi_mil import __version__
from wsi_mil.bundle import Kind, Known, card_path, write_bundle
from wsi_mil.errors import ConfigError, SlideError, StoreError
from wsi_mil.fitting.checkpoints import load_model, method_of
from wsi_mil.outcomes import Summary
from wsi_mil.progress import progress
from wsi_mil.results.cases import SlideFinder
from wsi_mil.results.reading import read_json
from wsi_mil.runs import FoldKey, RunDir, Selection
from wsi_mil.store import BagHeader, BagStore
from wsi_mil.targets import ClassTarget
from wsi_mil.tasks import Task
from wsi_mil.transfer.domain_shift import Measured, Training, measure
from wsi_mil.transfer.ensembles import mean_selection, methods_of
from wsi_mil.transfer.model_card import RESEARCH_USE, model_card

_ENSEMBLE = "ensemble"
_SETTINGS = ("label", "name", "params", "objective", "regularisers")
_USE = (
    "Research on slides of the same kind as those it was trained on: same organ, stain and question. Validate it on "
    "labelled slides of your own before anything depends on it."
)


def export_bundle(
    run: Path,
    *,
    out: Path,
    method: str | None = None,
    models: str = _ENSEMBLE,
    bags: Path | None = None,
    grids: Path | None = None,
    slides: Path | None = None,
    patient_hashes: bool = False,
    intended_use: str = _USE,
) -> Summary:
    """Make a folder of trained models with all that `wsi-mil predict` needs elsewhere: weights, contract, model card.

    It holds no code, no slide and no feature of a single slide. Given again, the same command finds its work done.

    Args:
        run: run folder that `wsi-mil train` or `crossval` wrote
        out: folder to make
        method: label of the method; needed where the run has several
        models: ensemble for all of the method's models together, or one such as r0_f0_s0
        bags: folder of the training bags; where they were at the time of the run when not given
        grids: folder that `wsi-mil tile` made, for training bags that do not say how they were tiled
        slides: folder of the training slides, for their stain; where they were at the time of the run when not given
        patient_hashes: keep salted hashes of the training patients, so that predictions on them are flagged
        intended_use: what the model card says the models are for
    """
    source = RunDir(run)
    config = source.config()
    label = _method(source, method)
    keys = _keys(source, label, models)
    spec = next(dict(one) for one in config["methods"] if one["label"] == label)
    _refuse_code(spec)
    paths = {key: source.checkpoint_path(label, key) for key in keys}
    loaded = {key: load_model(path, torch.device("cpu")) for key, path in paths.items()}
    selections = [source.selection(label, key) for key in keys]
    cohort = _trained_on(source, keys)
    store = _training_bags(config, bags)
    headers = _headers(store, cohort, config["encoder"]["contract"])
    training = Training.of(_measured(store, headers, cohort, _finder(config, slides)))
    tiles, notes = _tiles(headers, grids)
    weights = {str(key): dict(model.state_dict()) for key, (model, _) in loaded.items()}
    facts = {
        "version": __version__,
        "use": RESEARCH_USE,
        "method": _settings(spec),
        "task": config["task"],
        "in_dim": config["encoder"]["dim"],
        "models": [
            {
                "name": str(key),
                "method": _settings(method_of(paths[key]).as_config()),
                "task": task.as_config(),
                "selection": asdict(chosen),
            }
            for (key, (_, task)), chosen in zip(loaded.items(), selections, strict=True)
        ],
        "decision": _rule(selections, loaded[keys[0]][1]),
        "encoder": {**config["encoder"], "input_px": _seen_px(config["encoder"]["transform"])},
        "tiles": tiles,
        "training": _people(config, cohort, training, patient_hashes=patient_hashes),
    }
    metrics = read_json(source.metrics_path) if source.metrics_path.is_file() else None
    new = write_bundle(
        out,
        facts,
        weights=weights,
        training=training,
        known=_known(cohort, headers, weights) if patient_hashes else None,
        card=model_card(facts, metrics=metrics, intended_use=intended_use),
    )
    notes += [f"Read {card_path(out)}. Next, anywhere: wsi-mil predict {out} SLIDES --out DIR"]
    done = tuple(f"{label} {key}" for key in keys)
    return Summary(
        stage="export-bundle", out=out, done=done if new else (), reused=() if new else done, notes=tuple(notes)
    )


def _method(run: RunDir, wish: str | None) -> str:
    labels = methods_of(run)
    if wish is None and len(labels) > 1:
        raise ConfigError(f"{run.path} has several methods: {', '.join(labels)}. Name one: --method {labels[0]}.")
    if wish is not None and wish not in labels:
        raise ConfigError(f"{run.path} has no finished method {wish!r}; it has {', '.join(labels)}.")
    return wish or labels[0]


def _keys(run: RunDir, label: str, wish: str) -> list[FoldKey]:
    keys = run.keys(label)
    chosen = [key for key in keys if wish in (_ENSEMBLE, str(key))]
    if not chosen:
        raise ConfigError(f"--models {wish}: give {_ENSEMBLE}, or one of {', '.join(map(str, keys))}.")
    return chosen


def _settings(method: Mapping[str, Any]) -> dict[str, Any]:
    """What it takes to build a model; how it was trained stays with the run."""
    return {name: method[name] for name in _SETTINGS}


def _refuse_code(spec: Mapping[str, Any]) -> None:
    files = [name for name in (spec["name"], *spec["regularisers"]) if name.endswith(".py")]
    if files:
        raise ConfigError(
            f"{spec['label']} is defined in {', '.join(files)}, and a bundle holds no code. Make a package of it with "
            f"an entry point of group wsi_mil.models (or wsi_mil.regularisers), train by that name, and export that "
            f"run: whoever predicts installs your package."
        )


def _trained_on(run: RunDir, keys: Sequence[FoldKey]) -> pd.DataFrame:
    """The rows of cohort.csv whose patients trained or validated any of these models."""
    folds, cohort = run.folds(), run.cohort("site", "target", "path", "status")
    pairs = {(key.repeat, key.fold) for key in keys}
    rows = [pair in pairs for pair in zip(folds["repeat"], folds["fold"], strict=True)]
    patients = set(folds[rows].query("part != 'test'")["patient"])
    return cohort[(cohort["status"] == "used") & cohort["patient"].isin(patients)]


def _training_bags(config: Mapping[str, Any], bags: Path | None) -> BagStore:
    folder = bags or Path(config["bags"])
    if not folder.is_dir():
        raise StoreError(f"{folder}: the training bags are not there, and a bundle describes them. Give --bags FOLDER.")
    return BagStore(folder)


def _headers(store: BagStore, cohort: pd.DataFrame, contract: Mapping[str, Any]) -> dict[str, BagHeader]:
    headers = {name: store.header(name) for name in cohort["slide"]}
    odd = [name for name, header in headers.items() if header.contract != contract]
    if odd:
        raise StoreError(
            f"{store.folder}: {len(odd)} bags, such as {odd[0]}, are not the ones the run was trained on: another "
            f"encoder or tile size. Give the folder of those: --bags FOLDER."
        )
    return headers


def _finder(config: Mapping[str, Any], slides: Path | None) -> SlideFinder | None:
    root = slides or (Path(config["slides"]) if config.get("slides") else None)
    if slides is not None and not slides.is_dir():
        raise ConfigError(f"{slides}: no such folder. Give the one that holds the training slides.")
    return SlideFinder(root) if root is not None and root.is_dir() else None


def _measured(
    store: BagStore, headers: Mapping[str, BagHeader], cohort: pd.DataFrame, finder: SlideFinder | None
) -> list[Measured]:
    paths = dict(zip(cohort["slide"], cohort["path"], strict=True))
    found = []
    with progress("training slides", len(headers), "slides") as bar:
        for name, header in headers.items():
            bag = store.bag(name)
            try:
                file = finder.locate(name, path=paths[name]) if finder else None
                found.append(measure(bag, header, file))
            except SlideError:  # a slide that cannot be read any more has features, but no stain
                found.append(measure(bag, header, None))
            bar.advance()
    return found


def _tiles(headers: Mapping[str, BagHeader], grids: Path | None) -> tuple[dict[str, Any] | None, list[str]]:
    """How the training slides were tiled, and what the user should know about it."""
    if grids is not None:
        return _sorted(asdict(_spec_of_grids(headers, grids))), []
    told = Counter(header.tiles for header in headers.values() if header.tiles)
    if not told:
        note = "The training bags do not say how slides were tiled, so this bundle takes bags only. With --grids it "
        return None, [note + "takes slides too."]
    usual, count = told.most_common(1)[0]
    others = len(headers) - count
    notes = [f"{others} of {len(headers)} training bags were tiled otherwise, or do not say how."] if others else []
    return _sorted(json.loads(usual)), notes


def _sorted(value: Any) -> Any:
    """Mappings in the order of their keys, so that equal settings give equal bundles."""
    return {name: _sorted(value[name]) for name in sorted(value)} if isinstance(value, dict) else value


def _spec_of_grids(headers: Mapping[str, BagHeader], grids: Path) -> TileSpec:
    """The spec of these grids. Raises ConfigError unless the bags were made from them."""
    found = None
    for name, header in headers.items():
        path = grids / "grids" / f"{name}.h5"
        if not path.is_file():
            continue
        grid = read_grid(path)
        found, plan = grid.spec, grid.plan
        same = (header.slide_fingerprint, header.tile_px, header.tile_size_l0, header.stride_l0, header.origin_l0)
        if same != (grid.slide.fingerprint, found.tile_px, plan.tile_size_l0, plan.stride_l0, plan.origin_l0):
            raise ConfigError(f"--grids {grids}: the bag of {name} was not made from its grid there. Give those grids.")
    if found is None:
        raise ConfigError(f"--grids {grids}: it holds no grid of a training slide. Give the folder that tile made.")
    return found


def _seen_px(transform: str) -> int | None:
    """Side to which tiles are resized before the network sees them, which a `timm:` encoder must be told.

    A bag has it in words only; predict holds the digest of the transform against it.
    """
    found = re.search(r"resized from \d+ to (\d+) px", transform)
    return int(found.group(1)) if found else None


def _people(
    config: Mapping[str, Any], cohort: pd.DataFrame, training: Training, *, patient_hashes: bool
) -> dict[str, Any]:
    """Counts of who trained the models; no name."""
    labels = Counter(cohort["target"]) if config["task"]["classes"] else Counter()
    return {
        "kind": config["kind"],
        "patients": int(cohort["patient"].nunique()),
        "slides": len(cohort),
        "sites": int(cohort["site"][cohort["site"] != ""].nunique()),
        "labels": {name: labels[name] for name in config["task"]["classes"]},
        "mpp": list(training.mpp),
        "patient_hashes": patient_hashes,
    }


def _rule(selections: Sequence[Selection], task: Task) -> str:
    """How the models decide together, in a sentence."""
    several = len(selections) > 1
    said = ["What they say is the mean over the models."] if several else []
    for target in task.targets:
        cut = mean_selection(selections).cut(target.name)
        if cut is not None and isinstance(target, ClassTarget):
            of = "the mean of the models' thresholds" if several else "the model's threshold"
            said.append(
                f"{target.classes[-1]} is called from a probability of {cut.value:.4g} up: {of} ({cut.source})."
            )
        elif isinstance(target, ClassTarget):
            said.append(f"The class of {target.name} with the largest probability is called.")
        else:
            said.append(f"Of {target.name} (of kind {target.kind}) no decision is made.")
    return " ".join(said)


def _known(
    cohort: pd.DataFrame, headers: Mapping[str, BagHeader], weights: Mapping[str, Mapping[str, Tensor]]
) -> Known:
    """Salted by the weights: no table of hashes serves two models, and the same command makes the same bundle."""
    salt = hashlib.sha256()
    for own in weights.values():
        for name, tensor in sorted(own.items()):
            salt.update(name.encode())
            salt.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    prints = [header.slide_fingerprint for header in headers.values()]
    names: dict[Kind, list[str]] = {"patient": list(cohort["patient"]), "slide": list(headers), "fingerprint": prints}
    return Known.of(salt.hexdigest(), names)
