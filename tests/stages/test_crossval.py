import hashlib
import json
import multiprocessing
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from jsonargparse import ArgumentParser

from wsi_mil import experiment
from wsi_mil.cohort import CohortSpec
from wsi_mil.errors import CohortError, ConfigError, RunError, StoreError
from wsi_mil.fitting.checkpoints import load_model, load_state, save_state
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.methods import MethodSpec
from wsi_mil.report.evaluate import evaluate
from wsi_mil.report.study import read_study
from wsi_mil.results.cases import read_cases
from wsi_mil.runs import FoldKey, RunDir
from wsi_mil.splits import FoldSpec
from wsi_mil.stages.crossval import crossval
from wsi_mil.tasks import TaskSpec

TRAIN = TrainSpec(epochs=3, lr=1e-2, selection="none", device="cpu")
TASK = TaskSpec(target="label", classes=("normal", "tumour"))
FAILING = '''
from pathlib import Path

from wsi_mil.models.mean_pool import MeanPool


class Fails(MeanPool):
    """Mean pooling that cannot read one slide."""

    def forward(self, batch, *, generator=None):
        if batch.ids[0] == "s03_0" and not self.training and Path(__file__).with_name("broken").exists():
            raise RuntimeError("no answer for s03_0")
        return super().forward(batch, generator=generator)
'''


