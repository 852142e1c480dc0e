"""Fabricates a whole finished run folder with planted signal, without slides, models or training."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import tifffile

from tiling.slide import read_header
from wsi_mil.folding.confinement import Association, Confined
from wsi_mil.heatmap import ScoreColumn, TileGeometry, TileScores
from wsi_mil.leaks.leakage import LeakageAudit, LeakageFinding, Side, write_leakage
from wsi_mil.runs import FoldKey, RunDir, Selection, write_frame

SIDE_L0, TILE_L0 = 1536, 128


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What kind of run."""

    patients: int = 40
    n_folds: int = 5
    repeats: int = 1
    seeds: tuple[int, ...] = (0,)
    classes: tuple[str, ...] = ("normal", "tumour")
    signal: tuple[tuple[str, float], ...] = (("mean_pool", 0.6), ("abmil+aem", 1.8), ("acmil", 1.4))
    level: str = "patient"
    slides_per_patient: int = 1
    validation: int = 8
    excluded: tuple[str, ...] = ("slide file missing", "slide file missing", "no label")
    pathology: bool = False
    slides: bool = False
    scores: bool = True
    fold_shift: float = 0.0
    patient_name: str = "P{:03d}"
    values: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Further columns of the table and their levels, given to the patients in turn, two by two."""
    calibrated: bool = False
    search: bool = False
    leakage: bool = False
    """The audit from before training: a pair of slides that look alike, and a site that is tested only."""
    seed: int = 7


def fabricate(folder: Path, wish: Wish) -> RunDir:
    """Write the run into folder/run and its slides and annotations into folder/slides; return the run."""
    run = RunDir(folder / "run")
    generator = np.random.default_rng(wish.seed)
    patients = [wish.patient_name.format(place) for place in range(wish.patients)]
    truth = {patient: place % len(wish.classes) for place, patient in enumerate(patients)}
    slides = {p: [f"{p}_S{n}" for n in range(wish.slides_per_patient)] for p in patients}
    (folder / "slides").mkdir(parents=True)
    _write_config(run, folder, wish)
    write_frame(run.cohort_path, _cohort(folder, wish, slides, truth))
    folds = _folds(wish, patients, truth)
    write_frame(run.folds_path, folds)
    for patient in patients:
        for slide in slides[patient]:
            lesion = _lesion(truth[patient], len(wish.classes))
            if lesion:
                _annotation(folder / "slides" / f"{_safe(slide)}.geojson", lesion)
            if wish.slides:
                _slide(folder / "slides" / f"{_safe(slide)}.tif", lesion, generator)
    rows = [_predict(run, wish, folds, slides, truth, label, s, generator) for label, s in wish.signal]
    write_frame(run.predictions_path, pd.concat(rows, ignore_index=True))
    if wish.leakage:
        write_leakage(run.leakage_path, _leakage(wish, slides), {})
    return run


def _safe(slide: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in slide)


def _write_config(run: RunDir, folder: Path, wish: Wish) -> None:
    kind = "binary" if len(wish.classes) == 2 else "multiclass"
    run.write_config(
        {
            "kind": "crossval",
            "version": "0.1.0",
            "table": str(folder / "cohort.csv"),
            "slides": str(folder / "slides"),
            "bags": str(folder / "bags"),
            "task": {
                "target": "diagnosis",
                "level": wish.level,
                "kind": kind,
                "classes": list(wish.classes),
                "positive": wish.classes[-1],
                "targets": [{"name": "diagnosis", "kind": kind, "classes": list(wish.classes)}],
            },
            "folds": {"n_folds": wish.n_folds, "repeats": wish.repeats, "seed": 0, "validation": 0.2},
            "train": {"epochs": 20, "lr": 2.0e-4, "seeds": list(wish.seeds)},
            "methods": [
                {"label": label, "name": label.split("+")[0], "params": {}, "objective": {}, "regularisers": {}}
                for label, _ in wish.signal
            ],
            "cohort": {
                "columns": {},
                "counts": {"rows": wish.patients * wish.slides_per_patient + len(wish.excluded), "extra": 4},
            },
            "encoder": {
                "name": "tf_efficientnet_lite0",
                "weights_sha256": "ab" * 32,
                "mpp": 0.5,
                "tile_px": 128,
                "licence": "Apache-2.0",
                "pathology": wish.pathology,
            },
        }
    )
    run.write_environment({"python": "3.11", "torch": "2.14.1", "device": "cpu", "threads": 2})


def _cohort(folder: Path, wish: Wish, slides: dict[str, list[str]], truth: dict[str, int]) -> pd.DataFrame:
    rows = []
    for place, (patient, own) in enumerate(slides.items()):
        for slide in own:
            lesion = bool(_lesion(truth[patient], len(wish.classes)))
            annotation = str(folder / "slides" / f"{_safe(slide)}.geojson") if lesion else ""
            rows.append(
                {
                    "slide": slide,
                    "patient": patient,
                    "site": f"site{place // len(wish.classes) % 5}",
                    "target": wish.classes[truth[patient]],
                    "path": f"{_safe(slide)}.tif",
                    "annotation": annotation,
                    "mpp_x": "0.5" if place % 3 else "0.2528",
                    "mpp_y": "0.5" if place % 3 else "0.2528",
                    "status": "used",
                    "tiles": str((SIDE_L0 // TILE_L0) ** 2),
                }
            )
    frame = pd.DataFrame(rows)
    order = {patient: place for place, patient in enumerate(slides)}
    for name, levels in wish.values:
        cells = [levels[order[patient] // len(wish.classes) % len(levels)] for patient in frame["patient"]]
        frame[f"value:{name}"] = cells
    rows = frame.to_dict("records")
    for number, reason in enumerate(wish.excluded):
        lost = dict.fromkeys(rows[0], "") | {"slide": f"lost{number}", "patient": f"lostpatient{number}"}
        rows.append(lost | {"status": reason, "target": wish.classes[0] if "label" not in reason else ""})
    return pd.DataFrame(rows)


def _folds(wish: Wish, patients: list[str], truth: dict[str, int]) -> pd.DataFrame:
    k, rows = len(wish.classes), []
    for repeat in range(wish.repeats):
        home = {p: (place // k + repeat * (place % k + 1)) % wish.n_folds for place, p in enumerate(patients)}
        for fold in range(wish.n_folds):
            others = [p for p in patients if home[p] != fold]
            held = set(others[: wish.validation])
            for patient in patients:
                part = "test" if home[patient] == fold else "validation" if patient in held else "train"
                rows.append({"repeat": repeat, "fold": fold, "patient": patient, "part": part})
    return pd.DataFrame(rows)


def _predict(run, wish, folds, slides, truth, label, signal, generator) -> pd.DataFrame:
    rows = []
    for seed in wish.seeds:
        for (repeat, fold), part in folds.groupby(["repeat", "fold"]):
            key = FoldKey(int(repeat), int(fold), seed)
            shift = wish.fold_shift * (fold - (wish.n_folds - 1) / 2)
            make = lambda patients: _rows(wish, patients, slides, truth, label, key, signal, shift, generator)  # noqa: B023, E731
            test = list(part["patient"][part["part"] == "test"])
            validation = make(list(part["patient"][part["part"] == "validation"]))
            write_frame(run.validation_path(label, key), validation)
            run.write_selection(
                label,
                key,
                Selection(epoch=7 + fold, chosen_by="validation loss", metric="loss", value=0.4, epochs_run=20),
            )
            _note_choices(run, wish, label, key)
            rows.append(make(test))
            for patient in test if wish.scores else []:
                for slide in slides[patient]:
                    scores = _scores(wish, slide, truth[patient], signal, generator)
                    if wish.slides:
                        file = run.path.parent / "slides" / f"{_safe(slide)}.tif"
                        scores = dataclasses.replace(scores, slide_fingerprint=read_header(file).fingerprint)
                    run.write_scores(label, key, scores)
    return pd.concat(rows, ignore_index=True)


def _note_choices(run: RunDir, wish: Wish, label: str, key: FoldKey) -> None:
    """What calibration and search leave beside the chosen epoch."""
    path = run.selection_path(label, key)
    choice = json.loads(path.read_text())
    if wish.calibrated:
        reason = "temperature of 30 validation patients"
        choice["calibration"] = {"diagnosis": {"kind": "temperature", "reason": reason, "temperature": 2.0}}
    if wish.search:
        choice["search"] = {"trials": 12, "metric": "loss", "chosen": {"train.lr": 0.001, "params.dim": 128}}
    path.write_text(json.dumps(choice))


def _rows(wish, patients, slides, truth, label, key, signal, shift, generator) -> pd.DataFrame:
    k, rows = len(wish.classes), []
    for patient in patients:
        for slide in slides[patient] if wish.level == "slide" else [""]:
            logits = generator.normal(size=k) * 0.8
            logits[truth[patient]] += signal
            logits[-1] += shift
            odds = np.exp(logits - logits.max())
            probabilities = odds / odds.sum()
            rows.append(
                {
                    "method": label,
                    "target_name": "diagnosis",
                    "repeat": key.repeat,
                    "fold": key.fold,
                    "seed": key.seed,
                    "level": wish.level,
                    "patient": patient,
                    "slide": slide,
                    "target": wish.classes[truth[patient]],
                    **{f"logit_{name}": float(value) for name, value in zip(wish.classes, logits, strict=True)},
                    **{f"prob_{name}": float(value) for name, value in zip(wish.classes, probabilities, strict=True)},
                    **_calibrated(wish, probabilities),
                }
            )
    return pd.DataFrame(rows)


def _leakage(wish: Wish, slides: dict[str, list[str]]) -> LeakageAudit:
    (one, first), (other, second) = list(slides.items())[:2]
    alike = LeakageFinding(
        kind="same picture",
        severity="suspicious",
        slides=(first[0], second[0]),
        patients=(one, other),
        sides=(Side(repeat=0, fold=1, parts=("train", "test")),),
        value=7.0,
        reason=f"{first[0]} (patient {one}) and {second[0]} (patient {other}) look alike",
    )
    return LeakageAudit(
        findings=(alike,),
        slides=sum(map(len, slides.values())),
        patients=len(slides),
        fingerprints=len(slides),
        pictures=len(slides) - 1,
        bags=len(slides),
        left_out=0,
        not_compared={first[0]: f"{first[0]} cannot be opened"},
        confined=(Confined(repeat=0, fold=1, kind="site", name="site1", parts=("test",), patients=4),),
        association=Association(
            cramers_v=0.4,
            corrected_v=0.35,
            n=len(slides),
            sites=("site0", "site1"),
            labels=wish.classes,
            one_label_sites=("site1",),
            one_site_labels=(),
        ),
    )


def _calibrated(wish: Wish, probabilities) -> dict[str, float]:
    """Temperature 2: the square roots, normed."""
    if not wish.calibrated:
        return {}
    roots = np.sqrt(probabilities) / np.sqrt(probabilities).sum()
    return {f"calibrated_{name}": float(value) for name, value in zip(wish.classes, roots, strict=True)}


def _lesion(target: int, n_classes: int) -> tuple[int, int, int, int]:
    """(x, y, width, height) on level 0; empty for the first class."""
    return () if target == 0 else (384, 512, 384 + 128 * (target % n_classes), 384)


def _scores(wish, slide: str, target: int, signal: float, generator) -> TileScores:
    n = SIDE_L0 // TILE_L0
    grid_xy = np.stack(np.meshgrid(np.arange(n), np.arange(n)), axis=-1).reshape(-1, 2)
    coords = grid_xy * TILE_L0
    inside = np.zeros(len(coords))
    if lesion := _lesion(target, len(wish.classes)):
        x, y, width, height = lesion
        inside = (
            (coords[:, 0] >= x) & (coords[:, 0] < x + width) & (coords[:, 1] >= y) & (coords[:, 1] < y + height)
        ).astype(float)
    logits = generator.normal(size=len(coords)) * 0.7 + signal * inside
    attention = np.exp(logits) / np.exp(logits).sum()
    probability = 1 / (1 + np.exp(-(logits - 1)))
    columns = (
        ScoreColumn(name="attention", kind="attention", label=None),
        ScoreColumn(name=f"probability:{wish.classes[-1]}", kind="probability", label=wish.classes[-1]),
    )
    geometry = TileGeometry(
        level0_size=(SIDE_L0, SIDE_L0),
        mpp=(0.5, 0.5),
        tile_size_l0=(TILE_L0, TILE_L0),
        stride_l0=(TILE_L0, TILE_L0),
        origin_l0=(0, 0),
        bounds_l0=(0, 0, SIDE_L0, SIDE_L0),
    )
    return TileScores(
        slide_id=slide,
        slide_fingerprint=f"print-{slide}",
        geometry=geometry,
        coords_l0=coords.astype(np.int64),
        grid_xy=grid_xy.astype(np.int64),
        columns=columns,
        values=np.stack([attention, probability], axis=1).astype(np.float32),
    )


def _annotation(path: Path, lesion: tuple[int, int, int, int]) -> None:
    x, y, width, height = lesion
    ring = [[x, y], [x + width, y], [x + width, y + height], [x, y + height], [x, y]]
    feature = {"type": "Feature", "properties": {}, "geometry": {"type": "Polygon", "coordinates": [ring]}}
    path.write_text(json.dumps({"type": "FeatureCollection", "features": [feature]}))


def _slide(path: Path, lesion: tuple[int, ...], generator) -> None:
    pixels = np.full((SIDE_L0, SIDE_L0, 3), 240, dtype=np.uint8)
    pixels[128:-128, 128:-128] = (226, 178, 205)
    speckle = generator.integers(-18, 18, size=(SIDE_L0 // 8, SIDE_L0 // 8, 1)).repeat(8, 0).repeat(8, 1)
    pixels = np.clip(pixels.astype(int) + speckle, 0, 255).astype(np.uint8)
    if lesion:
        x, y, width, height = lesion
        pixels[y : y + height, x : x + width] = (128, 80, 150)
    tifffile.imwrite(path, pixels, tile=(256, 256), photometric="rgb", compression="jpeg")
