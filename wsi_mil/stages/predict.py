"""`wsi-mil predict`: score slides from outside with the models of a run."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from tiling.discovery import find_slides
from wsi_mil import __version__
from wsi_mil.bags import Bag
from wsi_mil.checkpoints import load_model
from wsi_mil.datasets import Item
from wsi_mil.errors import RunError, StoreError
from wsi_mil.evaluation import answer, class_logits, prediction_columns, prediction_frame, probabilities, split_by_slide
from wsi_mil.malloc import keep_freed_memory
from wsi_mil.models._base import MILModel
from wsi_mil.outcomes import Failure, Summary
from wsi_mil.progress import progress
from wsi_mil.runs import FoldKey, RunDir, write_frame
from wsi_mil.store import BagHeader, BagStore
from wsi_mil.tasks import Task
from wsi_mil.train_spec import TrainSpec

_KEY = FoldKey(0, 0, 0)
_TILE_UM_TOLERANCE = 0.02
_SHOWN = 8


def predict(
    run: Path,
    *,
    bags: Path,
    out: Path,
    slides: Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> Summary:
    """Score the bags of slides from outside: the mean over all models of each method.

    Logits, probabilities and tile scores are means over the models. There are no labels, and no thresholds are made
    here: the ones in the report of the run come from its validation parts.

    Args:
        run: run folder that `wsi-mil crossval` or `train` wrote
        bags: folder of bags to score, made with the encoder and tile size of the run
        out: run folder to write
        slides: root of the slides, for pictures in the viewer
        device: where to compute; auto takes a GPU when there is one
    """
    spec = TrainSpec(device=device)
    spec.check()
    keep_freed_memory()
    source, target, store = RunDir(run), RunDir(out), BagStore(bags)
    config = source.config()
    ensembles = [_load(source, label, spec.torch_device()) for label in _methods(source, config)]
    headers = {slide_id: store.header(slide_id) for slide_id in store.ids()}
    _check_contract(headers.values(), config["encoder"]["contract"], run)
    target.claim(_config(config, source, ensembles, headers, bags=bags, slides=slides))
    write_frame(target.cohort_path, _cohort(headers, slides))
    frames, failures, done = [], [], []
    with progress("predicting", len(headers)) as bar:
        for slide_id, header in headers.items():
            try:
                bag = store.bag(slide_id)
                frames += [_score(target, e, bag, header, spec.torch_device()) for e in ensembles]
                done.append(slide_id)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                failures.append(Failure(item=slide_id, outcome="failed", reason=reason))
            bar.advance(1, slide_id)
    _write_predictions(target, frames, ensembles)
    notes = [_result(target, slides)]
    notes += _cautions(source, config, ensembles, headers)
    if config["task"]["level"] == "patient":
        notes.append("The models were trained on patients; here each slide is scored as a patient with one slide.")
    return Summary(stage="predict", out=out, done=tuple(done), failures=tuple(failures), notes=tuple(notes))


@dataclass(frozen=True, kw_only=True)
class _Ensemble:
    label: str
    models: tuple[MILModel, ...]
    digests: tuple[str, ...]
    task: Task


def _methods(source: RunDir, config: Mapping[str, Any]) -> list[str]:
    if config["kind"] == "predict":
        raise RunError(f"{source.path} holds predictions, not models. Give the folder of the run that made them.")
    labels = [label for label in source.methods() if source.keys(label)]
    if not labels:
        raise RunError(f"{source.path} holds no finished model. Give its command again to finish it.")
    return labels


def _load(source: RunDir, label: str, device: torch.device) -> _Ensemble:
    paths = [source.checkpoint_path(label, key) for key in source.keys(label)]
    loaded = [load_model(path, device) for path in paths]
    return _Ensemble(
        label=label,
        models=tuple(model for model, _ in loaded),
        digests=tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths),
        task=replace(loaded[0][1], level="slide"),
    )


def _cautions(
    source: RunDir, config: Mapping[str, Any], ensembles: Sequence[_Ensemble], headers: Mapping[str, BagHeader]
) -> list[str]:
    """What the user must know before trusting the means: models that are not there, slides that were trained on."""
    notes = []
    folds = source.folds()[["repeat", "fold"]].drop_duplicates()
    trained = {ensemble.label: len(ensemble.models) for ensemble in ensembles}
    for method in config["methods"]:
        seeds = (method.get("train") or {}).get("seeds") or config["train"]["seeds"]
        asked, there = len(folds) * len(seeds), trained.get(method["label"], 0)
        if there < asked:
            notes.append(
                f"{method['label']}: only {there} of {asked} models are finished. Give the command of {source.path} "
                f"again, then predict into another --out."
            )
    cohort = source.cohort("status")
    own = sorted(set(cohort["slide"][cohort["status"] == "used"]) & set(headers))
    if own:
        notes.append(
            f"{len(own)} of {len(headers)} slides, such as {own[0]}, have the names of slides that the models were "
            f"trained on. What the models say of these is no test."
        )
    return notes


def _result(target: RunDir, slides: Path | None) -> str:
    where = "" if slides else " --slides FOLDER"
    return (
        f"Scores: {target.predictions_path}, each the mean over the models of a method; labels are not known. "
        f"Next: wsi-mil view {target.path}{where}"
    )


def _check_contract(headers: Sequence[BagHeader] | Any, contract: Mapping[str, Any], run: Path) -> None:
    headers = list(headers)
    if not headers:
        raise StoreError("the folder holds no bag. Give the folder that `wsi-mil encode` made (bags_...).")
    odd = {h.slide_id: found for h in headers if (found := _departures(h.contract, contract))}
    if odd:
        shown = "; ".join(f"{name} ({', '.join(found)})" for name, found in list(odd.items())[:_SHOWN])
        raise StoreError(
            f"{len(odd)} of {len(headers)} bags were made otherwise than the bags of {run}: {shown}. "
            f"Tile and encode these slides with the settings in that run's config.yaml (encoder)."
        )


def _departures(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    found = [f"{n} {ours[n]}, the run's {theirs[n]}" for n in ours if n != "tile_um" and ours[n] != theirs[n]]
    if abs(ours["tile_um"] - theirs["tile_um"]) > _TILE_UM_TOLERANCE * theirs["tile_um"]:
        found.append(f"tile_um {ours['tile_um']:g}, the run's {theirs['tile_um']:g}")
    return found


def _config(
    config: Mapping[str, Any],
    source: RunDir,
    ensembles: Sequence[_Ensemble],
    headers: Mapping[str, BagHeader],
    *,
    bags: Path,
    slides: Path | None,
) -> dict[str, Any]:
    rows = [[h.slide_id, h.slide_fingerprint, h.params_digest, h.n] for h in headers.values()]
    labels = [ensemble.label for ensemble in ensembles]
    return {
        "kind": "predict",
        "version": __version__,
        "run": str(source.path),
        "table": None,
        "slides": str(slides) if slides else None,
        "bags": str(bags),
        "task": {**config["task"], "level": "slide", "trained_level": config["task"]["level"]},
        "methods": [method for method in config["methods"] if method["label"] in labels],
        "models": {ensemble.label: list(ensemble.digests) for ensemble in ensembles},
        "combined": "mean over models",
        "encoder": config["encoder"],
        "bags_sha256": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
    }


def _score(target: RunDir, ensemble: _Ensemble, bag: Bag, header: BagHeader, device: torch.device) -> pd.DataFrame:
    columns = ensemble.models[0].score_columns(ensemble.task.classes)
    answers = [answer(model, bag, device=device, columns=columns) for model in ensemble.models]
    tiles = np.mean([found.tile_scores for found in answers], axis=0, dtype=np.float64)
    values = np.asarray(tiles, dtype=np.float32)
    for scores in split_by_slide(bag, values, [header], columns) if columns else ():
        target.write_scores(ensemble.label, _KEY, scores)
    item = Item(id=header.slide_id, patient=header.slide_id, slide_ids=(header.slide_id,), label=-1)
    logits = class_logits(answers, ensemble.task).mean(axis=0, keepdims=True)
    shares = probabilities(answers, ensemble.task).mean(axis=0, keepdims=True)
    return prediction_frame([item], logits, shares, ensemble.task, method=ensemble.label, key=_KEY)


def _write_predictions(target: RunDir, frames: Sequence[pd.DataFrame], ensembles: Sequence[_Ensemble]) -> None:
    order = {ensemble.label: place for place, ensemble in enumerate(ensembles)}
    if not frames:
        frames = [pd.DataFrame(columns=prediction_columns(ensembles[0].task.classes))]
    rows = pd.concat(frames, ignore_index=True)
    places = np.argsort(rows["method"].map(order).to_numpy(dtype=np.int64), kind="stable")
    write_frame(target.predictions_path, rows.iloc[places])


def _cohort(headers: Mapping[str, BagHeader], slides: Path | None) -> pd.DataFrame:
    paths = {} if slides is None else {s.slide_id: s.path for s in find_slides(slides).sources}
    rows = []
    for name, header in headers.items():
        path = paths[name].relative_to(slides).as_posix() if slides and name in paths else ""
        row: dict[str, object] = {"slide": name, "patient": name, "site": "", "target": "", "path": path}
        row |= {"annotation": "", "mpp_x": header.mpp[0], "mpp_y": header.mpp[1], "status": "used", "tiles": header.n}
        rows.append(row)
    return pd.DataFrame(rows)
