"""A study: the labelled bags of a cohort, and what a run folder says about them."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from wsi_mil import __version__
from wsi_mil.bag_header import NO_SLIDE
from wsi_mil.cohort import Cohort, CohortSpec, SlideRecord, read_cohort, sites_of_patients
from wsi_mil.errors import CohortError, StoreError
from wsi_mil.fitting.datasets import Item, values_of
from wsi_mil.methods import MethodSpec
from wsi_mil.splits import Fold, folds_to_frame
from wsi_mil.store import BagHeader, BagStore, check_one_contract
from wsi_mil.table.labels import is_labelled, resolve_task
from wsi_mil.targets import Cells, ClassTarget
from wsi_mil.targets._base import Balance, labelled
from wsi_mil.tasks import Task, TaskSpec

_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Study:
    """The bags that take part, with their labels."""

    cohort: Cohort
    task: Task
    balance: Balance
    store: BagStore
    headers: Mapping[str, BagHeader]
    """Slide id -> header, of the slides that take part."""
    items: tuple[Item, ...]
    """Sorted by id."""
    status: Mapping[str, str]
    """Slide or row -> "used", or why it does not take part."""

    @property
    def values(self) -> NDArray[np.float64]:
        """(items, n_values) all labels."""
        return values_of(self.items)

    @property
    def classes_of(self) -> dict[str, set[str]]:
        """Patient -> what folds are stratified by: the classes of its items, or the strata of its numbers."""
        classes: dict[str, set[str]] = {}
        for item, strata in zip(self.items, self.task.strata(self.values), strict=True):
            classes.setdefault(item.patient, set()).update(strata)
        return classes

    @property
    def essential(self) -> set[str]:
        """Of these, what every training part must hold."""
        return self.task.essential(self.values)

    @property
    def patients_of_slides(self) -> dict[str, str]:
        """Slide id -> patient, of the slides that take part."""
        return {slide_id: item.patient for item in self.items for slide_id in item.slide_ids}

    @property
    def left_out(self) -> set[str]:
        """Slides and patients of the table that do not take part."""
        slides = {name for name, status in self.status.items() if status != "used"}
        there = {item.patient for item in self.items}
        return slides | {record.patient for record in self.cohort.records if record.patient not in there}

    @property
    def in_dim(self) -> int:
        """Width of the features."""
        return next(iter(self.headers.values())).dim

    @property
    def total_bytes(self) -> int:
        """Memory that all bags take as float32."""
        return sum(header.n * header.dim * 4 for header in self.headers.values())

    def sites(self) -> dict[str, str]:
        """Patient -> site. Raises CohortError for a patient without one."""
        return sites_of_patients(record for record in self.cohort.records if record.slide_id in self.headers)

    @property
    def known_sites(self) -> dict[str, str]:
        """Patient -> site, of those that have one."""
        return {record.patient: record.site for record in self.cohort.records if record.site}

    def notes(self) -> tuple[str, ...]:
        """What the user should know about the cohort: counts of every reason, and the warnings of the table."""
        reasons = Counter("no bag" if text.startswith("no bag") else text for text in self.status.values())
        counted = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        return (
            f"{len(self.status)} slides: {counted}. {len(self.items)} {self.task.level}s: {self._told_labels()}.",
            *self.cohort.warnings,
        )

    def _told_labels(self) -> str:
        told = []
        for target, values in self.task.split(self.values):
            if isinstance(target, ClassTarget):
                labels = Counter(target.strata(values))
                text = ", ".join(f"{labels[name]} {name}" for name in target.classes)
            else:
                there = values[labelled(values)]
                events = f", {int(there[:, 1].sum())} events" if target.n_values == 2 else ""
                text = f"{len(there)} from {there[:, 0].min():g} to {there[:, 0].max():g}{events}"
            told.append(text if self.task.single else f"{target.name} {text}")
        return "; ".join(told)

    def of_patients(self, patients: Iterable[str]) -> tuple[Item, ...]:
        """The items of some patients."""
        chosen = set(patients)
        return tuple(item for item in self.items if item.patient in chosen)


def open_study(
    table: Path, *, bags: Path, task: TaskSpec, cohort: CohortSpec, slides: Path | None, allow_missing: bool
) -> Study:
    """Read the cohort and match it with its bags.

    Raises CohortError or StoreError when the table, the labels or the bags cannot make a study, or bags are missing.
    """
    store = BagStore(bags)
    ids = store.ids()
    if not ids:
        raise StoreError(f"{bags} holds no bag. Give the folder that `wsi-mil encode` made (bags_...).")
    read = read_cohort(table, cohort, slides=slides, known_ids=None if slides else ids)
    wished = resolve_task(task, read.records)  # a wrong column is a better message than missing bags
    headers, status = _match(read, store, wished)
    _refuse_missing(status, table, allow_missing=allow_missing)
    used = [record for record in read.records if record.slide_id in headers]
    if not used:
        raise CohortError(f"{table.name}: no slide has both a bag and a label in column {task.target!r}.")
    check_one_contract(headers.values())
    resolved = resolve_task(task, used)
    return Study(
        cohort=read,
        task=resolved,
        balance=task.balance,
        store=store,
        headers=headers,
        items=items_of(used, resolved),
        status=status,
    )


def _match(cohort: Cohort, store: BagStore, task: Task) -> tuple[dict[str, BagHeader], dict[str, str]]:
    columns = [column for target in task.targets for column in target.columns]
    headers, status, unlabelled = {}, {}, f"no label in column {', '.join(columns)}"
    known = {record.patient for record in cohort.records if is_labelled(task, record.values)}
    for gone in cohort.excluded:
        without_bag = f"no bag: {gone.reason}" if _has_cells(task, gone.values) else unlabelled
        status[gone.item] = without_bag if gone.outcome == "missing" else gone.reason
    for record in cohort.records:
        # at level patient the label is the patient's, in whichever of the rows it stands
        there = record.patient in known if task.level == "patient" else is_labelled(task, record.values)
        if not there:
            status[record.slide_id] = unlabelled
            continue
        try:
            headers[record.slide_id] = store.header(record.slide_id)
            status[record.slide_id] = "used"
        except StoreError as error:
            status[record.slide_id] = f"no bag: {error}"
    return headers, status


def _has_cells(task: Task, cells: Cells) -> bool:
    """Whether the cells of any target are filled, rightly or not."""
    return any(all(cells.get(column) is not None for column in target.columns) for target in task.targets)


def _refuse_missing(status: Mapping[str, str], table: Path, *, allow_missing: bool) -> None:
    missing = [name for name, reason in status.items() if reason.startswith("no bag")]
    if missing and not allow_missing:
        shown = ", ".join(missing[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
        reason = status[missing[0]].removeprefix("no bag: ")
        raise CohortError(
            f"{table.name}: {len(missing)} of {len(status)} rows have no usable bag: {shown} ({reason}). Encode them, "
            f"exclude them in fixes.csv, or go on without them by --allow_missing true; the report counts them."
        )


def items_of(records: Sequence[SlideRecord], task: Task) -> tuple[Item, ...]:
    """The bags of these slides, sorted by id: one a slide, or one a patient."""
    groups: dict[tuple[str, str], list[SlideRecord]] = {}
    for record in records:
        name = record.patient if task.level == "patient" else record.slide_id
        groups.setdefault((name, record.patient), []).append(record)
    items = [
        Item(
            id=name,
            patient=patient,
            slide_ids=tuple(sorted(record.slide_id for record in group)),
            values=_values([task.encode(record.values) for record in group]),
        )
        for (name, patient), group in groups.items()
    ]
    return tuple(sorted(items, key=lambda item: item.id))


def _values(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The labels of a patient, each from the first of its slides that has it."""
    return tuple(next((v for v in column if not math.isnan(v)), math.nan) for column in zip(*rows, strict=True))


