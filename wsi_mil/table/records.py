"""The records of a cohort: the wish (CohortSpec), one slide (SlideRecord), and all of it with its account (Cohort)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tiling.discovery import SlideSource


@dataclass(frozen=True, kw_only=True)
class CohortSpec:
    """How to read the table of slides, patients and labels."""

    sheet: str | None = None
    """Sheet of an Excel file, needed when several hold data."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our name of a column -> the table's name, such as {slide: FILENAME, patient: CASE}."""
    patient_regex: str | None = None
    """Without a patient column: what finds the patient in the slide's name (its first group), or `tcga`."""
    fixes: Path | None = None
    """The file with decisions on single slides; without it a fixes.csv beside the table is used."""
    slide_mpp: float | None = None
    """Microns per pixel of slides that have none in the table, the fixes or the file."""


@dataclass(frozen=True, kw_only=True)
class SlideRecord:
    """One slide of the study and all the table says about it."""

    slide_id: str
    patient: str
    site: str | None = None
    values: Mapping[str, str | None] = field(default_factory=dict)
    """Every other column; None where the value is not known."""
    path: Path | None = None
    slide_mpp: tuple[float, float] | None = None
    mask: Path | None = None
    annotation: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """A row or slide that is left out, and why."""

    item: str
    reason: str
    outcome: str = "excluded"
    """`missing`: there is no such slide (or bag); `excluded`: the user left it out."""
    values: Mapping[str, str | None] = field(default_factory=dict)
    """Of a missing one: what its row says, as in a SlideRecord."""


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """The slides of a study in the order of the table, and the account of all the others."""

    records: tuple[SlideRecord, ...]
    excluded: tuple[Exclusion, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    """rows, matched, missing, extra, excluded, unlabelled (rows with an unknown value), patients, sites."""
    warnings: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    """Slides (or bags) without a row in the table."""

    @property
    def sources(self) -> tuple[SlideSource, ...]:
        """The slides that lie as files, for tiling and encoding."""
        return tuple(
            SlideSource(slide_id=r.slide_id, path=r.path, slide_mpp=r.slide_mpp, mask=r.mask)
            for r in self.records
            if r.path is not None
        )
