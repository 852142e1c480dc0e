"""Tables as people keep them: CSV, TSV, semicolons, Excel, Parquet. Every cell comes out as the text that was meant.

Nothing is guessed into numbers: `0012`, `12e3` and `1_000` stay as they are. Where a file holds real numbers (Excel,
Parquet), a whole number is shown without decimals, and a cell that Excel shows with leading zeros keeps them.
"""

import csv
import difflib
import io
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from pathlib import Path

import pandas as pd

from wsi_mil.errors import CohortError

SUFFIXES = (".csv", ".tsv", ".txt", ".xlsx", ".xlsm", ".parquet")
NOT_KNOWN = frozenset(
    {
        "",
        "NA",
        "Na",
        "na",
        "N/A",
        "n/a",
        "NaN",
        "nan",
        "NAN",
        "None",
        "null",
        "Null",
        "NULL",
        "#N/A",
        "#NA",
        "<NA>",
        "?",
        "#REF!",
        "#DIV/0!",
        "#VALUE!",
        "#NAME?",
        "#NUM!",
        "#NULL!",
    }
)
"""Spellings that mean "not known", Excel's errors among them. A lower-case `none` is a word and stays a value."""
EVENT_CELLS = {
    **dict.fromkeys(("1", "1.0", "true", "yes"), True),
    **dict.fromkeys(("0", "0.0", "false", "no"), False),
}
"""Cells of a column of events, in small letters -> whether the event was seen."""
_DELIMITERS = ",;\t|"
_LEADING_ZEROS_FORMAT = re.compile(r"0{2,}")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row. `line` is its line in the file (its row in a sheet), as the user counts them."""

    line: int
    cells: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Table:
    """All rows of a file, as text. `notes` say what the reader had to decide."""

    path: Path
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


def known(text: str) -> str | None:
    """The text without blanks around it, or None where it says that the value is not known."""
    stripped = text.strip()
    return None if stripped in NOT_KNOWN else stripped


def read_table(path: Path, *, sheet: str | None = None) -> Table:
    """Read a table by its suffix. Raises CohortError for a file that is none, with the reason and the cure."""
    if not path.is_file():
        raise CohortError(f"{path}: no such file")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise CohortError(
            f"{path.name}: not a table this program reads ({', '.join(SUFFIXES)}); save it as one of these"
        )
    if suffix in (".xlsx", ".xlsm"):
        return _from_excel(path, sheet)
    if sheet is not None:
        raise CohortError(f"{path.name}: a sheet ({sheet!r}) is given, but only Excel files have sheets")
    if suffix == ".parquet":
        return _from_parquet(path)
    return _from_text(path)


def rename_columns(table: Table, columns: Mapping[str, str]) -> Table:
    """The table with our names for the user's columns. columns: our name -> theirs.

    Raises CohortError for a name that the table does not have, with the ones it has and the nearest spelling.
    """
    for ours, theirs in columns.items():
        if theirs not in table.columns:
            raise CohortError(
                f"{table.path.name}: no column {theirs!r}, which columns.{ours} names. {columns_there(table, theirs)}"
            )
    ours_of: dict[str, list[str]] = {}
    for ours, theirs in columns.items():
        ours_of.setdefault(theirs, []).append(ours)
    hidden = [c for c in table.columns if c in columns and c not in ours_of]
    names = [(c, ours) for c in table.columns if c not in hidden for ours in ours_of.get(c, [c])]
    rows = tuple(replace(row, cells={ours: row.cells[theirs] for theirs, ours in names}) for row in table.rows)
    notes = tuple(f"{table.path.name}: column {c!r} is not used, columns.{c} names {columns[c]!r}" for c in hidden)
    return replace(table, columns=tuple(ours for _, ours in names), rows=rows, notes=table.notes + notes)


def spelled_alike(values: Iterable[str]) -> list[tuple[str, ...]]:
    """Groups of values that differ only in case and blanks, which are one thing to people: Tumour and tumour."""
    groups: dict[str, set[str]] = {}
    for value in values:
        groups.setdefault("".join(value.split()).casefold(), set()).add(value)
    return [tuple(sorted(group)) for _, group in sorted(groups.items()) if len(group) > 1]


def columns_there(table: Table, wished: str) -> str:
    """A sentence with the columns of the table and the one that is spelled most like `wished`."""
    return f"Columns: {', '.join(table.columns)}.{did_you_mean(wished, table.columns)}"


def did_you_mean(wished: str, allowed: Collection[str], *, cutoff: float = 0.6) -> str:
    """' Did you mean ...?' with the nearest spelling, or nothing. cutoff: least likeness, from 0 to 1."""
    spellings = {name.casefold(): name for name in allowed}
    close = difflib.get_close_matches(wished.casefold(), list(spellings), n=1, cutoff=cutoff)
    return f" Did you mean {spellings[close[0]]!r}?" if close else ""


def _from_text(path: Path) -> Table:
    text, notes = _decode(path)
    header = text.lstrip("\r\n").partition("\n")[0]
    bare = re.sub(r'"[^"]*"', "", header)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else max(_DELIMITERS, key=bare.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        rows = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        text = f"{path.name}, line {reader.line_num}: {error}. Is there a quotation mark that is never closed?"
        raise CohortError(text) from error
    return _table(path, rows, notes)


def _decode(path: Path) -> tuple[str, list[str]]:
    data = path.read_bytes()
    try:
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):
            return data.decode("utf-16"), []
    except UnicodeDecodeError as error:
        raise CohortError(f"{path.name}: cut or damaged UTF-16 text ({error}); save it as 'CSV UTF-8'") from error
    if b"\0" in data:
        raise CohortError(f"{path.name}: holds zero bytes, so it is no text that can be read; save it as 'CSV UTF-8'")
    try:
        return data.decode("utf-8-sig"), []
    except UnicodeDecodeError:
        note = f"{path.name}: not UTF-8; read as Windows-1252. If letters look wrong, save it as 'CSV UTF-8'."
        return data.decode("cp1252", errors="replace"), [note]


def _from_excel(path: Path, sheet: str | None) -> Table:
    import openpyxl

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # openpyxl warns of drop-down lists and the like, which hold no cell
        try:
            book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        except Exception as error:
            raise CohortError(f"{path.name}: cannot be opened as an Excel file ({error}); save it again") from error
        try:
            filled = {s.title: rows for s in book.worksheets if (rows := _sheet_rows(s))}
        finally:
            book.close()
    if sheet is None and len(filled) > 1:
        raise CohortError(f"{path.name}: several sheets hold data: {', '.join(filled)}. Say which one: sheet.")
    if sheet is not None and sheet not in filled:
        raise CohortError(
            f"{path.name}: no sheet {sheet!r} with data; there are: {', '.join(filled) or 'none'}."
            f"{did_you_mean(sheet, filled)}"
        )
    notes: list[str] = []
    rows = next(iter(filled.values()), []) if sheet is None else filled[sheet]
    texts = [
        (line, [_text(value, form, notes, f"{path.name}, row {line}") for value, form in row]) for line, row in rows
    ]
    return _table(path, texts, _shorten(notes))


def _sheet_rows(sheet: object) -> list[tuple[int, list[tuple[object, str]]]]:
    """Rows with a filled cell, each as (row number, [(value, number format)])."""
    rows = []
    for line, cells in enumerate(sheet.iter_rows(), start=1):  # type: ignore[attr-defined]
        row = [(cell.value, str(getattr(cell, "number_format", "General"))) for cell in cells]
        if any(value is not None for value, _ in row):
            rows.append((line, row))
    return rows


def _from_parquet(path: Path) -> Table:
    try:
        frame = pd.read_parquet(path, dtype_backend="pyarrow")
    except Exception as error:
        raise CohortError(f"{path.name}: cannot be read as Parquet ({error})") from error
    notes: list[str] = []
    columns = [[None if pd.isna(v) else v for v in frame.iloc[:, i]] for i in range(frame.shape[1])]
    texts = [
        (line, [_text(value, "General", notes, f"{path.name}, row {line}") for value in row])
        for line, row in enumerate(zip(*columns, strict=True), start=1)
    ]
    return _table(path, [(0, [str(name) for name in frame.columns]), *texts], _shorten(notes))


def _text(value: object, number_format: str, notes: list[str], where: str) -> str:
    """The text of a typed cell, as its writer sees it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, datetime) and value.time() == time():
        value = value.date()
    if isinstance(value, date | datetime):
        notes.append(
            f"{where}: a date, read as {value.isoformat()}; if it is an id, type it again in a cell of type text"
        )
        return value.isoformat()
    if isinstance(value, float) and value.is_integer():
        notes.append(f"{where}: the number {value!r} is read as {int(value)}")
        value = int(value)
    if isinstance(value, int) and _LEADING_ZEROS_FORMAT.fullmatch(number_format):
        return str(value).zfill(len(number_format))
    return repr(float(value)) if isinstance(value, float) else str(value)


