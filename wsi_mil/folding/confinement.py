"""Labels and sites that stand on one side of a fold only, and how far labels and sites go together. Pure: no files.

A model that is tested on another site than it learnt from has met new scanners and stains; one that learnt a site where
every patient has the same label may have learnt the site. Neither is an error, both must be known to read a figure.
A patient of several labels counts for each of them, but in the association once, with the set of its labels.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from wsi_mil.folding.folds import PARTS, Fold

NO_SITE = ""


@dataclass(frozen=True, kw_only=True)
class Confined:
    """A label or site that a fold does not train on, or does not test."""

    repeat: int
    fold: int
    kind: Literal["label", "site"]
    name: str
    parts: tuple[str, ...]
    """Where it stands, of train, validation and test, in this order; empty where the fold has none of it."""
    patients: int
    """Patients of the fold that have it."""

    @property
    def learnt(self) -> bool:
        """Whether the training part holds it. A label that is not learnt cannot be told."""
        return "train" in self.parts

    @property
    def tested(self) -> bool:
        """Whether the test part holds it. A label that is not tested has figures that are not defined."""
        return "test" in self.parts


@dataclass(frozen=True, kw_only=True)
class Association:
    """How far labels and sites go together, over the patients whose site is known."""

    cramers_v: float
    """From 0 (independent) to 1 (one tells the other); nan with less than two sites or labels."""
    corrected_v: float
    """The same without the bias of few patients in many cells, which alone may make 0.5 of 0 (Bergsma 2013); nan
    also where the patients are too few to correct."""
    n: int
    """Patients."""
    sites: tuple[str, ...]
    labels: tuple[str, ...]
    """Labels, or sets of labels joined with "+"."""
    one_label_sites: tuple[str, ...]
    """Sites all of whose patients have the same, where the cohort has several labels."""
    one_site_labels: tuple[str, ...]
    """Labels that one site alone has, where there are several sites."""


def confinement(
    folds: Sequence[Fold],
    classes_of: Mapping[str, Collection[str]],
    sites: Mapping[str, str | None] | None = None,
) -> tuple[Confined, ...]:
    """Every label and site of the cohort that a fold does not both train on and test, fold by fold, labels first.

    classes_of: patient -> its labels.  sites: patient -> site; who has none ("" or None) is left out. Folds by site
    confine every site, as they should. Folds that test nobody (`train`) say nothing about tests and give no record.
    """
    kinds: tuple[tuple[Literal["label", "site"], Mapping[str, Collection[str]]], ...] = (
        ("label", classes_of),
        ("site", {patient: (site,) for patient, site in (sites or {}).items() if site}),
    )
    found = []
    for fold in folds:
        if not fold.test:
            continue
        for kind, names_of_patient in kinds:
            for name in sorted({name for names in names_of_patient.values() for name in names}):
                holders = {p for p, names in names_of_patient.items() if name in names}
                in_part = {part: len(holders.intersection(getattr(fold, part))) for part in PARTS}
                if in_part["train"] and in_part["test"]:
                    continue
                found.append(
                    Confined(
                        repeat=fold.repeat,
                        fold=fold.fold,
                        kind=kind,
                        name=name,
                        parts=tuple(part for part in PARTS if in_part[part]),
                        patients=sum(in_part.values()),
                    )
                )
    return tuple(found)


def balance_frame(
    folds: Sequence[Fold],
    classes_of: Mapping[str, Collection[str]],
    sites: Mapping[str, str | None] | None = None,
) -> pd.DataFrame:
    """Patients of each label, by fold, part and site: columns repeat, fold, part, site, label, patients.

    A row for each combination that somebody has; `site` is "" where it is not known.
    """
    counts = Counter(
        (fold.repeat, fold.fold, PARTS.index(part), (sites or {}).get(patient) or NO_SITE, label)
        for fold in folds
        for part in PARTS
        for patient in getattr(fold, part)
        for label in set(classes_of.get(patient, ()))
    )
    rows = [(r, f, PARTS[part], site, label, n) for (r, f, part, site, label), n in sorted(counts.items())]
    return pd.DataFrame(rows, columns=["repeat", "fold", "part", "site", "label", "patients"])


def site_label_association(classes_of: Mapping[str, Collection[str]], sites: Mapping[str, str | None]) -> Association:
    """Cramer's V of site and label over patients. classes_of: patient -> its labels.  sites: patient -> site."""
    pairs = [
        (site, "+".join(sorted(set(labels)))) for p, labels in classes_of.items() if labels and (site := sites.get(p))
    ]
    names = sorted({site for site, _ in pairs})
    labels = sorted({label for _, label in pairs})
    table = np.zeros((len(names), len(labels)))
    for site, label in pairs:
        table[names.index(site), labels.index(label)] += 1
    plain, corrected = _cramers_v(table)
    return Association(
        cramers_v=plain,
        corrected_v=corrected,
        n=len(pairs),
        sites=tuple(names),
        labels=tuple(labels),
        one_label_sites=tuple(_lonely(names, table)) if len(labels) > 1 else (),
        one_site_labels=tuple(_lonely(labels, table.T)) if len(names) > 1 else (),
    )


def _lonely(names: Sequence[str], table: np.ndarray) -> Iterator[str]:
    """Names whose row of the table has a single cell that is not 0."""
    return (name for name, row in zip(names, table, strict=True) if (row > 0).sum() == 1)


def _cramers_v(table: np.ndarray) -> tuple[float, float]:
    """Cramer's V of a table of counts (rows, columns) without empty rows and columns, and Bergsma's corrected one.

    Bergsma 2013, J. Korean Stat. Soc. 42:323, eqs. for phi~, r~ and c~.
    """
    rows, columns = table.shape
    n = float(table.sum())
    if min(rows, columns) < 2:
        return float("nan"), float("nan")
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / n
    phi2 = float(((table - expected) ** 2 / expected).sum()) / n
    plain = (phi2 / (min(rows, columns) - 1)) ** 0.5
    less_rows = rows - (rows - 1) ** 2 / (n - 1)
    less_columns = columns - (columns - 1) ** 2 / (n - 1)
    freedom = min(less_rows, less_columns) - 1
    if freedom <= 0:
        return plain, float("nan")
    return plain, (max(0.0, phi2 - (rows - 1) * (columns - 1) / (n - 1)) / freedom) ** 0.5
