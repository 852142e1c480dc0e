"""A finished run seen slide by slide: what was predicted, how wrong, by which models, and where the file is."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from tiling.discovery import find_slides
from tiling.slide import Slide
from wsi_mil.errors import ConfigError, RunError, SlideError
from wsi_mil.heatmap import TileScores
from wsi_mil.results.thresholds import threshold_of
from wsi_mil.runs import FoldKey, RunDir


@dataclass(frozen=True, kw_only=True)
class Case:
    """One slide and what one method said of it (of its patient, at level patient), by models that did not see it."""

    slide_id: str
    patient: str
    site: str
    label: str
    """The true class, number or time; empty where it is not known."""
    predicted: str
    """Of two classes the last from the threshold up, as the report decides; of more the largest probability; else the
    number, or the risk."""
    threshold: float
    """Mean over the models in `keys`; NaN unless there are two classes."""
    probabilities: Mapping[str, float]
    """Class -> probability, the mean over the models in `keys`; empty for a target without classes."""
    loss: float
    """How wrong: -log of the true class's probability, or the distance of a number; NaN where neither is known."""
    keys: tuple[FoldKey, ...]
    """The models that scored it in test."""
    path: str
    """As the cohort has it: relative to the slides' folder, or empty."""
    mpp: tuple[float, float] | None
    """The pixel size that the study worked with."""

    @property
    def is_error(self) -> bool:
        """Whether a known label was missed."""
        return bool(self.label) and bool(self.probabilities) and self.predicted != self.label

    @property
    def how_sure(self) -> str:
        """Probability of the prediction as text, with the threshold where that is not a half; else nothing."""
        if not self.probabilities:
            return ""
        probability = f"{self.probabilities[self.predicted]:.2f}"
        if math.isnan(self.threshold) or self.threshold == 0.5:
            return probability
        return f"{probability}, {list(self.probabilities)[-1]} from {self.threshold:.2f} up"

    @property
    def said(self) -> str:
        """The prediction and how sure it is."""
        return f"predicted {self.predicted}" + (f" ({self.how_sure})" if self.how_sure else "")


def read_cases(run: RunDir, method: str) -> list[Case]:
    """The slides that a method was tested on, the worst first; of several targets the first counts.

    Raises ConfigError for a method the run has not.
    """
    if method not in run.methods():
        raise ConfigError(f"{run.path.name} has no method {method!r}; it has {', '.join(run.methods())}.")
    predictions, target = run.predictions(), run.config()["task"]["targets"][0]
    rows = predictions[(predictions["method"] == method) & (predictions["target_name"] == target["name"])]
    by_slide = dict(list(rows[rows["slide"] != ""].groupby("slide")))
    by_patient = dict(list(rows[rows["slide"] == ""].groupby("patient")))
    classes = [str(name) for name in target.get("classes") or ()]
    models = {FoldKey(*map(int, key)) for key in rows[["repeat", "fold", "seed"]].to_numpy()}
    cuts = dict.fromkeys(models, math.nan)
    if target["kind"] == "binary":
        cuts = {key: threshold_of(run, method, key, classes, target=target["name"]).value for key in models}
    cohort = run.cohort()
    cases = []
    for _, record in cohort.iterrows():
        own = by_slide.get(record["slide"], by_patient.get(record["patient"]))
        if own is not None:
            cases.append(_case(record, own, cuts, classes))
    return sorted(cases, key=lambda case: (-case.loss if math.isfinite(case.loss) else math.inf, case.slide_id))


def check_tested(run: RunDir) -> None:
    """Raise RunError when the folder holds no run, or one without predictions of slides that its models did not see."""
    if run.config()["kind"] == "train":
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
        return self.locate(case.slide_id, path=case.path)

    def locate(self, slide_id: str, *, path: str) -> Path:
        """The same of a slide by its id and its path as the cohort has it, which may be empty."""
        if path and (self.root / path).exists():
            return self.root / path
        if slide_id in self._by_id:
            return self._by_id[slide_id]
        raise SlideError(
            f"{slide_id}: its file {path or slide_id + '.*'} is not below {self.root}. "
            f"Give the folder that holds it with --slides DIR, or bring the file back."
        )

    @cached_property
    def _by_id(self) -> dict[str, Path]:
        if not self.root.is_dir():
            return {}
        return {source.slide_id: source.path for source in find_slides(self.root).sources}


def check_same_slide(slide: Slide, scores: TileScores) -> None:
    """Raise SlideError when the file is not the one that was scored."""
    there, scored = slide.info, scores.geometry
    if there.size_l0 != scored.level0_size or (there.fingerprint != scores.slide_fingerprint):
        raise SlideError(
            f"{scores.slide_id}: {slide.path} ({there.size_l0[0]} x {there.size_l0[1]}, {there.fingerprint[:8]}) "
            f"is not the file that was scored ({scored.level0_size[0]} x {scored.level0_size[1]}, "
            f"{scores.slide_fingerprint[:8]}). Give the folder with the original: --slides DIR."
        )


def slides_root(run: RunDir, slides: Path | None) -> Path:
    """The folder given, or the one that the run was made from. Raises RunError when there is neither."""
    known = run.config().get("slides")
    root = slides or (Path(known) if known else None)
    if root is None:
        raise RunError(f"{run.path} does not say where its slides are. Give their folder: --slides DIR.")
    if not root.is_dir():
        raise RunError(f"the slides' folder {root} does not exist. Give the one that holds them: --slides DIR.")
    return root


def _case(record: "pd.Series[str]", rows: pd.DataFrame, cuts: Mapping[FoldKey, float], classes: Sequence[str]) -> Case:
    probabilities = {name: float(rows[f"prob_{name}"].mean()) for name in classes}
    label = str(rows["target"].iloc[0])
    keys = tuple(sorted({FoldKey(*map(int, key)) for key in rows[["repeat", "fold", "seed"]].to_numpy()}))
    threshold = math.fsum(cuts[key] for key in keys) / len(keys)
    predicted, loss = _decided(probabilities, threshold), -math.log(max(probabilities.get(label, math.nan), 1e-12))
    if not classes:
        predicted, label, loss = _number(rows)
    return Case(
        slide_id=record["slide"],
        patient=record["patient"],
        site=record.get("site", ""),
        label=label,
        predicted=predicted,
        threshold=threshold,
        probabilities=probabilities,
        loss=loss,
        keys=keys,
        path=record.get("path", ""),
        mpp=_mpp(record),
    )


def _number(rows: pd.DataFrame) -> tuple[str, str, float]:
    """Prediction, label and distance of a target without classes."""
    label = pd.to_numeric(rows["target"], errors="coerce").iloc[0]
    told = "" if math.isnan(label) else f"{label:.3g}"
    if "prediction" in rows and rows["prediction"].notna().all():
        value = float(rows["prediction"].mean())
        return f"{value:.3g}", told, abs(value - label)
    if told:
        told += " (event)" if str(rows["event"].iloc[0]) in ("1", "1.0") else " (censored)"
    return f"risk {float(rows['risk'].mean()):.3g}", told, math.nan


def _decided(probabilities: Mapping[str, float], threshold: float) -> str:
    if not probabilities:
        return ""
    if math.isnan(threshold):
        return max(probabilities, key=lambda name: probabilities[name])
    negative, positive = probabilities
    return positive if probabilities[positive] >= threshold else negative


def _mpp(record: "pd.Series[str]") -> tuple[float, float] | None:
    x, y = record.get("mpp_x", ""), record.get("mpp_y", "")
    return (float(x), float(y)) if x and y else None
