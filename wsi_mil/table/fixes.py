"""fixes.csv: what the user decides about single slides (pixel size, leaving out), honoured by every stage.

Columns: slide, slide_mpp (`0.25` or `0.25x0.26`; empty for as it is), exclude (yes, or empty), reason.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tiling.atomic import write_text
from wsi_mil.errors import CohortError
from wsi_mil.table.files import columns_there, known, read_table

COLUMNS = ("slide", "slide_mpp", "exclude", "reason")
FILE_NAME = "fixes.csv"
_YES = frozenset({"yes", "y", "true", "1", "x"})
_NO = frozenset({"no", "n", "false", "0"})
_LARGEST_MPP = 100.0


@dataclass(frozen=True, kw_only=True)
class Fix:
    """One row: what shall happen to one slide. `where` names file and line."""

    slide: str
    slide_mpp: tuple[float, float] | None = None
    exclude: bool = False
    reason: str = ""
    where: str = ""

    @property
    def decided(self) -> bool:
        """The user has filled something in."""
        return self.exclude or self.slide_mpp is not None

    @property
    def why(self) -> str:
        """Why the slide is left out, for the account of the cohort."""
        return f"excluded in {self.where}" + (f": {self.reason}" if self.reason else "")


def read_fixes(path: Path) -> tuple[Fix, ...]:
    """Read a file of fixes (any table). Raises CohortError for a column or a cell that cannot be meant."""
    table = read_table(path)
    for column in COLUMNS[:3]:
        if column not in table.columns:
            raise CohortError(
                f"{path.name}: no column {column!r}; needed are {', '.join(COLUMNS)}. {columns_there(table, column)}"
            )
    fixes = []
    seen: dict[str, str] = {}
    for row in table.rows:
        where = f"{path.name}, line {row.line}"
        slide = row.cells["slide"]
        if known(slide) is None:
            raise CohortError(f"{where}: no slide is named")
        if slide in seen:
            raise CohortError(f"{where}: slide {slide!r} stands in {seen[slide]} already; keep one of the two")
        seen[slide] = where
        fixes.append(
            Fix(
                slide=slide,
                slide_mpp=parse_mpp(row.cells["slide_mpp"], where=where),
                exclude=_yes(row.cells["exclude"], where=where),
                reason=row.cells.get("reason", "").strip(),
                where=where,
            )
        )
    return tuple(fixes)


def parse_mpp(text: str, *, where: str) -> tuple[float, float] | None:
    """Microns per pixel (x, y) from `0.25`, `0,25` or `0.25x0.26`; None where nothing is given."""
    value = known(text)
    if value is None:
        return None
    fields = re.split(r"\s*[x×X]\s*", value.replace(",", "."))
    try:
        numbers = [float(field) for field in fields]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(0 < number < _LARGEST_MPP for number in numbers):
        raise CohortError(
            f"{where}: slide_mpp {value!r} is no pixel size. Give microns per pixel, as 0.25, or 0.25x0.26 for x and y."
        )
    return numbers[0], numbers[-1]


def write_fixes(folder: Path, rows: Iterable[tuple[str, str]], *, existing: Sequence[Fix] | None) -> Path | None:
    """Write rows (slide, reason) that wait for a decision; return the file, or None when there is nothing to add.

    A file that is there belongs to the user and is never touched: the rows of `existing` and the new ones go to
    fixes.new.csv, fixes.new2.csv ..., the first name that is free or holds exactly these rows.
    """
    kept = list(existing or ())
    named = {fix.slide for fix in kept}
    new = [Fix(slide=slide, reason=reason) for slide, reason in rows if slide not in named]
    if not new:
        return None
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for fix in [*kept, *new]:
        mpp = "" if fix.slide_mpp is None else "x".join(dict.fromkeys(map(repr, fix.slide_mpp)))
        writer.writerow((fix.slide, mpp, "yes" if fix.exclude else "", fix.reason))
    text = buffer.getvalue()
    text = text if text.isascii() else "\ufeff" + text  # the mark lets Excel see that it is UTF-8
    path = next(path for path in _names(folder, existing) if not path.exists() or path.read_bytes() == text.encode())
    write_text(path, text)
    return path


def _names(folder: Path, existing: Sequence[Fix] | None) -> Iterator[Path]:
    """Where new fixes may go, in the order of preference; without end."""
    if existing is None:
        yield folder / FILE_NAME
    yield folder / "fixes.new.csv"
    yield from (folder / f"fixes.new{number}.csv" for number in count(2))


def _yes(text: str, *, where: str) -> bool:
    value = known(text)
    if value is None or value.casefold() in _NO:
        return False
    if value.casefold() in _YES:
        return True
    raise CohortError(f"{where}: exclude {value!r} is neither yes nor no; give 'yes', or leave the cell empty")
