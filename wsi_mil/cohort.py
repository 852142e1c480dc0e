"""Who is in the study: patients, slides, labels and sites. The table is read once and validated on entry.

Every id and label is text. A label that is not known is None, and never a class.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tiling.discovery import Discovery, SlideSource, find_slides
from wsi_mil.errors import CohortError, ConfigError
from wsi_mil.folding.files import ValidationDraw, read_folds
from wsi_mil.splits import Fold, FoldSpec, check_folds, make_folds, stratum_of
from wsi_mil.table.enrolment import Enrolment, Fixes, Problems, enrol, fixes_by_id, match_rows, patient_pattern
from wsi_mil.table.files import read_table, rename_columns, spelled_alike
from wsi_mil.table.fixes import FILE_NAME
from wsi_mil.table.matching import SlideIndex, index_ids, index_sources
from wsi_mil.table.records import Cohort, CohortSpec, Exclusion, SlideRecord

__all__ = [
    "Cohort",
    "CohortSpec",
    "Exclusion",
    "Scan",
    "SlideRecord",
    "alike_patients",
    "find_sources",
    "folds_for",
    "labels_of_patients",
    "read_cohort",
    "scan_cohort",
    "sites_of_patients",
]
_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Scan:
    """A cohort as far as it could be read, with everything that forbids its use. `problems` are (kind, text)."""

    cohort: Cohort
    problems: Problems
    discovery: Discovery | None
    fixes: Fixes
    """slide id -> what the user decided."""
    unknown_fixes: tuple[str, ...]
    """A sentence for each decision on a slide that is not there."""


def read_cohort(
    table: Path, spec: CohortSpec, *, slides: Path | None = None, known_ids: Collection[str] | None = None
) -> Cohort:
    """Read the table and match its rows to the slides below `slides`, or to `known_ids` (the bags there are).

    Raises CohortError with all that is wrong at once: unknown columns, rows without patient, the same slide twice, rows
    that can mean two slides, and so on. A row without a slide is no error: it stands in `excluded`.
    """
    return _usable(table, scan_cohort(table, spec, slides=slides, known_ids=known_ids))


def find_sources(
    slides: Path, table: Path | None, spec: CohortSpec
) -> tuple[tuple[SlideSource, ...], tuple[Exclusion, ...], Problems]:
    """The slides to work on: those of the table, or all below `slides`; fixes are honoured.

    Returns the sources, what was left out, and as (relative path, reason) the files that cannot be used and the fixes
    that mean no slide.
    """
    if table is not None:
        scan = scan_cohort(table, spec, slides=slides)
        cohort = _usable(table, scan)
        problems = () if scan.discovery is None else scan.discovery.problems
        return cohort.sources, cohort.excluded, (*problems, *(("fixes", text) for text in scan.unknown_fixes))
    discovery = find_slides(slides)
    fixes, unknown = fixes_by_id(spec.fixes, index_sources(discovery.sources, discovery.root), ())
    kept, excluded = [], []
    for source in discovery.sources:
        fix = fixes.get(source.slide_id)
        if fix is not None and fix.exclude:
            excluded.append(Exclusion(item=source.slide_id, reason=fix.why))
        else:
            kept.append(source if fix is None else _with_mpp(source, fix.slide_mpp))
    return tuple(kept), tuple(excluded), (*discovery.problems, *(("fixes", text) for text in unknown))


def scan_cohort(
    path: Path, spec: CohortSpec, *, slides: Path | None = None, known_ids: Collection[str] | None = None
) -> Scan:
    """As `read_cohort`, but collect what is wrong instead of raising. Raises where the table cannot be read at all."""
    table = rename_columns(read_table(path, sheet=spec.sheet), spec.columns)
    pattern, notes = patient_pattern(table, spec)
    if not table.rows:
        raise CohortError(f"{path.name}: has the columns {', '.join(table.columns)}, but no row")
    discovery = None if slides is None else find_slides(slides)
    index = _index(discovery, known_ids)
    matching = match_rows(table, index)
    fixes_path = spec.fixes or _beside(path)
    fixes, unknown = fixes_by_id(fixes_path, matching.index, matching.missing_ids)
    enrolment = enrol(matching, fixes, pattern=pattern, discovery=discovery, table=path)
    warnings = [*table.notes, *notes, *unknown, *enrolment.warnings]
    if fixes_path is not None and spec.fixes is None:
        decided = sum(fix.decided for fix in fixes.values())
        warnings.append(f"{fixes_path.name} beside the table is honoured: it decides on {decided} slides.")
    if discovery is not None:
        warnings.extend(f"{item}: {reason}" for item, reason in discovery.problems)
    warnings.extend(alike_patients(enrolment.records))
    extra = () if index is None else tuple(sorted(index.ids - {slide_id for slide_id, _ in matching.matched}))
    cohort = Cohort(
        records=enrolment.records,
        excluded=enrolment.excluded,
        counts=_counts(len(table.rows), enrolment, extra),
        warnings=(*warnings, *_account(enrolment, extra)),
        extra=extra,
    )
    problems = (*matching.problems, *enrolment.problems)
    return Scan(cohort=cohort, problems=problems, discovery=discovery, fixes=fixes, unknown_fixes=tuple(unknown))


def alike_patients(records: Iterable[SlideRecord]) -> list[str]:
    """A sentence for each group of patients that a careless hand may have made of one."""
    return [
        f"patients {' and '.join(map(repr, group))} are held for different ones; if they are one, its slides can be "
        "split between training and test: spell it in one way"
        for group in spelled_alike({record.patient for record in records})
    ]


def labels_of_patients(records: Iterable[SlideRecord], target: str) -> dict[str, set[str]]:
    """Every label of each patient's slides in column `target`; patients without a known one are left out."""
    labels: dict[str, set[str]] = {}
    for record in records:
        value = record.values.get(target)
        if value is not None:
            labels.setdefault(record.patient, set()).add(value)
    return labels


