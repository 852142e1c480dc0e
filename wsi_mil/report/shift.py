"""How far the slides of an external validation lie from the training slides: what predict measured, read again."""

from dataclasses import dataclass

import pandas as pd

from wsi_mil.errors import RunError
from wsi_mil.outcomes import Failure
from wsi_mil.report.pictures import data_uri
from wsi_mil.report.study import Study
from wsi_mil.results.reading import read_frame, read_text

FAR = 0.95
"""A slide farther from the training slides than this share of them are from each other is unlike them."""
_MEASURES = ("features", "stain")
_NUMBERS = ["features_distance", "features_training_nearer", "stain_distance", "stain_training_nearer", "mpp"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Shift:
    """Every measured slide against the training slides."""

    slides: pd.DataFrame
    """slide, distances, shares of training slides that lie nearer (NaN: not measured), mpp, what is unusual; unlike
    ones first, the farthest first."""
    sentences: tuple[str, ...]
    """In which measures more slides are far than chance explains."""
    picture: str
    """PNG as a data: URI; empty where there is none."""

    @property
    def unlike(self) -> pd.DataFrame:
        """The slides that are unlike the training slides in any measure."""
        return self.slides[self.slides["unusual"] != ""]


def read_shift(study: Study) -> tuple[Shift | None, list[Failure]]:
    """What `wsi-mil predict` measured; None where nothing was, or with the reason where it cannot be read."""
    path = study.run.domain_shift_path
    if study.external is None or not path.is_file():
        return None, []
    told, picture = path.with_suffix(".txt"), path.with_suffix(".png")
    try:
        frame = read_frame(path, ["slide", *_NUMBERS, "unusual"])
        frame = frame.replace("", "nan").astype(dict.fromkeys(_NUMBERS, float)).assign(unusual=frame["unusual"])
        said = tuple(read_text(told).splitlines()) if told.is_file() else ()
        drawn = data_uri("image/png", picture.read_bytes()) if picture.is_file() else ""
    except (RunError, ValueError, OSError) as error:
        return None, [Failure(item=path.name, outcome="not shown", reason=str(error))]
    far = frame[[f"{name}_training_nearer" for name in _MEASURES]].max(axis=1).fillna(0)
    order = pd.DataFrame({"like": frame["unusual"] == "", "near": -far, "distance": -frame["features_distance"]})
    places = order.sort_values(["like", "near", "distance"], kind="stable").index
    return Shift(slides=frame.loc[places].reset_index(drop=True), sentences=said, picture=drawn), []
