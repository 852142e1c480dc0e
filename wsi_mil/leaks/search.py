"""The search for leaks: every pair of slides is compared, and each likeness is judged by where the folds have the two.

Costs one reading of all thumbnails and bags (wsi_mil.leaks.sketches), which is kept; then seconds for thousands of
slides, and the reading of two bags for each pair that may share tiles. Memory: the two largest bags as float32.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from wsi_mil.bag_header import BagHeader
from wsi_mil.errors import StoreError
from wsi_mil.folding.confinement import confinement, site_label_association
from wsi_mil.folding.folds import PARTS, Fold
from wsi_mil.leaks.leakage import (
    SEVERITIES,
    Kind,
    LeakageAudit,
    LeakageFinding,
    Severity,
    Side,
    Sketches,
    read_sketches,
    write_leakage,
)
from wsi_mil.leaks.likeness import PICTURE_BITS, picture_pairs, signature_pairs, twin_share
from wsi_mil.leaks.sketches import bits_of, signature_of, sketch_slides
from wsi_mil.table.records import SlideRecord

if TYPE_CHECKING:
    from wsi_mil.store import BagStore

_SURE_SHARE, _SURE_TILES = 0.95, 16
"""From here on tiles alone are proof. Smaller bags may be told apart by too little."""
_DOUBT_SHARE, _DOUBT_TILES = 0.1, 4
_MOST = 500
"""Pairs of each kind that are judged, those of two patients first: a cohort full of copies must not fill the disk."""

Slides = tuple[str, ...]
"""Two slide ids."""


def audit_before(
    path: Path,
    *,
    records: Sequence[SlideRecord],
    headers: Mapping[str, BagHeader],
    store: "BagStore",
    folds: Sequence[Fold],
    classes_of: Mapping[str, Collection[str]],
    workers: int = 4,
) -> LeakageAudit:
    """Audit a study and write what was found to `path`; what an earlier audit there has read is not read again.

    records: the cohort's slides; of those with a `path` the pictures are compared.  headers: slide id -> header, of
    the slides that take part.  classes_of: patient -> its labels.  workers: slides that are read at the same time.
    """
    used = [record for record in records if record.slide_id in headers]
    sketches, problems = sketch_slides(
        used,
        headers,
        store,
        known=read_sketches(path),
        save=lambda so_far: write_leakage(path, None, so_far),
        workers=workers,
    )
    search = _Search.of(used, folds)
    found = [*search.shared_patients(), *find_same_slides(used, headers, folds)]
    settled = {finding.slides for finding in found}
    tiles, tiles_left = search.same_tiles(sketches, store, settled)
    settled |= {finding.slides for finding in tiles}
    pictures, pictures_left = search.same_pictures(sketches, settled)
    found += [*tiles, *pictures]
    sites = {record.patient: record.site for record in used}
    audit = LeakageAudit(
        findings=tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))),
        slides=len(used),
        patients=len(sites),
        fingerprints=sum(bool(sketch.fingerprint) for sketch in sketches.values()),
        pictures=sum(bool(sketch.picture) for sketch in sketches.values()),
        bags=sum(bool(sketch.signature) for sketch in sketches.values()),
        left_out=tiles_left + pictures_left,
        not_compared=problems,
        confined=confinement(folds, classes_of, sites),
        association=site_label_association(classes_of, sites),
    )
    write_leakage(path, audit, sketches)
    return audit


def find_same_slides(
    records: Iterable[SlideRecord], headers: Mapping[str, BagHeader], folds: Sequence[Fold]
) -> list[LeakageFinding]:
    """Slides of the same file under two names, by the headers of their bags alone: milliseconds."""
    search = _Search.of([record for record in records if record.slide_id in headers], folds)
    groups: dict[str, list[str]] = {}
    for slide_id in sorted(search.patient_of):
        groups.setdefault(headers[slide_id].slide_fingerprint, []).append(slide_id)
    pairs = [pair for name, group in sorted(groups.items()) if name for pair in combinations(group, 2)]
    kept, _ = search.most_telling(pairs, settled=set())
    return [search.judge("same slide", pair, certain=True, value=None, what="are the same file") for pair in kept]


@dataclass(frozen=True, kw_only=True)
class _Search:
    """Whose slides they are, and in which part of each fold everybody is."""

    patient_of: Mapping[str, str]
    parts: tuple[tuple[Fold, Mapping[str, str]], ...]
    """Each fold with patient -> part."""

    @classmethod
    def of(cls, records: Iterable[SlideRecord], folds: Sequence[Fold]) -> Self:
        return cls(
            patient_of={record.slide_id: record.patient for record in records},
            parts=tuple((fold, {p: part for part in PARTS for p in getattr(fold, part)}) for fold in folds),
        )

    def shared_patients(self) -> list[LeakageFinding]:
        """Patients in two parts of a fold."""
        shared: dict[str, list[Side]] = {}
        for fold, _ in self.parts:
            for one, other in combinations(PARTS, 2):
                for patient in sorted(set(getattr(fold, one)) & set(getattr(fold, other))):
                    side = Side(repeat=fold.repeat, fold=fold.fold, parts=(one, other))
                    shared.setdefault(patient, []).append(side)
        return [
            LeakageFinding(
                kind="same patient",
                severity="leak" if any("test" in side.parts for side in sides) else "suspicious",
                slides=(),
                patients=(patient,),
                sides=tuple(sides),
                value=None,
                reason=f"patient {patient} is in two parts of fold {sides[0].fold}",
            )
            for patient, sides in sorted(shared.items())
        ]

    def same_tiles(
        self, sketches: Sketches, store: "BagStore", settled: Collection[Slides]
    ) -> tuple[list[LeakageFinding], int]:
        """Bags that share tiles, and how many pairs were not compared."""
        names = [slide_id for slide_id, sketch in sketches.items() if sketch.signature]
        if len(names) < 2:
            return [], 0
        alike = signature_pairs(np.stack([signature_of(sketches[name]) for name in names]))
        kept, left = self.most_telling([(names[i], names[j]) for i, j in alike], settled)
        found = []
        for pair in kept:
            try:
                share, count = twin_share([store.bag(name).features.numpy() for name in pair])
            except StoreError:  # lost since it was sketched; training will say so
                continue
            if share >= _DOUBT_SHARE and count >= _DOUBT_TILES:
                certain = share >= _SURE_SHARE and count >= _SURE_TILES
                what = f"share {share:.0%} of the {count} tiles that were compared"
                found.append(self.judge("same tiles", pair, certain=certain, value=round(share, 4), what=what))
        return found, left

    def same_pictures(self, sketches: Sketches, settled: Collection[Slides]) -> tuple[list[LeakageFinding], int]:
        """Slides that look alike, and how many pairs beyond the limit."""
        names = [slide_id for slide_id, sketch in sketches.items() if sketch.picture]
        if len(names) < 2:
            return [], 0
        alike = picture_pairs(np.stack([bits_of(sketches[name]) for name in names]))
        apart: dict[Slides, int] = {(names[i], names[j]): distance for i, j, distance in alike}
        kept, left = self.most_telling(list(apart), settled)
        what = "look alike, perhaps turned or mirrored ({} of {} bits apart)"
        return [
            self.judge(
                "same picture",
                pair,
                certain=False,
                value=float(apart[pair]),
                what=what.format(apart[pair], PICTURE_BITS),
            )
            for pair in kept
        ], left

    def most_telling(self, pairs: Sequence[Slides], settled: Collection[Slides]) -> tuple[list[Slides], int]:
        """The pairs that are not settled, those of two patients first, up to the limit; and how many are beyond it."""
        fresh = [pair for pair in pairs if pair not in settled]
        fresh.sort(key=lambda pair: self.patient_of[pair[0]] == self.patient_of[pair[1]])
        return fresh[:_MOST], len(fresh[_MOST:])

    def judge(self, kind: Kind, slides: Slides, *, certain: bool, value: float | None, what: str) -> LeakageFinding:
        """What it means that these two slides are the same (`certain`), or may be."""
        patients = (self.patient_of[slides[0]], self.patient_of[slides[1]])
        sides = self._sides(patients)
        severity: Severity = "suspicious"
        if patients[0] == patients[1]:
            severity, who = "note", f"{slides[0]} and {slides[1]} of patient {patients[0]}"
        else:
            severity = "leak" if certain and any("test" in side.parts for side in sides) else "suspicious"
            who = f"{slides[0]} (patient {patients[0]}) and {slides[1]} (patient {patients[1]})"
        return LeakageFinding(
            kind=kind,
            severity=severity,
            slides=slides,
            patients=patients,
            sides=sides,
            value=value,
            reason=f"{who} {what}{self._where(sides)}",
        )

    def _sides(self, patients: tuple[str, str]) -> tuple[Side, ...]:
        sides = []
        for fold, part_of in self.parts:
            parts = (part_of.get(patients[0], ""), part_of.get(patients[1], ""))
            if all(parts) and parts[0] != parts[1]:
                sides.append(Side(repeat=fold.repeat, fold=fold.fold, parts=parts))
        return tuple(sides)

    def _where(self, sides: Sequence[Side]) -> str:
        tested = sum("test" in side.parts for side in sides)
        return f"; {tested} of {len(self.parts)} folds test one of the two and not the other" if tested else ""
