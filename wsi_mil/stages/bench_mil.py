"""Stage `bench mil`: methods on the benchmark data of MIL that are no slides, beside the published accuracies.

Folds are the stored ones. Features are standardised on the training part of each fold, the number of epochs is fixed
beforehand or chosen inside it, bags are called by their most probable class: nothing is chosen by a look at a test bag.
Each finished model is a row of bench_mil_rows.csv, so the same command goes on where it was stopped.
"""

import inspect
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from tiling.atomic import write_text
from wsi_mil.errors import ConfigError, UserError
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.lookup import find_model
from wsi_mil.measuring.classic_bags import ClassicBags, read_classic
from wsi_mil.measuring.classic_training import Choose, ClassicJob, ClassicRow, train_and_test
from wsi_mil.methods import MethodSpec, build, rehearse, resolve_methods
from wsi_mil.outcomes import Failure, Summary
from wsi_mil.progress import progress
from wsi_mil.runs import write_frame
from wsi_mil.settings import override
from wsi_mil.workers import run_in_processes

PUBLISHED = Path(__file__).with_name("published_accuracies.csv")
_TRAIN = TrainSpec(epochs=40, lr=5e-4, weight_decay=1e-4, selection="none", device="cpu", checkpoint_seconds=math.inf)
_LARGE_Z = 2.5
_Key = tuple[str, str, str, int, int, int]


def bench_mil(
    data: Path,
    *,
    out: Path,
    methods: list[str | MethodSpec] = ["mean_pool", "max_pool", "abmil"],  # noqa: B006
    train: TrainSpec = _TRAIN,
    choose: Choose = "none",
    repeats: int | None = None,
    workers: int = 1,
) -> Summary:
    """Run methods on benchmark bags that are no slides (MUSK, Fox ...) and set them beside the published accuracies.

    Args:
        data: npz file with features, bag_id, bag_label and train_mask (repeats, folds, bags), or a folder of them
        out: folder for bench_mil.md, bench_mil.csv (a row a method) and bench_mil_folds.csv (a row a fold)
        methods: names such as [mean_pool, abmil+aem], or mappings with name, label, params, train ...
        train: how models are trained; selection must be none, a fixed number of epochs
        choose: epochs lets a quarter of each training part choose the number of epochs, at most train.epochs; then the
            whole part is trained on, on the same schedule, and stopped after so many
        repeats: how many of the stored repeats are run; all when not given
        workers: processes, each with one thread
    """
    if workers < 1 or (repeats is not None and repeats < 1):
        raise ConfigError(f"workers is {workers}, repeats is {repeats}; each must be 1 or more.")
    sets = [read_classic(path) for path in _files(data)]
    plans = [_plan(spec, train, sets) for spec in resolve_methods(methods)]
    jobs = [
        ClassicJob(bags=bags, method=method, train=own, choose=choose, repeat=repeat, fold=fold, seed=seed)
        for bags in sets
        for method, own in plans
        for repeat, fold in bags.folds
        for seed in own.seeds
        if repeats is None or repeat < repeats
    ]
    known = _kept(out / "bench_mil_rows.csv")
    again = {_key(job) for job in jobs} & known.keys()
    failures: list[Failure] = []
    with progress("bench mil", len(jobs), "models") as bar:
        bar.advance(len(again))
        for job, result in _run([job for job in jobs if _key(job) not in again], workers):
            bar.advance(1, job.name)
            if isinstance(result, ClassicRow):
                known[_key(job)] = result
                write_frame(out / "bench_mil_rows.csv", _as_frame(known))
            else:
                failures.append(Failure(item=job.name, outcome="failed", reason=result))
    rows = [known[_key(job)] for job in jobs if _key(job) in known]
    if not rows:
        return Summary(stage="bench mil", out=out, failures=tuple(failures))
    folds = _per_fold(rows)
    table = summarise(folds, methods=[method for method, _ in plans], published=pd.read_csv(PUBLISHED))
    text = as_markdown(table, train=train, choose=choose)
    write_frame(out / "bench_mil_folds.csv", folds)
    write_frame(out / "bench_mil.csv", table)
    write_text(out / "bench_mil.md", text)
    new = {(job.bags.name, job.method.shown) for job in jobs if _key(job) in known.keys() - again}
    names = [(str(row.dataset), str(row.method)) for row in table.itertuples()]
    return Summary(
        stage="bench mil",
        out=out,
        done=tuple(" ".join(name) for name in names if name in new),
        reused=tuple(" ".join(name) for name in names if name not in new),
        failures=tuple(failures),
        notes=(text,),
    )


