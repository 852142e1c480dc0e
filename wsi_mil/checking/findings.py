"""What is wrong with a cohort, found from its table and the headers of its slides. Pure: no file is opened here."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tiling.discovery import SlideSource
from tiling.slide import SlideHeader, choose_mpp
from wsi_mil.cohort import Cohort, Scan, alike_patients, labels_of_patients
from wsi_mil.errors import CohortError, MissingPixelSize, SlideError, UserError
from wsi_mil.splits import make_folds
from wsi_mil.table.files import spelled_alike
from wsi_mil.table.records import SlideRecord

Headers = Mapping[str, SlideHeader | SlideError]
"""slide id -> what its file says, or why it cannot be read."""
Level = Literal["slide", "patient"]
Kind = Literal["classes", "ordinal", "regression", "survival"]
LABEL_NAMES = frozenset({"label", "labels", "target", "class", "diagnosis", "y"})
_UNSURE = frozenset({"unknown", "undetermined", "missing", "not available", "[not available]", "tbd", "-", "none"})
_MOST_CLASSES = 10
_BAR = 40


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong. `slide` is the one that fixes.csv can settle it for, if any."""

    kind: str
    item: str
    reason: str
    slide: str | None = None


def slide_findings(sources: Iterable[SlideSource], headers: Headers, *, default_mpp: float | None) -> list[Finding]:
    """Slides that cannot be opened, have no pixel size, or say two different things about it."""
    findings = []
    for source in sources:
        header = headers[source.slide_id]
        if isinstance(header, SlideError):
            findings.append(_about(source.slide_id, "cannot be opened", str(header)))
            continue
        try:
            size = choose_mpp(header, cohort_mpp=source.slide_mpp, default_mpp=default_mpp)
        except SlideError as error:
            kind = "no pixel size" if isinstance(error, MissingPixelSize) else "bad pixel size"
            findings.append(_about(source.slide_id, kind, str(error)))
            continue
        findings.extend(_about(source.slide_id, "pixel size in doubt", warning) for warning in size.warnings)
    return findings


def duplicate_findings(headers: Headers, patients: Mapping[str, str]) -> list[Finding]:
    """Slides with the same content under two names. patients: slide id -> patient, where it is known."""
    first: dict[str, str] = {}
    findings = []
    for slide_id, header in sorted(headers.items()):
        if isinstance(header, SlideError):
            continue
        other = first.setdefault(header.fingerprint, slide_id)
        if other == slide_id:
            continue
        reason = f"the same content as {other}"
        if patients.get(other) != patients.get(slide_id):
            both = f"{patients[other]} and {patients[slide_id]}"
            reason += f", but of another patient ({both}): a model could be tested on what it was trained on"
        findings.append(_about(slide_id, "same slide twice", reason + ". Exclude one of them."))
    return findings


def table_findings(scan: Scan, table: str) -> list[Finding]:
    """Rows that cannot be used, and rows without a slide."""
    findings = [Finding(kind=kind, item=table, reason=text) for kind, text in scan.problems]
    missing = [e for e in scan.cohort.excluded if e.outcome == "missing"]
    return findings + [_about(e.item, "missing slide", e.reason) for e in missing]


def label_findings(
    records: Sequence[SlideRecord], column: str, *, n_folds: int, level: Level | None = None
) -> list[Finding]:
    """What keeps a column from being cross-validated: conflicts inside a patient, one class, classes too small."""
    labels = labels_of_patients(records, column)
    findings = [
        Finding(
            kind="conflicting labels",
            item=f"patient {patient}",
            reason=f"{column} is {_list_of(records, patient, column)}. At level patient this is an error; where slides "
            "are labelled one by one, say so (level slide).",
        )
        for patient, found in labels.items()
        if len(found) > 1 and level != "slide"
    ]
    values = {value for found in labels.values() for value in found}
    findings += [
        Finding(
            kind="spelled alike",
            item=f"column {column}",
            reason=f"{' and '.join(map(repr, group))} count as {len(group)} classes; spell them in one way",
        )
        for group in spelled_alike(values)
    ]
    try:
        make_folds(labels, n_folds=n_folds)
    except CohortError as error:
        findings.append(Finding(kind="folds impossible", item=f"column {column}", reason=str(error)))
    return findings


def number_findings(records: Sequence[SlideRecord], wishes: Mapping[str, Any], *, n_folds: int) -> list[Finding]:
    """What crossval would refuse about a number or a time. wishes: target, kind, event and level of a TaskSpec."""
    import numpy as np

    from wsi_mil.table.labels import resolve_task
    from wsi_mil.tasks import TaskSpec

    where = f"column {wishes['target']}"
    try:
        task = resolve_task(TaskSpec(**wishes), records)
    except UserError as error:
        return [Finding(kind="labels", item=where, reason=str(error))]
    strata: dict[str, set[str]] = {}
    values = np.array([task.encode(record.values) for record in records], dtype=np.float64)
    for record, found in zip(records, task.strata(values), strict=True):
        strata.setdefault(record.patient, set()).update(found)
    try:
        make_folds({patient: found for patient, found in strata.items() if found}, n_folds=n_folds, essential=())
    except CohortError as error:
        return [Finding(kind="folds impossible", item=where, reason=str(error))]
    return []


