"""Stage `bench methods`: what a training step and an evaluation of each method cost on this machine, by bag size.

Each figure comes from a process of its own (`wsi_mil.measuring.costs`). Rows are written as they come, and those that
are there for the same versions and threads are not measured again; others are replaced.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from tiling.atomic import write_text
from wsi_mil import __version__
from wsi_mil.errors import ConfigError
from wsi_mil.lookup import model_names
from wsi_mil.measuring.costs import PACKED, CostJob, MethodCost, measure_apart
from wsi_mil.methods import MethodSpec, resolve_methods
from wsi_mil.outcomes import Failure, Summary
from wsi_mil.progress import progress
from wsi_mil.runs import write_frame
from wsi_mil.study import method_config

_PACKED = "packed"
_FIGURES = tuple(field.name for field in fields(MethodCost))
_MADE_WITH = ("width", "version", "torch", "threads")
_COLUMNS = ("method", "settings", "tiles", *_FIGURES, "outcome", "reason", "limit", *_MADE_WITH)
_Row = dict[str, Any]
_Key = tuple[str, str, str]


def bench_methods(
    *,
    out: Path,
    methods: list[str | MethodSpec] | None = None,
    tiles: list[int] = [1_000, 10_000, 100_000],  # noqa: B006
    width: int = 1024,
    limit: float = 300.0,
    threads: int | None = None,
) -> Summary:
    """Measure seconds and peak memory of one training step and one evaluation of each method on made-up bags.

    Args:
        out: folder for bench_methods.csv and bench_methods.md; rows that are there for the same versions are kept
        methods: names such as [mean_pool, abmil+aem], or mappings with name, label, params; every method by default
        tiles: sizes of the bag
        width: width of the features
        limit: seconds that one measurement may take, with the start of its process
        threads: threads of one measurement; as many as torch takes by itself when not given
    """
    if min([width, limit, *tiles, threads or 1]) < 1 or not tiles:
        raise ConfigError("tiles, width, limit and threads: each must be 1 or more, and there must be a size of bag.")
    made_with = {"width": width, "version": __version__, "torch": version("torch")}
    made_with["threads"] = threads or torch.get_num_threads()
    specs = resolve_methods(methods or model_names())
    asked = [(spec, size) for spec in specs for size in (*sorted(set(tiles)), None)]
    path = out / "bench_methods.csv"
    rows = _kept(path, made_with | {"limit": limit})
    reused: list[str] = []
    with progress("bench methods", len(asked), "measurements") as bar:
        for spec, size in asked:
            key = _key(spec, size)
            if key in rows:
                reused.append(_name(spec, size))
            else:
                job = CostJob(method=spec, tiles=size, width=width, threads=threads)
                found = asdict(measure_apart(job, limit=limit))
                named = dict(zip(("method", "settings", "tiles"), key, strict=True))
                rows[key] = named | {"outcome": "", "reason": "", "limit": limit} | found | made_with
                write_frame(path, pd.DataFrame(list(rows.values()), columns=list(_COLUMNS)))
            bar.advance(1, _name(spec, size))
    mine = [rows[_key(spec, size)] for spec, size in asked]
    text = as_markdown(mine)
    write_text(out / "bench_methods.md", text)
    failures = tuple(_failure(row) for row in mine if row["outcome"] not in ("", "refused"))
    failed = {failure.item for failure in failures}
    names = [_name(spec, size) for spec, size in asked]
    return Summary(
        stage="bench methods",
        out=out,
        done=tuple(name for name in names if name not in failed and name not in reused),
        reused=tuple(name for name in reused if name not in failed),
        failures=failures,
        notes=(text,),
    )


def as_markdown(rows: Sequence[_Row]) -> str:
    """A row a method, what could not be measured below, and how it is to be read."""
    sizes = sorted({int(row["tiles"]) for row in rows if row["tiles"] != _PACKED})
    heads = [f"{size:,} tiles: train s | eval s | peak GiB" for size in sizes]
    lines = [f"| method | {' | '.join(heads)} | packed / single |", "|" + "---|" * (2 + 3 * len(sizes))]
    methods: dict[str, dict[str, _Row]] = {}
    for row in rows:
        methods.setdefault(row["method"], {})[row["tiles"]] = row
    for method, found in methods.items():
        cells = [cell for size in sizes for cell in _cells(found[str(size)])]
        lines.append(f"| {method} | {' | '.join(cells)} | {_ratio(found[_PACKED])} |")
    missing = [f"- {_title(row)}: {row['outcome']}: {row['reason']}" for row in rows if row["outcome"]]
    made = rows[0]
    return "\n".join(
        [
            *lines,
            "",
            f"One bag of random features of width {made['width']}, two classes, {made['threads']} thread"
            f"{'' if made['threads'] == 1 else 's'}, torch {made['torch']}, wsi-mil {made['version']}. Each figure is "
            "from a process of its own, the least of up to five times. Seconds are those of the processor; the file "
            "bench_methods.csv has those of the clock too. A training step is forward, backward and optimiser, on as "
            "many tiles as the method draws from a bag in training. Peak GiB is that of the whole process after the "
            "training step, Python and the bag included.",
            f"packed / single: forward and backward of eight unequal bags ({sum(PACKED):,} tiles) in one batch, over "
            "that of the eight one by one; below 1 packing gains. 'loops' are methods that go bag by bag anyway.",
            *missing,
            "",
        ]
    )


def _cells(row: _Row) -> tuple[str, str, str]:
    if row["outcome"]:
        return row["outcome"], "", ""
    peak = "" if _is_missing(row["train_mib"]) else f"{row['train_mib'] / 1024:.1f}"
    return f"{row['train_cpu_s']:.2g}", f"{row['eval_cpu_s']:.2g}", peak


def _ratio(row: _Row) -> str:
    if row["outcome"]:
        return str(row["outcome"])
    return "loops" if _is_missing(row["packed_ratio"]) else f"{row['packed_ratio']:.2f}"


def _is_missing(value: float | None) -> bool:
    return value is None or math.isnan(value)


def _title(row: _Row) -> str:
    return f"{row['method']} {row['tiles'] if row['tiles'] == _PACKED else format(int(row['tiles']), ',') + ' tiles'}"


def _name(spec: MethodSpec, size: int | None) -> str:
    method, _, tiles = _key(spec, size)
    return _title({"method": method, "tiles": tiles})


def _key(spec: MethodSpec, size: int | None) -> _Key:
    """Label, what else makes the method, and the size."""
    made_of = {name: value for name, value in method_config(spec).items() if name not in ("label", "train")}
    return spec.shown, json.dumps(made_of, sort_keys=True), _PACKED if size is None else str(size)


def _kept(path: Path, wanted: _Row) -> dict[_Key, _Row]:
    """Rows of an earlier run with the same versions and threads. What was killed or failed is tried again, and what
    took too long when it gets more time.
    """
    if not path.is_file():
        return {}
    words = ("method", "settings", "tiles", "outcome", "reason", "version", "torch")
    frame = pd.read_csv(path, dtype=dict.fromkeys(words, str))
    if list(frame.columns) != list(_COLUMNS):
        raise ConfigError(f"{path} is no table of this command. Give another folder as out, or remove the file.")
    rows = frame.fillna({"outcome": "", "reason": ""}).to_dict("records")
    same = [row for row in rows if all(row[name] == wanted[name] for name in _MADE_WITH)]
    kept = [row for row in same if row["outcome"] in ("", "refused") or _took_too_long(row, wanted["limit"])]
    return {(row["method"], row["settings"], row["tiles"]): row for row in kept}


def _took_too_long(row: _Row, limit: float) -> bool:
    return bool(row["outcome"] == "over the limit" and row["limit"] >= limit)


def _failure(row: _Row) -> Failure:
    return Failure(item=_title(row), outcome=row["outcome"], reason=row["reason"])
