"""Bags of other tools and forms, one form a file with `recognises(path)` and `read(path)`; files are the registry."""

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from wsi_mil.bag_header import BagHeader
from wsi_mil.errors import StoreError


@dataclass(frozen=True, kw_only=True, eq=False)
class ImportedBag:
    """One bag as the store takes it."""

    header: BagHeader
    features: NDArray[np.float32]
    """(n, d)."""
    coords_l0: NDArray[np.int64]
    """(n, 2) level-0 top left."""
    grid_xy: NDArray[np.int64]
    """(n, 2)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Imported:
    """What a file of another form holds."""

    bags: Callable[[], Iterator[ImportedBag]]
    table: pd.DataFrame
    """Cohort table: slide, patient, label."""
    folds: pd.DataFrame | None
    """In the columns of folds.csv, where the form has folds."""
    unknown: tuple[str, ...]
    """What the form does not say, in words."""


def read_foreign(path: Path) -> Imported:
    """What a file of a known form holds. Raises StoreError, naming the forms, for any other."""
    names = sorted(found.name for found in pkgutil.iter_modules(__path__))
    for name in names:
        module = import_module(f"{__name__}.{name}")
        if module.recognises(path):
            found: Imported = module.read(path)
            return found
    forms = "; ".join(f"{name} ({str(import_module(f'{__name__}.{name}').__doc__).splitlines()[0]})" for name in names)
    raise StoreError(f"{path}: not in a form that can be imported. Known: {forms}")
