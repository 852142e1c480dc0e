"""Settings are searched inside the training part, and nothing else has a say."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest

from wsi_mil.errors import ConfigError
from wsi_mil.fitting.search_spec import SearchSpec
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.runs import RunDir
from wsi_mil.splits import FoldSpec
from wsi_mil.stages.crossval import crossval
from wsi_mil.tasks import TaskSpec

TRAIN = TrainSpec(epochs=3, lr=1e-2, device="cpu", bags_per_step=8, patience=None)
SEARCH = SearchSpec(trials=3, inner_folds=2, space={"train.lr": {"low": 1e-6, "high": 3e-2, "log": True}})


def search_run(table, bags, out, **changes):
    wishes = {"methods": ["mean_pool"], "folds": FoldSpec(n_folds=2, validation=0.3), "train": TRAIN, "search": SEARCH}
    summary = crossval(table, bags=bags, out=out, task=TaskSpec(target="sex"), **wishes | changes)
    assert summary.exit_code == 0, summary.failures
    return RunDir(out)


@pytest.fixture(scope="module")
def planted(write_planted, tmp_path_factory):
    return write_planted(tmp_path_factory.mktemp("planted"), patients=88)


@pytest.fixture(scope="module")
def run(planted, tmp_path_factory):
    return search_run(*planted[:2], tmp_path_factory.mktemp("search") / "run")


def test_the_best_of_the_trials_is_what_was_trained(run):
    for key in run.keys("mean_pool"):
        trials = pd.read_csv(run.trials_path("mean_pool", key))
        found = run.selection("mean_pool", key).search
        best = trials.loc[trials["loss"].idxmin()]
        assert (found["trials"], found["failed"], found["value"]) == (3, 0, best["loss"])
        assert found["chosen"] == json.loads(best["settings"])
        assert run.log("mean_pool", key)["lr"].iloc[0] <= found["chosen"]["train.lr"]
        assert trials["loss"].nunique() == 3


def test_a_search_that_was_killed_goes_on_to_the_same_bytes(run, planted, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(run.path, out)
    again = RunDir(out)
    key = again.keys("mean_pool")[1]
    path = again.trials_path("mean_pool", key)
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    for lost in (again.selection_path, again.checkpoint_path):
        lost("mean_pool", key).unlink()
    search_run(*planted[:2], out)
    assert path.read_bytes() == whole
    for name in (again.selection_path, again.checkpoint_path, again.test_path):
        old = run.path / name("mean_pool", key).relative_to(out)
        assert name("mean_pool", key).read_bytes() == old.read_bytes()


def replaced_test(planted, run, folder):
    """The same study with the labels and features of the first fold's test patients replaced by anything."""
    table, bags = folder / "labels.csv", folder / "bags"
    shutil.copytree(planted[1], bags)
    frame = pd.read_csv(planted[0])
    folds = run.folds()
    tested = set(folds[(folds["fold"] == 0) & (folds["part"] == "test")]["patient"])
    from wsi_mil.store import BagStore, write_bag

    store, rng = BagStore(bags), np.random.default_rng(1)
    for slide, patient in zip(frame["slide"], frame["patient"], strict=True):
        if patient in tested:
            bag, header = store.bag(slide), store.header(slide)
            wild = rng.normal(size=bag.features.shape).astype(np.float32) * 100
            (bags / f"{slide}.h5").unlink()
            write_bag(
                bags / f"{slide}.h5",
                header,
                features=wild,
                coords_l0=bag.coords_l0.numpy(),
                grid_xy=bag.grid_xy.numpy(),
            )
    mine = frame["patient"].isin(tested)
    frame.loc[mine, "sex"] = frame.loc[mine, "sex"].map({"yes": "no", "no": "yes"})
    frame.to_csv(table, index=False)
    return table, bags


@pytest.mark.parametrize("changes", [{}, {"search": SearchSpec()}, {"search": SearchSpec(), "train": "none"}])
def test_nothing_that_is_chosen_depends_on_the_test_part(planted, run, tmp_path, changes):
    if changes.get("train") == "none":
        changes = changes | {"train": TrainSpec(**vars(TRAIN) | {"selection": "none"})}
    saved = tmp_path / "folds.csv"
    shutil.copy(run.folds_path, saved)
    folds = FoldSpec(file=saved)
    before = search_run(*planted[:2], tmp_path / "before", folds=folds, **changes)
    after = search_run(*replaced_test(planted, run, tmp_path), tmp_path / "after", folds=folds, **changes)
    key = before.keys("mean_pool")[0]
    assert before.test("mean_pool", key)["prob_yes"].tolist() != after.test("mean_pool", key)["prob_yes"].tolist()
    for name in ("checkpoint_path", "selection_path", "validation_path", "log_path"):
        ours, theirs = getattr(before, name)("mean_pool", key), getattr(after, name)("mean_pool", key)
        assert ours.read_bytes() == theirs.read_bytes(), name


