"""Known faults of other tools in training and cross-validation, and that this project does not have them."""

import dataclasses
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
import pytest
from torch.utils.data import DataLoader

from wsi_mil.errors import RunError
from wsi_mil.fitting.datasets import BagDataset, BagReader, Item
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.runs import FoldKey, RunDir
from wsi_mil.splits import FoldSpec
from wsi_mil.stages.crossval import crossval
from wsi_mil.statistics.ranking import auc
from wsi_mil.store import BagStore, write_bag
from wsi_mil.tasks import TaskSpec

TRAIN = TrainSpec(epochs=4, lr=1e-2, selection="none", device="cpu")
TASK = TaskSpec(target="label")


def study_of(folder, out, table=None, **changes):
    options = {"bags": folder / "bags", "out": out, "task": TASK, "methods": ["mean_pool"], "train": TRAIN}
    crossval(table or folder / "labels.csv", **options | changes)
    return RunDir(out)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory, make_study):
    """40 bags; every feature of bag i is the number i."""
    folder = tmp_path_factory.mktemp("numbered")
    _, bags = make_study(folder, patients=40)
    store = BagStore(bags)
    for i, slide in enumerate(store.ids()):
        header, bag = store.header(slide), store.bag(slide)
        features = np.full_like(bag.features.numpy(), i)
        write_bag(
            store.path(slide), header, features=features, coords_l0=bag.coords_l0.numpy(), grid_xy=bag.grid_xy.numpy()
        )
    items = [Item(id=slide, patient=slide, slide_ids=(slide,), values=(0.0,)) for slide in store.ids()]
    return BagDataset(BagReader(store), items)


def _is_its_number(dataset, order):
    return all((dataset[i].features == i).all() for i in order)


@pytest.mark.parametrize("workers", [0, 2, 8])
def test_sto_07_every_row_of_every_bag_is_its_own_with_many_readers(numbered, workers):
    rng = np.random.default_rng(0)
    orders = [rng.permutation(40).tolist() for _ in range(5)]
    if workers == 0:
        assert all(_is_its_number(numbered, order) for order in orders)
        return
    with ThreadPoolExecutor(workers) as pool:
        for order in orders:
            found = list(pool.map(lambda i: (i, numbered[i]), order))
            assert all((bag.features == i).all() for i, bag in found)


