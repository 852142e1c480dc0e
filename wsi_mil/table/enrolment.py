"""From the rows of a table to the records of a cohort. What is wrong is collected, so that it is seen all at once."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from tiling.discovery import Discovery, slide_id_of
from wsi_mil.errors import CohortError, ConfigError
from wsi_mil.table.files import Row, Table, columns_there, did_you_mean, known
from wsi_mil.table.fixes import Fix, parse_mpp, read_fixes
from wsi_mil.table.matching import SlideIndex, index_ids
from wsi_mil.table.records import CohortSpec, Exclusion, SlideRecord

RESERVED = ("slide", "patient", "site", "slide_mpp", "mask", "annotation")
PATIENT_PRESETS = {"tcga": r"^(TCGA-[A-Za-z0-9]{2}-[A-Za-z0-9]{4})"}
_MOST_HINTS = 30  # rows for which all slides are searched for a like name; more would take minutes in a large cohort
_SAME_NAME = 0.85  # how alike two slide names must be to propose one for the other; s90 and s10 are not

Problems = tuple[tuple[str, str], ...]
Fixes = Mapping[str, Fix]


@dataclass(frozen=True, kw_only=True)
class Matching:
    """Which slide each row means."""

    index: SlideIndex
    matched: tuple[tuple[str, Row], ...]
    missing: tuple[tuple[Row, str], ...]
    """Rows without a slide, and why."""
    problems: Problems

    @property
    def missing_ids(self) -> tuple[str, ...]:
        """The ids that the missing slides would have."""
        return tuple(_id_in(row) for row, _ in self.missing)


@dataclass(frozen=True, kw_only=True)
class Enrolment:
    """The records, and the account of the rows that gave none."""

    records: tuple[SlideRecord, ...]
    excluded: tuple[Exclusion, ...]
    warnings: tuple[str, ...]
    problems: Problems
    unusable_rows: int


def patient_pattern(table: Table, spec: CohortSpec) -> tuple[re.Pattern[str] | None, list[str]]:
    """What finds the patient in a slide's name, None where a column says it; and what the user should know.

    Raises CohortError where neither is there, or the slide column is missing.
    """
    if "slide" not in table.columns:
        raise CohortError(
            f"{table.path.name}: no column 'slide'. {columns_there(table, 'slide')} "
            "If one of them names the slides, say so: columns.slide."
        )
    regex = spec.patient_regex
    if "patient" in table.columns:
        unused = f"{table.path.name} has a patient column, so patient_regex is not used."
        return None, [] if regex is None else [unused]
    if regex is None:
        raise CohortError(
            f"{table.path.name}: no column 'patient', and slides of one patient must never be split. "
            f"{columns_there(table, 'patient')} Map the column that names the patients (columns.patient), or give "
            "patient_regex (for example tcga) to find them in the slides' names. Where each slide is a patient of its "
            "own, say so by mapping patient to the slide column."
        )
    try:
        return re.compile(PATIENT_PRESETS.get(regex, regex)), []
    except re.error as error:
        presets = ", ".join(PATIENT_PRESETS)
        raise ConfigError(
            f"patient_regex {regex!r} is no regular expression ({error}) and no preset ({presets})"
        ) from None


def match_rows(table: Table, index: SlideIndex | None) -> Matching:
    """Find the slide of each row; without an index, every row is taken at its word."""
    problems: list[tuple[str, str]] = []
    named: list[Row] = []
    for row in table.rows:
        if known(row.cells["slide"]) is None:
            problems.append(("no slide", f"line {row.line}: no slide is named"))
        else:
            named.append(row)
    index = index or index_ids({_id_in(row) for row in named})
    matches = [(row, index.find(row.cells["slide"])) for row in named]
    by_whole_name = {match.exact or match.hits[0] for _, match in matches if match.exact or len(match.hits) == 1}
    matched: list[tuple[str, Row]] = []
    missing: list[tuple[Row, str]] = []
    for row, match in matches:
        rivals = [hit for hit in match.hits if hit != match.exact and hit not in by_whole_name]
        if not match.hits:
            missing.append((row, _why_missing(row, index, match.proposals, near=len(missing) < _MOST_HINTS)))
        elif len(match.hits) == 1 or (match.exact is not None and not rivals):
            matched.append((match.exact or match.hits[0], row))
        else:
            both = " or ".join(map(repr, match.hits))
            text = f"line {row.line}: {row.cells['slide']!r} can mean {both}; write its path below the slides' folder"
            problems.append(("ambiguous slide", text))
    problems += _same_slide_twice(matched)
    return Matching(index=index, matched=tuple(matched), missing=tuple(missing), problems=tuple(problems))


def fixes_by_id(path: Path | None, index: SlideIndex, missing_ids: Sequence[str]) -> tuple[dict[str, Fix], list[str]]:
    """What is decided on each slide id, and a sentence for each fix that means no slide of the study."""
    if path is None:
        return {}, []
    missing = index_ids(missing_ids)
    fixes: dict[str, Fix] = {}
    unknown = []
    for fix in read_fixes(path):
        found = index.find(fix.slide)
        hits = (found.exact,) if found.exact else found.hits or missing.find(fix.slide).hits
        if not hits:  # the fix may hold the slide's whole id, and a row that found no bag only its name
            hits = tuple(item for item in missing_ids if index_ids([fix.slide]).find(item).hits)
        if len(hits) > 1:
            raise CohortError(
                f"{fix.where}: {fix.slide!r} can mean {' or '.join(map(repr, hits))}; write the whole path"
            )
        if not hits:
            alike = " or ".join(map(repr, found.proposals))
            hint = f" Is it {alike}?" if alike else did_you_mean(fix.slide, index.ids, cutoff=_SAME_NAME)
            unknown.append(f"{fix.where}: there is no slide {fix.slide!r}, so nothing is done for it.{hint}")
            continue
        if hits[0] in fixes:
            raise CohortError(
                f"{fix.where}: slide {hits[0]!r} stands in {fixes[hits[0]].where} already; keep one of them"
            )
        fixes[hits[0]] = fix
    return fixes, unknown


def enrol(
    matching: Matching,
    fixes: Fixes,
    *,
    pattern: re.Pattern[str] | None,
    discovery: Discovery | None,
    table: Path,
) -> Enrolment:
    """Make the records of the matched rows, and say why the others have none."""
    sources = {} if discovery is None else {source.slide_id: source for source in discovery.sources}
    folders = [table.parent] if discovery is None else [table.parent, discovery.root]
    records, excluded = [], []
    problems: list[tuple[str, str]] = []
    warnings: list[str] = []
    for slide_id, row in matching.matched:
        fix = fixes.get(slide_id)
        if fix is not None and fix.exclude:
            excluded.append(Exclusion(item=slide_id, reason=fix.why))
            continue
        try:
            masks_needed = discovery is not None
            record = _record(
                slide_id, row, pattern=pattern, folders=folders, masks_needed=masks_needed, warnings=warnings
            )
        except _BadRowError as error:
            problems.append((error.kind, f"line {row.line}: {error}"))
            continue
        source = sources.get(slide_id)
        mpp = fix.slide_mpp if fix is not None and fix.slide_mpp is not None else record.slide_mpp
        records.append(replace(record, path=None if source is None else source.path, slide_mpp=mpp))
    return Enrolment(
        records=tuple(records),
        excluded=(*excluded, *_without_slide(matching, fixes, () if discovery is None else discovery.problems)),
        warnings=tuple(warnings),
        problems=tuple(problems),
        unusable_rows=len(matching.problems),
    )


def _without_slide(matching: Matching, fixes: Fixes, unusable: Problems) -> Iterator[Exclusion]:
    """Rows without a slide. unusable: (relative path, reason) of files that are there and cannot be used."""
    why_not = {slide_id_of(PurePath(item)): f" {item}: {reason}" for item, reason in unusable}
    for (row, reason), slide_id in zip(matching.missing, matching.missing_ids, strict=True):
        fix = fixes.get(slide_id)
        if fix is not None and fix.exclude:
            yield Exclusion(item=slide_id, reason=fix.why)
        else:
            why = reason + why_not.get(slide_id, "")
            yield Exclusion(item=row.cells["slide"], reason=why, outcome="missing", values=_values(row))


class _BadRowError(CohortError):
    """A row that cannot be used. `kind` is the word that check counts."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def _record(
    slide_id: str,
    row: Row,
    *,
    pattern: re.Pattern[str] | None,
    folders: Sequence[Path],
    masks_needed: bool,
    warnings: list[str],
) -> SlideRecord:
    """One row as a record, without its file. Raises _BadRowError; a mask is needed only where slides are tiled."""
    cells = row.cells
    try:
        slide_mpp = parse_mpp(cells.get("slide_mpp", ""), where=f"slide {slide_id!r}")
    except CohortError as error:
        raise _BadRowError("bad pixel size", str(error)) from error
    mask = _file(cells.get("mask", ""), folders)
    if isinstance(mask, str):
        text = f"the mask {mask!r} of slide {slide_id!r} is not there; mend the path or empty the cell"
        if masks_needed:
            raise _BadRowError("no mask", text)
        warnings.append(f"line {row.line}: {text}")
        mask = None
    annotation = _file(cells.get("annotation", ""), folders)
    if isinstance(annotation, str):
        warnings.append(f"line {row.line}: the annotation {annotation!r} of slide {slide_id!r} is not there")
        annotation = None
    return SlideRecord(
        slide_id=slide_id,
        patient=_patient(slide_id, row, pattern),
        site=known(cells.get("site", "")),
        values=_values(row),
        slide_mpp=slide_mpp,
        mask=mask,
        annotation=annotation,
    )


