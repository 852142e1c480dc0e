"""Slides from outside as a study: for a task that is settled, with labels where a table has them."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wsi_mil.bundle import Bundle
from wsi_mil.cohort import Cohort, CohortSpec, SlideRecord, find_sources, read_cohort
from wsi_mil.errors import CohortError, StoreError, UserError
from wsi_mil.outcomes import Failure
from wsi_mil.store import BagHeader, BagStore
from wsi_mil.study import Study, items_of
from wsi_mil.table.labels import is_labelled
from wsi_mil.targets import ClassTarget, Target
from wsi_mil.tasks import Task
from wsi_mil.transfer.ensembles import Source

_TILE_UM_TOLERANCE = 0.02
_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Newcomers:
    """Who is to be scored, before any bag is opened."""

    cohort: Cohort
    task: Task
    """At level patient only where a table says whose the slides are."""

    @property
    def label_columns(self) -> list[str]:
        """Columns of the table that hold labels."""
        return [column for target in self.task.targets for column in target.columns]

    @property
    def labelled(self) -> bool:
        """Whether any slide has a label."""
        return any(is_labelled(self.task, record.values) for record in self.cohort.records)

    def labels(self) -> list[list[Any]]:
        """Of every slide: id, patient and the cells of its labels."""
        columns, records = self.label_columns, self.cohort.records
        return [[r.slide_id, r.patient, *(r.values.get(column) for column in columns)] for r in records]


def find_newcomers(
    task: Task, *, table: Path | None, spec: CohortSpec, slides: Path | None, ids: Sequence[str] | None
) -> Newcomers:
    """Those of the table, else all of the slides or bags, each a patient of its own.

    ids: the bags that there are; None when they are yet to be made from `slides`. Raises CohortError for a table that
    cannot be read, a label that is none of the task's, and at level patient for a patient with two.
    """
    if table is not None:
        by_bags = None if ids is None or slides is not None else ids
        cohort = read_cohort(table, spec, slides=slides, known_ids=by_bags)
        _refuse_foreign(task, cohort.records, spec)
        _refuse_conflicts(task, cohort.records)
        return Newcomers(cohort=cohort, task=task)
    alone = replace(task, level="slide")
    sources = () if slides is None else find_sources(slides, None, spec)[0]
    paths = {source.slide_id: source.path for source in sources}
    names = list(paths) if ids is None else ids
    records = tuple(SlideRecord(slide_id=name, patient=name, path=paths.get(name)) for name in names)
    return Newcomers(cohort=Cohort(records=records), task=alone)


def newcomer_study(people: Newcomers, store: BagStore, headers: Mapping[str, BagHeader]) -> Study:
    """The bags of those who have one, labelled or not."""
    used = [record for record in people.cohort.records if record.slide_id in headers]
    status = {gone.item: gone.reason for gone in people.cohort.excluded}
    status |= {r.slide_id: "used" if r.slide_id in headers else "no bag" for r in people.cohort.records}
    return Study(
        cohort=people.cohort,
        task=people.task,
        balance="none",
        store=store,
        headers={record.slide_id: headers[record.slide_id] for record in used},
        items=items_of(used, people.task),
        status=status,
    )


def accepted_headers(folder: Path, source: Source) -> tuple[dict[str, BagHeader], list[Failure]]:
    """Headers of the bags, by slide id, and the bags that are damaged.

    Raises StoreError where no bag can be read, or one is of another contract.
    """
    headers, damaged = _read_headers(BagStore(folder))
    if not headers and not damaged:
        raise StoreError(f"{folder} holds no bag. Give the folder that `wsi-mil encode` made (bags_...).")
    if not headers:
        raise StoreError(
            f"{folder}: none of the {len(damaged)} bags can be read, such as {damaged[0].reason} Give the folder that "
            f"`wsi-mil encode` made (bags_...)."
        )
    contract = source.config["encoder"]["contract"]
    odd = {name: found for name, h in headers.items() if (found := _departures(h.contract, contract))}
    if odd:
        shown = "; ".join(f"{name} ({', '.join(found)})" for name, found in list(odd.items())[:_SHOWN])
        cure = "Tile and encode these slides with the settings in that run's config.yaml (encoder)."
        if source.bundle is not None:
            cure = "Give the slides instead: they are then tiled and encoded as the bundle demands."
        raise StoreError(
            f"{len(odd)} of {len(headers)} bags were made otherwise than the bags of {source.path}: {shown}. {cure}"
        )
    return headers, damaged


def _read_headers(store: BagStore) -> tuple[dict[str, BagHeader], list[Failure]]:
    headers, damaged = {}, []
    for slide_id in store.ids():
        try:
            headers[slide_id] = store.header(slide_id)
        except Exception as error:  # what h5py raises on a damaged file depends on the damage
            told = str(error) if isinstance(error, UserError) else f"{slide_id}: {type(error).__name__}: {error}."
            damaged.append(Failure(item=slide_id, outcome="failed", reason=told))
    return headers, damaged


def differences(bundle: Bundle, headers: Mapping[str, BagHeader]) -> list[str]:
    """What may differ between bags of one contract, and yet changes features a little."""
    notes = []
    precision = bundle.facts["encoder"]["precision"]
    others = sorted({header.precision for header in headers.values()} - {precision})
    if others:
        notes.append(f"There are bags encoded in {', '.join(others)}; the training bags were in {precision}.")
    wished = bundle.facts["tiles"]
    other = [] if wished is None else [h for h in headers.values() if h.tiles and json.loads(h.tiles) != wished]
    if other:
        own = json.loads(other[0].tiles)
        changed = ", ".join(f"{n} {v} instead of {wished.get(n)}" for n, v in own.items() if v != wished.get(n))
        notes.append(
            f"{len(other)} bags, such as {other[0].slide_id}, were tiled otherwise than the training bags: {changed}."
        )
    return notes


def _departures(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    found = [f"{n} {ours[n]}, the model's {theirs[n]}" for n in ours if n != "tile_um" and ours[n] != theirs[n]]
    if abs(ours["tile_um"] - theirs["tile_um"]) > _TILE_UM_TOLERANCE * theirs["tile_um"]:
        found.append(f"tile_um {ours['tile_um']:g}, the model's {theirs['tile_um']:g}")
    return found


def _refuse_foreign(task: Task, records: Sequence[SlideRecord], spec: CohortSpec) -> None:
    """Raise CohortError with all labels that are none of the classes, of every target."""
    told = []
    for target in task.targets:
        if not isinstance(target, ClassTarget):
            continue
        cells = Counter(cell for record in records if (cell := record.values.get(target.name)) is not None)
        foreign = {cell: n for cell, n in cells.most_common() if not _is_label(target, cell)}
        if foreign:
            words = ", ".join(_told_word(cell, n, target) for cell, n in foreign.items())
            told.append(
                f"column {spec.columns.get(target.name, target.name)!r}: {sum(foreign.values())} of {cells.total()} "
                f"labels are none of the classes {', '.join(target.classes)}: {words}."
            )
    if told:
        raise CohortError(
            f"{' '.join(told)} Classes are matched by exact spelling. Change these cells to a class, or empty them: "
            f"a slide without a label is scored nevertheless."
        )


def _is_label(target: Target, cell: str) -> bool:
    try:
        target.encode({target.name: cell})
    except CohortError:
        return False
    return True


def _told_word(cell: str, count: int, target: ClassTarget) -> str:
    alike = [name for name in target.classes if name.casefold() == cell.casefold()]
    return f"{cell!r} ({count}{f'; only the case differs from {alike[0]!r}' if alike else ''})"


def _refuse_conflicts(task: Task, records: Sequence[SlideRecord]) -> None:
    """Raise CohortError for a cell that is no label, and at level patient for patients with several labels."""
    found: dict[tuple[str, int], set[float]] = {}
    for record in records:
        for place, value in enumerate(task.encode(record.values)):
            found.setdefault((record.patient, place), set()).update(() if math.isnan(value) else (value,))
    several = sorted({patient for (patient, _), values in found.items() if len(values) > 1})
    if task.level == "patient" and several:
        raise CohortError(
            f"column {task.target!r}: {len(several)} of {len({patient for patient, _ in found})} patients have slides "
            f"with different labels, such as {several[0]}. The models were trained on patients with one label each: "
            f"correct the table."
        )
