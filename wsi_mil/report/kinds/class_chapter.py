"""The part of the report about one target with classes: the sections of the class report, and what an order adds."""

from dataclasses import dataclass
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from wsi_mil.report import wording
from wsi_mil.report.designs import design_of
from wsi_mil.report.figures import colour_of
from wsi_mil.report.findings import Findings
from wsi_mil.report.kinds.chapters import Cell, Chapter, Line, Part, Table, figure_cell, interval_of
from wsi_mil.report.kinds.ordinal import OrdinalFigures, ordinal_figures
from wsi_mil.report.kinds.records import Target
from wsi_mil.report.metrics import metrics, run_facts
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.sections import calibration, compared, errors, how, methods, subgroups
from wsi_mil.report.tables import run_tables, tables
from wsi_mil.report.wording import number, span

PRIMARY = "AUC"
SECTIONS = {
    "compared": compared,
    "calibration": calibration,
    "subgroups": subgroups,
    "methods": methods,
    "errors": errors,
}
OF_THE_RUN = frozenset({"kind", "schema_version", "target", "level", "patients", "slides", "intervals"})
"""What metrics.json says once for all targets, beside `run_facts`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassFindings:
    """All that is said of one target with classes."""

    target: Target
    found: Findings
    ordinal: tuple[OrdinalFigures, ...]
    """One a method; empty for classes without an order."""


def find_classes(target: Target, found: Findings) -> ClassFindings:
    """Add what an order of the classes allows."""
    ordered = target.kind == "ordinal"
    added = tuple(ordinal_figures(method, target.classes) for method in found.methods) if ordered else ()
    return ClassFindings(target=target, found=found, ordinal=added)


def class_chapter(part: ClassFindings, names: Names, templates: jinja2.Environment) -> Chapter:
    """Words, tables and charts."""
    found = part.found
    sentences = (
        wording.verdict(found.best, found, beside=_kappa_words(part)),
        wording.called(found.best, found),
        _ordinal_words(part),
        wording.comparison(found),
    )
    return Chapter(
        target=part.target,
        question=_question(part),
        sentences=tuple(filter(None, sentences)),
        warnings=tuple(wording.figure_warnings(found)),
        how=(),
        how_html=Markup(templates.get_template("how.html").render(how.context(found, names))),
        parts=_parts(part, names, templates),
        primary=PRIMARY,
        labelled=len(found.best.patients.ids),
        lines=tuple(Line(method=method.label, figure=method.primary) for method in found.methods),
        metrics=_metrics(part, names),
        tables=_tables(part, names),
        failures=found.failures,
    )


def _question(part: ClassFindings) -> str:
    classes, counts = part.target.classes, part.found.best.confusion.sum(axis=1).tolist()
    groups = ", ".join(f"{n} {name}" for n, name in zip(counts, classes, strict=True))
    if part.target.kind == "binary":
        aim = f"tell “{classes[-1]}” from “{classes[0]}” (column “{part.target.name}”)"
    elif part.target.kind == "ordinal":
        aim = f"tell where a patient stands from “{classes[0]}” to “{classes[-1]}” (column “{part.target.name}”)"
    else:
        aim = f"tell {len(classes)} classes apart (column “{part.target.name}”)"
    return f"Can the tissue alone {aim}? Asked of {sum(counts)} patients ({groups})."


def _best_ordinal(part: ClassFindings) -> OrdinalFigures | None:
    return next((one for one in part.ordinal if one.label == part.found.best.label), None)


def _ordinal_words(part: ClassFindings) -> str:
    best = _best_ordinal(part)
    if best is None:
        return ""
    return (
        f"Its decisions are {number(best.steps.value)} steps off on average (95 % interval "
        f"{span(best.steps.interval)})."
    )


def _kappa_words(part: ClassFindings) -> str:
    """How far decisions agree with the order, to stand beside the AUC: an order can be found and no class hit."""
    best = _best_ordinal(part)
    if best is None:
        return ""
    return (
        f"; quadratic kappa of its decisions {number(best.kappa.value)} ({span(best.kappa.interval)}), 0 being chance "
        f"and 1 agreement throughout"
    )


def _parts(part: ClassFindings, names: Names, templates: jinja2.Environment) -> tuple[Part, ...]:
    parts = [
        Part(
            anchor=name,
            title=section.TITLE,
            html=Markup(templates.get_template(f"{name}.html").render(section.context(part.found, names))),
        )
        for name, section in SECTIONS.items()
    ]
    if part.ordinal:
        one_group = design_of(part.found.study).one_group
        order = {"steps": _steps_table(part), "splits": _splits_table(part), "one_group": one_group}
        html = Markup(templates.get_template("kinds/order.html").render(order))
        parts.insert(1, Part(anchor="order", title="In the order of the classes", html=html))
    return tuple(parts)


def _steps_table(part: ClassFindings) -> Table:
    return Table(
        head=("Method", "Quadratic kappa", "Steps off, mean", "AUC of the cuts, mean"),
        rows=tuple(
            (
                Cell(words=one.label, colour=colour_of(place)),
                figure_cell(one.kappa),
                figure_cell(one.steps),
                figure_cell(one.splits_mean),
            )
            for place, one in enumerate(part.ordinal)
        ),
    )


def _splits_table(part: ClassFindings) -> Table:
    return Table(
        head=("Method", *(f"AUC, “{name}” and above" for name in part.target.classes[1:])),
        rows=tuple(
            (Cell(words=one.label, colour=colour_of(place)), *(figure_cell(figure) for _, figure in one.splits))
            for place, one in enumerate(part.ordinal)
        ),
    )


def _metrics(part: ClassFindings, names: Names) -> dict[str, Any]:
    every = metrics(part.found, names)
    plain = {name: every[name] for name in every if name not in OF_THE_RUN | set(run_facts(part.found, names))}
    added = {
        one.label: {
            "kappa_quadratic": interval_of(one.kappa),
            "steps_off": interval_of(one.steps),
            "auc_of_cuts": interval_of(one.splits_mean),
            "auc_by_cut": {name: interval_of(figure) for name, figure in one.splits},
        }
        for one in part.ordinal
    }
    by_method = {label: {**own, **added.get(label, {})} for label, own in plain["methods"].items()}
    patients = len(part.found.best.patients.ids)
    return {"kind": part.target.kind, **plain, "primary_figure": "auc", "patients": patients, "methods": by_method}


def _tables(part: ClassFindings, names: Names) -> dict[str, pd.DataFrame]:
    every = tables(part.found, names)
    own = {name: every[name] for name in every if name not in run_tables(part.found, names)}
    if not part.ordinal:
        return own
    rows = [
        {
            "method": one.label,
            "kappa_quadratic": one.kappa.value,
            "steps_off": one.steps.value,
            "auc_of_cuts": one.splits_mean.value,
            **{f"auc_{name}_and_above": figure.value for name, figure in one.splits},
        }
        for one in part.ordinal
    ]
    return {**own, "ordinal.csv": pd.DataFrame(rows)}
