"""`wsi-mil demo`: the whole path on a cohort composed from real tissue, and one real scan from outside."""

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from tiling.atomic import write_bytes
from tiling.grid import TileSpec
from wsi_mil.demo.compose import compose_cohort, plan_cohort
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.methods import MethodSpec
from wsi_mil.outcomes import Summary
from wsi_mil.runs import RunDir
from wsi_mil.splits import FoldSpec
from wsi_mil.stages.crossval import crossval
from wsi_mil.stages.encode import encode
from wsi_mil.stages.heatmap import heatmap
from wsi_mil.stages.predict import predict
from wsi_mil.stages.report import report
from wsi_mil.stages.tile import tile
from wsi_mil.tasks import TaskSpec

_SCAN = "CMU-1-Small-Region.svs"
_ABOUT = (
    "The cohort is composed: every pixel is real tissue, the arrangement is not. Sites share no source tile; whether "
    "source tiles share a patient is not known. The encoder is an ImageNet encoder, not a pathology one."
)


@dataclass(frozen=True, kw_only=True)
class _Size:
    n_slides: int
    n_sites: int
    side_px: int
    tiles: TileSpec
    train: TrainSpec
    methods: tuple[MethodSpec, ...]


_METHODS = (
    MethodSpec(name="mean_pool"),
    MethodSpec(name="abmil", label="abmil_gated", params={"gated": True}),
    MethodSpec(name="abmil", label="abmil_gated+aem", params={"gated": True}, regularisers={"aem": {"weight": 0.1}}),
    MethodSpec(name="acmil"),
    MethodSpec(name="focusmil"),
)
_FIXED = {"selection": "none", "patience": None}
_SIZES = {
    "full": _Size(
        n_slides=40,
        n_sites=5,
        side_px=2500,
        tiles=TileSpec(mpp=0.5, tile_px=224),
        train=TrainSpec(epochs=50, bags_per_step=2, **_FIXED),  # type: ignore[arg-type]
        methods=_METHODS,
    ),
    "mini": _Size(
        n_slides=8,
        n_sites=2,
        side_px=1100,
        tiles=TileSpec(mpp=0.5, tile_px=128),
        train=TrainSpec(epochs=4, **_FIXED),  # type: ignore[arg-type]
        methods=(_METHODS[1], _METHODS[4]),
    ),
}


def demo(
    *,
    out: Path,
    size: Literal["full", "mini"] = "full",
    seed: int = 0,
    workers: int = 2,
    command: str = "wsi-mil",
) -> Summary:
    """Run the whole path: compose slides, tile, encode, cross-validate, report, heatmaps, and a real scan from outside.

    The same command goes on after an interruption.

    Args:
        out: folder to write
        size: full is 40 slides and five methods; mini is 8 small slides and two methods, for a first look
        seed: draws another cohort
        workers: processes that compose, tile and train
        command: how this program is called where the next steps are named
    """
    plan = _SIZES[size]
    cohort = out / "cohort"
    slides = plan_cohort(n_slides=plan.n_slides, n_sites=plan.n_sites, side_px=plan.side_px, seed=seed)
    table = compose_cohort(cohort, slides, n_sites=plan.n_sites, workers=workers)
    root = cohort / "slides"
    tiled = tile(root, out=out / "work", table=table, tiles=plan.tiles, workers=workers)
    encoded = encode(root, grids=tiled.out, out=out / "work", table=table)
    trained = crossval(
        table,
        bags=encoded.out,
        out=out / "run",
        task=TaskSpec(target="label", level="patient", classes=("normal", "tumour")),
        methods=list(plan.methods),
        folds=FoldSpec(n_folds=plan.n_sites, by_site=True, seed=seed),
        train=plan.train,
        slides=root,
        workers=workers if size == "full" else 1,
    )
    reported = report(out / "run", slides=root)
    drawn = heatmap(out / "run", slides=root)
    outside = _score_outside(out, plan, workers)
    stages = (tiled, encoded, trained, reported, drawn, *outside)
    return Summary(
        stage="demo",
        out=out,
        done=tuple(slide.patient for slide in slides),
        failures=tuple(failure for stage in stages for failure in stage.failures),
        notes=(*_figures(RunDir(out / "run")), *_ways_on(out, command)),
    )


def _score_outside(out: Path, plan: _Size, workers: int) -> tuple[Summary, ...]:
    """Tile, encode and score a real scan with the models of the run, as a slide from another hospital would be."""
    scan = out / "outside" / "slides" / _SCAN
    if not scan.exists():
        write_bytes(scan, (files("wsi_mil.demo") / "data" / _SCAN).read_bytes())
    work = out / "outside" / "work"
    tiled = tile(scan.parent, out=work, tiles=plan.tiles, workers=workers)
    encoded = encode(scan.parent, grids=tiled.out, out=work)
    scored = predict(
        out / "run", bags=encoded.out, out=out / "outside" / "prediction", slides=scan.parent, heatmaps=False
    )
    drawn = heatmap(out / "outside" / "prediction", slides=scan.parent)
    return tiled, encoded, scored, drawn


def _figures(run: RunDir) -> tuple[str, ...]:
    """One line a method, from metrics.json: AUC with its interval, and how well the heatmap finds the lesion."""
    methods: dict[str, dict[str, Any]] = json.loads(run.metrics_path.read_text())["methods"]
    width = max(map(len, methods))
    return tuple(f"{label:<{width}}  {_figure(found)}" for label, found in methods.items())


def _figure(found: dict[str, Any]) -> str:
    auc = found["auc"]
    text = f"patient AUC {_two(auc['value'])} ({_two(auc['low'])} to {_two(auc['high'])})"
    for score in found["localisation"]:
        if score["drawn_by_default"]:
            precision, chance = _two(score["average_precision_mean_over_slides"]), _two(score["prevalence"])
            tile_auc = _two(score["auc_mean_over_slides"]["value"])
            text += f"; lesion found by {score['score']}: tile AUC {tile_auc}, AP {precision} (chance {chance})"
    return text


def _two(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.2f}"


def _ways_on(out: Path, command: str) -> tuple[str, ...]:
    return (
        _ABOUT,
        "",
        f"1. Open {RunDir(out / 'run').report_path} in a browser.",
        f"2. {command} view {out / 'run'}    then open http://127.0.0.1:8501; Ctrl+C ends it",
        f"3. {command} view {out / 'outside' / 'prediction'}    the real scan, scored as a slide from outside",
    )
