"""What a file or folder is, in words, and what is wrong with it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiling.errors import UserError
from tiling.slide import choose_mpp, read_header
from tiling.store import GridChangedError, read_grid
from wsi_mil.checking.findings import Finding
from wsi_mil.errors import MissingPixelSize, SlideError

if TYPE_CHECKING:
    from wsi_mil.runs import RunDir

Explanation = tuple[list[str], list[Finding]]
"""Lines for the user, and what is wrong."""


def explain_slide(path: Path, *, deep: bool = False) -> Explanation:
    """A slide: what its header says. `deep` changes nothing here."""
    try:
        header = read_header(path)
    except SlideError as error:
        return [f"{path.name}: not a slide that can be opened"], [_wrong("cannot be opened", path, str(error))]
    levels = ", ".join(f"{w} x {h}" for w, h in header.level_sizes)
    lines = [
        f"{path.name}: a slide, {header.vendor}",
        f"  size {header.size_l0[0]} x {header.size_l0[1]} px, levels {levels}",
        f"  objective {header.objective_power or 'not known'}, colour profile {'yes' if header.icc_profile else 'no'}",
        f"  fingerprint {header.fingerprint}",
    ]
    try:
        size = choose_mpp(header)
    except MissingPixelSize as error:
        return lines, [_wrong("no pixel size", path, str(error))]
    lines.append(f"  {size.mpp[0]:g} x {size.mpp[1]:g} microns per pixel, from {size.source}")
    lines += [f"  {warning}" for warning in header.warnings]
    return lines, [_wrong("pixel size in doubt", path, warning) for warning in size.warnings]


def explain_h5(path: Path, *, deep: bool = False) -> Explanation:
    """An HDF5 file: a bag, a grid, or the scores of tiles; else why it is none of them. deep: read all rows."""
    for explain in (_explain_bag, _explain_grid, _explain_scores):
        explanation = explain(path, deep=deep)
        if explanation is not None:
            return explanation
    return [f"{path.name}: a file that cannot be used"], [_wrong("incomplete", path, _why_unusable(path))]


def explain_method(path: Path, *, deep: bool = False) -> Explanation:
    """A method in a Python file: the laws that it keeps, and those that it breaks with what mends them most often."""
    from wsi_mil.contracts import LAWS, LawResult, check_model, next_step
    from wsi_mil.lookup import find_model

    cls = find_model(path)
    results = check_model(cls)
    lines = [f"{path.name}: the method {cls.__name__}"]
    lines += [f"  kept  {r.name}: {r.message}" for r in results if r.passed]
    if len(results) < len(LAWS):
        lines.append(f"  {len(LAWS) - len(results)} laws not tried: mend this first")
    alike: dict[str, list[LawResult]] = {}  # one error in forward breaks many laws, with other numbers in each
    for result in results:
        if not result.passed:
            alike.setdefault(re.sub(r"\d+", "", result.message), []).append(result)
    told = [f"{', '.join(r.name for r in of)}: {of[0].message}. {next_step(of[0])}".rstrip() for of in alike.values()]
    return lines, [_wrong("law broken", path, text) for text in told]


def explain_folder(path: Path, *, deep: bool = False) -> Explanation | None:
    """A run, a bundle, a folder of bags or of grids; None when it is none of them."""
    from wsi_mil.bundle import is_bundle
    from wsi_mil.runs import RunDir

    if is_bundle(path):
        return _explain_bundle(path)
    if RunDir(path).exists():
        return _explain_run(RunDir(path))
    if (path / "grids").is_dir():
        return explain_folder(path / "grids", deep=deep)
    files = sorted(file for file in path.glob("*.h5") if not file.name.startswith("."))
    if not files:
        return None
    explained = [(file, *explain_h5(file, deep=deep)) for file in files]
    found = [finding for _, _, findings in explained for finding in findings]
    whole = [file for file, _, findings in explained if not findings]
    lines = [f"{path.name}: {len(files)} HDF5 files, {len(whole)} of them whole"]
    lines += [line for _, text, _ in explained[:1] for line in text]
    left = sorted(file.name for file in path.glob(".*.tmp"))
    if left:
        lines.append(f"  {len(left)} temporary files of a run that goes on or was stopped; the next one removes them")
    return lines, found + _mixed(path, whole)


def _explain_bag(path: Path, *, deep: bool) -> Explanation | None:
    from wsi_mil.store import read_bag_header, read_failed, why_incomplete

    if why_incomplete(path) is not None:
        return None
    header = read_bag_header(path)
    width, height = header.level0_size
    mpp_x, mpp_y = header.mpp
    lines = [
        f"{path.name}: the bag of slide {header.slide_id}",
        f"  {header.n} tiles x {header.dim} features by {header.encoder}, weights {header.weights_sha256[:12]}",
        f"  tiles of {header.tile_px} px over {header.tile_um:g} microns, {len(read_failed(path))} could not be read",
        f"  slide {width} x {height} px, {mpp_x:g} x {mpp_y:g} microns per pixel from {header.mpp_source}",
    ]
    lines += [f"  departs from the encoder's contract: {breach}" for breach in header.contract_breach]
    reason = why_incomplete(path, deep=True) if deep else None
    return lines, [] if reason is None else [_wrong("damaged", path, reason)]


def _explain_grid(path: Path, *, deep: bool) -> Explanation | None:
    try:
        grid = read_grid(path)
    except GridChangedError as error:
        return [f"{path.name}: a damaged grid"], [_wrong("damaged", path, str(error))]
    except UserError:
        return None
    lines = [
        f"{path.name}: the grid of slide {grid.slide.slide_id}",
        f"  {len(grid)} tiles of {grid.spec.tile_px} px at {grid.spec.mpp:g} microns per pixel",
        f"  read from level {grid.plan.level}; a tile is {grid.plan.tile_size_l0[0]} x {grid.plan.tile_size_l0[1]} "
        "level-0 pixels",
    ]
    return lines, []


def _explain_scores(path: Path, *, deep: bool) -> Explanation | None:
    from wsi_mil.runs import read_scores

    try:
        scores = read_scores(path)
    except UserError:
        return None
    columns = ", ".join(column.name for column in scores.columns)
    return [f"{path.name}: scores of {len(scores.values)} tiles of slide {scores.slide_id}: {columns}"], []


def _why_unusable(path: Path) -> str:
    """Why a file is no bag; of a file in a folder of grids, why it is no grid."""
    from wsi_mil.store import why_incomplete

    if path.parent.name == "grids":
        try:
            read_grid(path)
        except UserError as error:
            return str(error)
    return why_incomplete(path) or ""


def _mixed(folder: Path, whole: Sequence[Path]) -> list[Finding]:
    """Whether the whole bags of a folder were all made in one way."""
    from wsi_mil.store import check_one_contract, read_bag_header

    headers = []
    for file in whole:
        try:
            headers.append(read_bag_header(file))
        except UserError:
            return []  # grids or scores, not bags
    try:
        check_one_contract(headers)
    except UserError as error:
        return [_wrong("mixed contracts", folder, str(error))]
    return []


def _explain_run(run: "RunDir") -> Explanation:
    path, config = run.path, run.config()
    lines = [f"{path.name}: a run of {config.get('kind', 'an unknown kind')}, version {config.get('version', '?')}"]
    task = config.get("task") or {}
    lines.append(f"  {_told_task(task)}")
    trials = (config.get("search") or {}).get("trials")
    lines += [f"  {trials} trials of a search for settings in each training part"] if trials else []
    lines += [f"  {method}: {len(run.keys(method))} finished models" for method in run.methods()]
    found = []
    if not run.is_finished():
        found.append(_wrong("unfinished", path, "no predictions yet; give the command that began it again, it goes on"))
    else:
        predictions = run.predictions()
        key = [c for c in ("method", "target_name", "repeat", "fold", "seed", "patient", "slide") if c in predictions]
        lines.append(f"  {len(predictions)} predictions")
        if predictions.duplicated(subset=key).any():
            found.append(_wrong("predictions twice", path, "rows of predictions.csv have the same key"))
    if not run.report_path.is_file():
        lines.append(f"  no report yet: wsi-mil report {path}")
    return lines, found


def _explain_bundle(path: Path) -> Explanation:
    import torch

    from wsi_mil.bundle import card_path, open_bundle

    try:
        bundle = open_bundle(path)
        bundle.models(torch.device("cpu"))
    except UserError as error:
        return [f"{path.name}: a bundle that cannot be used"], [_wrong("damaged", path, str(error))]
    facts = bundle.facts
    task, encoder, training = facts["task"], facts["encoder"], facts["training"]
    tiles = "slides or bags" if facts["tiles"] else "bags only, since it does not know how slides were tiled"
    lines = [
        f"{path.name}: a bundle of {len(facts['models'])} models of {facts['method']['label']}, version "
        f"{facts['version']}, whole. {facts['use']}",
        f"  {_told_task(task)}",
        f"  {facts['decision']}",
        f"  takes {tiles}: tiles of {encoder['tile_px']} px at {encoder['mpp']:g} microns per pixel",
        f"  encoder {encoder['name']}, weights {encoder['weights_sha256'][:12]}, {encoder['precision']}",
        f"  trained on {training['patients']} patients, {training['slides']} slides, {training['sites']} sites; hashes "
        f"of them: {'yes' if training['patient_hashes'] else 'no'}",
        f"  read {card_path(path)}",
    ]
    return lines, []


def _told_task(task: Mapping[str, Any]) -> str:
    """What is predicted, at which level, and what its targets are."""
    targets = [one for one in task.get("targets", []) if isinstance(one, dict)]
    told = [
        f"{one.get('name')} ({', '.join(map(str, one['classes']))})"
        if one.get("classes")
        else f"{one.get('name')} ({one.get('kind')}" + (f", event in {one['event']})" if one.get("event") else ")")
        for one in targets
    ]
    known = "; ".join(told) or f"{task.get('target')}: {', '.join(map(str, task.get('classes', [])))}"
    return f"task {known} at level {task.get('level')}"


def _wrong(kind: str, path: Path, reason: str) -> Finding:
    return Finding(kind=kind, item=path.name, reason=reason)
