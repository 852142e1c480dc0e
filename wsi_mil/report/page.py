"""Findings -> one self-contained HTML page. Every word from a file is escaped by the template engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jinja2

import wsi_mil
from wsi_mil.report.findings import Findings
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.sections import (
    appendix,
    audit,
    calibration,
    cohort,
    compared,
    errors,
    how,
    leakage,
    methods,
    pointing,
    subgroups,
    summary,
    tripod,
)

_FOLDER = Path(__file__).parent


class Section(Protocol):
    """A file of `sections`: its name is the anchor and the name of its template."""

    __name__: str
    TITLE: str

    def context(self, found: Findings, names: Names) -> dict[str, Any]:
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
"""In the order of the page."""


def render(found: Findings, names: Names) -> str:
    """The page as text."""
    engine = templates()
    titles = {anchor(section): section.TITLE for section in SECTIONS}
    bodies = []
    for section in SECTIONS:
        context = section.context(found, names) | {"titles": titles}
        html = engine.get_template(f"{anchor(section)}.html").render(context)
        bodies.append((anchor(section), section.TITLE, html))
    return render_page(
        title=f"{found.study.target}: {len(found.methods)} methods on {found.flow.patients} patients",
        labels=[method.label for method in found.methods],
        sections=bodies,
        hidden=names.hidden,
    )


def render_page(
    *, title: str, labels: Sequence[str], sections: Sequence[tuple[str, str, str]], hidden: bool, style: str = ""
) -> str:
    """A page of rendered sections: (anchor, title, HTML that the templates have escaped). style: more CSS."""
    return (
        templates()
        .get_template("report.html")
        .render(
            title=title,
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
