"""wsi-mil export-bundle, and predict with what it made: the same answers far from the run, and no silent misuse."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from apps.cli import main
from tiling.atomic import temporary_path
from wsi_mil.bundle import _digest as bundle_digest
from wsi_mil.bundle import card_path, open_bundle
from wsi_mil.errors import CohortError, ConfigError, RunError, StoreError
from wsi_mil.fitting.search_spec import SearchSpec
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.runs import FoldKey, RunDir, write_frame
from wsi_mil.splits import FoldSpec
from wsi_mil.stages.check import check
from wsi_mil.stages.crossval import crossval
from wsi_mil.stages.export_bundle import export_bundle
from wsi_mil.stages.predict import predict
from wsi_mil.stages.report import report
from wsi_mil.stages.train import train as train_whole
from wsi_mil.statistics.decisions import choose_threshold
from wsi_mil.table.records import CohortSpec
from wsi_mil.targets import TargetSpec
from wsi_mil.tasks import TaskSpec
from wsi_mil.transfer.model_card import model_card

KEY = FoldKey(0, 0, 0)
WEIGHTS = f"models/{KEY}.safetensors"
LEVELS = TaskSpec(target="label", level="slide")


def train(table: Path, bags: Path, out: Path, *, task=LEVELS, methods=("abmil+aem", "mean_pool"), **options) -> RunDir:
    spec = TrainSpec(epochs=2, lr=1e-2, selection="none", device="cpu")
    crossval(
        table, bags=bags, out=out, task=task, methods=list(methods), folds=FoldSpec(n_folds=2), train=spec, **options
    )
    return RunDir(out)


@pytest.fixture(scope="module")
def study(make_study, tmp_path_factory):
    return make_study(tmp_path_factory.mktemp("study"), patients=12)


@pytest.fixture(scope="module")
def run(study, tmp_path_factory):
    return train(*study, tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="module")
def bundle(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("bundle") / "bundle"
    export_bundle(run.path, out=out, method="abmil+aem", patient_hashes=True)
    return out


@pytest.fixture(scope="module")
def outside(make_study, tmp_path_factory):
    return make_study(tmp_path_factory.mktemp("outside"), patients=6, slides_per_patient=2, seed=9)


@pytest.fixture
def copied(bundle, tmp_path):
    return shutil.copytree(bundle, tmp_path / "elsewhere")


def rows_of(out: Path) -> pd.DataFrame:
    return RunDir(out).predictions()


def test_a_bundle_far_from_its_run_says_the_same_as_the_run(make_study, outside, tmp_path):
    table, bags = make_study(tmp_path / "study", patients=12)
    run = train(table, bags, tmp_path / "run")
    predict(run.path, bags=outside[1], out=tmp_path / "by_run", device="cpu")
    export_bundle(run.path, out=tmp_path / "run" / "bundle", method="abmil+aem")
    shutil.move(tmp_path / "run" / "bundle", tmp_path / "moved")
    shutil.rmtree(run.path)
    shutil.rmtree(tmp_path / "study")
    predict(tmp_path / "moved", outside[1], out=tmp_path / "by_bundle", device="cpu")
    old, new = rows_of(tmp_path / "by_run").query("method == 'abmil+aem'"), rows_of(tmp_path / "by_bundle")
    pd.testing.assert_frame_equal(new, old.reset_index(drop=True).assign(in_training=""))
    scores = [RunDir(tmp_path / name).scores("abmil+aem", KEY, "s01_0").values for name in ("by_run", "by_bundle")]
    np.testing.assert_array_equal(*scores)
    assert np.ptp(new["prob_tumour"]) > 0.01


def test_one_model_of_the_ensemble_can_be_taken(run, outside, tmp_path):
    export_bundle(run.path, out=tmp_path / "one", method="mean_pool", models="r0_f1_s0", patient_hashes=True)
    one = open_bundle(tmp_path / "one")
    folds = run.folds().query("fold == 1")
    own, others = (set(folds.query(f"part {sign} 'test'")["patient"]) for sign in ("!=", "=="))
    assert [model["name"] for model in one.facts["models"]] == ["r0_f1_s0"]
    assert all(one.known.holds("patient", name) for name in own)
    assert not any(one.known.holds("patient", name) for name in others)
    assert one.facts["training"]["patients"] == len(own)
    with pytest.raises(ConfigError, match="r0_f0_s0, r0_f1_s0"):
        export_bundle(run.path, out=tmp_path / "none", method="mean_pool", models="r9_f9_s9")


def test_the_model_of_a_whole_cohort_can_be_exported(study, outside, tmp_path):
    spec = TrainSpec(epochs=1, selection="none", device="cpu")
    train_whole(study[0], bags=study[1], out=tmp_path / "run", task=LEVELS, methods=["mean_pool"], train=spec)
    export_bundle(tmp_path / "run", out=tmp_path / "b")
    assert open_bundle(tmp_path / "b").facts["training"]["patients"] == 12
    assert "by 1 trained model of method" in card_path(tmp_path / "b").read_text()
    predict(tmp_path / "run", bags=outside[1], out=tmp_path / "by_run", device="cpu")
    predict(tmp_path / "b", outside[1], out=tmp_path / "by_bundle", device="cpu")
    np.testing.assert_array_equal(
        rows_of(tmp_path / "by_run")["prob_tumour"], rows_of(tmp_path / "by_bundle")["prob_tumour"]
    )


def rewrite(path: Path, change) -> None:
    """The bundle as if it had been exported with other content of bundle.json."""
    facts = json.loads((path / "bundle.json").read_text())
    change(facts)
    facts["digest"] = bundle_digest(facts)
    (path / "bundle.json").write_text(json.dumps(facts, ensure_ascii=False))


@pytest.mark.parametrize(
    ("method", "setting", "value"), [("mhim", "act", "gelu"), ("abmil", "hidden", 8)], ids=["same shape", "other shape"]
)
def test_models_of_a_searched_run_keep_the_settings_that_their_search_chose(
    write_planted, tmp_path, method, setting, value
):
    table, bags, _ = write_planted(tmp_path, patients=40)
    search = SearchSpec(trials=1, inner_folds=2, space={f"params.{setting}": [value]})
    run = train(table, bags, tmp_path / "run", task=TaskSpec(target="sex"), methods=[method], search=search)
    export_bundle(run.path, out=tmp_path / "b")
    assert [method.params for method in open_bundle(tmp_path / "b").methods] == [{setting: value}] * 2
    predict(run.path, bags=bags, out=tmp_path / "by_run", device="cpu")
    predict(tmp_path / "b", bags, out=tmp_path / "by_bundle", device="cpu")
    ours, theirs = (rows_of(tmp_path / name)["logit_yes"] for name in ("by_bundle", "by_run"))
    np.testing.assert_array_equal(ours, theirs)
    assert np.ptp(theirs) > 0.01


def test_check_says_that_the_models_of_a_bundle_cannot_be_built(copied):
    rewrite(copied, lambda facts: facts["models"][1]["method"]["params"].update(hidden=3))
    assert open_bundle(copied)
    [failure] = check(copied).failures
    assert "weights do not fit method abmil" in failure.reason


def test_a_bundle_of_an_older_form_is_exported_again(copied):
    rewrite(copied, lambda facts: facts.update(schema_version=1))
    with pytest.raises(StoreError, match=r"schema 1; .*Export it again"):
        open_bundle(copied)


def test_a_bundle_of_another_version_says_so(copied):
    rewrite(copied, lambda facts: facts["models"][0]["selection"].update(surprise=1))
    with pytest.raises(StoreError, match=r"does not know a setting in it .*surprise.*written by version"):
        open_bundle(copied)


def test_a_table_without_the_target_is_told(bundle, outside, tmp_path):
    table = pd.read_csv(outside[0], dtype=str).rename(columns={"label": "DIAGNOSIS"})
    write_frame(tmp_path / "table.csv", table)
    summary = predict(bundle, outside[1], table=tmp_path / "table.csv", out=tmp_path / "out", device="cpu")
    assert any("no label of label" in note and "columns.label" in note for note in summary.notes)
    assert not RunDir(tmp_path / "out").config()["labelled"]


def test_columns_without_labels_are_named_one_by_one(write_planted, tmp_path):
    table, bags, _ = write_planted(tmp_path, patients=40)
    task = TaskSpec(target="sex", others=("sex2",))
    run = train(table, bags, tmp_path / "run", task=task, methods=["mean_pool"])
    write_frame(tmp_path / "none.csv", pd.read_csv(table, dtype=str)[["slide", "patient"]])
    summary = predict(run.path, bags=bags, table=tmp_path / "none.csv", out=tmp_path / "out", device="cpu")
    [note] = [note for note in summary.notes if "no label" in note]
    assert "columns.sex, columns.sex2" in note


def test_what_is_wished_must_be_there_and_must_hold_no_code(run, study, tmp_path):
    with pytest.raises(ConfigError, match=r"several methods: abmil\+aem, mean_pool"):
        export_bundle(run.path, out=tmp_path / "b")
    with pytest.raises(ConfigError, match="no finished method 'abmil'"):
        export_bundle(run.path, out=tmp_path / "b", method="abmil")
    own = tmp_path / "mine.py"
    own.write_text(Path("wsi_mil/models/mean_pool.py").read_text())
    coded = train(*study, tmp_path / "run", methods=[str(own)])
    with pytest.raises(ConfigError, match=r"mine\.py, and a bundle holds no code"):
        export_bundle(coded.path, out=tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_the_same_bundle_is_left_alone_and_another_folder_is_never_written_over(run, bundle, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in bundle.rglob("*")}
    again = export_bundle(run.path, out=bundle, method="abmil+aem", patient_hashes=True)
    assert (again.done, len(again.reused)) == ((), 2)
    assert {path: path.stat().st_mtime_ns for path in bundle.rglob("*")} == before
    with pytest.raises(StoreError, match="not this bundle"):
        export_bundle(run.path, out=bundle, method="mean_pool")
    (tmp_path / "mine").mkdir()
    with pytest.raises(StoreError, match="not this bundle"):
        export_bundle(run.path, out=tmp_path / "mine", method="mean_pool")


def test_a_bundle_is_there_as_a_whole_or_not_at_all(run, tmp_path, monkeypatch):
    def full(path, data):
        if path.name == "bundle.json":
            raise OSError(28, "No space left on device")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    monkeypatch.setattr("wsi_mil.bundle.write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        export_bundle(run.path, out=tmp_path / "b", method="mean_pool")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_a_killed_export_left_does_not_stop_the_run(run, study, tmp_path):
    shutil.copytree(run.path, tmp_path / "run")
    left = temporary_path(tmp_path / "run" / "bundle", 2**22 + 1)
    (left / "models").mkdir(parents=True)
    train(*study, tmp_path / "run")
    assert not left.exists()


@pytest.mark.parametrize(
    "name", ["models/r0_f0_s0.safetensors", "training.safetensors", "patients.json", "bundle.json"]
)
def test_a_damaged_file_is_named(copied, outside, tmp_path, name):
    data = bytearray((copied / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copied / name).write_bytes(data)
    with pytest.raises(StoreError, match=name):
        predict(copied, outside[1], out=tmp_path / "out", device="cpu")
    assert check(copied).failures[0].outcome == "damaged"


def test_check_explains_a_bundle(bundle):
    summary = check(bundle)
    text = "\n".join(summary.notes)
    assert summary.exit_code == 0
    assert "a bundle of 2 models of abmil+aem" in text
    assert "Research use only, not for diagnosis" in text
    assert "bags only" in text


def test_bags_of_another_contract_are_refused_with_what_differs(bundle, make_study, tmp_path):
    _, bags = make_study(tmp_path, patients=1, encoder="other", tile_px=256)
    with pytest.raises(StoreError, match=r"encoder other, the model's synthetic, tile_px 256, the model's 224"):
        predict(bundle, bags, out=tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_training_patients_are_flagged_and_scored(bundle, study, outside, tmp_path):
    table, bags = study
    summary = predict(bundle, bags, table=table, out=tmp_path / "known", device="cpu")
    rows = rows_of(tmp_path / "known")
    assert set(rows["in_training"]) == {"patient slide file"}
    assert any("12 of 12 slides, such as s00_0, were trained on" in note for note in summary.notes)
    summary = predict(bundle, outside[1], out=tmp_path / "by_name", device="cpu")
    assert rows_of(tmp_path / "by_name").set_index("slide")["in_training"]["s00_0"] == "slide file"
    assert rows_of(tmp_path / "by_name").set_index("slide")["in_training"]["s00_1"] == ""


def test_a_bundle_without_hashes_says_that_it_cannot_recognise_its_patients(run, bundle, study, tmp_path):
    export_bundle(run.path, out=tmp_path / "b", method="mean_pool")
    silent = "made without --patient-hashes"
    for path, wanted in {tmp_path / "b": True, bundle: False, run.path: False}.items():
        summary = predict(path, bags=study[1], out=tmp_path / f"of_{path.name}_{wanted}", device="cpu")
        assert any(silent in note and "in_training" in note for note in summary.notes) == wanted


def test_a_bundle_holds_no_id_of_anybody(bundle, run):
    text = b"".join(path.read_bytes() for path in bundle.rglob("*") if path.is_file())
    cohort = run.cohort()
    assert not [name for name in {*cohort["patient"], *cohort["slide"]} if name.encode() in text]
    assert str(run.path).encode() not in text


def test_the_model_card_says_who_what_and_how_well(run, bundle, tmp_path):
    assert "no report when the bundle was made" in card_path(bundle).read_text()
    reported = shutil.copytree(run.path, tmp_path / "run")
    report(reported)
    export_bundle(reported, out=tmp_path / "b", method="mean_pool", intended_use="Sorting of slides in a study.")
    card = card_path(tmp_path / "b").read_text()
    figures = json.loads(RunDir(reported).metrics_path.read_text())["methods"]["mean_pool"]["auc"]
    assert f"| auc | {figures['value']:.3f} | {figures['low']:.3f} | {figures['high']:.3f} |" in card
    assert "Research use only, not for diagnosis." in card
    assert "Sorting of slides in a study." in card
    assert "The models together were not tested" in card
    assert "12 patients, 12 slides, 3 sites" in card


def test_the_card_says_that_validation_chose_the_threshold_only_where_it_did(bundle):
    facts = json.loads(json.dumps(open_bundle(bundle).facts))
    chosen = choose_threshold(np.repeat([False, True], 10), np.linspace(0, 1, 20))

    def said(*sources):
        for model, source in zip(facts["models"], sources, strict=True):
            model["selection"]["thresholds"] = {"label": {"value": 0.4, "source": source}} if source else {}
        card = model_card(facts, metrics=None, intended_use="")
        return [line.split(" chosen on")[0] for line in card.splitlines() if "validation patients" in line]

    fixed = "0.5, since there is no validation part"
    assert "0.5, since" in card_path(bundle).read_text()
    assert "validation patients" not in card_path(bundle).read_text()
    assert said(fixed, fixed) == said("", "") == []
    assert said(chosen.source, chosen.source) == ["- The threshold was"]
    assert said(chosen.source, fixed) == ["- 1 of 2 thresholds were"]


def test_a_shifted_cohort_is_told_and_its_figure_rises(bundle, make_study, tmp_path):
    medians = []
    for name, options in {"same": {}, "shifted": {"signal": 40.0}}.items():
        _, bags = make_study(tmp_path / name, patients=6, seed=5, **options)
        summary = predict(bundle, bags, out=tmp_path / f"{name}_out", device="cpu")
        found = pd.read_csv(tmp_path / f"{name}_out" / "domain_shift.csv")
        medians.append(found["features_distance"].median())
        assert any("Domain shift in features" in note for note in summary.notes) == (name == "shifted")
        assert (tmp_path / f"{name}_out" / "domain_shift.png").read_bytes()[:4] == b"\x89PNG"
        told = (tmp_path / f"{name}_out" / "domain_shift.txt").read_text().splitlines()
        assert list(summary.notes[len(summary.notes) - len(told) :]) == told
    assert medians[1] > 3 * medians[0]


def test_labels_of_the_table_stand_beside_the_predictions(bundle, outside, tmp_path):
    table = pd.read_csv(outside[0], dtype=str).rename(columns={"label": "DIAGNOSIS"})
    table.loc[0, "DIAGNOSIS"] = ""
    write_frame(tmp_path / "table.csv", table.iloc[:-1])
    spec = CohortSpec(columns={"label": "DIAGNOSIS"})
    predict(bundle, outside[1], table=tmp_path / "table.csv", cohort=spec, out=tmp_path / "out", device="cpu")
    rows = rows_of(tmp_path / "out").set_index("slide")
    assert list(rows.index) == list(table["slide"])[:-1]
    assert list(rows["target"]) == list(table["DIAGNOSIS"])[:-1]
    assert list(rows["patient"]) == list(table["patient"])[:-1]
    scored = RunDir(tmp_path / "out")
    assert set(scored.folds()["part"]) == {"test"}
    cut = scored.selection("abmil+aem", KEY).cut("label")
    means = [selection.cut("label").value for selection in open_bundle(bundle).selections]
    assert cut.value == pytest.approx(np.mean(means))
    called = np.where(rows["prob_tumour"] >= cut.value, "tumour", "normal")
    assert list(rows["decision"]) == list(called)


def test_all_labels_that_are_none_of_the_classes_are_told_at_once_with_the_cure(bundle, outside, tmp_path):
    table = pd.read_csv(outside[0], dtype=str).rename(columns={"label": "DIAGNOSIS"})
    table.loc[[0, 1, 2, 3], "DIAGNOSIS"] = ["cancer", "cancer", "Tumour", ""]
    write_frame(tmp_path / "table.csv", table)
    spec = CohortSpec(columns={"label": "DIAGNOSIS"})
    with pytest.raises(CohortError) as refused:
        predict(bundle, outside[1], table=tmp_path / "table.csv", cohort=spec, out=tmp_path / "out", device="cpu")
    told = str(refused.value)
    assert "column 'DIAGNOSIS': 3 of 11 labels are none of the classes normal, tumour" in told
    assert "'cancer' (2), 'Tumour' (1; only the case differs from 'tumour')" in told
    assert "Change these cells" in told
    assert "or empty them" in told
    assert not (tmp_path / "out").exists()


def test_patients_are_scored_as_patients_where_a_table_tells_whose_slides_they_are(study, outside, tmp_path):
    run = train(*study, tmp_path / "run", task=TaskSpec(target="label", level="patient"), methods=["mean_pool"])
    export_bundle(run.path, out=tmp_path / "b")
    summary = predict(tmp_path / "b", outside[1], table=outside[0], out=tmp_path / "out", device="cpu")
    rows = rows_of(tmp_path / "out")
    assert list(rows["patient"]) == [f"p{i:02}" for i in range(6)]
    assert set(rows["slide"]) == {""}
    assert len(summary.done) == 6
    model = open_bundle(tmp_path / "b")
    assert len(pd.read_csv(tmp_path / "out" / "domain_shift.csv")) == 12
    assert model.facts["task"]["level"] == "patient"
    summary = predict(tmp_path / "b", outside[1], out=tmp_path / "alone", device="cpu")
    assert list(rows_of(tmp_path / "alone")["slide"]) == sorted(f"s{i:02}_{k}" for i in range(6) for k in (0, 1))
    assert any("each slide is scored as a patient with one slide" in note for note in summary.notes)
    conflicting = pd.read_csv(outside[0], dtype=str)
    conflicting.loc[0, "label"] = "tumour"
    write_frame(tmp_path / "table.csv", conflicting)
    with pytest.raises(CohortError, match="1 of 6 patients have slides with different labels, such as p00"):
        predict(tmp_path / "b", outside[1], table=tmp_path / "table.csv", out=tmp_path / "o2", device="cpu")


def test_other_labels_are_another_run(bundle, outside, tmp_path):
    predict(bundle, outside[1], table=outside[0], out=tmp_path / "out", device="cpu")
    write_frame(tmp_path / "t.csv", pd.read_csv(outside[0], dtype=str).iloc[2:])
    with pytest.raises(RunError, match="labels_sha256"):
        predict(bundle, outside[1], table=tmp_path / "t.csv", out=tmp_path / "out", device="cpu")


def test_what_is_neither_slides_nor_bags_is_said(bundle, outside, make_pyramid, tissue_rgb, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither a slide nor a bag"):
        predict(bundle, tmp_path / "empty", out=tmp_path / "out")
    with pytest.raises(ConfigError, match="one of them is enough"):
        predict(bundle, outside[1], bags=outside[1], out=tmp_path / "out")
    make_pyramid(tmp_path / "slides" / "a.tif", tissue_rgb(300, 300))
    with pytest.raises(ConfigError, match="holds slides, and --slides"):
        predict(bundle, tmp_path / "slides", slides=tmp_path, out=tmp_path / "out")
    with pytest.raises(ConfigError, match="name a folder"):
        predict(bundle, out=tmp_path / "out")


def test_the_commands_are_there(run, outside, tmp_path, capsys):
    out = str(tmp_path / "b")
    assert main(["export-bundle", str(run.path), "--out", out, "--method", "mean_pool", "--patient-hashes"]) == 0
    assert main(["check", out]) == 0
    assert main(["predict", out, str(outside[1]), "--out", str(tmp_path / "out"), "--device", "cpu"]) == 0
    assert "unlike the training slides" in capsys.readouterr().out


def test_a_bundle_that_does_not_know_the_tiling_takes_no_slides(bundle, make_pyramid, tissue_rgb, tmp_path):
    make_pyramid(tmp_path / "slides" / "a.tif", tissue_rgb(300, 300))
    with pytest.raises(ConfigError, match="--grids"):
        predict(bundle, tmp_path / "slides", out=tmp_path / "out")


def test_labels_make_the_report_of_an_external_validation(bundle, make_study, tmp_path):
    table, bags = make_study(tmp_path / "outside", patients=42, seed=4)
    write_frame(table, pd.read_csv(table, dtype=str).iloc[12:])  # without those that bear the names of training slides
    predict(bundle, bags, table=table, out=tmp_path / "out", device="cpu")
    scored = RunDir(tmp_path / "out")
    assert report(scored.path).exit_code == 0
    found = json.loads(scored.metrics_path.read_text())
    rows = rows_of(scored.path)
    tumour, normal = (rows.query("target == @name")["prob_tumour"].to_numpy() for name in ("tumour", "normal"))
    pairs = np.subtract.outer(tumour, normal)
    own = found["methods"]["abmil+aem"]
    assert own["auc"]["value"] == pytest.approx((pairs > 0).mean() + (pairs == 0).mean() / 2)
    assert own["accuracy"]["value"] == pytest.approx((rows["decision"] == rows["target"]).mean())
    assert found["audit"]["clean"]
    assert found["patients"] == 30
    assert found["external"]["patients_trained_on"] == {}
    page = scored.report_path.read_text()
    assert "None of these patients is known as one that the models were trained on" in page
    assert "data:image/png;base64," in page


def test_training_patients_are_no_external_validation(bundle, study, make_study, tmp_path):
    predict(bundle, study[1], table=study[0], out=tmp_path / "known", device="cpu")
    with pytest.raises(RunError, match=r"nobody is left to test: 12 patients were trained on, such as p00 \(known by"):
        report(tmp_path / "known")
    table, bags = make_study(tmp_path / "some", patients=42, seed=4)
    predict(bundle, bags, table=table, out=tmp_path / "out", device="cpu")
    summary = report(tmp_path / "out")
    assert any("12 patients were trained on" in note for note in summary.notes)
    assert json.loads(RunDir(tmp_path / "out").metrics_path.read_text())["patients"] == 30


def test_predictions_without_labels_are_sent_back_for_a_table(bundle, outside, tmp_path):
    predict(bundle, outside[1], out=tmp_path / "out", device="cpu")
    with pytest.raises(RunError, match=r"without labels.*--table TABLE"):
        report(tmp_path / "out")


NUMBERS = {
    "regression": {"kind": "regression", "target": "age"},
    "survival": {"kind": "survival", "target": "months", "event": "died"},
    "ordinal": {"kind": "ordinal", "target": "grade"},
    "several": {"target": "label", "others": (TargetSpec(target="age", kind="regression"), "site2")},
}


FIGURES = {"regression": "r2", "survival": "c_index", "ordinal": "auc", "binary": "auc"}


@pytest.mark.parametrize("kind", NUMBERS)
def test_every_kind_of_target_travels(make_study, tmp_path, kind):
    table, bags = make_study(tmp_path, patients=18)
    rows = pd.read_csv(table, dtype=str)
    number = rows.index.to_series()
    rows = rows.assign(age=40 + 3 * number, months=1.5 + number, died=number % 3 // 2, grade=1 + number % 3)
    rows = rows.assign(site2=np.where(number % 4 < 2, "a", "b"))
    write_frame(table, rows)
    run = train(table, bags, tmp_path / "run", task=TaskSpec(level="slide", **NUMBERS[kind]), methods=["abmil"])
    report(run.path)
    export_bundle(run.path, out=tmp_path / "b")
    for name, source in {"by_run": run.path, "by_bundle": tmp_path / "b"}.items():
        predict(source, bags, table=table, out=tmp_path / name, device="cpu")
    ours = rows_of(tmp_path / "by_bundle")
    pd.testing.assert_frame_equal(
        ours.drop(columns="in_training"), rows_of(tmp_path / "by_run").drop(columns="in_training")
    )
    target = NUMBERS[kind]["target"]
    told = ours[ours["target_name"] == target].set_index("slide")["target"]
    assert [str(float(a)) if kind != "several" else a for a in told] == [
        str(float(b)) if kind != "several" else b for b in rows.set_index("slide")[target].astype(str)
    ]
    card = card_path(tmp_path / "b").read_text()
    assert f"Predicts {target}" in card
    for name, found in json.loads(run.metrics_path.read_text())["targets"].items():
        figure, known = FIGURES[found["kind"]], found["methods"]["abmil"]
        about = f"{name} {figure}" if kind == "several" else figure
        value, low, high = (known[figure][part] for part in ("value", "low", "high"))
        assert f"| {about} | {value:.3f} | {low:.3f} | {high:.3f} |" in card
    assert ("| auc_at_times " in card) == (kind == "survival")
    assert "threshold was chosen" not in card
    assert "validation patients" not in card
