"""All that the report says, computed once: the page, the tables and metrics.json are views of it."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from wsi_mil.errors import UserError
from wsi_mil.leaks.leakage import LeakageAudit, read_leakage
from wsi_mil.outcomes import Failure
from wsi_mil.progress import progress
from wsi_mil.report.audit import Audit, Flow, audit, cohort_flow
from wsi_mil.report.benefit import Benefit, benefits
from wsi_mil.report.choices import Choices, choices_of
from wsi_mil.report.evaluate import evaluate
from wsi_mil.report.faithful import MethodFaithfulness, read_faithfulness
from wsi_mil.report.method_figures import MethodFigures
from wsi_mil.report.pictures import Case, worst_cases
from wsi_mil.report.pointing import Pointing, point
from wsi_mil.report.ranking_figures import within_folds
from wsi_mil.report.shift import Shift, read_shift
from wsi_mil.report.study import Study
from wsi_mil.report.subgroups import Column, subgroups
from wsi_mil.statistics.comparison import PairedTest, compare_aucs, holm


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two methods of the run."""

    first: str
    second: str
    patients: int
    test: PairedTest
    p_corrected: float
    """Holm, over all pairs of the run."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedFindings:
    """What is said of a run whatever it predicts."""

    study: Study
    flow: Flow
    audit: Audit
    choices: tuple[Choices, ...]
    """One a method; empty where the chapters of the targets tell it."""
    leakage: LeakageAudit | None
    """The audit from before training; None where the run holds none."""
    pointing: tuple[Pointing, ...]
    faithfulness: tuple[MethodFaithfulness, ...]
    """Of the methods where cross-validation measured it."""
    failures: tuple[Failure, ...]
    shift: Shift | None
    """Of an external validation, where it was measured."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Of the methods, in the order of the run."""
        return tuple(method.label for method in self.study.methods)


@dataclass(frozen=True, kw_only=True, eq=False)
class Findings(SharedFindings):
    """Everything that is said of a run that predicts classes."""

    methods: tuple[MethodFigures, ...]
    comparisons: tuple[Comparison, ...]
    benefits: tuple[Benefit, ...]
    """Binary only."""
    columns: tuple[Column, ...]
    """Subgroups."""
    cases: dict[str, tuple[Case, ...]]

    @property
    def best(self) -> MethodFigures:
        """The method with the highest primary AUC; the first one where none is defined."""
        return max(self.methods, key=lambda method: np.nan_to_num(method.primary.value, nan=-1.0))


def find(study: Study, *, slides_root: Path | None) -> Findings:
    """Compute all figures of a study."""
    shared = find_shared(study, pointed=study)
    figures: list[MethodFigures] = []
    cases: dict[str, tuple[Case, ...]] = {}
    failures = list(shared.failures)
    with progress("report", total=len(study.methods), unit="methods") as bar:
        for method in study.methods:
            figures.append(evaluate(method))
            found, failed = worst_cases(study, figures[-1], slides_root=slides_root)
            cases[method.label] = tuple(found)
            failures.extend(failed)
            bar.advance()
    methods = tuple(figures)
    choices = tuple(choices_of(method, found) for method, found in zip(study.methods, methods, strict=True))
    return Findings(
        **vars(replace(shared, choices=choices, failures=tuple(dict.fromkeys(failures)))),
        methods=methods,
        comparisons=tuple(compare_all(methods)),
        benefits=benefits(methods),
        columns=subgroups(study, methods),
        cases=cases,
    )


def find_shared(study: Study, *, pointed: Study) -> SharedFindings:
    """What is said of a run whatever it predicts.

    pointed: the study as its tile scores name its classes; the same, where classes are predicted.
    """
    pointing, failures = point(pointed)
    prints, failed = fingerprints(study)
    leakage, unread = before_training(study)
    faithful, unmeasured = read_faithfulness(study)
    shift, unshown = read_shift(study)
    return SharedFindings(
        study=study,
        flow=cohort_flow(study),
        audit=audit(study, prints),
        choices=(),
        leakage=leakage,
        pointing=tuple(pointing),
        faithfulness=tuple(faithful),
        failures=tuple(dict.fromkeys([*failures, *failed, *unread, *unmeasured, *unshown])),
        shift=shift,
    )


def compare_all(methods: tuple[MethodFigures, ...]) -> list[Comparison]:
    """Every pair of methods on the patients and models that both scored, corrected together."""
    pairs = [
        (a, b)
        for place, a in enumerate(methods)
        for b in methods[place + 1 :]
        if set(zip(a.rows.keys, a.rows.patients, strict=True)) & set(zip(b.rows.keys, b.rows.patients, strict=True))
    ]
    tests: list[tuple[PairedTest, int]] = []
    for first, second in pairs:
        mine, theirs = (list(zip(m.rows.keys, m.rows.patients, strict=True)) for m in (first, second))
        shared = set(mine) & set(theirs)
        left = first.rows.take(i for i, item in enumerate(mine) if item in shared)
        right = second.rows.take(i for i, item in enumerate(theirs) if item in shared)
        ids = tuple(sorted(set(left.patients)))
        tests.append((compare_aucs(within_folds(left, ids), within_folds(right, ids)), len(ids)))
    corrected = holm([test.p for test, _ in tests])
    return [
        Comparison(first=a.label, second=b.label, patients=n, test=test, p_corrected=p)
        for (a, b), (test, n), p in zip(pairs, tests, corrected, strict=True)
    ]


def before_training(study: Study) -> tuple[LeakageAudit | None, list[Failure]]:
    """The leakage audit of the run; one that cannot be read is a Failure."""
    path = study.run.leakage_path
    if not path.is_file():
        return None, []
    try:
        return read_leakage(path), []
    except UserError as error:
        return None, [Failure(item=path.name, outcome="not shown", reason=str(error))]


def fingerprints(study: Study) -> tuple[dict[str, str], list[Failure]]:
    """Fingerprint of each slide, from the stored tile scores of any method."""
    found: dict[str, str] = {}
    failures: list[Failure] = []
    for slide in study.used["slide"]:
        for method in study.methods:
            keys = study.run.score_keys(method.label, slide)
            if not keys:
                continue
            try:
                found[slide] = study.run.scores(method.label, keys[0], slide).slide_fingerprint
                break
            except (UserError, OSError) as error:
                failures.append(Failure(item=slide, outcome="no fingerprint", reason=str(error)))
    return {slide: text for slide, text in found.items() if text}, failures
