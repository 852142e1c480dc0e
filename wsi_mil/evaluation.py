"""What a trained model says: logits and probabilities of each bag, scores of each tile. Always of all tiles."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from wsi_mil.bags import Bag, pack
from wsi_mil.datasets import BagDataset, Item, read_ahead
from wsi_mil.errors import RunError
from wsi_mil.heatmap import TileGeometry, TileScores
from wsi_mil.models._base import MILModel, StoredScores
from wsi_mil.runs import FoldKey
from wsi_mil.store import BagHeader
from wsi_mil.tasks import Task


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


def class_logits(answers: Sequence[Answer], task: Task) -> NDArray[np.float64]:
    """(n, classes) whatever the head."""
    if not answers:
        return np.empty((0, len(task.classes)))
    return task.class_logits(torch.stack([a.logits for a in answers]).double()).numpy()


def probabilities(answers: Sequence[Answer], task: Task) -> NDArray[np.float64]:
    """(n, classes), rows sum to 1."""
    if not answers:
        return np.empty((0, len(task.classes)))
    return task.probabilities(torch.stack([a.logits for a in answers]).double()).numpy()


def prediction_rows(
    items: Sequence[Item], answers: Sequence[Answer], task: Task, *, method: str, key: FoldKey
) -> pd.DataFrame:
    """The rows of predictions.csv for these items and one model's answers."""
    logits, shares = class_logits(answers, task), probabilities(answers, task)
    return prediction_frame(items, logits, shares, task, method=method, key=key)


def prediction_frame(
    items: Sequence[Item],
    logits: NDArray[np.float64],
    shares: NDArray[np.float64],
    task: Task,
    *,
    method: str,
    key: FoldKey,
) -> pd.DataFrame:
    """The rows of predictions.csv. logits, shares: (n, classes)."""
    rows = []
    for item, item_logits, item_shares in zip(items, logits, shares, strict=True):
        row: dict[str, object] = {"method": method, "target_name": task.target, **key._asdict(), "level": task.level}
        row |= {"patient": item.patient, "slide": item.slide_ids[0] if task.level == "slide" else ""}
        row |= {"target": task.classes[item.label] if item.label >= 0 else ""}
        row |= {f"logit_{name}": float(v) for name, v in zip(task.classes, item_logits, strict=True)}
        row |= {f"prob_{name}": float(v) for name, v in zip(task.classes, item_shares, strict=True)}
        rows.append(row)
    return pd.DataFrame(rows, columns=prediction_columns(task.classes))


def prediction_columns(classes: Sequence[str]) -> list[str]:
    """Names and order of the columns of predictions.csv."""
    fixed = ["method", "target_name", "repeat", "fold", "seed", "level", "patient", "slide", "target"]
    return [*fixed, *(f"logit_{name}" for name in classes), *(f"prob_{name}" for name in classes)]


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
