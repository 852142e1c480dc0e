"""What a trained model says: an answer for each bag, scores for each tile. Always of all tiles."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from wsi_mil.bags import Bag, pack
from wsi_mil.errors import RunError
from wsi_mil.fitting.datasets import BagDataset, Item, read_ahead, values_of
from wsi_mil.heatmap import TileGeometry, TileScores
from wsi_mil.models._base import MILModel, StoredScores
from wsi_mil.runs import FoldKey
from wsi_mil.statistics.recalibration import Calibrator
from wsi_mil.store import BagHeader
from wsi_mil.targets import ClassTarget, Target
from wsi_mil.targets._base import Answers
from wsi_mil.tasks import Task

_FIXED = ["method", "target_name", "repeat", "fold", "seed", "level", "patient", "slide", "target"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model says of one bag."""

    logits: Tensor
    """(k,) as the model's head gives them."""
    tile_scores: NDArray[np.float32]
    """(tiles, columns) in the order of the bag."""


def answer_each(
    model: MILModel, dataset: BagDataset, *, device: torch.device, columns: Sequence[StoredScores] = ()
) -> Iterator[tuple[Bag, Answer]]:
    """Each bag of a dataset with the model's answer, in fp32 with all tiles; `columns` are the scores to keep."""
    for (bag,) in read_ahead(dataset, [[i] for i in range(len(dataset))]):
        yield bag, answer(model, bag, device=device, columns=columns)


def answer(model: MILModel, bag: Bag, *, device: torch.device, columns: Sequence[StoredScores] = ()) -> Answer:
    """What the model says of one bag. Its mode is restored. Raises RunError when that is no finite number."""
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        output = model(pack([bag]).to(device))
        scores = [model.instance_scores(output, c.kind, index=c.index).float().cpu().numpy() for c in columns]
        logits = output.logits[0].float().cpu()
    model.train(was_training)
    values = np.stack(scores, axis=1) if scores else np.empty((len(bag), 0))
    if not torch.isfinite(logits).all() or not np.isfinite(values).all():
        raise RunError(
            f"{bag.id}: the model's answer is not a finite number (its features reach {bag.features.abs().max():g}). "
            f"Look at this bag with `wsi-mil check`, or train with a smaller train.lr."
        )
    return Answer(logits=logits, tile_scores=values.astype(np.float32))


def stacked_logits(answers: Sequence[Answer]) -> Tensor:
    """(n, k) double. answers: at least one."""
    return torch.stack([found.logits for found in answers]).double()


def class_logits(answers: Sequence[Answer], task: Task) -> NDArray[np.float64]:
    """(n, classes) whatever the head; of a task with one target of classes."""
    return task.class_logits(stacked_logits(answers)).numpy() if answers else np.empty((0, len(task.classes)))


def probabilities(answers: Sequence[Answer], task: Task) -> NDArray[np.float64]:
    """(n, classes), rows sum to 1; of a task with one target of classes."""
    return task.probabilities(stacked_logits(answers)).numpy() if answers else np.empty((0, len(task.classes)))


def answers_by_target(answers: Sequence[Answer], task: Task) -> dict[str, Answers]:
    """Name of each target -> what one model says of each bag, in the columns of predictions.csv."""
    if not answers:
        return {t.name: {column: np.empty(0) for column in t.answer_columns()} for t in task.targets}
    return {target.name: target.answers(logits) for target, logits in task.own_logits(stacked_logits(answers))}


def calibrated(told: Answers, target: Target, calibrator: Calibrator | None) -> Answers:
    """The same, of a target with classes with `calibrated_<class>` beside each probability."""
    if not isinstance(target, ClassTarget):
        return told
    shares = np.stack([told[f"prob_{name}"] for name in target.classes], axis=1)
    shares = calibrator.apply(shares) if calibrator else shares
    return told | {f"calibrated_{name}": shares[:, i] for i, name in enumerate(target.classes)}


def prediction_frame(
    items: Sequence[Item], told: Mapping[str, Answers], task: Task, *, method: str, key: FoldKey
) -> pd.DataFrame:
    """The rows of predictions.csv: each item with each target. told: name of a target -> its answers."""
    values = values_of(items).reshape(len(items), task.n_values)
    frames = []
    for target, own in task.split(values):
        frame = pd.DataFrame(told[target.name])
        labels = pd.DataFrame([target.decode(row) for row in own], dtype=object)
        frame = pd.concat([labels, frame], axis=1)
        frame.insert(0, "target_name", target.name)
        frame.insert(1, "order", range(len(items)))
        frames.append(frame)
    rows = pd.concat(frames, ignore_index=True).sort_values("order", kind="stable", ignore_index=True)
    places = rows.pop("order").to_numpy(dtype=np.int64)
    rows = rows.assign(method=method, **key._asdict(), level=task.level)
    rows["patient"] = [items[i].patient for i in places]
    rows["slide"] = [items[i].slide_ids[0] if task.level == "slide" else "" for i in places]
    return rows.reindex(columns=prediction_columns(task))


def prediction_columns(task: Task) -> list[str]:
    """Names and order of the columns of predictions.csv."""
    named: dict[str, None] = dict.fromkeys(_FIXED)
    for target in task.targets:
        named |= dict.fromkeys(["event"] if target.n_values == 2 else [])
        named |= dict.fromkeys(target.answer_columns())
        named |= (
            dict.fromkeys(f"calibrated_{name}" for name in target.classes) if isinstance(target, ClassTarget) else {}
        )
    return list(named)


def split_by_slide(
    bag: Bag, values: NDArray[np.float32], headers: Sequence[BagHeader], columns: Sequence[StoredScores]
) -> Iterator[TileScores]:
    """The tile scores of each slide of a bag. headers: one a slide, in the order of `bag.slide_ids`."""
    slide_index = bag.slide_index.numpy()
    for i, header in enumerate(headers):
        rows = slide_index == i
        yield TileScores(
            slide_id=header.slide_id,
            slide_fingerprint=header.slide_fingerprint,
            geometry=geometry_of(header),
            coords_l0=bag.coords_l0.numpy()[rows],
            grid_xy=bag.grid_xy.numpy()[rows],
            columns=tuple(column.column for column in columns),
            values=values[rows],
        )


def geometry_of(header: BagHeader) -> TileGeometry:
    """Where the tiles of a bag lie."""
    return TileGeometry(
        level0_size=header.level0_size,
        mpp=header.mpp,
        tile_size_l0=header.tile_size_l0,
        stride_l0=header.stride_l0,
        origin_l0=header.origin_l0,
        bounds_l0=header.bounds_l0,
    )
