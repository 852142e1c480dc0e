"""All that the report says of a run that predicts numbers, times, ordered classes or several targets at once."""

from dataclasses import dataclass, replace
from pathlib import Path

from wsi_mil.outcomes import Failure
from wsi_mil.progress import progress
from wsi_mil.report.findings import SharedFindings, find, find_shared
from wsi_mil.report.kinds.class_chapter import ClassFindings, find_classes
from wsi_mil.report.kinds.reading import RunStudies
from wsi_mil.report.kinds.records import Target
from wsi_mil.report.kinds.regression_findings import NumberFindings, find_numbers
from wsi_mil.report.kinds.survival_chapter import SurvivalFindings, find_survival
from wsi_mil.report.study import Study

TargetFindings = ClassFindings | NumberFindings | SurvivalFindings


@dataclass(frozen=True, kw_only=True, eq=False)
class RunFindings:
    """Everything, shared parts once."""

    studies: RunStudies
    shared: SharedFindings
    targets: tuple[tuple[Target, TargetFindings | None], ...]
    """In the configured order; None where no tested patient has a label."""


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


def _shared(studies: RunStudies) -> SharedFindings:
    everyone, first = studies.everyone, studies.targets[0]
    alone = len(studies.targets) == 1 and not first.has_classes
    return find_shared(everyone, pointed=_seen(studies, first) if alone else everyone)


def all_failures(found: RunFindings) -> tuple[Failure, ...]:
    """Each once."""
    own = [failure for _, part in found.targets if part is not None for failure in _failures(part)]
    return tuple(dict.fromkeys([*own, *found.shared.failures]))


def _failures(part: TargetFindings) -> tuple[Failure, ...]:
    return part.found.failures if isinstance(part, ClassFindings) else part.failures
