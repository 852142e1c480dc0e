"""All that the report says of a run that predicts numbers, times, ordered classes or several targets at once."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from wsi_mil.outcomes import Failure
from wsi_mil.progress import progress
from wsi_mil.report.audit import audit, cohort_flow
from wsi_mil.report.faithful import read_faithfulness
from wsi_mil.report.findings import Findings, before_training, find, fingerprints
from wsi_mil.report.kinds.class_chapter import ClassFindings, find_classes
from wsi_mil.report.kinds.reading import RunStudies
from wsi_mil.report.kinds.records import Target
from wsi_mil.report.kinds.regression_findings import NumberFindings, find_numbers
from wsi_mil.report.kinds.survival_chapter import SurvivalFindings, find_survival
from wsi_mil.report.method_figures import MethodFigures
from wsi_mil.report.pointing import point
from wsi_mil.report.shift import read_shift
from wsi_mil.report.study import Study

TargetFindings = ClassFindings | NumberFindings | SurvivalFindings


@dataclass(frozen=True, kw_only=True, eq=False)
class RunFindings:
    """Everything, shared parts once."""

    studies: RunStudies
    shared: Findings
    """Cohort flow, audit and pointing of the run; its methods are named and have no figures."""
    targets: tuple[tuple[Target, TargetFindings | None], ...]
    """In the configured order; None where no tested patient has a label."""


@dataclass(frozen=True, kw_only=True)
class _Named:
    """As much of a method as shared sections need."""

    label: str


def find_run(studies: RunStudies, *, slides_root: Path | None) -> RunFindings:
    """Compute all figures of a run."""
    targets: list[tuple[Target, TargetFindings | None]] = []
    with progress("report", total=len(studies.targets), unit="targets") as bar:
        for target, study in zip(studies.targets, studies.studies, strict=True):
            if not study.methods:
                targets.append((target, None))
            elif isinstance(study, Study):
                targets.append((target, find_classes(target, find(study, slides_root=slides_root))))
            elif target.kind == "survival":
                targets.append((target, find_survival(study, _seen(studies, target), slides_root=slides_root)))
            else:
                targets.append((target, find_numbers(study, _seen(studies, target), slides_root=slides_root)))
            bar.advance()
    return RunFindings(studies=studies, shared=_shared(studies), targets=tuple(targets))


def _seen(studies: RunStudies, target: Target) -> Study:
    """The run as pictures and pointing see it: tile scores of a target without classes bear its name."""
    everyone = studies.everyone
    return replace(everyone, classes=(target.name,), cohort=everyone.cohort.assign(target=target.name))


def _shared(studies: RunStudies) -> Findings:
    everyone, first = studies.everyone, studies.targets[0]
    alone = len(studies.targets) == 1 and not first.has_classes
    pointing, failures = point(_seen(studies, first) if alone else everyone)
    prints, failed = fingerprints(everyone)
    leakage, unread = before_training(everyone)
    faithful, unmeasured = read_faithfulness(everyone)
    shift, unshown = read_shift(everyone)
    named = tuple(cast(MethodFigures, _Named(label=method.label)) for method in everyone.methods)
    return Findings(
        study=everyone,
        flow=cohort_flow(everyone),
        audit=audit(everyone, prints),
        methods=named,
        comparisons=(),
        choices=(),
        benefits=(),
        columns=(),
        leakage=leakage,
        pointing=tuple(pointing),
        faithfulness=tuple(faithful),
        cases={},
        failures=(*failures, *failed, *unread, *unmeasured, *unshown),
        shift=shift,
    )


def all_failures(found: RunFindings) -> tuple[Failure, ...]:
    """Each once."""
    own = [failure for _, part in found.targets if part is not None for failure in _failures(part)]
    return tuple(dict.fromkeys([*own, *found.shared.failures]))


def _failures(part: TargetFindings) -> tuple[Failure, ...]:
    return part.found.failures if isinstance(part, ClassFindings) else part.failures