def test_cli_10_a_used_dataset_goes_to_spawned_workers(numbered):
    assert (numbered[7].features == 7).all()
    loader = DataLoader(numbered, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    assert all((bag.features == i).all() for i, bag in enumerate(loader))


def test_cv_09_nothing_of_the_test_part_reaches_a_choice(make_study, tmp_path):
    """Features and labels of the test part are replaced by anything: weights, log and choice stay the same bytes."""
    make_study(tmp_path / "a", patients=80)
    train = dataclasses.replace(TRAIN, selection="validation", epochs=4)
    folds = FoldSpec(n_folds=2, validation=0.5)
    methods = {"methods": ["abmil"], "train": train}
    before = study_of(tmp_path / "a", tmp_path / "before", folds=folds, **methods)
    key = FoldKey(0, 0, 0)
    assert before.selection("abmil", key).chosen_by == "validation loss"
    parts = before.folds().query("fold == 0")
    tested = set(parts[parts["part"] == "test"]["patient"])

    shutil.copytree(tmp_path / "a", tmp_path / "b")
    table = pd.read_csv(tmp_path / "b" / "labels.csv", dtype=str)
    mine = table["patient"].isin(tested)
    table.loc[mine, "label"] = table.loc[mine, "label"].map({"normal": "tumour", "tumour": "normal"})
    table.to_csv(tmp_path / "b" / "labels.csv", index=False)
    store = BagStore(tmp_path / "b" / "bags")
    for slide in table.loc[mine, "slide"]:
        bag = store.bag(slide)
        features = np.full_like(bag.features.numpy(), 77)
        write_bag(
            store.path(slide),
            store.header(slide),
            features=features,
            coords_l0=bag.coords_l0.numpy(),
            grid_xy=bag.grid_xy.numpy(),
        )
    same_folds = FoldSpec(file=before.folds_path)
    after = study_of(tmp_path / "b", tmp_path / "after", folds=same_folds, **methods)
    for path in ("checkpoint_path", "log_path", "selection_path", "validation_path"):
        assert getattr(before, path)("abmil", key).read_bytes() == getattr(after, path)("abmil", key).read_bytes()
    assert before.test("abmil", key)["prob_normal"].tolist() != after.test("abmil", key)["prob_normal"].tolist()


def test_cv_09_coin_flips_stay_near_one_half(make_study, tmp_path):
    make_study(tmp_path, patients=60, signal=0.0, dim=32)
    values = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        table = pd.read_csv(tmp_path / "labels.csv", dtype=str)
        table["label"] = rng.permutation(table["label"])
        table.to_csv(tmp_path / f"flips{seed}.csv", index=False)
        train = dataclasses.replace(TRAIN, selection="validation", bags_per_step=8, epochs=8)
        folds = FoldSpec(seed=seed, validation=0.45)
        run = study_of(tmp_path, tmp_path / f"run{seed}", tmp_path / f"flips{seed}.csv", train=train, folds=folds)
        rows = run.predictions()
        values += [auc(f["target"] == "tumour", f["prob_tumour"]) for _, f in rows.groupby("fold")]
        chosen = {run.selection("mean_pool", key).chosen_by for key in run.keys("mean_pool")}
        assert chosen == {"validation loss"}
    assert abs(np.mean(values) - 0.5) < 0.1


def test_cv_11_flipped_labels_are_refused_in_the_same_folder_and_learned_in_a_new_one(make_study, tmp_path):
    make_study(tmp_path, signal=8.0)
    table = tmp_path / "labels.csv"
    first = study_of(tmp_path, tmp_path / "run")
    before = first.predictions_path.read_bytes()
    flipped = table.read_text().replace("normal", "x").replace("tumour", "normal").replace("x", "tumour")
    table.write_text(flipped)
    with pytest.raises(RunError, match="labels_sha256"):
        study_of(tmp_path, tmp_path / "run")
    assert first.predictions_path.read_bytes() == before
    rows = study_of(tmp_path, tmp_path / "other").predictions()
    assert auc(rows["target"] == "tumour", rows["prob_tumour"]) > 0.9
    old = first.predictions()
    assert auc(old["target"] == "tumour", old["prob_tumour"]) > 0.9
    assert (old.set_index("slide")["target"] != rows.set_index("slide")["target"][old["slide"]]).all()


BIG = """
import sys
from pathlib import Path
from wsi_mil.stages.crossval import crossval
from wsi_mil.splits import FoldSpec
from wsi_mil.tasks import TaskSpec
from wsi_mil.fitting.spec import TrainSpec
folder = Path(sys.argv[1])
train = TrainSpec(epochs=1, selection="none", device="cpu", cache="none", bags_per_step=1)
summary = crossval(folder / "labels.csv", bags=folder / "bags", out=folder / "run", task=TaskSpec(target="label"),
                   methods=["abmil"], train=train, folds=FoldSpec(n_folds=2))
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(summary.exit_code, int(peak.split()[1]) // 1024)
"""


def test_cv_10_a_bag_of_120_000_tiles_trains_in_4_gib_and_is_tested_whole(make_study, tmp_path):
    _, bags = make_study(tmp_path, patients=4, dim=384)
    n = 120_000
    grid_xy = np.stack([np.arange(n) % 400, np.arange(n) // 400], axis=1)
    header = BagStore(bags).header("s00_0")
    big = dataclasses.replace(header, level0_size=(100_000, 100_000), bounds_l0=(0, 0, 100_000, 100_000))
    features = np.random.default_rng(0).normal(size=(n, 384)).astype(np.float16)
    write_bag(bags / "s00_0.h5", big, features=features, coords_l0=grid_xy * 224, grid_xy=grid_xy)
    done = subprocess.run([sys.executable, "-c", BIG, str(tmp_path)], capture_output=True, text=True, check=True)
    exit_code, peak_mib = map(int, done.stdout.split())
    assert exit_code == 0
    assert peak_mib < 4096
    run = RunDir(tmp_path / "run")
    (key,) = run.score_keys("abmil", "s00_0")
    assert len(run.scores("abmil", key, "s00_0").values) == n


def test_cv_03_ids_made_of_digits_stay_apart(make_study, tmp_path):
    table, bags = make_study(tmp_path, patients=12)
    names = ["0012", "7", "007", "12e3", "1_000", "0100", "1e2", "00", "0", "1.0", "-1", "1200"]
    store = BagStore(bags)
    rows = ["slide,patient,label"]
    for i, (old, new) in enumerate(zip(store.ids(), names, strict=True)):
        bag, header = store.bag(old), dataclasses.replace(store.header(old), slide_id=new)
        write_bag(
            bags / f"{new}.h5",
            header,
            features=bag.features.numpy(),
            coords_l0=bag.coords_l0.numpy(),
            grid_xy=bag.grid_xy.numpy(),
        )
        (bags / f"{old}.h5").unlink()
        rows.append(f"{new},0{i},{'ab'[i % 2]}")
    table.write_text("\n".join(rows))
    run = study_of(tmp_path, tmp_path / "run", folds=FoldSpec(n_folds=2))
    assert set(run.predictions()["slide"]) == set(names)
    assert set(run.predictions()["patient"]) == {f"0{i}" for i in range(12)}
    again = study_of(tmp_path, tmp_path / "again", folds=FoldSpec(file=run.folds_path))
    assert again.predictions_path.read_bytes() == run.predictions_path.read_bytes()