def _values(row: Row) -> dict[str, str | None]:
    return {name: known(text) for name, text in row.cells.items() if name not in RESERVED}


def _patient(slide_id: str, row: Row, pattern: re.Pattern[str] | None) -> str:
    if pattern is None:
        patient = known(row.cells["patient"])
        if patient is None:
            raise _BadRowError(
                "no patient", f"slide {slide_id!r} has no patient; fill it in, or exclude the slide in fixes.csv"
            )
        return patient
    name = PurePath(row.cells["slide"].strip()).name
    found = pattern.search(name)
    if found is None or not found.group(1 if pattern.groups else 0):
        raise _BadRowError("no patient", f"patient_regex {pattern.pattern!r} finds no patient in {name!r}")
    return str(found.group(1 if pattern.groups else 0))


def _file(text: str, folders: Sequence[Path]) -> Path | str | None:
    """The file that a cell names, from one of the folders; the text itself when it is not there; None when empty."""
    value = known(text)
    if value is None:
        return None
    paths = (folder / value for folder in folders)
    return next((path.resolve() for path in paths if path.is_file()), value)


def _same_slide_twice(matched: Iterable[tuple[str, Row]]) -> list[tuple[str, str]]:
    first: dict[str, Row] = {}
    problems = []
    for slide_id, row in matched:
        other = first.setdefault(slide_id, row)
        if other is not row:
            differ = [c for c in row.cells if c != "slide" and row.cells[c].strip() != other.cells[c].strip()]
            pairs = ", ".join(f"{c} {other.cells[c]!r} and {row.cells[c]!r}" for c in differ)
            how = f"they differ in {pairs}" if differ else "they are equal"
            text = f"lines {other.line} and {row.line}: both are slide {slide_id!r}; {how}. Keep one of them."
            problems.append(("same slide twice", text))
    return problems


def _id_in(row: Row) -> str:
    """The id that the slide of a row would have if its path were relative to the slides' folder."""
    return slide_id_of(PurePath(row.cells["slide"]))


def _why_missing(row: Row, index: SlideIndex, proposals: Sequence[str], *, near: bool) -> str:
    text = f"line {row.line}: there is no slide {row.cells['slide']!r}."
    if proposals:
        alike = " or ".join(map(repr, proposals))
        return f"{text} Is it {alike}? (A number that lost its zeros? Mend the table; nothing is guessed.)"
    return text + (did_you_mean(_id_in(row), index.ids, cutoff=_SAME_NAME) if near else "")
