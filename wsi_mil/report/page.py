"""Findings -> one self-contained HTML page. Every word from a file is escaped by the template engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jinja2

import wsi_mil
from wsi_mil.report.designs import design_of
from wsi_mil.report.findings import Findings, SharedFindings
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.sections import (
    appendix,
    audit,
    calibration,
    cohort,
    compared,
    errors,
    how,
    known,
    leakage,
    methods,
    pointing,
    shift,
    subgroups,
    summary,
    tripod,
)

_FOLDER = Path(__file__).parent
_Kind = TypeVar("_Kind", "Section", "SharedSection")


class Section(Protocol):
    """A file of `sections`: its name is the anchor and the name of its template."""

    __name__: str
    TITLE: str

    def context(self, found: Findings, names: Names) -> dict[str, Any]:
        """What its template needs."""


class SharedSection(Section, Protocol):
    """One that stands on the page whatever was predicted."""

    def context(self, found: SharedFindings, names: Names) -> dict[str, Any]:
        """What its template needs."""


SECTIONS: tuple[Section, ...] = (
    summary,
    compared,
    calibration,
    subgroups,
    pointing,
    methods,
    errors,
    cohort,
    leakage,
    audit,
    how,
    tripod,
    appendix,
)
"""In the order of the page of a cross-validation."""
_ELSEWHERE: dict[str, tuple[SharedSection, ...]] = {leakage.__name__: (shift, known)}


def render(found: Findings, names: Names) -> str:
    """The page as text."""
    engine = templates()
    sections = sections_for(SECTIONS, found)
    titles = {anchor(section): section.TITLE for section in sections}
    bodies = []
    for section in sections:
        context = section.context(found, names) | {"titles": titles}
        html = engine.get_template(f"{anchor(section)}.html").render(context)
        bodies.append((anchor(section), section.TITLE, html))
    return render_page(
        title=f"{found.study.target}: {about(found)}",
        headline=design_of(found.study).headline,
        labels=found.labels,
        sections=bodies,
        hidden=names.hidden,
    )


def sections_for(sections: Sequence[_Kind], found: SharedFindings) -> tuple[_Kind, ...]:
    """The same; where models were trained elsewhere, how far that is stands in place of the audit before training."""
    if found.study.external is None:
        return tuple(sections)
    return tuple(own for section in sections for own in _ELSEWHERE.get(section.__name__, (section,)))


def about(found: SharedFindings) -> str:
    """What the title says after the target."""
    n, patients = len(found.labels), found.flow.patients
    methods = "1 method" if n == 1 else f"{n} methods"
    return f"{methods}{', trained elsewhere,' if found.study.external else ''} on {patients} patients"


def render_page(
    *,
    title: str,
    headline: str,
    labels: Sequence[str],
    sections: Sequence[tuple[str, str, str]],
    hidden: bool,
    style: str = "",
) -> str:
    """A page of rendered sections: (anchor, title, HTML that the templates have escaped). style: more CSS."""
    return (
        templates()
        .get_template("report.html")
        .render(
            title=title,
            headline=headline,
            labels=labels,
            sections=sections,
            style=(_FOLDER / "style.css").read_text(encoding="utf-8") + style,
            version=wsi_mil.__version__,
            hidden=hidden,
        )
    )


def templates() -> jinja2.Environment:
    """The page's templates; what they are given is escaped."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([_FOLDER, _FOLDER / "sections"]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def anchor(section: Section) -> str:
    """Where a link within the page points."""
    return section.__name__.rpartition(".")[2]
