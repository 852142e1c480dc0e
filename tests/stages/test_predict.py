import pickle

import numpy as np
import pandas as pd
import pytest
import torch

from wsi_mil.errors import RunError, StoreError
from wsi_mil.fitting.checkpoints import load_model, save_model
from wsi_mil.fitting.evaluation import answer, probabilities
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.methods import MethodSpec, build, parse_method
from wsi_mil.runs import FoldKey, RunDir, write_frame
from wsi_mil.splits import FoldSpec
from wsi_mil.stages.crossval import crossval
from wsi_mil.stages.predict import predict
from wsi_mil.store import BagStore
from wsi_mil.tasks import TaskSpec, class_task

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(make_study, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    table, bags = make_study(folder, patients=12)
    train = TrainSpec(epochs=3, lr=1e-2, selection="none", device="cpu")
    options = {"bags": bags, "out": folder / "run", "task": TaskSpec(target="label"), "methods": ["abmil", "focusmil"]}
    crossval(table, **options, folds=FoldSpec(n_folds=3), train=train)
    return RunDir(folder / "run")


@pytest.fixture(scope="module")
def outside(make_study, tmp_path_factory):
    return make_study(tmp_path_factory.mktemp("outside"), patients=3, seed=9)[1]


@pytest.mark.parametrize("method", ["abmil", "focusmil"])
def test_a_slide_from_outside_gets_the_mean_over_the_fold_models(run, outside, tmp_path, method):
    summary = predict(run.path, bags=outside, out=tmp_path / "out", device="cpu")
    scored = RunDir(tmp_path / "out")
    rows = scored.predictions().query("method == @method").set_index("slide")
    assert summary.done == ("s00_0", "s01_0", "s02_0")
    assert (list(rows.index), set(rows["target"])) == (list(summary.done), {""})
    models = [load_model(run.checkpoint_path(method, key), CPU) for key in run.keys(method)]
    bag = BagStore(outside).bag("s01_0")
    columns = models[0][0].score_columns(("normal", "tumour"))
    answers = [answer(model, bag, device=CPU, columns=columns) for model, _ in models]
    expected = probabilities(answers, models[0][1]).mean(0)
    assert rows.loc["s01_0", "prob_tumour"] == expected[1]
    assert np.ptp(probabilities(answers, models[0][1])[:, 1]) > 0
    scores = scored.scores(method, FoldKey(0, 0, 0), "s01_0")
    np.testing.assert_allclose(scores.values, np.mean([a.tile_scores for a in answers], axis=0), atol=1e-6)


def test_the_folder_reads_as_a_run(run, outside, tmp_path):
    predict(run.path, bags=outside, out=tmp_path / "out", device="cpu")
    scored = RunDir(tmp_path / "out")
    assert (scored.config()["kind"], scored.methods()) == ("predict", ["abmil", "focusmil"])
    assert scored.keys("abmil") == [FoldKey(0, 0, 0)]
    assert scored.cohort()["slide"].tolist() == ["s00_0", "s01_0", "s02_0"]
    with pytest.raises(RunError, match="predictions, not models"):
        predict(scored.path, bags=outside, out=tmp_path / "again")


def test_bags_of_another_encoder_are_refused_and_nothing_is_written(run, make_study, tmp_path):
    _, bags = make_study(tmp_path, patients=1, encoder="other")
    with pytest.raises(StoreError, match=r"s00_0 \(encoder other, the model's synthetic\)"):
        predict(run.path, bags=bags, out=tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_predictions_of_other_bags_do_not_share_a_folder(run, outside, make_study, tmp_path):
    predict(run.path, bags=outside, out=tmp_path / "out", device="cpu")
    predict(run.path, bags=outside, out=tmp_path / "out", device="cpu")
    _, others = make_study(tmp_path, patients=4)
    with pytest.raises(RunError, match="bags_sha256"):
        predict(run.path, bags=others, out=tmp_path / "out", device="cpu")


def test_a_damaged_bag_is_listed_and_the_others_are_scored(run, make_study, tmp_path, monkeypatch):
    _, bags = make_study(tmp_path, patients=3)
    whole = BagStore.bag

    def damaged(store, slide_id):
        if slide_id == "s01_0":
            raise StoreError("s01_0.h5: bad sector")
        return whole(store, slide_id)

    monkeypatch.setattr(BagStore, "bag", damaged)
    summary = predict(run.path, bags=bags, out=tmp_path / "out", device="cpu")
    assert (summary.exit_code, summary.failures[0].item) == (3, "s01_0")
    assert len(RunDir(tmp_path / "out").predictions()) == 4


def test_a_bag_cut_short_is_listed_and_the_others_are_scored(run, make_study, tmp_path):
    table, bags = make_study(tmp_path, patients=3, slides_per_patient=2)
    cut = bags / "s01_0.h5"
    cut.write_bytes(cut.read_bytes()[:2000])
    summary = predict(run.path, bags=bags, out=tmp_path / "out", device="cpu")
    [failure] = summary.failures
    assert (summary.exit_code, failure.item, failure.outcome) == (3, "s01_0", "failed")
    assert "s01_0.h5" in failure.reason
    assert summary.done == ("s00_0", "s00_1", "s01_1", "s02_0", "s02_1")
    status = RunDir(tmp_path / "out").cohort("status").set_index("slide")["status"]
    assert (status["s01_0"], status["s01_1"]) == ("no bag", "used")
    rows = pd.read_csv(table, dtype=str)
    write_frame(tmp_path / "others.csv", rows[rows["patient"] != "p01"])
    assert predict(run.path, bags=bags, table=tmp_path / "others.csv", out=tmp_path / "o", device="cpu").exit_code == 0


def test_bags_of_which_none_can_be_read_are_refused(run, make_study, tmp_path):
    _, bags = make_study(tmp_path, patients=2)
    for path in bags.glob("*.h5"):
        path.write_bytes(b"cut")
    with pytest.raises(StoreError, match=r"none of the 2 bags can be read, such as s00_0\.h5"):
        predict(run.path, bags=bags, out=tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_what_computed_the_predictions_stands_beside_them(run, outside, tmp_path):
    predict(run.path, bags=outside, out=tmp_path / "out", device="cpu")
    told = RunDir(tmp_path / "out").environment()
    assert told["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert told["device"] == "cpu"


def test_equal_models_give_equal_bytes_whatever_strings_they_share(tmp_path):
    task = class_task("label", ("label", "abmil"))
    model, _ = build(parse_method("abmil"), in_dim=4, task=task, seed=0)
    apart = pickle.loads(pickle.dumps((MethodSpec(name="abmil"), task)))
    for name, (method, its_task) in {"a": (MethodSpec(name="abmil"), task), "b": apart}.items():
        save_model(tmp_path / name, model, method=method, task=its_task)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    again, its_task = load_model(tmp_path / "a", CPU)
    assert its_task == task
    assert torch.equal(again.head.weight, model.head.weight)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("ran",))

    torch.save({"kind": "mil_model", "weights": Evil()}, tmp_path / "checkpoint.ckpt")
    with pytest.raises(RunError, match="cannot be read"):
        load_model(tmp_path / "checkpoint.ckpt", CPU)


def test_what_a_kill_left_half_written_is_gone_after_the_next_start(run, outside, tmp_path):
    predict(run.path, bags=outside, out=tmp_path / "out", device="cpu")
    left = tmp_path / "out" / "instance_scores" / ".x.h5.wsi-mil-5bce98f7-4194303.tmp"
    left.write_bytes(b"half")
    predict(run.path, bags=outside, out=tmp_path / "out", device="cpu")
    assert not left.exists()
