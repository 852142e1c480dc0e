"""`wsi-mil predict`: score slides from outside with the models of a run or of a bundle."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from tiling.atomic import remove_leftovers, write_bytes, write_text
from tiling.discovery import find_slides
from wsi_mil import __version__
from wsi_mil.bags import Bag
from wsi_mil.bundle import Bundle
from wsi_mil.encoders import EncodeSpec
from wsi_mil.errors import ConfigError, SlideError
from wsi_mil.experiment import environment
from wsi_mil.fitting.datasets import Item, join_slides
from wsi_mil.fitting.evaluation import prediction_columns, prediction_frame, split_by_slide
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.malloc import keep_freed_memory
from wsi_mil.outcomes import Failure, Summary
from wsi_mil.progress import progress
from wsi_mil.runs import FoldKey, RunDir, write_frame
from wsi_mil.splits import Fold, folds_to_frame
from wsi_mil.stages.heatmap import heatmap
from wsi_mil.stages.make_bags import encoder_for, make_bags
from wsi_mil.store import BagHeader, BagStore
from wsi_mil.study import Study, cohort_frame
from wsi_mil.table.records import CohortSpec
from wsi_mil.transfer import domain_shift
from wsi_mil.transfer.domain_shift import Measured
from wsi_mil.transfer.ensembles import Ensemble, Source, open_source
from wsi_mil.transfer.newcomers import Newcomers, accepted_headers, differences, find_newcomers, newcomer_study

_KEY = FoldKey(0, 0, 0)
_ANY_COHORT = CohortSpec()


def predict(
    model: Path,
    data: Path | None = None,
    *,
    out: Path,
    bags: Path | None = None,
    slides: Path | None = None,
    table: Path | None = None,
    cohort: CohortSpec = _ANY_COHORT,
    encoder: str | None = None,
    weights: Path | None = None,
    heatmaps: bool = True,
    workers: int = 2,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> Summary:
    """Score slides or bags from outside: the mean over all models of each method.

    With a bundle, slides are tiled and encoded as its models were trained; the same command goes on after an
    interruption. Thresholds are those of the models' validation parts; nothing is fitted here. Where a table has
    labels, the folder can be reported like a cross-validation.

    Args:
        model: bundle that `wsi-mil export-bundle` made, or run folder that `wsi-mil crossval` or `train` wrote
        data: folder of slides (for a bundle), or of bags made with the encoder and tile size of the model
        out: run folder to write
        bags: the folder of bags, when not given as data
        slides: root of the slides that the bags come from, for pictures and stain
        table: cohort table; only its slides are scored, and labels in the model's target column are kept beside them
        cohort: how the table is read
        encoder: how the bundle's encoder is opened here, when its own name does not do (a .py file, timm:local-dir:...)
        weights: file of the encoder's weights; timm's hub or the bundled file when not given
        heatmaps: draw a picture of every slide whose file is known
        workers: processes that tile
        device: where to compute; auto takes a GPU when there is one
    """
    train = TrainSpec(device=device)
    train.check()
    keep_freed_memory()
    source, target = open_source(model, train.torch_device()), RunDir(out)
    root, folder = _what(data, bags=bags, slides=slides)
    ground = root.parent if root is not None and root.is_file() else root
    encoding = EncodeSpec(encoder=encoder or "", weights=weights, device=device)
    if folder is None and root is not None:
        encoding = encoder_for(source, encoding, slides=root, out=out)
    headers, damaged = ({}, []) if folder is None else accepted_headers(folder, source)
    ids = None if folder is None else sorted([*headers, *(failure.item for failure in damaged)])
    people = find_newcomers(source.ensembles[0].task, table=table, spec=cohort, slides=root, ids=ids)
    target.claim(_config(source, people, headers, table=table, bags=folder, slides=ground))
    remove_leftovers(target.path)
    target.write_environment(environment(train.torch_device(), 1))
    wanted = {record.slide_id for record in people.cohort.records}
    failures = [failure for failure in damaged if failure.item in wanted]
    if folder is None and root is not None and source.bundle is not None:
        folder, failures = make_bags(
            source.bundle, root, out=out, table=table, cohort=cohort, encoding=encoding, workers=workers
        )
        headers = {} if folder is None else accepted_headers(folder, source)[0]
    if folder is None:
        return Summary(stage="predict", out=out, failures=tuple(failures))
    study = newcomer_study(people, BagStore(folder), headers)
    scored = _score_all(target, source, study, device=train.torch_device())
    failures += scored.failures
    _write(target, source, study, scored, ground)
    shifted = _write_shift(target, source.bundle.training, scored.measured) if source.bundle and scored.measured else []
    pictures = _draw(target, study, scored, ground) if heatmaps and ground is not None else []
    return Summary(
        stage="predict",
        out=out,
        done=scored.done,
        failures=(*failures, *pictures),
        notes=(*_notes(target, source, people, study, scored, root), *shifted),
    )


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """What came of the bags."""

    frames: tuple[pd.DataFrame, ...]
    done: tuple[str, ...]
    failures: tuple[Failure, ...]
    measured: tuple[Measured, ...]


def _what(data: Path | None, *, bags: Path | None, slides: Path | None) -> tuple[Path | None, Path | None]:
    """(slides, bags): which of them `data` is, by its content. Raises ConfigError where it is neither or both."""
    if data is None:
        if bags is None:
            raise ConfigError("name a folder of slides or of bags after the model.")
        return slides, bags
    if bags is not None:
        raise ConfigError(f"{data} and --bags {bags} are given; one of them is enough.")
    has_bags = data.is_dir() and bool(BagStore(data).ids())
    found = () if not data.exists() else find_slides(data).sources
    if has_bags == bool(found):
        both = "both slides and bags" if has_bags else "neither a slide nor a bag"
        raise ConfigError(f"{data} holds {both}. Give a folder of slides, or the folder that `wsi-mil encode` made.")
    if found and slides is not None:
        raise ConfigError(f"{data} holds slides, and --slides {slides} is given too; one of them is enough.")
    return (slides, data) if has_bags else (data, None)


def _config(
    source: Source,
    people: Newcomers,
    headers: Mapping[str, BagHeader],
    *,
    table: Path | None,
    bags: Path | None,
    slides: Path | None,
) -> dict[str, Any]:
    rows = [[h.slide_id, h.slide_fingerprint, h.params_digest, h.n] for h in headers.values()]
    task = source.config["task"]
    return {
        "kind": "predict",
        "version": __version__,
        "run": None if source.bundle else str(source.path),
        "bundle": source.bundle.digest if source.bundle else None,
        "table": str(table.resolve()) if table else None,
        "slides": str(slides.resolve()) if slides else None,
        "bags": str(bags.resolve()) if bags else None,
        "task": {**task, "level": people.task.level, "trained_level": task["level"]},
        "labelled": people.labelled,
        "labels_sha256": _digest(people.labels()) if table else None,
        "training_known": source.known is not None,
        "methods": list(source.config["methods"]),
        "models": {ensemble.label: list(ensemble.digests) for ensemble in source.ensembles},
        "combined": "mean over models",
        "encoder": source.config["encoder"],
        "bags_sha256": _digest(rows) if rows else None,
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _score_all(target: RunDir, source: Source, study: Study, *, device: torch.device) -> _Scored:
    frames: list[pd.DataFrame] = []
    measured: list[Measured] = []
    done: list[str] = []
    failures: list[Failure] = []
    with progress("predicting", len(study.items)) as bar:
        for item in study.items:
            try:
                slides = [study.store.bag(slide_id) for slide_id in item.slide_ids]
                bag = join_slides(slides, name=item.id)
                own = [_row(target, ensemble, study, item, bag, source, device) for ensemble in source.ensembles]
                seen = [_measure(source.bundle, study, slide) for slide in slides] if source.bundle else []
                frames += own
                measured += seen
                done.append(item.id)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                failures.append(Failure(item=item.id, outcome="failed", reason=reason))
            bar.advance(1, item.id)
    return _Scored(frames=tuple(frames), done=tuple(done), failures=tuple(failures), measured=tuple(measured))


def _row(
    target: RunDir, ensemble: Ensemble, study: Study, item: Item, bag: Bag, source: Source, device: torch.device
) -> pd.DataFrame:
    """The row of predictions.csv of one bag by one method; its tile scores are stored."""
    said = ensemble.say(bag, device)
    headers = [study.headers[slide_id] for slide_id in item.slide_ids]
    if ensemble.columns:
        for scores in split_by_slide(bag, said.tile_scores, headers, ensemble.columns):
            target.write_scores(ensemble.label, _KEY, scores)
    frame = prediction_frame([item], said.told, study.task, method=ensemble.label, key=_KEY)
    decisions = frame["target_name"].map(said.decisions)
    return frame.assign(decision=decisions, in_training=_in_training(source, item, headers))


def _in_training(source: Source, item: Item, headers: Sequence[BagHeader]) -> str:
    """By what this bag is known to be one that the models were trained on; empty where it is not."""
    known = source.known
    if known is None:
        return ""
    by = [("patient", known.holds("patient", item.patient))]
    by += [("slide", any(known.holds("slide", h.slide_id) for h in headers))]
    by += [("file", any(known.holds("fingerprint", h.slide_fingerprint) for h in headers))]
    return " ".join(name for name, found in by if found)


def _measure(bundle: Bundle, study: Study, bag: Bag) -> Measured:
    header = study.headers[bag.id]
    path = next(record.path for record in study.cohort.records if record.slide_id == bag.id)
    try:
        return domain_shift.measure(bag, header, path if bundle.training.stain else None)
    except SlideError:  # its features are measured nevertheless
        return domain_shift.measure(bag, header, None)


def _write(target: RunDir, source: Source, study: Study, scored: _Scored, slides: Path | None) -> None:
    """Everything beside the tile scores. One fold in which everybody is tested: the report needs no other."""
    write_frame(target.cohort_path, cohort_frame(study, slides))
    patients = tuple(sorted({item.patient for item in study.items}))
    write_frame(target.folds_path, folds_to_frame([Fold(repeat=0, fold=0, train=(), validation=(), test=patients)]))
    order = {ensemble.label: place for place, ensemble in enumerate(source.ensembles)}
    columns = [*prediction_columns(study.task), "decision", "in_training"]
    rows = pd.concat(scored.frames, ignore_index=True) if scored.frames else pd.DataFrame(columns=columns)
    places = np.argsort(rows["method"].map(order).to_numpy(dtype=np.int64), kind="stable")
    write_frame(target.predictions_path, rows.iloc[places])
    for ensemble in source.ensembles:
        write_frame(target.validation_path(ensemble.label, _KEY), rows.iloc[:0])
        target.write_selection(ensemble.label, _KEY, ensemble.selection)


def _write_shift(target: RunDir, training: domain_shift.Training, measured: Sequence[Measured]) -> list[str]:
    """How far the slides lie from the training slides: table, picture and words. Returns what the user should know."""
    found = domain_shift.compare(training, measured)
    said = domain_shift.sentences(training, found)
    write_frame(target.domain_shift_path, found)
    write_bytes(target.domain_shift_path.with_suffix(".png"), domain_shift.draw(training, found))
    write_text(target.domain_shift_path.with_suffix(".txt"), "".join(f"{line}\n" for line in said))
    unusual = int((found["unusual"] != "").sum())
    first = f"{unusual} of {len(found)} slides are unlike the training slides: see {target.domain_shift_path}."
    return [first, *said]


def _draw(target: RunDir, study: Study, scored: _Scored, slides: Path) -> list[Failure]:
    """Heatmaps of the slides whose file is known."""
    known = {record.slide_id for record in study.cohort.records if record.path}
    names = [name for item in study.items if item.id in scored.done for name in item.slide_ids if name in known]
    if not names:
        return []
    summary = heatmap(target.path, slides=slides, slide=names)
    return [replace(failure, outcome="no picture") for failure in summary.failures]


def _notes(
    target: RunDir, source: Source, people: Newcomers, study: Study, scored: _Scored, slides: Path | None
) -> list[str]:
    """What the user must know before trusting the means."""
    where = "" if slides else " --slides FOLDER"
    told = "labels stand beside them" if people.labelled else "labels are not known"
    following = f"wsi-mil report {target.path}" if people.labelled else f"wsi-mil view {target.path}{where}"
    notes = [
        f"Scores: {target.predictions_path}, each the mean over the models of a method; {told}. Next: {following}",
        *source.cautions,
        *people.cohort.warnings,
    ]
    if people.cohort.counts and not people.labelled:
        names = people.label_columns
        notes.append(
            f"The table has no label of {', '.join(names)}. Where a column has another name, map it: "
            f"{', '.join(f'columns.{name}' for name in names)}."
        )
    rows = pd.concat(scored.frames) if scored.frames else pd.DataFrame({"in_training": []})
    if source.known is None:
        notes.append(
            "Slides that the models were trained on cannot be recognised: the bundle was made without "
            "--patient-hashes. An empty cell in column in_training says nothing here."
        )
    own = rows[rows["in_training"] != ""]
    if len(own):
        unit = people.task.level
        items, name = own[["patient", "slide"]].drop_duplicates(), own[unit].iloc[0]
        notes.append(
            f"{len(items)} of {len(scored.done)} {unit}s, such as {name}, were trained on (column in_training). What "
            f"the models say of these is no test."
        )
    if people.task.level != source.config["task"]["level"]:
        notes.append("The models were trained on patients; here each slide is scored as a patient with one slide.")
    return notes if source.bundle is None else [*notes, *differences(source.bundle, study.headers)]
