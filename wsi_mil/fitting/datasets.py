"""Labelled bags for training: which bags, read per access within a bound of memory, in which order and batches."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from wsi_mil.bags import Bag
from wsi_mil.errors import ConfigError
from wsi_mil.fitting.randomness import Stream
from wsi_mil.models._base import Objective
from wsi_mil.store import BagStore
from wsi_mil.targets._base import Balance

Cache = Literal["auto", "none", "ram"]
_AUTO_CACHE_BYTES = 2 * 1024**3


@dataclass(frozen=True, kw_only=True)
class Item:
    """One bag of a study: a slide, or all slides of a patient."""

    id: str
    patient: str
    slide_ids: tuple[str, ...]
    values: tuple[float, ...]
    """The labels of all targets one after the other, as `Task.encode` gives them; NaN where one is missing."""


class BagReader:
    """Bags by slide id. Holds no open file; keeps bags in memory only when it may. Can be pickled, without its memory.

    cache: "ram" keeps every bag that was read, "none" no bag, "auto" keeps them where all of them fit into 2 GiB.
    """

    def __init__(self, store: BagStore, *, cache: Cache = "none", total_bytes: int = 0) -> None:
        self.store = store
        self.keeps = cache == "ram" or (cache == "auto" and total_bytes <= _AUTO_CACHE_BYTES)
        self._kept: dict[str, Bag] = {}

    def bag(self, slide_id: str) -> Bag:
        """The whole bag of one slide."""
        if slide_id in self._kept:
            return self._kept[slide_id]
        bag = self.store.bag(slide_id)
        if self.keeps:
            self._kept[slide_id] = bag
        return bag

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": {}}


class BagDataset(Dataset[Bag]):
    """The bags of some items. Item i is read when it is asked for."""

    def __init__(self, reader: BagReader, items: Sequence[Item]) -> None:
        self.reader = reader
        self.items = tuple(items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Bag:
        item = self.items[index]
        return join_slides([self.reader.bag(slide_id) for slide_id in item.slide_ids], name=item.id)

    @property
    def values(self) -> NDArray[np.float64]:
        """(n, n_values) labels of each item."""
        return values_of(self.items)


def values_of(items: Sequence[Item]) -> NDArray[np.float64]:
    """(n, n_values) labels of some items."""
    if not items:
        return np.empty((0, 0))
    return np.array([item.values for item in items], dtype=np.float64)


def join_slides(bags: Sequence[Bag], *, name: str) -> Bag:
    """The slides of one patient, one after the other; `slide_index` says which tile is whose."""
    lengths = torch.tensor([len(bag) for bag in bags])
    if len(bags) == 1 and bags[0].id == name:
        return bags[0]
    return Bag(
        features=torch.cat([bag.features for bag in bags]) if len(bags) > 1 else bags[0].features,
        coords_l0=torch.cat([bag.coords_l0 for bag in bags]),
        grid_xy=torch.cat([bag.grid_xy for bag in bags]),
        slide_index=torch.repeat_interleave(torch.arange(len(bags)), lengths),
        slide_ids=tuple(bag.slide_ids[0] for bag in bags),
        id=name,
    )


def plan_epoch(
    labels: NDArray[np.int64], *, bags_per_step: int, balance: Balance, both_classes: bool, seed: int, epoch: int
) -> list[list[int]]:
    """The batches of one epoch: indices into `labels`. A pure function of its arguments.

    balance "sampler": as many draws as there are items, equally many of each class, as few repetitions as that allows.
    both_classes: each batch holds every class; rare ones are repeated, and a batch may hold a few bags more.
    """
    rng = np.random.default_rng([seed, epoch, Stream.ORDER])
    groups = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    if balance == "sampler":
        share = -(-len(labels) // len(groups))
        groups = [_cycled(group, share, rng) for group in groups]
    if both_classes:
        return _deal(groups, bags_per_step, rng)
    order = rng.permutation(np.concatenate(groups))
    return [order[i : i + bags_per_step].tolist() for i in range(0, len(order), bags_per_step)]


def sample_tiles(bag: Bag, cap: int | None, *, seed: int, epoch: int, position: int) -> Bag:
    """At most `cap` tiles of a bag, drawn without replacement, in their old order."""
    if cap is None or len(bag) <= cap:
        return bag
    rng = np.random.default_rng([seed, epoch, Stream.TILES, position])
    return bag.take(torch.from_numpy(np.sort(rng.choice(len(bag), size=cap, replace=False))))


def read_ahead(dataset: BagDataset, batches: Sequence[Sequence[int]]) -> Iterator[list[Bag]]:
    """The bags of each batch; the next batch is read while the caller works on this one."""
    if dataset.reader.keeps:
        yield from ([dataset[i] for i in batch] for batch in batches)
        return
    with ThreadPoolExecutor(max_workers=1) as thread:
        waiting = None
        for batch in [*batches, None]:
            upcoming = None if batch is None else thread.submit(lambda b: [dataset[i] for i in b], batch)
            if waiting is not None:
                yield waiting.result()
            waiting = upcoming


def check_batches(*, bags_per_step: int, n_classes: int, objective: Objective) -> None:
    """Raise ConfigError when a method needs every class in each step and the step is too small for it."""
    if objective.needs_both_classes and bags_per_step < n_classes:
        raise ConfigError(
            f"train.bags_per_step is {bags_per_step}, but this method compares bags of different classes in each step; "
            f"it needs at least {n_classes}."
        )


def _cycled(group: NDArray[np.int64], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    rounds = [group, *(rng.permutation(group) for _ in range(-(-count // len(group)) - 1))]
    return np.concatenate(rounds)[:count]


def _deal(groups: list[NDArray[np.int64]], bags_per_step: int, rng: np.random.Generator) -> list[list[int]]:
    n_batches = -(-sum(map(len, groups)) // bags_per_step)
    batches: list[list[int]] = [[] for _ in range(n_batches)]
    turn = 0
    for group in groups:
        for index in _cycled(group, max(len(group), n_batches), rng).tolist():
            batches[turn % n_batches].append(index)
            turn += 1
    return batches
