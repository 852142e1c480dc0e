"""`wsi-mil check`: find everything that is wrong before the night, and explain any file of ours."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tiling.discovery import SUFFIXES as SLIDE_SUFFIXES
from tiling.discovery import Discovery, SlideSource
from tiling.slide import Slide, SlideHeader, read_header
from wsi_mil.checking import findings as find
from wsi_mil.checking.explain import explain_folder, explain_h5, explain_method, explain_slide
from wsi_mil.checking.findings import Finding
from wsi_mil.cohort import CohortSpec, Scan, find_sources, scan_cohort
from wsi_mil.errors import CohortError, ConfigError, SlideError
from wsi_mil.outcomes import Failure, Summary
from wsi_mil.progress import progress
from wsi_mil.table.enrolment import fixes_by_id
from wsi_mil.table.files import SUFFIXES as TABLE_SUFFIXES
from wsi_mil.table.files import did_you_mean
from wsi_mil.table.fixes import FILE_NAME, Fix, read_fixes, write_fixes
from wsi_mil.table.matching import index_sources
from wsi_mil.table.records import SlideRecord

_OTHER_TABLES = (".xls", ".xlsb", ".ods", ".numbers")  # refused with the cure, not taken for slides
_DEEP_MPP = 32.0
_PROBE_PX = 16
_ANY_COHORT = CohortSpec()


def check(
    path: Path,
    *,
    slides: Path | None = None,
    cohort: CohortSpec = _ANY_COHORT,
    target: str | None = None,
    kind: find.Kind = "classes",
    event: str | None = None,
    level: find.Level | None = None,
    n_folds: int = 5,
    out: Path | None = None,
    deep: bool = False,
    workers: int = 8,
) -> Summary:
    """Check a cohort, or explain a slide, grid, bag, folder of bags, run, bundle or method: what is wrong with it.

    Of slides only the header and a corner of the smallest level are read. What needs a decision is written to a
    fixes.csv that every other command honours; an existing one is never touched, new rows then go to fixes.new.csv
    beside it.

    Args:
        path: a cohort table, folder of slides, slide, grid or bag, a folder of them, a run, a bundle, or my_method.py
        slides: the folder of slides that the table is about
        target: the column with the labels; without it, a column named so, or the only one
        kind: what stands in that column; ordinal needs no more than classes here
        event: of kind survival, the column that says whether the event was seen
        level: slide where the slides of a patient may differ in their label
        n_folds: number of folds that the classes must suffice for
        out: folder for fixes.csv; without it, the folder of the table
        deep: read each slide once at low resolution, and all rows of grids and bags
        workers: how many slides are opened at the same time
    """
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file or folder")
    suffix = path.suffix.lower()
    if out is not None and cohort.fixes is None and (out / FILE_NAME).is_file():
        cohort = replace(cohort, fixes=out / FILE_NAME)
    reader = _HeaderReader(deep=deep, workers=workers)
    if path.is_file() and suffix in (*TABLE_SUFFIXES, *_OTHER_TABLES):
        if kind in ("regression", "survival") and target is None:
            raise ConfigError(f"kind is {kind}: name the column, --target COLUMN.")
        judge = _Judge(target=target, kind=kind, event=event, level=level, n_folds=n_folds)
        return _check_cohort(path, slides, spec=cohort, judge=judge, out=out, reader=reader)
    if path.is_file():
        explain = {".py": explain_method, ".h5": explain_h5}.get(suffix, explain_slide)
        lines, found = explain(path, deep=deep)
        return _summary(path, found, done=(path.name,), notes=lines)
    explained = explain_folder(path, deep=deep)
    if explained is not None:
        return _summary(path, explained[1], done=(path.name,), notes=explained[0])
    return _check_slides(path, spec=cohort, out=out, reader=reader)


@dataclass(frozen=True, kw_only=True)
class _Judge:
    """What the labels must suffice for."""

    target: str | None
    kind: find.Kind
    event: str | None
    level: find.Level | None
    n_folds: int

    def findings(self, records: Sequence[SlideRecord], table: str) -> list[Finding]:
        """What is wrong with labels and sites. Raises CohortError for a target that is no column."""
        columns = list(records[0].values) if records else []
        if self.target is not None and columns and self.target not in columns:
            near = did_you_mean(self.target, columns)
            raise CohortError(f"{table}: no column {self.target!r}. Columns: {', '.join(columns)}.{near}")
        found = find.patient_findings(records) + find.site_findings(records)
        if self.kind in ("regression", "survival") and self.target is not None:
            own = {"target": self.target, "kind": self.kind, "event": self.event, "level": self.level}
            return found + find.number_findings(records, own, n_folds=self.n_folds)
        for column in find.judged_columns(records, self.target):
            found += find.label_findings(records, column, n_folds=self.n_folds, level=self.level)
        return found


@dataclass(frozen=True, kw_only=True)
class _HeaderReader:
    """Reads headers, several at a time; a slide that fails is kept with its error."""

    deep: bool
    workers: int

    def read(self, sources: Sequence[SlideSource]) -> dict[str, SlideHeader | SlideError]:
        headers: dict[str, SlideHeader | SlideError] = {}
        if not sources:
            return headers
        with progress("check", len(sources)) as bar, ThreadPoolExecutor(self.workers) as pool:
            for source, header in zip(sources, pool.map(self._read, sources), strict=True):
                headers[source.slide_id] = header
                bar.advance()
        return headers

    def _read(self, source: SlideSource) -> SlideHeader | SlideError:
        try:
            header = read_header(source.path, slide_id=source.slide_id)
            with Slide(source.path, cohort_mpp=source.slide_mpp, default_mpp=_DEEP_MPP) as slide:
                slide.read_rgb(0, 0, level=len(header.level_sizes) - 1, size_lv=(_PROBE_PX, _PROBE_PX))
                if self.deep:
                    slide.thumbnail(mpp=max(_DEEP_MPP, *slide.mpp))
        except SlideError as error:
            return error
        except OSError as error:
            return SlideError(f"{source.path.name}: cannot be read ({error})")
        return header


def _check_cohort(
    table: Path,
    slides: Path | None,
    *,
    spec: CohortSpec,
    judge: "_Judge",
    out: Path | None,
    reader: _HeaderReader,
) -> Summary:
    """Table and slides together; without slides the table alone."""
    scan = scan_cohort(table, spec, slides=slides)
    records = scan.cohort.records
    headers = reader.read(scan.cohort.sources)
    found = find.table_findings(scan, table.name)
    found += find.slide_findings(scan.cohort.sources, headers, default_mpp=spec.slide_mpp)
    found += find.duplicate_findings(headers, {record.slide_id: record.patient for record in records})
    found += judge.findings(records, table.name)
    found += _unusable_files(scan.discovery)
    found += [Finding(kind="unknown fix", item=table.name, reason=text) for text in scan.unknown_fixes]
    told = {finding.reason for finding in found}
    notes = find.count_lines(scan.cohort) + find.label_lines(records) + find.site_lines(records)
    notes += find.mpp_lines(scan.cohort.sources, headers, default_mpp=spec.slide_mpp) + find.header_lines(headers)
    notes += [warning for warning in scan.cohort.warnings if warning not in told and warning not in _texts(scan)]
    open_findings = _undecided(found, scan.fixes)
    path, advice = _write_fixes(open_findings, scan.fixes, out or table.parent, slides=slides, given=spec.fixes)
    clean = _clean(scan.cohort.sources, open_findings) or (table.name,)
    return _summary(path or table, open_findings, done=clean, notes=[*notes, *advice])


def _check_slides(folder: Path, *, spec: CohortSpec, out: Path | None, reader: _HeaderReader) -> Summary:
    """A folder of slides without a table."""
    sources, excluded, problems = find_sources(folder, None, spec)
    if not sources and not problems:
        raise CohortError(
            f"{folder}: holds nothing to check: no slide ({', '.join(SLIDE_SUFFIXES)}), no bag, no grid and no run"
        )
    headers = reader.read(sources)
    found = [Finding(kind="unusable file", item=item, reason=reason) for item, reason in problems]
    found += find.slide_findings(sources, headers, default_mpp=spec.slide_mpp)
    found += find.duplicate_findings(headers, {})
    notes = [f"{len(sources)} slides, {len(excluded)} left out by fixes, {len(problems)} files that cannot be used"]
    notes += find.mpp_lines(sources, headers, default_mpp=spec.slide_mpp) + find.header_lines(headers)
    fixes, _ = fixes_by_id(spec.fixes, index_sources(sources, folder), ())
    open_findings = _undecided(found, fixes)
    path, advice = _write_fixes(open_findings, fixes, out, slides=folder, given=spec.fixes)
    clean = _clean(sources, open_findings) or (folder.name,)
    return _summary(path or folder, open_findings, done=clean, notes=[*notes, *advice])


def _unusable_files(discovery: Discovery | None) -> list[Finding]:
    problems = () if discovery is None else discovery.problems
    return [Finding(kind="unusable file", item=item, reason=reason) for item, reason in problems]


def _texts(scan: Scan) -> set[str]:
    """Warnings that say the same as a finding about an unusable file."""
    return set() if scan.discovery is None else {f"{item}: {reason}" for item, reason in scan.discovery.problems}


def _undecided(found: Sequence[Finding], fixes: Mapping[str, Fix]) -> list[Finding]:
    """The findings that the user has not settled in fixes.csv."""
    return [f for f in found if f.slide is None or f.slide not in fixes or not fixes[f.slide].decided]


def _clean(sources: Sequence[SlideSource], found: Sequence[Finding]) -> tuple[str, ...]:
    bad = {finding.slide for finding in found}
    return tuple(source.slide_id for source in sources if source.slide_id not in bad)


def _write_fixes(
    found: Sequence[Finding],
    fixes: Mapping[str, Fix],
    folder: Path | None,
    *,
    slides: Path | None,
    given: Path | None,
) -> tuple[Path | None, list[str]]:
    """Write what waits for a decision, and say what to do with it. Nothing is ever written below the slides' folder."""
    reasons: dict[str, str] = {}
    for finding in found:
        if finding.slide is not None:
            reasons.setdefault(finding.slide, f"{finding.kind}: {finding.reason}")
    if not reasons:
        return None, []
    if given is not None:
        folder = given.parent
    if folder is None or (slides is not None and folder.resolve().is_relative_to(slides.resolve())):
        return None, [f"{len(reasons)} slides wait for a decision. Give --out FOLDER to get a fixes.csv to fill in."]
    existing_path = given or folder / FILE_NAME
    existing = read_fixes(existing_path) if existing_path.is_file() else None
    new = [(slide, reason) for slide, reason in reasons.items() if slide not in fixes]
    try:
        path = write_fixes(folder, new, existing=existing)
    except OSError as error:  # a share that cannot be written to must not take the findings along
        why = f"{FILE_NAME} cannot be written in {folder}: {error.strerror or error}. Give --out FOLDER."
        return None, [f"{len(reasons)} slides wait for a decision. {why}"]
    where = path or existing_path
    advice = f"{len(reasons)} slides wait for a decision in {where}: fill in slide_mpp, or exclude 'yes'."
    if path is None:
        return None, [advice]
    also = "beside the table it is found without" if path.name == FILE_NAME else f"or make it the {FILE_NAME}"
    return path, [advice, f"Then check again, and give every command --cohort.fixes {path}; {also}."]


def _summary(path: Path, found: Sequence[Finding], *, done: tuple[str, ...], notes: Sequence[str]) -> Summary:
    failures = tuple(Failure(item=f.item, outcome=f.kind, reason=f.reason) for f in found)
    return Summary(stage="check", out=path, done=done, failures=failures, notes=tuple(notes))