@pytest.mark.parametrize(
    ("search", "says"),
    [
        (SearchSpec(trials=2), "space is empty"),
        (SearchSpec(space={"train.lr": [1e-3]}), "trials is 0"),
        (SearchSpec(trials=2, space={"lr": [1e-3]}), "is no setting"),
        (SearchSpec(trials=2, space={"train.lr": {"low": 1.0}}), "give choices"),
        (SearchSpec(trials=2, space={"train.lr": {"low": 1.0, "high": 0.1}}), "low must be below high"),
        (SearchSpec(trials=2, space={"train.rate": [1e-3]}), "cannot be searched"),
        (SearchSpec(trials=2, space={"params.heads": [1]}), "no setting 'heads'"),
        (SearchSpec(trials=2, space={"train.seeds": [[0], [1]]}), "cannot be searched"),
        (SearchSpec(trials=2, space={"train.selection": ["none", "validation"]}), "cannot be searched"),
        (SearchSpec(trials=2, space={"train.lr": [1e-3, -1.0]}), "must be above 0"),
    ],
)
def test_a_search_that_cannot_be_made_is_refused_at_once(planted, tmp_path, search, says):
    with pytest.raises(ConfigError, match=says):
        crossval(
            planted[0], bags=planted[1], out=tmp_path / "run", task=TaskSpec(target="sex"), methods=["mean_pool"],
            train=TRAIN, search=search,
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_a_trial_that_breaks_is_recorded_and_the_others_decide(planted, tmp_path, monkeypatch):
    from wsi_mil.fitting import search as searching

    whole = searching.fit

    def breaks(model, objective, *, spec, **rest):
        if spec.lr > 1:
            raise RuntimeError("out of memory")
        return whole(model, objective, spec=spec, **rest)

    monkeypatch.setattr(searching, "fit", breaks)
    wished = SearchSpec(trials=6, inner_folds=2, space={"train.lr": [1e-3, 5.0]})
    short = TrainSpec(**vars(TRAIN) | {"epochs": 1})
    run = search_run(*planted[:2], tmp_path / "run", search=wished, train=short, folds=FoldSpec(n_folds=2))
    key = run.keys("mean_pool")[0]
    found, trials = run.selection("mean_pool", key).search, pd.read_csv(run.trials_path("mean_pool", key))
    assert found["chosen"] == {"train.lr": 1e-3}
    assert 0 < found["failed"] == trials["problem"].str.contains("out of memory").sum()


def test_a_search_with_a_failed_trial_goes_on_and_a_fault_is_tried_again(run, planted, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(run.path, out)
    again = RunDir(out)
    key = again.keys("mean_pool")[0]
    path = again.trials_path("mean_pool", key)
    whole = path.read_bytes()
    rows = pd.read_csv(path, dtype=str)
    rows.loc[1, ["loss", "problem"]] = ["", "fault: OSError: the share is gone"]
    rows.to_csv(path, index=False)
    again.selection_path("mean_pool", key).unlink()
    search_run(*planted[:2], out)
    assert path.read_bytes() == whole
    rows.loc[1, "problem"] = "the loss is not finite any more"
    rows.iloc[:2].to_csv(path, index=False)
    again.selection_path("mean_pool", key).unlink()
    search_run(*planted[:2], out)
    assert again.selection("mean_pool", key).search["failed"] == 1


@pytest.mark.parametrize(
    ("space", "says"),
    [
        ({"params.hidden": [8, "big", 16]}, "hidden is 'big'"),
        ({"train.epochs": [3, -1, 2]}, "epochs is -1"),
        ({"train.lr": {"low": 1e-3, "high": float("inf")}}, "give choices"),
        ({"regularisers.aem.weight": [0.1, 0.2]}, "has no such plug-in"),
    ],
)
def test_every_choice_is_looked_at_before_the_folder_is_taken(planted, tmp_path, space, says):
    with pytest.raises(ConfigError, match=says):
        search_run(*planted[:2], tmp_path / "run", methods=["abmil"], search=SearchSpec(trials=2, space=space))
    assert not (tmp_path / "run").exists()