def summarise(folds: pd.DataFrame, *, methods: Sequence[MethodSpec], published: pd.DataFrame) -> pd.DataFrame:
    """A row for each data set and method: mean and standard error over its folds, the published value, and z.

    folds: dataset, method, repeat, fold, accuracy, auc (NaN where a test part lacks a class).
    """
    rows = []
    for (dataset, label), group in folds.groupby(["dataset", "method"], sort=False):
        method = next(method for method in methods if method.shown == label)
        row: dict[str, object] = {"dataset": dataset, "method": label, "folds": len(group)}
        mean, error = _mean_and_error(group["accuracy"])
        auc, auc_error = _mean_and_error(group["auc"])
        row |= {"accuracy": mean, "accuracy_se": error, "auc": auc, "auc_se": auc_error}
        value, value_error, source = _published(published, str(dataset), method)
        z = (mean - value) / math.hypot(error, value_error) if math.hypot(error, value_error) > 0 else math.nan
        rows.append(row | {"published": value, "published_se": value_error, "z": z, "source": source})
    return pd.DataFrame(rows)


def as_markdown(table: pd.DataFrame, *, train: TrainSpec, choose: Choose = "none") -> str:
    """The table, and how it is to be read."""
    epochs = "fixed beforehand"
    if choose == "epochs":
        epochs = (
            "at most, their number chosen by a quarter of each training part before all of it is trained on for so "
            "long, on the schedule of all epochs"
        )
    lines = [
        "| data | method | folds | accuracy | AUC | published accuracy | z |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in table.to_dict("records"):
        known = not math.isnan(row["published"])
        shown = f"{row['published']:.3f} ± {row['published_se']:.3f}" if known else "none known"
        z = f"{row['z']:+.1f}" + (" (look into it)" if abs(row["z"]) > _LARGE_Z else "") if known else ""
        accuracy, auc = (f"{row[name]:.3f} ± {row[f'{name}_se']:.3f}" for name in ("accuracy", "auc"))
        lines.append(f"| {row['dataset']} | {row['method']} | {row['folds']} | {accuracy} | {auc} | {shown} | {z} |")
    sources = sorted({str(source) for source in table["source"] if source})
    return "\n".join(
        [
            *lines,
            "",
            f"Stored folds; features standardised on the training part of each, and test values kept within its range; "
            f"{train.epochs} epochs {epochs} (lr {train.lr:g}, weight decay {train.weight_decay:g}, "
            f"{train.bags_per_step} bags a step) unless a method says otherwise; no choice looks at a test bag. "
            "Mean ± standard error over folds; folds of several "
            "repeats share bags, so it is too small rather than too large. AUC leaves out test parts without a class. "
            f"z = difference / sqrt(se1^2 + se2^2); above {_LARGE_Z} either way it is to be explained.",
            *(f"Published: {source}." for source in sources),
            "",
        ]
    )


def _files(data: Path) -> list[Path]:
    found = sorted(data.glob("*.npz")) if data.is_dir() else [data]
    if not found or not data.exists():
        raise ConfigError(f"{data}: there is no npz file. Give one, or a folder that holds some.")
    return found


def _plan(method: MethodSpec, train: TrainSpec, sets: Sequence[ClassicBags]) -> tuple[MethodSpec, TrainSpec]:
    """A method and its own training settings, tried on made-up bags. Raises ConfigError when it cannot run here."""
    own = override(train, method.train, where=f"method {method.shown}, train")
    own.check()
    if own.selection != "none":
        raise ConfigError(
            "train.selection is validation, but these folds have no validation part; choosing by test bags is no "
            "benchmark. Use train.selection none, a fixed number of epochs."
        )
    for bags in sets:
        in_dim = bags.features.shape[1]
        rehearse(method, in_dim=in_dim, task=bags.task, bags_per_step=own.bags_per_step)
        model, objective = build(method, in_dim=in_dim, task=bags.task, seed=0)
        if model.uses_positions:
            raise ConfigError(f"{method.shown} uses positions, and the instances of {bags.name} have none.")
        if objective.init_from is not None:
            raise ConfigError(f"{method.shown} starts from a trained {objective.init_from}, which is not offered here.")
    return method, own


def _run(jobs: Sequence[ClassicJob], workers: int) -> Iterator[tuple[ClassicJob, ClassicRow | str]]:
    """Each job with what it reached, or with the reason why it failed."""
    if workers == 1:
        with _one_thread():
            yield from ((job, _try_one(job)) for job in jobs)
        return
    for job, result in run_in_processes(_try_one, jobs, workers=workers, start=partial(torch.set_num_threads, 1)):
        yield job, "the process was killed, twice; is there enough memory?" if result is None else result


@contextmanager
def _one_thread() -> Iterator[None]:
    """These bags are so small that threads cost more than they give."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _try_one(job: ClassicJob) -> ClassicRow | str:
    try:
        return train_and_test(job)
    except Exception as error:
        return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _key(job: ClassicJob) -> _Key:
    return job.bags.name, job.method.shown, job.settings, job.repeat, job.fold, job.seed


def _as_frame(rows: Mapping[_Key, ClassicRow]) -> pd.DataFrame:
    return pd.DataFrame([{"settings": key[2]} | vars(row) for key, row in rows.items()])


def _kept(path: Path) -> dict[_Key, ClassicRow]:
    """Models that were finished before. Raises ConfigError for a file that is something else."""
    if not path.is_file():
        return {}
    frame = pd.read_csv(path, dtype={"dataset": str, "method": str, "settings": str})
    if list(frame.columns) != ["settings", *ClassicRow.__dataclass_fields__]:
        raise ConfigError(f"{path} is no table of this command. Give another folder as out, or remove the file.")
    rows = [(row.pop("settings"), ClassicRow(**row)) for row in frame.to_dict("records")]
    return {(row.dataset, row.method, made, row.repeat, row.fold, row.seed): row for made, row in rows}


def _per_fold(rows: Iterable[ClassicRow]) -> pd.DataFrame:
    """A row a fold: the mean over its seeds, in the order of the jobs."""
    frame = pd.DataFrame([vars(row) for row in rows])
    keys = ["dataset", "method", "repeat", "fold", "test_bags"]
    return frame.groupby(keys, sort=False, as_index=False)[["accuracy", "auc"]].mean()


def _mean_and_error(values: pd.Series) -> tuple[float, float]:
    """Mean and its standard error over the defined values; NaN where too few are."""
    defined = values[np.isfinite(values)]
    if not len(defined):
        return math.nan, math.nan
    return float(defined.mean()), float(defined.sem()) if len(defined) > 1 else math.nan


def _published(table: pd.DataFrame, dataset: str, method: MethodSpec) -> tuple[float, float, str]:
    """Accuracy, standard error and source of exactly this method, or NaN, NaN and nothing."""
    if not method.regularisers:
        defaults = inspect.signature(find_model(method.name)).parameters
        for row in table.to_dict("records"):
            asked = json.loads(row["params"])
            given = {name: method.params.get(name, defaults[name].default) for name in asked if name in defaults}
            if (row["dataset"], row["method"], asked) == (dataset, method.name, given):
                return float(row["accuracy"]), float(row["standard_error"]), str(row["source"])
    return math.nan, math.nan, ""
