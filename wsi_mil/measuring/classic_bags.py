"""Benchmark data of MIL that are no slides: bags of instances in one npz, with the folds that everybody shares.

Arrays: `features` (total, d), `bag_id` (total,) from 0 to b - 1, `bag_label` (b,), `train_mask` (repeats, folds, b) of
bool: what is not trained on in a fold is its test part.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray

from wsi_mil.bags import Bag
from wsi_mil.errors import StoreError
from wsi_mil.fitting.datasets import BagDataset, BagReader, Item
from wsi_mil.tasks import Task, class_task

_ARRAYS = {"features": 2, "bag_id": 1, "bag_label": 1, "train_mask": 3}


@dataclass(frozen=True, kw_only=True)
class ClassicBags:
    """One data set. See the module for the arrays."""

    name: str
    features: NDArray[np.float64]
    bag_id: NDArray[np.int64]
    labels: NDArray[np.int64]
    """(b,) index of each bag's class."""
    train_mask: NDArray[np.bool_]
    task: Task

    @cached_property
    def digest(self) -> str:
        """Of every number in it."""
        digest = hashlib.sha256()
        for values in (self.features, self.bag_id, self.labels, self.train_mask):
            digest.update(np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()

    @property
    def folds(self) -> list[tuple[int, int]]:
        """(repeat, fold) of each fold."""
        repeats, folds, _ = self.train_mask.shape
        return [(repeat, fold) for repeat in range(repeats) for fold in range(folds)]

    def datasets(self, repeat: int, fold: int) -> tuple[BagDataset, BagDataset]:
        """The bags of one fold, to train on and to test: standardised by what the training part alone knows.

        Test values beyond all that the training part holds are set to its ends: a feature that hardly varies there
        would otherwise lie thousands of standard deviations off in a test bag (12,000 in Tiger), and decide alone.
        """
        trained = self.train_mask[repeat, fold]
        known = self.features[trained[self.bag_id]]
        spread = known.std(axis=0)
        within = np.clip(self.features, known.min(axis=0), known.max(axis=0))
        standard = (within - known.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
        reader = _InMemory({f"{i:06d}": standard[self.bag_id == i] for i in range(len(self.labels))})
        items = [
            Item(id=name, patient=name, slide_ids=(name,), values=(float(label),))
            for name, label in zip(reader.names, self.labels, strict=True)
        ]
        train = [item for item, mine in zip(items, trained, strict=True) if mine]
        test = [item for item, mine in zip(items, trained, strict=True) if not mine]
        return BagDataset(reader, train), BagDataset(reader, test)


def read_classic(path: Path) -> ClassicBags:
    """Read and check one npz. Raises StoreError when it cannot be used."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in _ARRAYS if name in file}
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise StoreError(f"{path}: cannot be read as npz ({error}).") from None
    problem = _problem(arrays)
    if problem:
        shapes = "features (total, d), bag_id (total,), bag_label (b,), train_mask (repeats, folds, b)"
        raise StoreError(f"{path.name}: {problem}. Needed are the arrays {shapes}.")
    classes, labels = np.unique(arrays["bag_label"], return_inverse=True)
    return ClassicBags(
        name=path.stem,
        features=arrays["features"].astype(np.float64),
        bag_id=arrays["bag_id"].astype(np.int64),
        labels=labels.astype(np.int64),
        train_mask=arrays["train_mask"],
        task=class_task("bag_label", [str(value) for value in classes.tolist()]),
    )


class _InMemory(BagReader):
    """Bags that are no files. Instances have no place: they stand in a row, in the order of the data."""

    def __init__(self, features: dict[str, NDArray[np.float64]]) -> None:
        self.names = tuple(features)
        self.keeps = True
        self._bags = {name: _bag(name, rows) for name, rows in features.items()}

    def bag(self, slide_id: str) -> Bag:
        return self._bags[slide_id]


def _bag(name: str, rows: NDArray[np.float64]) -> Bag:
    places = torch.stack([torch.arange(len(rows)), torch.zeros(len(rows), dtype=torch.int64)], dim=1)
    return Bag(
        features=torch.from_numpy(rows.astype(np.float32)),
        coords_l0=places,
        grid_xy=places,
        slide_index=torch.zeros(len(rows), dtype=torch.int64),
        slide_ids=(name,),
        id=name,
    )


def _problem(arrays: dict[str, NDArray[np.generic]]) -> str | None:
    """What is wrong with the arrays, or None."""
    for name, dimensions in _ARRAYS.items():
        if name not in arrays:
            return f"there is no array {name}"
        if arrays[name].ndim != dimensions:
            return f"{name} has the shape {arrays[name].shape}"
    features, bag_id, labels, mask = (arrays[name] for name in _ARRAYS)
    if len(features) != len(bag_id) or mask.shape[2] != len(labels) or mask.dtype != np.bool_:
        return f"{len(features)} features, {len(bag_id)} bag_id, {len(labels)} bag_label, train_mask {mask.shape}"
    if not np.array_equal(np.unique(bag_id), np.arange(len(labels))):
        return f"bag_id does not name each of the bags 0 to {len(labels) - 1}"
    if not np.isfinite(features.astype(np.float64)).all():
        return "features are not all finite numbers"
    classes = set(np.unique(labels).tolist())
    for place in np.ndindex(mask.shape[:2]):
        if mask[place].all() or set(np.unique(labels[mask[place]]).tolist()) != classes or len(classes) < 2:
            return f"repeat {place[0]}, fold {place[1]} has no test bag, or not every class to train on"
    return None
