"""Every kind of target from table to predictions, on planted signals: the figure recovers the planted strength."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr

from wsi_mil.errors import CohortError, ConfigError
from wsi_mil.fitting.checkpoints import load_model
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.runs import RunDir
from wsi_mil.splits import FoldSpec
from wsi_mil.stages.crossval import crossval
from wsi_mil.stages.heatmap import heatmap
from wsi_mil.stages.report import report
from wsi_mil.stages.train import train
from wsi_mil.statistics.ranking import auc
from wsi_mil.statistics.survival_concordance import survival_concordance
from wsi_mil.targets import ClassTarget, RegressionTarget, TargetSpec
from wsi_mil.tasks import Task, TaskSpec


def harrell_c(times, events, risks):
    everyone = np.arange(len(times))
    found = survival_concordance(
        times, events, risks, groups=np.zeros_like(everyone), patients=everyone, n_patients=len(times)
    )
    return found.auc


TRAIN = TrainSpec(epochs=25, lr=2e-2, selection="none", device="cpu", bags_per_step=8)


@pytest.fixture(scope="module")
def planted(write_planted, tmp_path_factory):
    return write_planted(tmp_path_factory.mktemp("planted"))


def run_of(planted, out, task, *, methods=("mean_pool",), spec=TRAIN, **more):
    summary = crossval(
        planted[0],
        bags=planted[1],
        out=out,
        task=task,
        methods=list(methods),
        folds=FoldSpec(n_folds=3),
        train=spec,
        **more,
    )
    assert summary.exit_code == 0, summary.failures
    return RunDir(out)


def merged(run, planted, **columns):
    rows = run.predictions()
    for name in columns:
        rows[name] = pd.to_numeric(rows[name])
    return rows.merge(planted[2][["patient", "z"]], on="patient")


def test_a_binary_target_is_found_as_well_as_the_planted_number_tells_it(planted, tmp_path):
    rows = merged(run_of(planted, tmp_path / "run", TaskSpec(target="sex")), planted)
    known = auc(rows["target"] == "yes", rows["z"].to_numpy())
    assert 0.85 < known < 1
    assert auc(rows["target"] == "yes", rows["prob_yes"].to_numpy()) == pytest.approx(known, abs=0.05)
    np.testing.assert_allclose(rows["prob_yes"] + rows["prob_no"], 1)


def test_classes_in_order_are_found(planted, tmp_path):
    rows = merged(run_of(planted, tmp_path / "run", TaskSpec(target="grade", kind="ordinal")), planted)
    shares = rows[["prob_1", "prob_2", "prob_3"]].to_numpy()
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    expected = shares @ np.arange(1, 4)
    known = spearmanr(rows["z"], rows["target"].astype(float)).statistic
    assert spearmanr(expected, rows["target"].astype(float)).statistic == pytest.approx(known, abs=0.05)


@pytest.mark.parametrize("method", ["max_pool", "lse_pool", "focusmil"])
def test_a_method_whose_tiles_only_have_probabilities_learns_numbers_without_a_map(planted, tmp_path, method):
    run = run_of(planted, tmp_path / "run", TaskSpec(target="ki67", kind="regression"), methods=[method])
    rows = merged(run, planted, target=0)
    assert rows["prediction"].corr(rows["target"]) > 0.3
    key = run.keys(method)[0]
    slide = run.test(method, key)["slide"][0]
    assert run.scores(method, key, slide).columns == ()
    made = report(run.path)
    assert made.exit_code == 0, made.failures
    drawn = heatmap(run.path, slides=tmp_path)
    assert drawn.exit_code == 1
    assert "no scores of tiles to draw" in drawn.failures[0].reason


def test_a_number_is_found_in_its_own_units(planted, tmp_path):
    run = run_of(planted, tmp_path / "run", TaskSpec(target="ki67", kind="regression"))
    rows = merged(run, planted, target=0)
    assert rows["prediction"].corr(rows["target"]) == pytest.approx(rows["z"].corr(rows["target"]), abs=0.06)
    error, spread = (rows["prediction"] - rows["target"]), rows["target"]
    assert 1 - (error**2).mean() / spread.var(ddof=0) == pytest.approx(rows["z"].corr(spread) ** 2, abs=0.12)
    _, task = load_model(run.checkpoint_path("mean_pool", run.keys("mean_pool")[0]), "cpu")
    assert task.targets[0].mean == pytest.approx(rows[rows["fold"] != 0]["target"].mean())


def test_tiles_have_scores_of_the_outputs_that_the_kind_has(planted, tmp_path):
    short = TrainSpec(**vars(TRAIN) | {"epochs": 1})
    task = TaskSpec(target="ki67", kind="regression")
    run = run_of(planted, tmp_path / "run", task, methods=("abmil",), spec=short)
    key, row = run.keys("abmil")[0], run.predictions().iloc[0]
    scores = run.scores("abmil", key, row["slide"])
    assert [column.name for column in scores.columns] == ["attention", "contribution:ki67"]
    _, fitted = load_model(run.checkpoint_path("abmil", key), "cpu")
    own = fitted.targets[0]
    total = scores.column("contribution:ki67").sum() * own.deviation + own.mean
    assert total == pytest.approx(row["prediction"], rel=1e-4)


@pytest.mark.parametrize("loss", ["discrete", "cox"])
def test_a_time_is_found(planted, tmp_path, loss):
    task = TaskSpec(target="months", kind="survival", event="dead", loss=loss)
    rows = merged(run_of(planted, tmp_path / "run", task), planted, target=0, event=0)
    each, known = [], []
    for _, fold in rows.groupby("fold"):
        time, event = fold["target"].to_numpy(), fold["event"].to_numpy() == 1
        each.append(harrell_c(time, event, fold["risk"].to_numpy()))
        known.append(harrell_c(time, event, fold["z"].to_numpy()))
    assert np.mean(known) > 0.8
    assert np.mean(each) == pytest.approx(np.mean(known), abs=0.05)
    if loss == "discrete":
        curve = rows[[f"survival_{i}" for i in (1, 2, 3, 4)]].to_numpy()
        assert (np.diff(curve, axis=1) <= 0).all()
        assert ((curve >= 0) & (curve <= 1)).all()
        assert rows.groupby("fold")["cut_4"].nunique().eq(1).all()


def test_several_targets_are_found_by_one_model_and_missing_labels_are_no_labels(planted, tmp_path):
    others = (
        "sex2",
        TargetSpec(target="ki67_some", kind="regression"),
        TargetSpec(target="months", kind="survival", event="dead"),
    )
    run = run_of(planted, tmp_path / "run", TaskSpec(target="sex", others=others))
    rows = merged(run, planted)
    assert rows.groupby("target_name").size().to_list() == [len(planted[2])] * 4
    for name in ("sex", "sex2"):
        own = rows[(rows["target_name"] == name) & (rows["target"] != "")]
        known = auc(own["target"] == "yes", own["z"].to_numpy())
        assert auc(own["target"] == "yes", own["prob_yes"].to_numpy()) == pytest.approx(known, abs=0.07)
    number = rows[(rows["target_name"] == "ki67_some") & (rows["target"] != "")]
    assert len(number) == planted[2]["ki67_some"].notna().sum()
    assert number["prediction"].corr(pd.to_numeric(number["target"])) > 0.8
    assert run.config()["task"]["kind"] == "several"
    assert set(run.selection("mean_pool", run.keys("mean_pool")[0]).thresholds) == {"sex", "sex2"}


def test_a_bag_without_a_label_of_a_target_does_not_move_that_targets_outputs():
    """The gradient of the loss on the outputs of a target is exactly 0 for bags that lack its label."""
    task = Task(
        level="slide",
        targets=(ClassTarget(name="a", classes=("no", "yes")), RegressionTarget(name="b")),
    )
    values = np.array([[1.0, np.nan], [np.nan, 2.0], [0.0, 1.0]])
    logits = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    task.criterion(3)(logits, task.tensor(values)).backward()
    moved = (logits.grad != 0).tolist()
    assert moved == [[True, True, False], [False, False, True], [True, True, True]]


@pytest.mark.parametrize(
    ("task", "changes", "says"),
    [
        (TaskSpec(target="ki67", kind="regression"), {"methods": ["clam_sb"]}, "learns one target of classes"),
        (TaskSpec(target="ki67", kind="regression"), {"methods": ["prob_max"]}, "learns one target of classes"),
        (TaskSpec(target="ki67", kind="regression", balance="weight"), {}, "needs classes"),
        (TaskSpec(target="ki67", kind="regression"), {"train": TrainSpec(metric="auc")}, "it can be loss or r2"),
        (TaskSpec(target="months", kind="survival", event="dead", loss="cox"), {"train": TrainSpec()}, "8 or more"),
        (TaskSpec(target="sex", others=("sex2",)), {"train": TrainSpec(metric="auc")}, "it can be loss"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_folder_is_taken(planted, tmp_path, task, changes, says):
    wishes = {"methods": ["mean_pool"], "train": TRAIN} | changes
    with pytest.raises(ConfigError, match=says):
        crossval(planted[0], bags=planted[1], out=tmp_path / "run", task=task, folds=FoldSpec(n_folds=3), **wishes)
    assert not (tmp_path / "run").exists()


def test_validation_chooses_by_the_figure_of_the_kind(planted, tmp_path):
    spec = TrainSpec(epochs=6, lr=2e-2, device="cpu", metric="r2")
    out = tmp_path / "run"
    task = TaskSpec(target="ki67", kind="regression")
    folds = FoldSpec(n_folds=2, validation=0.4)
    crossval(planted[0], bags=planted[1], out=out, task=task, methods=["mean_pool"], folds=folds, train=spec)
    run = RunDir(out)
    key = run.keys("mean_pool")[0]
    log, chosen = run.log("mean_pool", key), run.selection("mean_pool", key)
    assert (chosen.metric, chosen.value) == ("r2", log["val_r2"].max())
    rows = run.validation("mean_pool", key)
    error = pd.to_numeric(rows["prediction"]) - pd.to_numeric(rows["target"])
    assert 1 - (error**2).mean() / pd.to_numeric(rows["target"]).var(ddof=0) == pytest.approx(chosen.value)


def test_a_model_of_numbers_can_be_trained_on_everybody(planted, tmp_path):
    task = TaskSpec(target="months", kind="survival", event="dead")
    summary = train(planted[0], bags=planted[1], out=tmp_path / "run", task=task, methods=["mean_pool"], train=TRAIN)
    assert summary.exit_code == 0


def test_at_level_patient_every_slide_of_a_labelled_patient_takes_part(make_study, tmp_path):
    table, bags = make_study(tmp_path, patients=8, slides_per_patient=2)
    frame = pd.read_csv(table, dtype=str)
    frame.loc[frame["slide"].str.endswith("_1"), "label"] = ""
    frame.to_csv(table, index=False)
    short = TrainSpec(epochs=1, selection="none", device="cpu")
    folds, task = FoldSpec(n_folds=2), TaskSpec(target="label", level="patient")
    crossval(table, bags=bags, out=tmp_path / "run", task=task, methods=["abmil"], folds=folds, train=short)
    run = RunDir(tmp_path / "run")
    assert set(run.cohort()["status"]) == {"used"}
    assert run.score_keys("abmil", "s00_1")


def test_what_can_never_be_learnt_is_found_by_check(planted, tmp_path):
    from wsi_mil.stages.check import check

    frame = planted[2].drop(columns="z").astype(str)
    frame.loc[3, "months"] = "12,5"
    frame.to_csv(tmp_path / "labels.csv", index=False)
    found = check(tmp_path / "labels.csv", target="months", kind="survival", event="dead")
    assert any("'12,5' is no number" in failure.reason for failure in found.failures)
    sound = check(planted[0], target="months", kind="survival", event="dead", out=tmp_path)
    assert not [failure for failure in sound.failures if "months" in failure.item]


@pytest.mark.parametrize("loss", ["discrete", "cox"])
def test_times_without_an_event_are_refused_before_the_folder_is_taken(planted, tmp_path, loss):
    planted[2].assign(dead=0).drop(columns="z").to_csv(tmp_path / "labels.csv", index=False)
    task = TaskSpec(target="months", kind="survival", event="dead", loss=loss)
    with pytest.raises(CohortError, match="repeat 0, fold 0: months: a training part holds no event"):
        crossval(
            tmp_path / "labels.csv",
            bags=planted[1],
            out=tmp_path / "run",
            task=task,
            methods=["mean_pool"],
            train=TRAIN,
        )
    assert not (tmp_path / "run").exists()