def _shorten(notes: Sequence[str], shown: int = 3) -> list[str]:
    more = [f"... and {len(notes) - shown} more cells like these"] if len(notes) > shown else []
    return [*notes[:shown], *more]


def _table(path: Path, rows: Iterable[tuple[int, Sequence[str]]], notes: Sequence[str]) -> Table:
    """Header and rows from cells; empty lines and columns without a name are left out."""
    filled = [(line, cells) for line, cells in rows if any(cell.strip() for cell in cells)]
    if not filled:
        raise CohortError(f"{path.name}: the table is empty")
    header = [name.strip() for name in filled[0][1]]
    twice = sorted({name for name in header if name and header.count(name) > 1})
    if twice:
        raise CohortError(f"{path.name}: column {', '.join(twice)} is there twice; rename one of them")
    body = []
    for line, cells in filled[1:]:
        if any(cell.strip() for cell in cells[len(header) :]):
            raise CohortError(f"{path.name}, line {line}: {len(cells)} cells, but the header has {len(header)} columns")
        padded = [*cells, *[""] * (len(header) - len(cells))]
        body.append(Row(line=line, cells={name: cell for name, cell in zip(header, padded, strict=False) if name}))
    return Table(path=path, columns=tuple(n for n in header if n), rows=tuple(body), notes=tuple(notes))
