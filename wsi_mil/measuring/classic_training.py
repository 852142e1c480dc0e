"""One model on one fold of classic MIL data: trained, its number of epochs chosen inside the training part, tested."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from wsi_mil import __version__
from wsi_mil.fitting.datasets import BagDataset
from wsi_mil.fitting.evaluation import answer_each, probabilities
from wsi_mil.fitting.randomness import Stream, derive_seed
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.measuring.classic_bags import ClassicBags
from wsi_mil.methods import MethodSpec, build
from wsi_mil.models._base import MILModel
from wsi_mil.statistics.ranking import macro, one_vs_rest_auc
from wsi_mil.study import method_config
from wsi_mil.training import FitFiles, fit, weights_seed

Choose = Literal["none", "epochs"]
_INNER_SHARE = 0.25


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassicJob:
    """One model to train and test. Travels to another process."""

    bags: ClassicBags
    method: MethodSpec
    train: TrainSpec
    choose: Choose
    repeat: int
    fold: int
    seed: int

    @property
    def name(self) -> str:
        """As it is listed."""
        return f"{self.bags.name} {self.method.shown} r{self.repeat}_f{self.fold}_s{self.seed}"

    @property
    def settings(self) -> str:
        """A digest of all that makes the result but repeat, fold and seed."""
        made_of = {
            "method": method_config(self.method),
            "train": asdict(replace(self.train, seeds=())),
            "choose": self.choose,
            "bags": self.bags.digest,
            "version": __version__,
        }
        return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class ClassicRow:
    """What one model reached on its test part."""

    dataset: str
    method: str
    repeat: int
    fold: int
    seed: int
    epochs: int
    """Of the model that was tested."""
    test_bags: int
    accuracy: float
    auc: float


def train_and_test(job: ClassicJob) -> ClassicRow:
    """Train on the training part of the fold, test once on the rest."""
    task = job.bags.task
    train, test = job.bags.datasets(job.repeat, job.fold)
    epochs = job.train.epochs if job.choose == "none" else chosen_epochs(job, train)
    model, _ = _fitted(job, train, BagDataset(train.reader, ()), stop_after=epochs)
    answers = [found for _, found in answer_each(model, test, device=job.train.torch_device())]
    shares, labels = probabilities(answers, task), task.labels(test.values)
    aucs = one_vs_rest_auc(labels, shares)
    return ClassicRow(
        dataset=job.bags.name,
        method=job.method.shown,
        repeat=job.repeat,
        fold=job.fold,
        seed=job.seed,
        epochs=epochs,
        test_bags=len(test),
        accuracy=float((shares.argmax(axis=1) == labels).mean()),
        auc=float(aucs[-1]) if task.kind == "binary" else macro(aucs),
    )


def chosen_epochs(job: ClassicJob, train: BagDataset) -> int:
    """The epoch of least loss on a quarter of the training part, while the other three are trained on.

    At most train.epochs. The whole part is then trained on the same schedule, and stopped there.
    """
    held = held_out(job.bags.task.labels(train.values), seed=derive_seed(job.seed, job.repeat, job.fold, Stream.INNER))
    kept = [item for item, out in zip(train.items, held, strict=True) if not out]
    watched = [item for item, out in zip(train.items, held, strict=True) if out]
    inner, validation = BagDataset(train.reader, kept), BagDataset(train.reader, watched)
    _, log = _fitted(job, inner, validation, stop_after=None)
    return int(log.loc[log["val_loss"].idxmin(), "epoch"])


def held_out(labels: NDArray[np.int64], *, seed: int) -> NDArray[np.bool_]:
    """(n,) a quarter of each class, drawn at random; at least one bag of each stays. labels: (n,)."""
    rng = np.random.default_rng(seed)
    held = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        mine = rng.permutation(np.flatnonzero(labels == label))
        held[mine[: min(round(_INNER_SHARE * len(mine)), len(mine) - 1)]] = True
    return held


def _fitted(
    job: ClassicJob, train: BagDataset, validation: BagDataset, *, stop_after: int | None
) -> tuple[MILModel, pd.DataFrame]:
    """A model after its last epoch, and its log. validation: watched, never chosen by."""
    task, seed = job.bags.task, derive_seed(job.seed, job.repeat, job.fold)
    model, objective = build(job.method, in_dim=job.bags.features.shape[1], task=task, seed=weights_seed(seed))
    with TemporaryDirectory() as folder:
        files = FitFiles(resume=Path(folder) / "resume.ckpt", log=Path(folder) / "log.csv")
        fit(
            model,
            objective,
            task=task,
            train=train,
            validation=validation,
            spec=job.train,
            balance="none",
            seed=seed,
            files=files,
            stop_after=stop_after,
        )
        return model, pd.read_csv(files.log)