def cohort_frame(study: Study, slides: Path | None) -> pd.DataFrame:
    """What stands in the run's cohort.csv: every row of the table, used or not."""
    rows = []
    records = {record.slide_id: record for record in study.cohort.records}
    first = study.task.targets[0].name
    others = sorted({name for record in records.values() for name in record.values} - {first})
    for name in dict.fromkeys([*records, *study.status]):
        record, header = records.get(name), study.headers.get(name)
        label = record.values.get(first) if record else None
        mpp = header.mpp if header else ("", "")
        row: dict[str, object] = {
            "slide": name,
            "patient": record.patient if record else "",
            "site": record.site if record else "",
        }
        row |= {"target": label, "path": _relative(record, slides)}
        row |= {"annotation": str(record.annotation.resolve()) if record and record.annotation else ""}
        row |= {"mpp_x": mpp[0], "mpp_y": mpp[1], "status": study.status[name], "tiles": header.n if header else ""}
        row |= {f"value:{column}": record.values.get(column) if record else None for column in others}
        rows.append(row)
    return pd.DataFrame(rows, dtype=object).fillna("")


def _relative(record: SlideRecord | None, slides: Path | None) -> str:
    if record is None or record.path is None or slides is None:
        return ""
    path, root = record.path.absolute(), slides.absolute()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def study_config(study: Study, folds: Sequence[Fold], methods: Sequence[MethodSpec], **specs: Any) -> dict[str, Any]:
    """The resolved configuration of a run. specs: kind, table, slides, bags, fold_spec, train, search,
    cohort."""
    task, header = study.task, next(iter(study.headers.values()))
    labels = [[i.id, i.patient, list(i.slide_ids), *_labels(task, i)] for i in study.items]
    bags = [[h.slide_id, h.slide_fingerprint, h.params_digest, h.weights_sha256, h.n] for h in study.headers.values()]
    folds_text = folds_to_frame(folds).to_csv(index=False)
    config = {
        "kind": specs["kind"],
        "version": __version__,
        "table": str(specs["table"]),
        "slides": str(specs["slides"]) if specs["slides"] else None,
        "bags": str(specs["bags"]),
        "task": {**task.as_config(), "balance": study.balance},
        "folds": {**asdict(specs["fold_spec"]), "sha256": _digest(folds_text)},
        "train": asdict(specs["train"]),
        "search": asdict(specs["search"]),
        "methods": [method_config(method) for method in methods],
        "cohort": {
            **asdict(specs["cohort"]),
            "counts": {**study.cohort.counts, "used": len(study.headers), "items": len(study.items)},
            "warnings": study.cohort.warnings,
            "labels_sha256": _digest(labels),
            "bags_sha256": _digest(sorted(bags)),
        },
        "encoder": encoder_config(header),
    }
    return dict(_plain(config))


def _labels(task: Task, item: Item) -> list[Any]:
    values = np.array([item.values])
    return [cell for target, own in task.split(values) for cell in target.decode(own[0]).values()]


def method_config(method: MethodSpec) -> dict[str, Any]:
    """Its settings; of a user's own method the digest of the file too, so that a changed one is another run."""
    digests = method.files_sha256()
    return method.as_config() | ({"files_sha256": digests} if digests else {})


def encoder_config(header: BagHeader) -> dict[str, Any]:
    """What a run keeps about its bags; `contract` is what bags from outside must share."""
    fields = (
        "weights_sha256",
        "transform",
        "precision",
        "licence",
        "pathology",
        "contract_breach",
        "tile_px",
        "tile_um",
    )
    kept = {name: getattr(header, name) for name in fields}
    if header.mpp_source == NO_SLIDE:
        kept.pop("pathology")  # nobody knows on what such features were trained
    mpp = header.tile_um / header.tile_px
    return dict(_plain({"name": header.encoder, "mpp": mpp, "dim": header.dim, **kept, "contract": header.contract}))


def _plain(value: Any) -> Any:
    """The same in types that YAML knows."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()[:16]
