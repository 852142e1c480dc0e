"""The part of the report about one time to an event: findings, words and the parts of the page."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from wsi_mil.outcomes import Failure
from wsi_mil.report.case_notes import pictures_note
from wsi_mil.report.designs import Design, design_of
from wsi_mil.report.figures import colour_of
from wsi_mil.report.findings import Comparison
from wsi_mil.report.kinds.cases import cases_shown, worst_errors
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
from wsi_mil.report.kinds.charts import Bar, dots_chart, groups_chart, interval_chart
from wsi_mil.report.kinds.pairs import compare_methods
from wsi_mil.report.kinds.reading import targets_of
from wsi_mil.report.kinds.records import Answers, TargetStudy
from wsi_mil.report.kinds.survival import SurvivalFigures, evaluate_survival, within_folds
from wsi_mil.report.kinds.survival_tables import survival_metrics, survival_tables
from wsi_mil.report.kinds.survival_times import Followed, followed_patients, times_in_table
from wsi_mil.report.kinds.survival_wording import (
    brier_words,
    groups_words,
    range_words,
    survival_how,
    survival_question,
    survival_verdict,
    survival_warnings,
    time_words,
)
from wsi_mil.report.kinds.wording import chosen_by, digits_for, spread_of_seeds
from wsi_mil.report.pictures import Case
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.sections.errors import gradient
from wsi_mil.report.study import Study
from wsi_mil.report.wording import compared_words, number, p_value, span
from wsi_mil.statistics.comparison import PairedTest, compare_aucs

PRIMARY = "C-index"
CASES_NOTE = "For each method, the patients ranked wrongly against most others of their fold, worst first."


@dataclass(frozen=True, kw_only=True, eq=False)
class SurvivalFindings:
    """All that is said of one time to an event."""

    study: TargetStudy
    followed: Followed
    methods: tuple[SurvivalFigures, ...]
    comparisons: tuple[Comparison, ...]
    cases: dict[str, tuple[Case, ...]]
    failures: tuple[Failure, ...]

    @property
    def best(self) -> SurvivalFigures:
        """The method with the highest C-index; the first one where none is defined."""
        return max(self.methods, key=lambda method: np.nan_to_num(method.primary.value, nan=-1.0))

    @property
    def digits(self) -> int:
        """Decimals of a time."""
        return digits_for(self.best.patients.times)


def find_survival(study: TargetStudy, everyone: Study, *, slides_root: Path | None) -> SurvivalFindings:
    """Compute all figures of a time to an event."""
    followed = followed_patients([method.test for method in study.methods], study.folds, _times_of_everybody(study))
    methods, cases, failures = [], {}, []
    for method in study.methods:
        figures = evaluate_survival(method, followed)
        methods.append(figures)
        cases[method.label], failed = worst_errors(
            everyone, method.label, figures.patients.ids, figures.patients.wrong, slides_root=slides_root
        )
        failures.extend(failed)
    return SurvivalFindings(
        study=study,
        followed=followed,
        methods=tuple(methods),
        comparisons=compare_methods([(m.label, m.rows) for m in methods], _compare),
        cases=cases,
        failures=tuple(failures),
    )


def _times_of_everybody(study: TargetStudy) -> dict[str, tuple[float, bool]] | None:
    """From the table, as training patients need not be tested; None where there is no training part."""
    if study.external is not None:
        return None
    first = targets_of(study.config)[0].name
    time, event = ("target" if name == first else f"value:{name}" for name in (study.target.name, study.target.event))
    cohort = study.run.cohort("status", time, event)
    return times_in_table(cohort, time=time, event=event, source=str(study.run.cohort_path))


def _compare(first: Answers, second: Answers) -> PairedTest:
    ids = tuple(sorted(set(first.patients)))
    return compare_aucs(within_folds(first, ids), within_folds(second, ids))


def survival_chapter(found: SurvivalFindings, names: Names, templates: jinja2.Environment) -> Chapter:
    """Words, tables and charts."""
    compare = compared_words(found.comparisons, n_methods=len(found.methods), higher_is_better=True)
    study, best, digits = found.study, found.best, found.digits
    design = design_of(study)
    verdict = survival_verdict(best, design, alone=len(found.methods) == 1)
    return Chapter(
        target=study.target,
        question=survival_question(study, best, digits),
        sentences=tuple(filter(None, (verdict, groups_words(best, design), compare))),
        warnings=tuple(survival_warnings(study, found.methods, found.followed)),
        how=survival_how(design),
        parts=rendered(templates, _context(found, names)),
        primary=PRIMARY,
        labelled=len(best.patients.ids),
        lines=tuple(Line(method=method.label, figure=method.primary) for method in found.methods),
        metrics=survival_metrics(study, found.methods, found.comparisons),
        tables=survival_tables(found.methods, found.comparisons, names),
        failures=found.failures,
    )


def _context(found: SurvivalFindings, names: Names) -> dict[str, Any]:
    bars = [Bar(label=m.label, colour=colour_of(place), figure=m.primary) for place, m in enumerate(found.methods)]
    design = design_of(found.study)
    return {
        "meaning": _meaning(design),
        "external": design.external,
        "forest": interval_chart(bars, axis="C-index with 95 % interval (dotted line: chance)", reference=0.5),
        "compared": _compared(found),
        "compared_note": f"{range_words()} {time_words(found.followed, found.methods, found.digits)}",
        "tests": comparison_table(found.comparisons, what="C-index", digits=3),
        "tests_note": (
            "The same patients, judged by both methods. Small corrected p: the difference is larger than chance "
            "allows. Not defined: fewer than 10 patients with the event, or fewer than 10 seen longer."
        ),
        "together": () if design.external else (_dots(found),),
        "cases_note": CASES_NOTE if not design.one_group else CASES_NOTE.replace(" of their fold", ""),
        "pictures_note": pictures_note(
            [case for cases in found.cases.values() for case in cases], external=found.study.external is not None
        ),
        "gradient": gradient(),
        "methods": [_part(found, method, place, names) for place, method in enumerate(found.methods)],
    }


def _meaning(design: Design) -> str:
    counted = (
        "all pairs of patients."
        if design.one_group
        else "pairs of patients of the same test fold, judged by the same model, since risks of different models have "
        "no common scale."
    )
    return (
        "C-index: of two patients of whom it is known who had the event first, how often that one has the higher "
        f"predicted risk; 0.5 is chance, 1 is perfect. It is counted over {counted}"
    )


def _dots(found: SurvivalFindings) -> Shown:
    dots = [(m.label, [fold.c_index for fold in m.folds]) for m in found.methods]
    return Shown(
        chart=dots_chart(dots, axis="C-index of each fold model (dotted line: chance)", reference=0.5),
        note="One dot a fold model. The spread of folds is no interval: folds share training patients.",
    )


def _compared(found: SurvivalFindings) -> Table:
    design = design_of(found.study)
    times = [f"AUC at time {number(at, found.digits)}" for at in found.followed.times]
    brier = any(np.isfinite(method.brier.figure.value) for method in found.methods)
    return Table(
        head=(
            "Method",
            design.within("C-index"),
            *([] if design.one_group else ["C-index pooled"]),
            *times,
            *(["Brier score, averaged"] if brier else []),
        ),
        rows=tuple(
            (
                Cell(words=method.label, colour=colour_of(place)),
                figure_cell(method.primary, strong=True),
                *([] if design.one_group else [figure_cell(method.pooled, tag="differs" if method.flagged else "")]),
                *(figure_cell(one.figure) for one in method.times),
                *([figure_cell(method.brier.figure, 3)] if brier else []),
            )
            for place, method in enumerate(found.methods)
        ),
    )


def _part(found: SurvivalFindings, method: SurvivalFigures, place: int, names: Names) -> MethodPart:
    digits, cases, patients = found.digits, found.cases[method.label], method.patients

    def about(row: int) -> str:
        seen = "the event" if patients.events[row] else "no event until then"
        return (
            f"{seen} at {number(float(patients.times[row]), digits)}, called {'high' if patients.high[row] else 'low'} "
            f"risk; ranked wrongly against {number(float(patients.wrong[row]), 1)} of "
            f"{number(float(patients.met[row]), 1)} patients"
        )

    design = design_of(found.study)
    pooled = (number(method.pooled.value), f"C-index pooled, {span(method.pooled.interval)}")
    facts = [
        (number(method.primary.value), f"{design.within('C-index')}, {span(method.primary.interval)}"),
        *([] if design.one_group else [pooled]),
        (p_value(method.log_rank.p), "log-rank p of the two risk groups"),
    ]
    if np.isfinite(method.brier.figure.value):
        words = f"Brier score, averaged; without any slide {number(method.brier.null, 3)}"
        facts.append((number(method.brier.figure.value, 3), words))
    return MethodPart(
        label=method.label,
        colour=colour_of(place),
        facts=tuple(facts),
        sentences=tuple(filter(None, (groups_words(method, design), brier_words(method, digits, design)))),
        charts=_charts(found, method),
        folds=None if design.external else _folds(method),
        folds_note=chosen_by(method.folds) + spread_of_seeds(method.by_seed, "within-fold C-index", digits=2),
        cases=cases_shown(cases, patients.ids, about, names),
        cases_table=_cases_table(found, method, names),
    )


def _charts(found: SurvivalFindings, method: SurvivalFigures) -> tuple[Shown, ...]:
    note = (
        "Ticks: patients whose follow-up ended without the event. The groups come from risks of patients that the "
        "models had not seen, so the curves show what they would have told"
    )
    note += "." if found.study.external else "; the p-value is approximate, since folds share training patients."
    return (Shown(chart=groups_chart(method.groups, name=found.study.target.name, label=method.label), note=note),)


def _folds(method: SurvivalFigures) -> Table:
    return Table(
        head=("Model", "Test patients", "With the event", "C-index", "Epoch kept"),
        rows=tuple(
            (
                *words_cells(str(fold.key), str(fold.patients), str(fold.events)),
                Cell(words=number(fold.c_index), range=fold.reason),
                *words_cells(str(fold.epoch) if fold.epoch is not None else "–"),
            )
            for fold in method.folds
        ),
    )


def _cases_table(found: SurvivalFindings, method: SurvivalFigures, names: Names) -> Table:
    patients = method.patients
    return Table(
        head=("Patient", "Event", "Called", "Time", "Risk", "Pairs ranked wrongly", "of pairs"),
        n_words=3,
        rows=tuple(
            words_cells(
                names.patient(patients.ids[row]),
                "seen" if patients.events[row] else "not seen",
                "high risk" if patients.high[row] else "low risk",
                number(float(patients.times[row]), found.digits),
                number(float(patients.risks[row])),
                number(float(patients.wrong[row]), 1),
                number(float(patients.met[row]), 1),
            )
            for row in (case.place for case in found.cases[method.label])
        ),
    )
