"""The worst errors of a number or a risk, with the pictures that class reports show."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wsi_mil.outcomes import Failure
from wsi_mil.report.kinds.chapters import CaseShown
from wsi_mil.report.pictures import Case, worst_cases
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.study import Study
from wsi_mil.statistics.ranking import Floats, Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class _Patients:
    ids: tuple[str, ...]
    losses: Floats
    targets: Ints
    decisions: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class _Judged:
    """A method as its worst cases see it."""

    label: str
    patients: _Patients


def worst_errors(
    everyone: Study, label: str, ids: tuple[str, ...], losses: Floats, *, slides_root: Path | None
) -> tuple[tuple[Case, ...], list[Failure]]:
    """The patients with the highest loss (n,), the first few with a picture; what cannot be shown is a Failure."""
    nobody = np.zeros(len(ids), dtype=np.int64)
    judged = _Judged(label=label, patients=_Patients(ids=ids, losses=losses, targets=nobody, decisions=nobody))
    cases, failures = worst_cases(everyone, judged, slides_root=slides_root)
    return tuple(cases), failures


def cases_shown(
    cases: tuple[Case, ...], ids: tuple[str, ...], about: Callable[[int], str], names: Names
) -> tuple[CaseShown, ...]:
    """about: row of a patient -> what is said of it."""
    return tuple(
        CaseShown(
            patient=names.patient(ids[case.place]),
            about=about(case.place),
            slide=names.slide(case.picture.slide) if case.picture else "",
            picture=case.picture,
        )
        for case in cases
    )
