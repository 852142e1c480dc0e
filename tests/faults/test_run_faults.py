"""Run folders with lost, damaged or edited files: a sentence with a cure, and never another number."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import pandas as pd
import pytest

from apps.cli import main
from apps.viewer.library import Signer
from wsi_mil.errors import ConfigError, RunError, UserError
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.report.audit import audit
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.study import read_study
from wsi_mil.results.score_files import read_scores
from wsi_mil.runs import FoldKey, RunDir, write_frame
from wsi_mil.splits import FoldSpec, make_folds
from wsi_mil.stages.crossval import crossval
from wsi_mil.stages.heatmap import heatmap
from wsi_mil.stages.predict import predict
from wsi_mil.stages.report import report
from wsi_mil.tasks import TaskSpec

KEY = FoldKey(0, 0, 0)
MODEL = f"models/abmil/{KEY}"


def train(study: tuple[Path, Path], out: Path, **task: str):
    return crossval(
        study[0],
        bags=study[1],
        out=out,
        task=TaskSpec(**{"target": "label"} | task),
        methods=["abmil"],
        folds=FoldSpec(n_folds=2),
        train=TrainSpec(epochs=1, selection="none", device="cpu"),
    )


@pytest.fixture(scope="module")
def study(make_study, tmp_path_factory) -> tuple[Path, Path]:
    return make_study(tmp_path_factory.mktemp("study"), patients=8)


@pytest.fixture(scope="module")
def whole(study, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    train(study, out)
    return out


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["test.csv", "validation.csv", "checkpoint.ckpt", "selection.json"])
def test_a_lost_file_of_a_model_is_made_again_with_the_same_bytes(study, whole: Path, run: Path, name: str) -> None:
    (run / MODEL / name).unlink()
    summary = train(study, run)
    assert (len(summary.done), len(summary.reused), summary.failures) == (1, 1, ())
    assert contents(run) == contents(whole)


def test_lost_tile_scores_are_made_again(study, whole: Path, run: Path) -> None:
    next((run / "instance_scores" / "abmil" / str(KEY)).glob("*.h5")).unlink()
    assert len(train(study, run).done) == 1
    assert contents(run) == contents(whole)


def test_a_damaged_resume_state_costs_its_model_a_new_start_only(study, whole: Path, run: Path) -> None:
    (run / MODEL / "selection.json").unlink()
    (run / MODEL / "resume.ckpt").write_bytes(b"no state")
    assert train(study, run).exit_code == 0
    assert contents(run) == contents(whole)


@pytest.mark.parametrize(
    "content", [b"", b"a: [1", b"\xff\xfe\x00", b"kind: crossval\n", b"kind: crossval\nmethods: 3\n"]
)
def test_a_config_that_is_none_is_a_sentence_for_every_command(study, run: Path, content: bytes) -> None:
    (run / "config.yaml").write_bytes(content)
    for command in (report, heatmap, lambda path: train(study, path)):
        with pytest.raises(RunError, match=r"config\.yaml.*(another --out|command)"):
            command(run)


@pytest.mark.parametrize("name", ["predictions.csv", "folds.csv", "cohort.csv", f"{MODEL}/validation.csv"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00,", b"a,b\n1,2\n", None])
def test_a_table_that_is_none_is_a_sentence(run: Path, name: str, content: bytes | None) -> None:
    (run / name).unlink() if content is None else (run / name).write_bytes(content)
    with pytest.raises(RunError, match=Path(name).name):
        report(run)


@pytest.mark.parametrize("name", ["environment.json", f"{MODEL}/selection.json"])
@pytest.mark.parametrize("content", ["{", "[]", '{"surprise": 1}'])
def test_json_that_is_none_is_a_sentence(run: Path, name: str, content: str) -> None:
    (run / name).write_text(content)
    if "surprise" in content and "environment" in name:
        return
    with pytest.raises(RunError, match="damaged"):
        report(run)


def edited(change: Callable[[pd.DataFrame], pd.DataFrame], run: Path) -> None:
    path = run / "predictions.csv"
    write_frame(path, change(pd.read_csv(path, dtype=str)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: pd.concat([rows, rows[:1]]), "twice"),
        (lambda rows: rows.assign(prob_tumour="0.9"), "no distribution"),
        (lambda rows: rows.assign(prob_tumour="many"), "damaged"),
    ],
)
def test_edited_predictions_give_no_figure(run: Path, change, said: str) -> None:
    edited(change, run)
    with pytest.raises(RunError, match=said):
        report(run)


def test_missing_predictions_are_a_listed_failure(run: Path) -> None:
    edited(lambda rows: rows[rows["fold"] == "0"], run)
    summary = report(run)
    assert summary.exit_code == 3
    assert "4 test predictions are missing" in summary.failures[0].reason


def test_a_study_whose_patients_all_have_mixed_labels_is_reported_by_slide(study, tmp_path: Path) -> None:
    rows = pd.read_csv(study[0], dtype=str)
    pairs = (rows.index // 2).astype(str)
    write_frame(tmp_path / "mixed.csv", rows.assign(patient=pairs))
    train((tmp_path / "mixed.csv", study[1]), tmp_path / "run", level="slide")
    assert report(tmp_path / "run").exit_code == 0
    found = json.loads((tmp_path / "run" / "metrics.json").read_text())["methods"]["abmil"]
    assert found["auc"]["value"] is None
    assert found["auc_slides"]["value"] is not None


@pytest.mark.parametrize("attribute", ["{", '[{"x": 1}]', "[]"])
def test_damaged_tile_scores_are_a_sentence(run: Path, attribute: str) -> None:
    path = next((run / "instance_scores").rglob("*.h5"))
    with h5py.File(path, "a") as h5:
        h5.attrs["columns"] = attribute
    with pytest.raises(RunError, match="damaged"):
        read_scores(path)


def test_a_threshold_that_saw_test_patients_is_a_leak(run: Path) -> None:
    path = RunDir(run).validation_path("abmil", KEY)
    write_frame(path, pd.read_csv(RunDir(run).test_path("abmil", KEY), dtype=str))
    found = audit(read_study(run), {})
    assert (found.clean, found.foreign_rows) == (False, 4)


def test_short_ids_and_the_names_of_files_are_hidden_too() -> None:
    names = Names({"Q01"}, {"2021__Smith_J"}, salt="s")
    shown = names.text("Q01 and Q012: no slide Smith_J")
    assert "Q012" in shown
    assert "Q01 " not in shown
    assert "Smith" not in shown
    assert "Smith" not in names.text("Smith_J.svs: no pixel size")
    assert Names({"Q1"}, {"2021__Smith_J"}).text("Q1 Smith_J") == "Q1 Smith_J"


def test_a_token_of_any_length_is_refused_and_raises_nothing() -> None:
    assert not Signer().is_valid("a", "f" * 9000 + ".0")
    assert not Signer().is_valid("a", "-1.0")


@pytest.mark.parametrize("command", ["train", "crossval", "predict", "report", "heatmap", "view", "list"])
def test_every_command_of_the_results_has_a_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"wsi-mil {command}" in capsys.readouterr().out


@pytest.mark.parametrize("port", ["-1", "65536", "70000"])
def test_a_port_that_cannot_be_is_wrong_use(run: Path, port: str) -> None:
    assert main(["view", str(run), "--slides", str(run), "--port", port]) == 2


def test_wishes_that_cannot_be_are_refused(study, run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seed is -1"):
        make_folds({str(n): str(n % 2) for n in range(8)}, n_folds=2, seed=-1)
    with pytest.raises(ConfigError, match="width_px is 0"):
        heatmap(run, slides=tmp_path, width_px=0)
    with pytest.raises(UserError, match="meaning of its own"):
        train(study, tmp_path / "other", target="site")


def test_predicting_tells_of_models_that_are_not_there_and_of_slides_that_were_trained_on(
    study, run: Path, tmp_path: Path
) -> None:
    shutil.rmtree(run / MODEL)
    notes = " ".join(predict(run, bags=study[1], out=tmp_path / "predicted").notes)
    assert "only 1 of 2 models" in notes
    assert "8 of 8 slides" in notes