def digests(run):
    files = [*run.path.rglob("*.ckpt"), *run.path.rglob("*.csv"), *run.path.rglob("*.h5"), *run.path.rglob("*.json")]
    return {str(p.relative_to(run.path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module")
def study(make_study, tmp_path_factory):
    return make_study(tmp_path_factory.mktemp("study"), patients=12)


@pytest.fixture(scope="module")
def finished(study, tmp_path_factory):
    """A run of two methods, three folds, two seeds."""
    out = tmp_path_factory.mktemp("finished") / "run"
    summary = crossval(study[0], **wishes(study, out))
    return summary, RunDir(out)


def wishes(study, out, **changes):
    train = TrainSpec(**vars(TRAIN) | {"seeds": (0, 1)})
    folds = FoldSpec(n_folds=3)
    return {
        "bags": study[1],
        "out": out,
        "task": TASK,
        "methods": ["mean_pool", "abmil"],
        "folds": folds,
        "train": train,
    } | changes


def test_each_patient_is_tested_once_a_seed_and_method_by_a_model_that_did_not_see_it(finished):
    summary, run = finished
    rows = run.predictions()
    assert summary.exit_code == 0
    assert len(summary.done) == 2 * 3 * 2
    assert not rows.duplicated(["method", "repeat", "fold", "seed", "slide"]).any()
    counts = rows.groupby(["method", "seed"])["slide"].nunique()
    assert (len(rows), set(counts)) == (2 * 2 * 12, {12})
    parts = run.folds().set_index(["repeat", "fold", "patient"])["part"]
    assert {parts[r.repeat, r.fold, r.patient] for r in rows.itertuples()} == {"test"}


def test_probabilities_are_those_of_the_logits_and_labels_those_of_the_table(finished, study):
    rows = finished[1].predictions()
    shares = rows[["prob_normal", "prob_tumour"]].to_numpy()
    logits = rows[["logit_normal", "logit_tumour"]].to_numpy()
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(shares, expected, rtol=1e-12)
    table = pd.read_csv(study[0], dtype=str).set_index("slide")["label"]
    assert (rows["target"] == rows["slide"].map(table)).all()


def test_tile_scores_lie_where_the_tiles_are_and_are_of_out_of_fold_models(finished):
    run = finished[1]
    row = run.predictions().query("method == 'abmil'").iloc[0]
    key = FoldKey(row["repeat"], row["fold"], row["seed"])
    scores = run.scores("abmil", key, row.slide)
    assert scores.column("attention").sum() == pytest.approx(1, abs=1e-5)
    assert (scores.coords_l0 == scores.grid_xy * 224).all()
    contribution = scores.column("contribution:tumour").sum() - scores.column("contribution:normal").sum()
    assert contribution == pytest.approx(row.logit_tumour - row.logit_normal, abs=1e-4)
    assert {k.fold for k in run.score_keys("abmil", row.slide)} == {row.fold}


def test_the_run_says_what_it_is(finished):
    run = finished[1]
    config = run.config()
    assert (config["kind"], config["train"]["seeds"], run.methods()) == ("crossval", [0, 1], ["mean_pool", "abmil"])
    assert config["task"] | {"balance": 0} == {
        "target": "label", "level": "slide", "kind": "binary", "classes": ["normal", "tumour"], "positive": "tumour",
        "balance": 0, "targets": [{"kind": "binary", "name": "label", "classes": ["normal", "tumour"]}],
    }  # fmt: skip
    assert config["encoder"]["name"] == "synthetic"
    cohort = run.cohort()
    assert (len(cohort), set(cohort["status"]), cohort["patient"][3]) == (12, {"used"}, "p03")
    selection = run.selection("abmil", FoldKey(0, 0, 0))
    assert (selection.epoch, selection.chosen_by) == (3, "fixed number of epochs: selection is none")
    assert run.validation("abmil", FoldKey(0, 0, 0)).empty
    assert (
        not list(run.path.rglob("*resume*")) + list(run.path.rglob("*.tmp")) + list(Path.cwd().glob("lightning_logs"))
    )


def test_a_finished_run_is_left_as_it_is(finished, study):
    before = digests(finished[1])
    summary = crossval(study[0], **wishes(study, finished[1].path))
    assert (len(summary.reused), summary.done, summary.exit_code) == (12, (), 0)
    assert digests(finished[1]) == before


def test_two_runs_have_the_same_bytes(finished, study, tmp_path):
    crossval(study[0], **wishes(study, tmp_path / "again"))
    assert digests(RunDir(tmp_path / "again")) == digests(finished[1])


def test_another_run_in_the_same_folder_is_refused_and_harms_nothing(finished, study, tmp_path):
    before = digests(finished[1])
    with pytest.raises(RunError, match=r"train\.epochs: 3 -> 4"):
        crossval(
            study[0], **wishes(study, finished[1].path, train=TrainSpec(**vars(TRAIN) | {"epochs": 4, "seeds": (0, 1)}))
        )
    assert digests(finished[1]) == before


def test_sigkill_at_random_moments_and_a_restart_end_with_the_same_bytes(study, tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["wsi_mil.stages.crossval", "wsi_mil.experiment"])
    spec = TrainSpec(epochs=10, lr=1e-2, selection="none", device="cpu", checkpoint_seconds=0.0)
    options = wishes(study, tmp_path / "killed", train=spec, methods=["abmil"], folds=FoldSpec(n_folds=2))
    crossval(study[0], **options | {"out": tmp_path / "whole"})
    killed = 0
    for seconds in np.random.default_rng(0).uniform(0, 0.4, size=5):
        child = context.Process(target=crossval, args=(study[0],), kwargs=options)
        child.start()
        while child.is_alive() and not list((tmp_path / "killed").rglob("resume.ckpt")):
            time.sleep(0.005)
        time.sleep(seconds)
        killed += child.is_alive()
        child.kill()
        child.join()
        child.close()
    summary = crossval(study[0], **options)
    assert killed >= 3, "the kills came too late to mean anything"
    assert digests(RunDir(tmp_path / "killed")) == digests(RunDir(tmp_path / "whole"))
    assert len(summary.done) + len(summary.reused) == 2
    assert not list((tmp_path / "killed").rglob(".*.tmp"))


def test_a_model_that_fails_is_listed_and_the_others_go_on(study, tmp_path):
    method = tmp_path / "my_method.py"
    method.write_text(FAILING)
    (tmp_path / "broken").touch()
    summary = crossval(study[0], **wishes(study, tmp_path / "run", methods=[str(method), "mean_pool"], train=TRAIN))
    run = RunDir(tmp_path / "run")
    (failure,) = summary.failures
    assert (summary.exit_code, len(summary.done)) == (3, 5)
    assert "no answer for s03_0" in failure.reason
    assert f"wsi-mil check {method}" in failure.reason
    tested = run.predictions().query("method == 'my_method'")["slide"]
    assert "s03_0" not in set(tested)
    assert len(tested) == 8
    (tmp_path / "broken").unlink()
    again = crossval(study[0], **wishes(study, tmp_path / "run", methods=[str(method), "mean_pool"], train=TRAIN))
    assert (len(again.done), len(again.reused), again.exit_code) == (1, 5, 0)
    assert len(run.predictions()) == 24
    checkpoint = run.checkpoint_path("my_method", run.keys("my_method")[0])
    assert load_model(checkpoint, torch.device("cpu"))[0].in_dim > 0
    method.write_text(FAILING + "# changed")
    with pytest.raises(RunError, match="methods"):
        crossval(study[0], **wishes(study, tmp_path / "run", methods=[str(method), "mean_pool"], train=TRAIN))
    with pytest.raises(RunError, match=r"trained with another .*my_method\.py"):
        load_model(checkpoint, torch.device("cpu"))
    method.unlink()
    with pytest.raises(RunError, match=r"no such file.*Put it back"):
        load_model(checkpoint, torch.device("cpu"))


@pytest.mark.parametrize(("setting", "value"), [("dropout", 1.0), ("nix", 3)])
def test_a_stored_model_with_a_setting_that_does_not_hold_any_more_is_named(finished, tmp_path, setting, value):
    run = finished[1]
    state = load_state(run.checkpoint_path("abmil", run.keys("abmil")[0]))
    header = json.loads(state["header"])
    header["method"]["params"][setting] = value
    save_state(tmp_path / "old.ckpt", state | {"header": json.dumps(header)})
    with pytest.raises(RunError, match=rf"old\.ckpt: method abmil cannot be built any more .*{setting}"):
        load_model(tmp_path / "old.ckpt", torch.device("cpu"))


def test_a_method_that_needs_more_tiles_than_a_bag_has_is_refused(study, tmp_path):
    method = tmp_path / "needy.py"
    method.write_text(
        "from wsi_mil.models.mean_pool import MeanPool\n\n\nclass Needy(MeanPool):\n    min_tiles = 1000\n"
    )
    with pytest.raises(ConfigError, match=r"needs at least 1000 tiles a bag; 12 of 12 bags have fewer: .*s0"):
        crossval(study[0], **wishes(study, tmp_path / "run", methods=[str(method)]))
    capped = replace(TRAIN, tile_cap=999)
    with pytest.raises(ConfigError, match=r"tile_cap is 999"):
        crossval(study[0], **wishes(study, tmp_path / "run", methods=[str(method)], train=capped))


def test_a_validation_part_that_is_too_small_to_choose_is_said_beforehand(study, tmp_path, caplog):
    asked = replace(TRAIN, epochs=1, selection="validation")
    summary = crossval(study[0], **wishes(study, tmp_path / "run", methods=["mean_pool"], train=asked))
    (note,) = [line for line in summary.notes if "chooses no epoch" in line]
    assert note.startswith("mean_pool: in 3 of 3 folds")
    assert "--train.selection none" in note
    assert note in caplog.messages
    assert not any("chooses no epoch" in line for line in crossval_notes(study, tmp_path))


def crossval_notes(study, tmp_path):
    fixed = replace(TRAIN, epochs=1)
    return crossval(study[0], **wishes(study, tmp_path / "fixed", methods=["mean_pool"], train=fixed)).notes


def test_level_patient_pools_the_slides_and_gives_scores_by_slide(make_study, tmp_path):
    study = make_study(tmp_path, patients=8, slides_per_patient=2)
    with pytest.raises(CohortError, match="level"):
        crossval(study[0], **wishes(study, tmp_path / "run"))
    task = TaskSpec(target="label", level="patient")
    crossval(
        study[0],
        **wishes(study, tmp_path / "run", task=task, methods=["abmil"], train=TRAIN, folds=FoldSpec(n_folds=2)),
    )
    run = RunDir(tmp_path / "run")
    rows = run.predictions()
    assert (sorted(rows["patient"]), set(rows["slide"])) == ([f"p{i:02}" for i in range(8)], {""})
    key = run.keys("abmil")[0]
    patient = run.predictions().query("fold == 0")["patient"].iloc[0]
    slides = [f"s{patient[1:]}_0", f"s{patient[1:]}_1"]
    attention = [run.scores("abmil", key, slide).column("attention") for slide in slides]
    assert sum(a.sum() for a in attention) == pytest.approx(1, abs=1e-5)
    assert 0 < attention[0].sum() < 1


def test_the_threshold_is_stored_with_the_model_and_decides_in_report_and_viewer_alike(make_study, tmp_path):
    study = make_study(tmp_path, patients=88, signal=1.0)
    folds, train = FoldSpec(n_folds=2, validation=0.5), TrainSpec(epochs=2, lr=1e-2, device="cpu")
    task = TaskSpec(target="label", level="patient", classes=("normal", "tumour"))
    crossval(study[0], **wishes(study, tmp_path / "run", methods=["mean_pool"], folds=folds, train=train, task=task))
    run = RunDir(tmp_path / "run")
    chosen = {key: run.selection("mean_pool", key) for key in run.keys("mean_pool")}
    assert {one.thresholds["label"]["source"] for one in chosen.values()} == {"Youden point of the validation part"}
    figures = evaluate(read_study(run.path).methods[0])
    assert [fold.threshold.value for fold in figures.folds] == [
        one.thresholds["label"]["value"] for one in chosen.values()
    ]
    decided = dict(zip(figures.patients.ids, figures.patients.decisions.tolist(), strict=True))
    cases = read_cases(run, "mean_pool")
    assert {case.patient: task.classes.index(case.predicted) for case in cases} == decided
    largest = {case.patient: max(case.probabilities, key=case.probabilities.get) for case in cases}
    assert any(case.predicted != largest[case.patient] for case in cases), "or the test would not tell"


def test_three_classes_are_told_apart(make_study, tmp_path):
    classes = ("a", "b", "c")
    study = make_study(tmp_path, patients=18, classes=classes, signal=6.0)
    spec = TrainSpec(epochs=12, lr=2e-2, selection="none", device="cpu", bags_per_step=2)
    folds = FoldSpec(n_folds=2)
    crossval(
        study[0],
        **wishes(study, tmp_path / "run", task=TaskSpec(target="label"), methods=["abmil"], train=spec, folds=folds),
    )
    rows = RunDir(tmp_path / "run").predictions()
    shares = rows[[f"prob_{name}" for name in classes]].to_numpy()
    assert (np.array(classes)[shares.argmax(1)] == rows["target"]).mean() > 0.8
    np.testing.assert_allclose(shares.sum(1), 1)


def test_a_method_can_have_its_own_training_settings(study, tmp_path):
    methods = ["mean_pool", MethodSpec(name="mean_pool", label="longer", train={"epochs": 5})]
    crossval(study[0], **wishes(study, tmp_path / "run", methods=methods, train=TRAIN))
    run = RunDir(tmp_path / "run")
    assert [len(run.log(label, FoldKey(0, 0, 0))) for label in run.methods()] == [3, 5]


@pytest.mark.parametrize("balance", ["weight", "sampler"])
def test_balance_changes_training(finished, study, tmp_path, balance):
    lines = [line for line in study[0].read_text().splitlines() if not line.startswith(("s01", "s03"))]
    table = tmp_path / "labels.csv"
    table.write_text("\n".join(lines))
    logs = []
    for name in ("none", balance):
        task = TaskSpec(target="label", balance=name)
        out = tmp_path / name
        crossval(table, **wishes(study, out, task=task, methods=["mean_pool"], train=TRAIN, folds=FoldSpec(n_folds=2)))
        logs.append(RunDir(out).log("mean_pool", FoldKey(0, 0, 0))["loss"].iloc[-1])
    assert logs[0] != logs[1]


def test_missing_bags_are_refused_unless_allowed_and_then_counted(study, tmp_path):
    table = tmp_path / "labels.csv"
    table.write_text(study[0].read_text() + "s90_0,p90,site0,normal\ns91_0,p91,site0,tumour\n")
    with pytest.raises(CohortError, match=r"2 of 14 rows have no usable bag: s90_0, s91_0"):
        crossval(table, **wishes(study, tmp_path / "run", train=TRAIN))
    summary = crossval(table, **wishes(study, tmp_path / "run", train=TRAIN, methods=["mean_pool"], allow_missing=True))
    assert "12 used" in summary.notes[0]
    assert "2 no bag" in summary.notes[0]
    statuses = RunDir(tmp_path / "run").cohort().set_index("slide")["status"]
    assert statuses["s90_0"].startswith("no bag")


def test_slides_left_out_in_fixes_do_not_count_as_missing(study, tmp_path):
    table = tmp_path / "labels.csv"
    table.write_text(study[0].read_text() + "s90_0,p90,site0,normal\n")
    fixes = tmp_path / "my_fixes.csv"
    fixes.write_text("slide,slide_mpp,exclude,reason\ns90_0,,yes,lost\n")
    options = wishes(study, tmp_path / "run", train=TRAIN, methods=["mean_pool"])
    assert crossval(table, **options, cohort=CohortSpec(fixes=fixes)).exit_code == 0
    assert len(RunDir(tmp_path / "run").predictions()) == 12


def test_slides_without_a_label_are_no_class(study, tmp_path):
    table = tmp_path / "labels.csv"
    table.write_text(study[0].read_text().replace("s04_0,p04,site2,normal", "s04_0,p04,site2,NA"))
    crossval(table, **wishes(study, tmp_path / "run", train=TRAIN, methods=["mean_pool"]))
    run = RunDir(tmp_path / "run")
    assert run.cohort().set_index("slide")["status"]["s04_0"] == "no label in column label"
    assert len(run.predictions()) == 11


def test_a_bag_of_another_encoder_is_refused_before_anything_is_written(make_study, study, tmp_path):
    shutil.copytree(study[1], tmp_path / "bags")
    other = make_study(tmp_path / "other", patients=1, weights_sha256="11")
    shutil.copy(other[1] / "s00_0.h5", tmp_path / "bags" / "s00_0.h5")
    with pytest.raises(StoreError, match="s00_0"):
        crossval(study[0], **wishes((study[0], tmp_path / "bags"), tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_folds_of_a_former_run_are_used_again(finished, study, tmp_path):
    folds = FoldSpec(file=finished[1].folds_path)
    crossval(study[0], **wishes(study, tmp_path / "run", folds=folds, methods=["mean_pool"], train=TRAIN))
    pd.testing.assert_frame_equal(RunDir(tmp_path / "run").folds(), finished[1].folds())


def parse(*arguments):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_function_arguments(crossval, as_positional=True)
    return parser.instantiate(parser.parse_args(["labels.csv", "--bags", "b", "--out", "o", *arguments]))


def test_the_command_line_takes_names_and_specs():
    wished = parse("--task.target", "label", "--methods", "[mean_pool, abmil+aem]", "--train.seeds", "[0, 1]")
    assert wished.methods == ["mean_pool", "abmil+aem"]
    assert wished.train == TrainSpec(seeds=(0, 1))
    assert wished.task == TaskSpec(target="label")


def test_a_config_file_takes_methods_with_settings(tmp_path):
    method = {"name": "acmil", "label": "acmil5", "params": {"n_branches": 5}, "train": {"epochs": 9}}
    config = {"task": {"target": "label"}, "methods": ["abmil", method], "train": {"lr": 0.001}}
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    wished = parse("--config", str(tmp_path / "c.yaml"))
    assert wished.methods == ["abmil", MethodSpec(**method)]
    assert wished.train.lr == 0.001


def test_a_method_that_cannot_work_fails_before_the_folder_is_taken(study, tmp_path):
    with pytest.raises(ConfigError, match="needs attention"):
        crossval(study[0], **wishes(study, tmp_path / "run", methods=["mean_pool+aem"]))
    assert not (tmp_path / "run").exists()


def test_an_unknown_method_fails_before_any_bag_is_opened(tmp_path):
    with pytest.raises(ConfigError, match="abmil"):
        crossval(Path("none.csv"), **wishes((None, tmp_path / "none"), tmp_path / "run", methods=["abmill"]))


def test_two_workers_give_the_bytes_of_one_worker_with_as_many_threads(make_study, tmp_path):
    table, bags = make_study(tmp_path, patients=12)
    options = {"bags": bags, "task": TaskSpec(target="label"), "methods": ["mean_pool", "abmil"]}
    options |= {"folds": FoldSpec(n_folds=2), "train": TrainSpec(epochs=2, selection="none")}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = crossval(table, out=tmp_path / "together", workers=2, **options)
        torch.set_num_threads(1)
        alone = crossval(table, out=tmp_path / "alone", **options)
    finally:
        torch.set_num_threads(threads)
    assert together.done == alone.done
    assert len(together.done) == 4
    for name in ("predictions.csv", "environment.json"):
        assert (tmp_path / "together" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def test_a_bag_more_in_the_folder_and_another_pace_of_saving_go_on_with_the_same_run(study, tmp_path):
    bags, out = tmp_path / "bags", tmp_path / "run"
    shutil.copytree(study[1], bags)
    once = crossval(study[0], **wishes((None, bags), out, train=TRAIN, methods=["mean_pool"]))
    shutil.copy(bags / "s00_0.h5", bags / "another.h5")
    train = replace(TRAIN, checkpoint_seconds=60.0)
    again = crossval(study[0], **wishes((None, bags), out, train=train, methods=["mean_pool"]))
    assert (again.done, again.reused) == ((), once.done)


def test_a_row_with_neither_label_nor_bag_stands_in_nobodys_way(study, tmp_path):
    table = tmp_path / "labels.csv"
    table.write_text(study[0].read_text() + "s90_0,p90,site0,NA\n")
    crossval(table, **wishes(study, tmp_path / "run", train=TRAIN, methods=["mean_pool"]))
    statuses = RunDir(tmp_path / "run").cohort().set_index("slide")["status"]
    assert (statuses["s90_0"], len(statuses)) == ("no label in column label", 13)


def test_each_method_keeps_bags_as_it_wishes_and_none_is_kept_twice(study, tmp_path, monkeypatch):
    kept = []
    fit = experiment.fit

    def watched(*args, train, **kwargs):
        kept.append(train.reader)
        return fit(*args, train=train, **kwargs)

    monkeypatch.setattr(experiment, "fit", watched)
    caches = ("none", "ram", "auto")
    methods = [MethodSpec(name="mean_pool", label=name, train={"cache": name}) for name in caches]
    crossval(study[0], **wishes(study, tmp_path / "run", methods=methods, train=TRAIN, folds=FoldSpec(n_folds=2)))
    assert [reader.keeps for reader in kept] == [False, False, True, True, True, True]
    assert len({id(reader) for reader in kept}) == 2


def test_the_balance_of_every_part_is_told_by_site(finished):
    run = finished[1]
    balance, folds = pd.read_csv(run.balance_path), run.folds()
    assert set(balance.columns) == {"repeat", "fold", "part", "site", "label", "patients"}
    assert balance["patients"].sum() == len(folds)
    tested = balance[(balance["fold"] == 0) & (balance["part"] == "test")]
    assert tested["patients"].sum() == ((folds["fold"] == 0) & (folds["part"] == "test")).sum()
    assert set(tested["site"]) <= {"site0", "site1", "site2"}


def test_a_method_starts_from_the_trained_model_of_another_of_the_same_fold(study, tmp_path):
    """It is listed first and trained last; without its baseline it is refused before the folder is taken."""
    student = MethodSpec(name="mhim", label="student", objective={"init_from": "base"})
    base = MethodSpec(name="mhim", label="base")
    short = TrainSpec(**vars(TRAIN) | {"epochs": 1})
    summary = crossval(study[0], **wishes(study, tmp_path / "run", methods=[student, base], train=short))
    assert (summary.failures, len(summary.done)) == ((), 6)
    with pytest.raises(ConfigError, match="is no method of this run"):
        crossval(study[0], **wishes(study, tmp_path / "other", methods=[student], train=short))
    assert not (tmp_path / "other").exists()
