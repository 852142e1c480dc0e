"""What one target adds to the page, whatever its kind: words, tables of cells, charts. The templates know no kind."""

from dataclasses import dataclass, field
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from wsi_mil.outcomes import Failure
from wsi_mil.report.figures import Chart
from wsi_mil.report.findings import Comparison
from wsi_mil.report.kinds.records import Target
from wsi_mil.report.method_figures import Figure
from wsi_mil.report.pictures import Picture
from wsi_mil.report.wording import ALPHA, number, p_value, signed, span
from wsi_mil.runs import FoldKey


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a table; all but the words may be empty."""

    words: str
    range: str = ""
    """An interval, small below the words."""
    tag: str = ""
    colour: str = ""
    """Of the dot before the words; none when empty."""
    strong: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns of words first, then columns of numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    n_words: int = 1
    """Leading columns that hold words and are set to the left."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A chart and what to read in it."""

    chart: Chart
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class CaseShown:
    """One of the worst errors."""

    patient: str
    about: str
    slide: str
    picture: Picture | None


@dataclass(frozen=True, kw_only=True)
class MethodPart:
    """The part of a chapter that one method has to itself."""

    label: str
    colour: str
    facts: tuple[tuple[str, str], ...]
    """(figure, what it is)"""
    sentences: tuple[str, ...]
    charts: tuple[Shown, ...]
    folds: Table | None
    """None where there are no fold models to tell apart."""
    folds_note: str
    cases: tuple[CaseShown, ...]
    cases_table: Table


@dataclass(frozen=True, kw_only=True)
class Line:
    """The primary figure of one method, for the table of all targets."""

    method: str
    figure: Figure


@dataclass(frozen=True, kw_only=True)
class Part:
    """A section of a chapter."""

    anchor: str
    title: str
    html: Markup
    """Escaped by the template engine."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Chapter:
    """Everything that one target adds to the report."""

    target: Target
    question: str
    sentences: tuple[str, ...]
    """The answer first."""
    warnings: tuple[str, ...]
    how: tuple[str, ...]
    """How its figures were computed; empty where `how_html` says it."""
    parts: tuple[Part, ...]
    primary: str
    """Name of the primary figure."""
    labelled: int
    """Patients with a label of this target who were tested."""
    lines: tuple[Line, ...]
    metrics: dict[str, Any]
    tables: dict[str, pd.DataFrame]
    failures: tuple[Failure, ...] = ()
    how_html: Markup = field(default_factory=Markup)


PARTS = (("compared", "Methods compared"), ("methods", "Each method"), ("errors", "Worst errors"))
"""Of numbers and times, each with a template."""


def rendered(templates: jinja2.Environment, context: dict[str, Any]) -> tuple[Part, ...]:
    """The sections of a number or a time."""
    return tuple(
        Part(anchor=name, title=title, html=Markup(templates.get_template(f"kinds/{name}.html").render(context)))
        for name, title in PARTS
    )


def figure_cell(figure: Figure, digits: int = 2, *, tag: str = "", strong: bool = False) -> Cell:
    """A figure over its interval."""
    return Cell(words=number(figure.value, digits), range=span(figure.interval, digits), tag=tag, strong=strong)


def words_cells(*words: str) -> tuple[Cell, ...]:
    """Plain cells."""
    return tuple(Cell(words=one) for one in words)


def comparison_table(compared: tuple[Comparison, ...], *, what: str, digits: int) -> Table:
    """Paired tests. what: the figure whose difference is tested."""
    return Table(
        head=("First", "Second", "Patients", f"{what} difference", "95 % interval", "p", "p, corrected"),
        n_words=2,
        rows=tuple(
            (
                *words_cells(one.first, one.second, str(one.patients), signed(one.test.difference, digits)),
                *words_cells(span(one.test.interval, digits), p_value(one.test.p)),
                Cell(words=p_value(one.p_corrected), strong=bool(one.p_corrected < ALPHA)),
            )
            for one in compared
        ),
    )


def comparison_frame(compared: tuple[Comparison, ...], *, what: str) -> pd.DataFrame:
    """The tests for machines."""
    columns = ["first", "second", "patients", f"{what}_difference", "low", "high", "p", "p_holm"]
    rows = [
        (c.first, c.second, c.patients, c.test.difference, c.test.interval.low, c.test.interval.high, c.test.p)
        for c in compared
    ]
    corrected = [c.p_corrected for c in compared]
    return pd.DataFrame([(*row, p) for row, p in zip(rows, corrected, strict=True)], columns=columns)


def interval_of(figure: Figure) -> dict[str, Any]:
    """A figure for machines."""
    interval = figure.interval
    return {"value": figure.value, "low": interval.low, "high": interval.high, "method": interval.method}


def judged_by(key: FoldKey) -> dict[str, int]:
    """A model for machines."""
    return {"repeat": key.repeat, "fold": key.fold, "seed": key.seed}
