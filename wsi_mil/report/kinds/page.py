"""Findings of a run of any kind -> chapters, and one self-contained HTML page of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from wsi_mil.report import wording
from wsi_mil.report.designs import Design, design_of
from wsi_mil.report.kinds.chapters import Cell, Chapter, Part, Table, figure_cell
from wsi_mil.report.kinds.class_chapter import ClassFindings, class_chapter
from wsi_mil.report.kinds.findings import RunFindings, all_failures
from wsi_mil.report.kinds.macro_mean import macro_mean
from wsi_mil.report.kinds.regression_chapter import number_chapter
from wsi_mil.report.kinds.regression_findings import NumberFindings
from wsi_mil.report.kinds.survival_chapter import survival_chapter
from wsi_mil.report.kinds.who_chose import who_chose
from wsi_mil.report.method_figures import Figure
from wsi_mil.report.page import about, anchor, render_page, sections_for, templates
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.sections import appendix, audit, cohort, leakage, pointing, tripod

_STYLE = Path(__file__).with_name("chapter.css")


def chapters_of(found: RunFindings, names: Names) -> tuple[Chapter, ...]:
    """One a target that has a labelled tested patient."""
    engine, chapters = templates(), []
    for _, part in found.targets:
        if isinstance(part, ClassFindings):
            chapters.append(class_chapter(part, names, engine))
        elif isinstance(part, NumberFindings):
            chapters.append(number_chapter(part, names, engine))
        elif part is not None:
            chapters.append(survival_chapter(part, names, engine))
    return tuple(chapters)


def render_run(found: RunFindings, chapters: Sequence[Chapter], names: Names) -> str:
    """The page as text."""
    engine, shared = templates(), found.shared
    labels = shared.labels
    parts = [Part(anchor="summary", title="Summary", html=_html(engine, "summary", _summary(found, chapters)))]
    parts += chapters[0].parts if len(found.targets) == 1 else _of_several(found, chapters, engine)
    ends = sections_for((pointing, cohort, leakage, audit, appendix), shared)
    design = design_of(shared.study)
    contexts = {section: section.context(shared, names) for section in ends}
    contexts[audit]["choices"] = who_chose(found, names)
    contexts[audit]["searched"] = any(one["searches"] for one in contexts[audit]["choices"])
    contexts[appendix]["failures"] = [
        (names.item(one.item), one.outcome, names.text(one.reason)) for one in all_failures(found)
    ]
    for section in ends:
        name = anchor(section)
        parts.append(Part(anchor=name, title=section.TITLE, html=_html(engine, name, contexts[section])))
    parts.insert(
        -1, Part(anchor="how", title="How it was computed", html=_how(engine, chapters, shared.study.level, design))
    )
    parts.insert(-1, _tripod(engine, found, parts, names))
    return render_page(
        title=f"{_listed(found)}: {about(shared)}",
        headline=design.headline,
        labels=labels,
        sections=[(part.anchor, part.title, part.html) for part in parts],
        hidden=names.hidden,
        style=_STYLE.read_text(encoding="utf-8"),
    )


def _listed(found: RunFindings) -> str:
    return ", ".join(target.name for target, _ in found.targets)


def _html(engine: jinja2.Environment, name: str, context: dict[str, Any]) -> Markup:
    return Markup(engine.get_template(f"{name}.html").render(context))


def _summary(found: RunFindings, chapters: Sequence[Chapter]) -> dict[str, Any]:
    shared, one = found.shared, len(found.targets) == 1
    question = (
        chapters[0].question
        if one
        else f"Each model of a method predicts {len(found.targets)} targets at once: {_listed(found)}. "
        f"{wording.asked_of(shared.study)}"
    )
    return {
        "question": f"{question} {design_of(shared.study).unseen}",
        "lines": [
            {"of": "" if one else chapter.target.name, "text": sentence}
            for chapter in chapters
            for sentence in (chapter.sentences if one else chapter.sentences[:1])
        ],
        "pointing": wording.pointing(shared),
        "warnings": [*wording.run_warnings(shared), *_target_warnings(found, chapters)],
        "not_shown": wording.not_shown(shared),
    }


def _target_warnings(found: RunFindings, chapters: Sequence[Chapter]) -> list[str]:
    """Those of a single target; of several, who has no label, and in which chapters there is more to mind."""
    lines = []
    for (target, part), missing in zip(found.targets, found.studies.unlabelled, strict=True):
        if part is None:
            lines.append(f"“{target.name}”: no tested patient has a label of its own, so there is no figure.")
        elif missing:
            lines.append(f"{missing} tested patients have no label of “{target.name}”; no figure of it counts them.")
    if len(found.targets) == 1:
        return lines + [line for chapter in chapters for line in chapter.warnings]
    more = [f"“{chapter.target.name}”" for chapter in chapters if chapter.warnings]
    return lines + ([f"There is more to mind in the chapters of {', '.join(more)}."] if more else [])


def _of_several(found: RunFindings, chapters: Sequence[Chapter], engine: jinja2.Environment) -> list[Part]:
    labels = found.shared.labels
    context = {"table": _targets_table(found, chapters, labels), "macro": any(_macro(found, label) for label in labels)}
    context["one_group"] = design_of(found.shared.study).one_group
    parts = [Part(anchor="targets", title="All targets", html=_html(engine, "kinds/targets", context))]
    for place, chapter in enumerate(chapters):
        html = _html(engine, "kinds/chapter", {"chapter": chapter, "anchor": f"target_{place}"})
        parts.append(Part(anchor=f"target_{place}", title=f"Target: {chapter.target.name}", html=html))
    return parts


def _targets_table(found: RunFindings, chapters: Sequence[Chapter], labels: Sequence[str]) -> Table:
    rows = [
        (
            *(Cell(words=words) for words in (chapter.target.name, chapter.target.kind, chapter.primary)),
            Cell(words=str(chapter.labelled)),
            *(_best_cell(chapter, label) for label in labels),
        )
        for chapter in chapters
    ]
    means = [_macro(found, label) for label in labels]
    if any(means):
        cells = [figure_cell(mean, strong=True) if mean else Cell(words="–") for mean in means]
        rows.append((*(Cell(words=words, strong=True) for words in ("mean over targets", "", "AUC", "")), *cells))
    return Table(head=("Target", "Kind", "Figure", "Patients with a label", *labels), rows=tuple(rows), n_words=3)


def _best_cell(chapter: Chapter, label: str) -> Cell:
    values = {line.method: line.figure for line in chapter.lines}
    if label not in values:
        return Cell(words="–")
    best = max(np.nan_to_num(figure.value, nan=-np.inf) for figure in values.values())
    return figure_cell(values[label], strong=bool(values[label].value == best))


def _macro(found: RunFindings, label: str) -> Figure | None:
    return macro_mean([part for _, part in found.targets], label)


def _how(engine: jinja2.Environment, chapters: Sequence[Chapter], level: str, design: Design) -> Markup:
    """Each kind's rules once."""
    lines = list(dict.fromkeys(line for chapter in chapters for line in chapter.how))
    pages = [chapter for chapter in chapters if chapter.how_html]
    several = len(chapters) > 1
    context = {
        "lines": lines,
        "pages": [(chapter.target.name, chapter.how_html) for chapter in pages[:1]],
        "several": several,
        "level": level,
        "external": design.external,
    }
    return _html(engine, "kinds/how", context)


def _tripod(engine: jinja2.Environment, found: RunFindings, parts: Sequence[Part], names: Names) -> Part:
    """The checklist, with links to the sections that this page has."""
    titles = {part.anchor: part.title for part in parts} | {"appendix": appendix.TITLE}
    if len(found.targets) > 1:
        chapters = {part.anchor: part.title for part in parts if part.anchor.startswith("target_")}
        first = next(iter(chapters), "targets")
        inner = {"compared": "targets", "methods": first, "errors": first}
    else:
        inner = {}
    context = tripod.context(found.shared, names)
    items = []
    for item in context["items"]:
        places = [inner.get(name, name) for name in item.sections]
        items.append(replace(item, sections=tuple(dict.fromkeys(name for name in places if name in titles))))
    context |= {"items": items, "alone": sum(not item.sections for item in items), "titles": titles}
    return Part(anchor="tripod", title=tripod.TITLE, html=_html(engine, "tripod", context))
