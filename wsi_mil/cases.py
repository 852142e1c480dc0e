"""A finished run seen slide by slide: what was predicted, how wrong, by which models, and where the file is."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from tiling.discovery import find_slides
from wsi_mil.errors import RunError, SlideError
from wsi_mil.runs import FoldKey, RunDir


@dataclass(frozen=True, kw_only=True)
class Case:
    """One slide and what one method said of it (of its patient, at level patient), by models that did not see it."""

    slide_id: str
    patient: str
    site: str
    label: str
    """The true class; empty where it is not known."""
    predicted: str
    probabilities: Mapping[str, float]
    """Class -> probability, the mean over the models in `keys`."""
    loss: float
    """-log of the true class's probability; NaN without a label."""
    keys: tuple[FoldKey, ...]
    """The models that scored it in test."""
    path: str
    """As the cohort has it: relative to the slides' folder, or empty."""
    mpp: tuple[float, float] | None
    """The pixel size that the study worked with."""

    @property
    def is_error(self) -> bool:
        """Whether a known label was missed."""
        return bool(self.label) and self.predicted != self.label


def read_cases(run: RunDir, method: str) -> list[Case]:
    """The slides that a method was tested on, the worst first. Raises RunError for a method the run does not have."""
    if method not in run.methods():
        raise RunError(f"{run.path.name} has no method {method!r}; it has {', '.join(run.methods())}.")
    predictions = run.predictions()
    rows = predictions[predictions["method"] == method]
    by_slide = dict(list(rows[rows["slide"] != ""].groupby("slide")))
    by_patient = dict(list(rows[rows["slide"] == ""].groupby("patient")))
    cohort = run.cohort()
    cases = []
    for _, record in cohort.iterrows():
        own = by_slide.get(record["slide"], by_patient.get(record["patient"]))
        if own is not None:
            cases.append(_case(record, own))
    return sorted(cases, key=lambda case: (-case.loss if math.isfinite(case.loss) else math.inf, case.slide_id))


def check_tested(run: RunDir) -> None:
    """Raise RunError when the folder holds no run, or one without predictions of slides that its models did not see."""
    if run.config().get("kind") == "train" and not run.is_finished():
        raise RunError(
            f"{run.path} holds a model that was trained on the whole cohort, and tested on nothing. "
            f"Score slides with it (wsi-mil predict {run.path} --bags BAGS --out OUT) and give that OUT."
        )
    run.predictions()


class SlideFinder:
    """Finds a case's slide file below one folder; the folder is searched at most once, and only when it must be."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, case: Case) -> Path:
        """The slide's file. Raises SlideError, naming what was looked for, when there is none."""
        if case.path and (self.root / case.path).exists():
            return self.root / case.path
        if case.slide_id in self._by_id:
            return self._by_id[case.slide_id]
        raise SlideError(
            f"{case.slide_id}: its file {case.path or case.slide_id + '.*'} is not below {self.root}. "
            f"Give the folder that holds it with --slides DIR, or bring the file back."
        )

    @cached_property
    def _by_id(self) -> dict[str, Path]:
        if not self.root.is_dir():
            return {}
        return {source.slide_id: source.path for source in find_slides(self.root).sources}


def slides_root(run: RunDir, slides: Path | None) -> Path:
    """The folder given, or the one that the run was made from. Raises RunError when there is neither."""
    known = run.config().get("slides")
    root = slides or (Path(known) if known else None)
    if root is None:
        raise RunError(f"{run.path} does not say where its slides are. Give their folder: --slides DIR.")
    if not root.is_dir():
        raise RunError(f"the slides' folder {root} does not exist. Give the one that holds them: --slides DIR.")
    return root


def _case(record: "pd.Series[str]", rows: pd.DataFrame) -> Case:
    names = [name for name in rows.columns if name.startswith("prob_")]
    probabilities = {name.removeprefix("prob_"): float(rows[name].mean()) for name in names}
    label = str(rows["target"].iloc[0])
    known = probabilities.get(label)
    return Case(
        slide_id=record["slide"],
        patient=record["patient"],
        site=record.get("site", ""),
        label=label,
        predicted=max(probabilities, key=lambda name: probabilities[name]),
        probabilities=probabilities,
        loss=math.nan if known is None else -math.log(max(known, 1e-12)),
        keys=tuple(sorted({FoldKey(*map(int, key)) for key in rows[["repeat", "fold", "seed"]].to_numpy()})),
        path=record.get("path", ""),
        mpp=_mpp(record),
    )


def _mpp(record: "pd.Series[str]") -> tuple[float, float] | None:
    x, y = record.get("mpp_x", ""), record.get("mpp_y", "")
    return (float(x), float(y)) if x and y else None
