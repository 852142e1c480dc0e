"""Stage bench mil: stored folds, nothing learned from a test bag, and a table that says what it says."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from apps import cli
from wsi_mil.errors import ConfigError, StoreError
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.measuring import classic_training
from wsi_mil.measuring.classic_bags import read_classic
from wsi_mil.measuring.classic_training import ClassicJob, held_out, train_and_test
from wsi_mil.methods import MethodSpec, resolve_methods
from wsi_mil.stages import bench_mil as stage
from wsi_mil.stages.bench_mil import PUBLISHED, bench_mil, summarise
from wsi_mil.training import fit

TRAIN = TrainSpec(epochs=12, lr=5e-2, selection="none", device="cpu")
FAILING = '''
from wsi_mil.models.mean_pool import MeanPool


class Fails(MeanPool):
    """Mean pooling that cannot be asked about bag 2."""

    def forward(self, batch, *, generator=None):
        if not self.training and batch.ids[0] == "000002":
            raise RuntimeError("no answer for bag 2")
        return super().forward(batch, generator=generator)
'''


def arrays(bags=12, repeats=2, folds=3, seed=0):
    """Bags of 2 to 5 instances whose first feature tells the label; in each repeat each bag is tested once."""
    rng = np.random.default_rng(seed)
    label = np.arange(bags) % 2
    bag_id = np.repeat(np.arange(bags), rng.integers(2, 6, size=bags))
    features = rng.normal(size=(len(bag_id), 8)) * 20 + 300
    features[:, 0] += 200 * label[bag_id]
    mask = np.ones((repeats, folds, bags), dtype=bool)
    for repeat in range(repeats):
        for fold, tested in enumerate(np.array_split(np.arange(bags), folds)):
            mask[repeat, fold, tested] = False
    return {
        "features": features.astype(np.float32),
        "bag_id": bag_id.astype(np.int32),
        "bag_label": label.astype(np.int8),
        "train_mask": mask,
    }


@pytest.fixture
def data(tmp_path):
    def write(name="tiny", **changes):
        np.savez(tmp_path / f"{name}.npz", **(arrays() | changes))
        return tmp_path / f"{name}.npz"

    return write


def test_a_clear_signal_is_found_and_the_table_is_the_mean_over_the_stored_folds(data, tmp_path):
    path = data()
    summary = bench_mil(path, out=tmp_path / "out", methods=["mean_pool", "abmil"], train=TRAIN)
    folds = pd.read_csv(tmp_path / "out" / "bench_mil_folds.csv")
    table = pd.read_csv(tmp_path / "out" / "bench_mil.csv").set_index("method")
    assert summary.done == ("tiny mean_pool", "tiny abmil")
    assert len(folds) == 2 * 2 * 3
    assert (folds["test_bags"] == 4).all()
    assert (table["accuracy"] > 0.9).all()
    mine = folds[folds["method"] == "abmil"]
    assert table.loc["abmil", "accuracy"] == pytest.approx(mine["accuracy"].mean())
    assert table.loc["abmil", "auc_se"] == pytest.approx(mine["auc"].std(ddof=1) / math.sqrt(6))
    assert (tmp_path / "out" / "bench_mil.md").read_text() == summary.notes[0]
    assert "| tiny | abmil | 6 |" in summary.notes[0]


def test_what_a_test_bag_holds_changes_neither_scaling_nor_training(data):
    wild = arrays()
    tested = ~wild["train_mask"][0, 0][wild["bag_id"]]
    wild["features"][tested] *= 1e4
    wild["bag_label"] = np.where(wild["train_mask"][0, 0], wild["bag_label"], 1 - wild["bag_label"])
    tame, _ = read_classic(data()).datasets(0, 0)
    same, test = read_classic(data("wild", **wild)).datasets(0, 0)
    assert [item.id for item in tame.items] == [item.id for item in same.items]
    assert not {item.id for item in same.items} & {item.id for item in test.items}
    for i in range(len(tame)):
        torch.testing.assert_close(tame[i].features, same[i].features)
    known = torch.cat([tame[i].features for i in range(len(tame))])
    torch.testing.assert_close(known.mean(dim=0), torch.zeros(8), atol=1e-5, rtol=0)
    torch.testing.assert_close(known.std(dim=0, correction=0), torch.ones(8), atol=1e-5, rtol=0)


def test_a_test_value_beyond_all_training_values_is_set_to_their_end(data):
    wild = arrays()
    tested = ~wild["train_mask"][0, 0][wild["bag_id"]]
    wild["features"][tested, 2] = 1e6
    wild["features"][tested, 3] = -1e6
    train, test = read_classic(data(**wild)).datasets(0, 0)
    known, seen = (torch.cat([part[i].features for i in range(len(part))]) for part in (train, test))
    assert (seen[:, 2] == known[:, 2].max()).all()
    assert (seen[:, 3] == known[:, 3].min()).all()


def test_a_feature_that_never_varies_in_training_stays_finite(data):
    features = arrays()["features"]
    features[:, 3] = 7.0
    train, _ = read_classic(data(features=features)).datasets(1, 2)
    assert all((train[i].features[:, 3] == 0).all() for i in range(len(train)))


def test_the_same_command_gives_the_same_figures_and_repeats_bound_the_work(data, tmp_path):
    path = data()
    for name in ("a", "b"):
        bench_mil(path, out=tmp_path / name, methods=["abmil"], train=TRAIN, repeats=1)
    first, second = ((tmp_path / name / "bench_mil_folds.csv").read_bytes() for name in ("a", "b"))
    assert first == second
    assert set(pd.read_csv(tmp_path / "a" / "bench_mil_folds.csv")["repeat"]) == {0}


def test_z_compares_with_the_published_value_of_exactly_this_method():
    accuracy = [0.7, 0.8, 0.9]
    plain = MethodSpec(name="abmil", label="plain", params={"gated": False})
    methods = resolve_methods(["abmil", plain, "abmil+aem", "mean_pool"])
    names = [method.shown for method in methods]
    frame = pd.DataFrame(
        [
            {"dataset": "musk1", "method": name, "repeat": 0, "fold": i, "accuracy": a, "auc": a}
            for name in names
            for i, a in enumerate(accuracy)
        ]
    )
    table = summarise(frame, methods=methods, published=pd.read_csv(PUBLISHED)).set_index("method")
    error = np.std(accuracy, ddof=1) / math.sqrt(3)
    assert table.loc["abmil", "published"] == 0.9
    assert table.loc["plain", "published"] == 0.892
    assert table.loc["abmil", "z"] == pytest.approx((0.8 - 0.9) / math.sqrt(error**2 + 0.05**2))
    assert table.loc[["abmil+aem", "mean_pool"], "z"].isna().all()


def test_a_fold_that_fails_is_listed_and_the_others_count(data, tmp_path):
    (tmp_path / "fails.py").write_text(FAILING)
    summary = bench_mil(
        data(), out=tmp_path / "out", methods=[str(tmp_path / "fails.py"), "mean_pool"], train=TRAIN, repeats=1
    )
    assert summary.exit_code == 3
    assert [(f.item, f.reason) for f in summary.failures] == [
        ("tiny fails r0_f0_s0", "RuntimeError: no answer for bag 2")
    ]
    assert list(pd.read_csv(tmp_path / "out" / "bench_mil.csv")["folds"]) == [2, 3]


def test_a_stopped_run_goes_on_where_it_was_and_other_settings_are_other_models(data, tmp_path, monkeypatch):
    path, out = data(), tmp_path / "out"
    how = {"out": out, "methods": ["mean_pool"], "train": TRAIN, "repeats": 1}
    whole = bench_mil(path, **how | {"out": tmp_path / "whole"})
    (tmp_path / "out").mkdir()
    rows = (tmp_path / "whole" / "bench_mil_rows.csv").read_text().splitlines(keepends=True)
    (out / "bench_mil_rows.csv").write_text("".join(rows[:3]))

    trained = []
    monkeypatch.setattr(stage, "train_and_test", lambda job: trained.append(job.fold) or train_and_test(job))
    assert bench_mil(path, **how).done == ("tiny mean_pool",)
    assert trained == [2]
    for name in ("bench_mil_rows.csv", "bench_mil_folds.csv", "bench_mil.csv", "bench_mil.md"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    again = bench_mil(path, **how)
    assert (again.done, again.reused, again.notes) == ((), ("tiny mean_pool",), whole.notes)
    assert trained == [2]
    for change in ({"train": replace(TRAIN, epochs=3)}, {"choose": "epochs"}):
        assert bench_mil(path, **how | change).done == ("tiny mean_pool",)
    assert trained == [2, *range(3), *range(3)]
    bench_mil(data(features=arrays(seed=1)["features"], bag_id=arrays(seed=1)["bag_id"]), **how)
    assert len(trained) == 1 + 3 * 3, "other bags under the same name"
    (out / "bench_mil_rows.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="no table of this command"):
        bench_mil(path, **how)


def test_a_method_whose_file_changed_is_trained_again(data, tmp_path):
    own = tmp_path / "fails.py"
    for text in (FAILING, FAILING.replace("000002", "nobody")):
        own.write_text(text)
        summary = bench_mil(data(), out=tmp_path / "out", methods=[str(own)], train=TRAIN, repeats=1)
    assert summary.exit_code == 0
    assert list(pd.read_csv(tmp_path / "out" / "bench_mil.csv")["folds"]) == [3]
    assert len(pd.read_csv(tmp_path / "out" / "bench_mil_rows.csv")) == 2 + 3


def test_epochs_are_chosen_by_bags_of_the_training_part_alone(data, monkeypatch):
    bags = read_classic(data(bag_label=np.random.default_rng(3).permutation(arrays()["bag_label"])))
    seen, logs = [], []

    def watched(model, objective, *, train, validation, files, **rest):
        fit(model, objective, train=train, validation=validation, files=files, **rest)
        seen.append(({i.id for i in train.items}, {i.id for i in validation.items}))
        logs.append(pd.read_csv(files.log))

    monkeypatch.setattr(classic_training, "fit", watched)
    (method,) = resolve_methods(["abmil+aem"])
    job = ClassicJob(bags=bags, method=method, train=TRAIN, choose="epochs", repeat=0, fold=1, seed=0)
    row = train_and_test(job)
    train, test = bags.datasets(0, 1)
    (inner, watched_by), (everything, nothing) = seen
    first, second = logs
    assert len(first) == TRAIN.epochs
    assert row.epochs == first["epoch"][first["val_loss"].idxmin()]
    assert 1 < row.epochs < TRAIN.epochs, "a case in which stopping means something"
    assert inner | watched_by == everything == {item.id for item in train.items}
    assert not inner & watched_by
    assert nothing == set()
    assert not everything & {item.id for item in test.items}
    labels = {item.id: int(item.values[0]) for item in train.items}
    assert sorted(labels[name] for name in watched_by) == [0, 1]
    assert train_and_test(replace(job, choose="none")).epochs == len(logs[2]) == TRAIN.epochs
    pd.testing.assert_frame_equal(second, logs[2].iloc[: row.epochs])  # the same training, stopped


@pytest.mark.parametrize(("counts", "held"), [((8, 40), [2, 10]), ((1, 2), [0, 0]), ((2, 3), [0, 1])])
def test_a_quarter_of_each_class_is_held_out_and_one_bag_always_stays(counts, held):
    labels = np.repeat([0, 1], counts)
    found = [held_out(labels, seed=seed) for seed in (0, 0, 1)]
    assert all(np.bincount(labels[mask], minlength=2).tolist() == held for mask in found)
    assert (found[0] == found[1]).all()
    assert sum(counts) < 20 or (found[0] != found[2]).any()


def test_choosing_by_test_bags_and_made_up_positions_are_refused(data, tmp_path):
    path = data()
    with pytest.raises(ConfigError, match="no validation part"):
        bench_mil(path, out=tmp_path / "o", train=TrainSpec(device="cpu"))
    with pytest.raises(ConfigError, match="positions"):
        bench_mil(path, out=tmp_path / "o", methods=["abmil+sm"], train=TRAIN)
    with pytest.raises(ConfigError, match="no npz"):
        bench_mil(tmp_path / "nowhere", out=tmp_path / "o", train=TRAIN)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"bag_id": np.zeros(3)}, "features"),
        ({"bag_label": np.ones(12)}, "every class"),
        ({"train_mask": np.ones((1, 2, 12), dtype=bool)}, "no test bag"),
        ({"features": np.full((len(arrays()["bag_id"]), 2), np.nan)}, "finite"),
        ({"train_mask": np.ones((2, 12), dtype=bool)}, "shape"),
    ],
)
def test_a_file_that_is_not_of_this_form_is_refused_with_the_reason(data, change, told):
    with pytest.raises(StoreError, match=told):
        read_classic(data("bad", **change))


def test_the_command_is_two_words_beside_bench(data, tmp_path, capsys):
    words = ["bench", "mil", str(data()), "--out", str(tmp_path / "out"), "--methods", "mean_pool", "--repeats", "1"]
    assert cli.main([*words, "--epochs", "2"]) == 0
    assert "bench mil: 1 done" in capsys.readouterr().out
    assert cli.main(["bench", "mil", "--no-such-option"]) == 2
    assert "wsi-mil bench mil: unknown option" in capsys.readouterr().err
    assert cli.main(["bench", "./mil", "--no-such-option"]) == 2
    assert "wsi-mil bench: unknown option" in capsys.readouterr().err