def patient_findings(records: Sequence[SlideRecord]) -> list[Finding]:
    """Patients that are spelled nearly the same."""
    return [Finding(kind="spelled alike", item="column patient", reason=text) for text in alike_patients(records)]


def site_findings(records: Sequence[SlideRecord]) -> list[Finding]:
    """Patients with two sites, and sites that are spelled nearly the same."""
    sites: dict[str, set[str]] = {}
    for record in records:
        if record.site is not None:
            sites.setdefault(record.patient, set()).add(record.site)
    return [
        Finding(
            kind="several sites",
            item=f"patient {p}",
            reason=f"sites {', '.join(sorted(found))}; folds by site need one",
        )
        for p, found in sites.items()
        if len(found) > 1
    ] + [
        Finding(
            kind="spelled alike",
            item="column site",
            reason=f"{' and '.join(map(repr, group))} count as {len(group)} sites; spell them in one way",
        )
        for group in spelled_alike({site for found in sites.values() for site in found})
    ]


def judged_columns(records: Sequence[SlideRecord], target: str | None) -> list[str]:
    """The columns that are held to be labels: the target, else those named so, else the only column there is."""
    columns = list(records[0].values) if records else []
    if target is not None:
        return [target]
    named = [column for column in columns if column.casefold() in LABEL_NAMES]
    return named or (columns if len(columns) == 1 else [])


def count_lines(cohort: Cohort) -> list[str]:
    """The account of rows and slides as a small table."""
    width = max(map(len, cohort.counts))
    return ["Counts", *(f"  {name:<{width}}  {n:>6}" for name, n in cohort.counts.items())]


def label_lines(records: Sequence[SlideRecord]) -> list[str]:
    """For each column that can hold classes: its values with the slides and patients that have them."""
    lines = []
    for column in records[0].values if records else ():
        slides = Counter(record.values[column] for record in records)
        known = sorted(value for value in slides if value is not None)
        if not known or len(known) > _MOST_CLASSES:
            continue
        patients = Counter(value for found in labels_of_patients(records, column).values() for value in found)
        lines.append(f"Column {column}")
        lines += [f"  {value}: {slides[value]} slides, {patients[value]} patients" for value in known]
        if slides[None]:
            lines.append(f"  not known: {slides[None]} slides")
        unsure = [value for value in known if value.casefold() in _UNSURE]
        if unsure:
            lines.append(f"  {', '.join(unsure)} counts as a class; name the classes of the task to leave it out")
    return lines


def site_lines(records: Sequence[SlideRecord]) -> list[str]:
    """Patients of each site."""
    sites: dict[str, set[str]] = {}
    for record in records:
        sites.setdefault(record.site or "not known", set()).add(record.patient)
    if set(sites) <= {"not known"}:
        return []
    listed = ", ".join(f"{site} {len(patients)}" for site, patients in sorted(sites.items()))
    return [f"Patients a site: {listed}. Folds by site: {len(sites) - ('not known' in sites)} at most."]


def mpp_lines(sources: Iterable[SlideSource], headers: Headers, *, default_mpp: float | None) -> list[str]:
    """Histogram of the pixel sizes, to two digits of a micron, as text."""
    counts: Counter[str] = Counter()
    for source in sources:
        header = headers[source.slide_id]
        if isinstance(header, SlideError):
            continue
        try:
            mpp = choose_mpp(header, cohort_mpp=source.slide_mpp, default_mpp=default_mpp).mpp
            counts[f"{mpp[0]:.2f}"] += 1
        except SlideError:
            counts["none"] += 1
    most = max(counts.values(), default=1)
    bars = [f"  {mpp:>5}  {'#' * max(1, round(_BAR * n / most))} {n}" for mpp, n in sorted(counts.items())]
    return ["Microns per pixel", *bars] if bars else []


def header_lines(headers: Headers, shown: int = 10) -> list[str]:
    """What the readers noticed about single slides."""
    said = [f"  {i}: {w}" for i, h in sorted(headers.items()) if not isinstance(h, SlideError) for w in h.warnings]
    more = [f"  ... and {len(said) - shown} more"] if len(said) > shown else []
    return ["Noticed", *said[:shown], *more] if said else []


def _about(slide: str, kind: str, reason: str) -> Finding:
    return Finding(kind=kind, item=slide, reason=reason, slide=slide)


def _list_of(records: Sequence[SlideRecord], patient: str, column: str) -> str:
    values = [(r.values.get(column), r.slide_id) for r in records if r.patient == patient]
    return ", ".join(f"{value} in {slide_id}" for value, slide_id in values if value is not None)