def sites_of_patients(records: Iterable[SlideRecord]) -> dict[str, str]:
    """The site of each patient. Raises CohortError for a patient without a site, or with two."""
    sites: dict[str, set[str | None]] = {}
    for record in records:
        sites.setdefault(record.patient, set()).add(record.site)
    without = sorted(patient for patient, found in sites.items() if found == {None})
    if without:
        raise CohortError(
            f"{len(without)} patients have no site: {', '.join(without[:_SHOWN])}. Fill in the column 'site' (or "
            "map it: columns.site), leave them out in fixes.csv, or do not split by site."
        )
    result = {}
    for patient, found in sites.items():
        named = sorted(site for site in found if site is not None)
        if len(named) > 1:
            raise CohortError(f"patient {patient!r} is in several sites: {', '.join(named)}; a patient has one site")
        result[patient] = named[0]
    return result


def folds_for(
    spec: FoldSpec,
    classes_of: Mapping[str, Collection[str]],
    *,
    sites: Mapping[str, str] | None = None,
    essential: Collection[str] | None = None,
    slides: Mapping[str, str] | None = None,
    left_out: Collection[str] = (),
) -> list[Fold]:
    """The folds that `spec` wishes: drawn anew, or read from its file and checked against the cohort.

    classes_of: patient -> the labels of its slides, or its strata.  sites: patient -> site, where `spec.needs_sites`.
    essential: as in make_folds.  slides: slide id -> patient, for a file that names slides.
    left_out: slides (or rows, or patients) that the cohort knows and the study does without; a file may name them.
    Raises CohortError when folds do not fit, or could not hold the classes.
    """
    if spec.needs_sites and sites is None:
        raise ValueError("folds by site need the sites")
    sites = sites if spec.needs_sites else None
    if spec.file is None:
        return make_folds(
            stratum_of(classes_of),
            n_folds=spec.n_folds,
            seed=spec.seed,
            repeats=spec.repeats,
            validation=spec.validation,
            sites=sites,
            leave_one_site_out=spec.leave_one_site_out,
            allow_absent_class=spec.allow_absent_class,
            essential=essential,
        )
    if spec.leave_one_site_out:
        raise ConfigError("folds: file says who is tested, so leave_one_site_out cannot hold too; give one of them.")
    folds = read_folds(
        spec.file,
        classes_of,
        slides=slides or {},
        left_out=left_out,
        validation=ValidationDraw(fraction=spec.validation, seed=spec.seed, sites=sites, essential=essential),
    )
    allowed = spec.allow_absent_class
    check_folds(folds, classes_of, allow_absent_class=allowed, sites=sites, essential=essential, complete=False)
    return folds


def _index(discovery: Discovery | None, known_ids: Collection[str] | None) -> SlideIndex | None:
    if discovery is not None:
        return index_sources(discovery.sources, discovery.root)
    return None if known_ids is None else index_ids(known_ids)


def _beside(table: Path) -> Path | None:
    path = table.parent / FILE_NAME
    return path if path.is_file() and path != table else None


def _with_mpp(source: SlideSource, mpp: tuple[float, float] | None) -> SlideSource:
    return replace(source, slide_mpp=mpp or source.slide_mpp)


def _counts(rows: int, enrolment: Enrolment, extra: Sequence[str]) -> dict[str, int]:
    records = enrolment.records
    outcomes = [exclusion.outcome for exclusion in enrolment.excluded]
    return {
        "rows": rows,
        "matched": rows - outcomes.count("missing") - enrolment.unusable_rows,
        "missing": outcomes.count("missing"),
        "excluded": outcomes.count("excluded"),
        "extra": len(extra),
        "unlabelled": sum(None in record.values.values() for record in records),
        "patients": len({record.patient for record in records}),
        "sites": len({record.site for record in records if record.site is not None}),
    }


def _account(enrolment: Enrolment, extra: Sequence[str]) -> list[str]:
    """A sentence for each kind of row or slide that the study does not have."""
    missing = [exclusion for exclusion in enrolment.excluded if exclusion.outcome == "missing"]
    sentences = [exclusion.reason for exclusion in missing[:_SHOWN]]
    if len(missing) > _SHOWN:
        sentences.append(f"{len(missing) - _SHOWN} more rows have no slide.")
    if extra:
        more = f" and {len(extra) - _SHOWN} more" if len(extra) > _SHOWN else ""
        sentences.append(f"{len(extra)} slides have no row in the table: {', '.join(extra[:_SHOWN])}{more}.")
    return sentences


def _usable(table: Path, scan: Scan) -> Cohort:
    """The scanned cohort. Raises CohortError with its problems, or when nothing of it can be used."""
    if scan.problems:
        more = f"\n... and {len(scan.problems) - _SHOWN} more" if len(scan.problems) > _SHOWN else ""
        raise CohortError(f"{table.name}:\n" + "\n".join(text for _, text in scan.problems[:_SHOWN]) + more)
    if not scan.cohort.records:
        reasons = "\n".join(f"  {e.item}: {e.reason}" for e in scan.cohort.excluded[:_SHOWN])
        raise CohortError(f"{table.name}: none of its {scan.cohort.counts['rows']} rows can be used.\n{reasons}")
    return scan.cohort
