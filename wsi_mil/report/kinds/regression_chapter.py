"""The part of the report about one predicted number."""

from typing import Any

import jinja2

from wsi_mil.report.case_notes import pictures_note
from wsi_mil.report.designs import design_of
from wsi_mil.report.figures import colour_of
from wsi_mil.report.kinds.cases import cases_shown
from wsi_mil.report.kinds.chapters import (
    Cell,
    Chapter,
    Line,
    MethodPart,
    Shown,
    Table,
    comparison_table,
    figure_cell,
    rendered,
    words_cells,
)
from wsi_mil.report.kinds.charts import Bar, dots_chart, interval_chart, scatter_chart
from wsi_mil.report.kinds.regression import NAMES, NumberFigures
from wsi_mil.report.kinds.regression_findings import NumberFindings
from wsi_mil.report.kinds.regression_tables import number_metrics, number_tables
from wsi_mil.report.kinds.regression_wording import (
    largest_error,
    number_comparison,
    number_how,
    number_question,
    number_verdict,
    number_warnings,
)
from wsi_mil.report.kinds.wording import chosen_by, spread_of_seeds
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.sections.errors import gradient
from wsi_mil.report.wording import number, signed, span

PRIMARY = "R²"
CASES_NOTE = "For each method, the patients whose prediction is farthest off, worst first."
TITLES = {"r2": "R²", "mae": "MAE", "rmse": "RMSE", "pearson": "Pearson", "spearman": "Spearman", "slope": "slope"}


def number_chapter(found: NumberFindings, names: Names, templates: jinja2.Environment) -> Chapter:
    """Words, tables and charts."""
    return Chapter(
        target=found.study.target,
        question=number_question(found),
        sentences=tuple(filter(None, (number_verdict(found), largest_error(found), number_comparison(found)))),
        warnings=tuple(number_warnings(found)),
        how=number_how(design_of(found.study)),
        parts=rendered(templates, _context(found, names)),
        primary=PRIMARY,
        labelled=len(found.best.patients.ids),
        lines=tuple(Line(method=method.label, figure=method.primary) for method in found.methods),
        metrics=number_metrics(found),
        tables=number_tables(found, names),
        failures=found.failures,
    )


def _context(found: NumberFindings, names: Names) -> dict[str, Any]:
    bars = [Bar(label=m.label, colour=colour_of(place), figure=m.primary) for place, m in enumerate(found.methods)]
    dots = [(m.label, [fold.values["mae"] for fold in m.folds]) for m in found.methods]
    mae = f"mean absolute error of each fold model ({found.study.target.name})"
    external = found.study.external is not None
    return {
        "meaning": (
            "R²: the share of the differences between patients that the predictions explain. 0 is no better than "
            "giving everyone the mean value, 1 is perfect. MAE says by how much a prediction is off on average, in "
            f"the units of “{found.study.target.name}”."
        ),
        "forest": interval_chart(bars, axis="R² with 95 % interval (dotted line: guessing the mean)", reference=0.0),
        "compared": _compared(found),
        "compared_note": (
            "Small figures are 95 % intervals. MAE and RMSE: 0 is best. Correlations: 1 is perfect, 0 is none. A dash: "
            "no interval can be claimed."
        ),
        "tests": comparison_table(found.comparisons, what="MAE", digits=found.digits + 1),
        "tests_note": (
            "The same patients, judged by both methods: difference of the mean absolute error, first minus second; "
            "below 0 the first is nearer. Not defined: fewer than 10 patients."
        ),
        "together": ()
        if external
        else (
            Shown(
                chart=dots_chart(dots, axis=mae, reference=None),
                note="One dot a fold model. The spread of folds is no interval: folds share training patients.",
            ),
        ),
        "external": external,
        "cases_note": CASES_NOTE,
        "pictures_note": pictures_note(
            [case for cases in found.cases.values() for case in cases], external=found.study.external is not None
        ),
        "gradient": gradient(),
        "methods": [_part(found, method, place, names) for place, method in enumerate(found.methods)],
    }


def _mean_over(found: NumberFindings) -> str:
    return "the mean over slides and models" if found.study.external else "the mean over slides, seeds and repeats"


def _digits(found: NumberFindings, name: str) -> int:
    return found.digits if name in ("mae", "rmse") else 2


def _compared(found: NumberFindings) -> Table:
    columns = [name for name in NAMES if name != "slope"]
    return Table(
        head=("Method", *(TITLES[name] for name in columns)),
        rows=tuple(
            (
                Cell(words=method.label, colour=colour_of(place)),
                *(figure_cell(method.figures[name], _digits(found, name), strong=name == "r2") for name in columns),
            )
            for place, method in enumerate(found.methods)
        ),
    )


def _part(found: NumberFindings, method: NumberFigures, place: int, names: Names) -> MethodPart:
    patients, digits = method.patients, found.digits
    cases = found.cases[method.label]

    def about(row: int) -> str:
        measured, predicted = (number(float(values[row]), digits) for values in (patients.truth, patients.predicted))
        return f"measured {measured}, predicted {predicted}, off by {signed(float(patients.off[row]), digits)}"

    chart = scatter_chart(
        patients.truth, patients.predicted, name=found.study.target.name, label=method.label, colour=colour_of(place)
    )
    facts = [(name, f"{TITLES[name]}, {span(method.figures[name].interval, _digits(found, name))}") for name in NAMES]
    return MethodPart(
        label=method.label,
        colour=colour_of(place),
        facts=tuple((number(method.figures[name].value, _digits(found, name)), words) for name, words in facts),
        sentences=(),
        charts=(Shown(chart=chart, note=f"One dot a patient: {_mean_over(found)}."),),
        folds=None if found.study.external is not None else _folds(found, method),
        folds_note=chosen_by(method.folds) + spread_of_seeds(method.by_seed, "mean absolute error", digits=digits),
        cases=cases_shown(cases, patients.ids, about, names),
        cases_table=_cases_table(found, method, names),
    )


def _folds(found: NumberFindings, method: NumberFigures) -> Table:
    columns = [name for name in NAMES if name != "slope"]
    return Table(
        head=("Model", "Test patients", *(TITLES[name] for name in columns), "Epoch kept"),
        rows=tuple(
            words_cells(
                str(fold.key),
                str(fold.patients),
                *(number(fold.values[name], _digits(found, name)) for name in columns),
                str(fold.epoch) if fold.epoch is not None else "–",
            )
            for fold in method.folds
        ),
    )


def _cases_table(found: NumberFindings, method: NumberFigures, names: Names) -> Table:
    patients, digits = method.patients, found.digits
    return Table(
        head=("Patient", "Measured", "Predicted", "Off by"),
        rows=tuple(
            words_cells(
                names.patient(patients.ids[case.place]),
                number(float(patients.truth[case.place]), digits),
                number(float(patients.predicted[case.place]), digits),
                signed(float(patients.off[case.place]), digits),
            )
            for case in found.cases[method.label]
        ),
    )
