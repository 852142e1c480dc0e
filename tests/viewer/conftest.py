"""A small finished run with its slides, made here: what page, routes and browser tests look at."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from apps.viewer import library as library_module
from apps.viewer.library import Library, install
from tiling.slide import read_header
from wsi_mil.heatmap import ScoreColumn, TileGeometry, TileScores
from wsi_mil.runs import FoldKey, RunDir, write_frame

SIZE, TILE = (2305, 1547), 101
FIDUCIALS = [(1, 1), (20, 1), (10, 7), (2, 13), (21, 14)]
"""Grid places of the dark squares, which the heatmap must cover exactly."""
ODD_NAME = "Präparat 07 #1 & <b>"
CLASSES = ("normal", "tumour")
OUT_OF_FOLD, SEEN = FoldKey(0, 0, 0), FoldKey(0, 1, 0)


@dataclass(frozen=True)
class Study:
    """Where the made run and its slides are."""

    run: Path
    slides: Path


def _fiducial_slide() -> NDArray[np.uint8]:
    rgb = np.full((SIZE[1], SIZE[0], 3), 235, np.uint8)
    for column, row in FIDUCIALS:
        rgb[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE] = (30, 30, 30)
    return rgb


def _scores(slide_id: str, fingerprint: str, *, branches: bool, lift: float) -> TileScores:
    """Every tile of the slide scored; the fiducials high, or each branch high at another one."""
    grid = np.stack(np.meshgrid(np.arange(SIZE[0] // TILE), np.arange(SIZE[1] // TILE)), axis=-1).reshape(-1, 2)
    hot = np.stack([(grid == place).all(axis=1) for place in FIDUCIALS], axis=1)
    if branches:
        columns = [ScoreColumn(name=f"probability:{c}", kind="probability", label=c) for c in CLASSES]
        values = 0.1 + lift * hot[:, :2]
    else:
        columns = [ScoreColumn(name="attention", kind="attention", label=None)]
        columns += [ScoreColumn(name="contribution:tumour", kind="contribution", label="tumour")]
        values = np.stack([0.001 + lift * hot.any(axis=1), np.where(hot[:, 2], -1.0, 0.25)], axis=1)
    return TileScores(
        slide_id=slide_id,
        slide_fingerprint=fingerprint,
        geometry=TileGeometry(
            level0_size=SIZE,
            mpp=(0.5, 0.5),
            tile_size_l0=(TILE, TILE),
            stride_l0=(TILE, TILE),
            origin_l0=(0, 0),
            bounds_l0=(0, 0, *SIZE),
        ),
        coords_l0=grid * TILE,
        grid_xy=grid,
        columns=tuple(columns),
        values=values.astype(np.float32),
    )


def _prediction(method: str, slide: str, key: FoldKey, *, label: str, tumour: float) -> dict[str, object]:
    return {
        "method": method,
        "target_name": "lesion",
        **key._asdict(),
        "level": "slide",
        "patient": f"patient of {slide}",
        "slide": slide,
        "target": label,
        "logit_normal": 0.0,
        "logit_tumour": float(np.log(tumour / (1 - tumour))),
        "prob_normal": 1 - tumour,
        "prob_tumour": tumour,
    }


def make_study(folder: Path, write: Callable[..., Path]) -> Study:
    """Three cases: a well predicted one, a missed one with a hostile name, and one whose file is gone."""
    study = Study(run=folder / "run", slides=folder / "slides")
    run, rows, predictions = RunDir(study.run), [], []
    methods = [
        {"label": name, "name": name, "params": {}, "objective": {}, "regularisers": {}} for name in ("abmil", "acmil")
    ]
    target = {"kind": "binary", "name": "lesion", "classes": list(CLASSES)}
    task = {"target": "lesion", "level": "slide", "classes": list(CLASSES), "positive": "tumour"}
    task |= {"kind": "binary", "targets": [target]}
    run.write_config({"kind": "crossval", "slides": str(study.slides), "task": task, "methods": methods})
    for slide, label, tumour in [("fiducials", "tumour", 0.9), (ODD_NAME, "normal", 0.7), ("gone", "normal", 0.4)]:
        path = write(
            study.slides / f"{slide}.tif", _fiducial_slide(), mpp=0.5, levels=(1, 4), quality=95, subsampling=(1, 1)
        )
        fingerprint = read_header(path).fingerprint
        for method, keys in (("abmil", [OUT_OF_FOLD]), ("acmil", [OUT_OF_FOLD, OUT_OF_FOLD._replace(seed=1)])):
            for key in keys:
                run.write_scores(
                    method, key, _scores(slide, fingerprint, branches=method == "acmil", lift=0.3 + 0.2 * key.seed)
                )
                predictions.append(_prediction(method, slide, key, label=label, tumour=tumour))
            run.write_scores(method, SEEN, _scores(slide, fingerprint, branches=method == "acmil", lift=0.9))
        row = {"slide": slide, "patient": f"patient of {slide}", "site": "A", "target": label, "path": path.name}
        rows.append(row | {"annotation": "", "mpp_x": "0.5", "mpp_y": "0.5", "status": "used", "tiles": "330"})
    (study.slides / "gone.tif").unlink()
    write_frame(run.cohort_path, pd.DataFrame(rows))
    write_frame(run.predictions_path, pd.DataFrame(predictions))
    return study


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory, make_pyramid: Callable[..., Path]) -> Study:
    """The made run; tests read it and change nothing."""
    return make_study(tmp_path_factory.mktemp("study"), make_pyramid)


@pytest.fixture
def library(study: Study) -> Iterator[Library]:
    """The made run as the viewer shares it, installed for the length of one test."""
    shared = Library(RunDir(study.run), None)
    install(shared)
    yield shared
    library_module._library = None
