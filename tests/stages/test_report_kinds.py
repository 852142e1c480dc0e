"""From table to report for every kind of target: the figure in metrics.json recovers the planted strength."""

import json

import numpy as np
import pandas as pd
import pytest

from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.runs import RunDir
from wsi_mil.splits import FoldSpec
from wsi_mil.stages.crossval import crossval
from wsi_mil.stages.report import report
from wsi_mil.statistics.ranking import auc
from wsi_mil.targets import TargetSpec
from wsi_mil.tasks import TaskSpec

pytestmark = pytest.mark.long

SPEC = TrainSpec(epochs=25, lr=2e-2, selection="none", device="cpu", bags_per_step=8)
OTHERS = (
    "sex2",
    TargetSpec(target="grade", kind="ordinal"),
    TargetSpec(target="ki67_some", kind="regression"),
    TargetSpec(target="months", kind="survival", event="dead", loss="discrete"),
)


@pytest.fixture(scope="module")
def reported(write_planted, tmp_path_factory):
    """Five targets in one model, trained and reported."""
    folder = tmp_path_factory.mktemp("several")
    table, bags, truth = write_planted(folder)
    task = TaskSpec(target="sex", others=OTHERS)
    trained = crossval(
        table, bags=bags, out=folder / "run", task=task, methods=["mean_pool"], folds=FoldSpec(n_folds=3), train=SPEC
    )
    assert trained.exit_code == 0, trained.failures
    return RunDir(folder / "run"), report(folder / "run"), truth


def _targets(run):
    metrics = json.loads(run.metrics_path.read_text(), parse_constant=pytest.fail)
    return metrics, {name: one["methods"]["mean_pool"] for name, one in metrics["targets"].items()}


def test_every_kind_is_as_strong_as_it_was_planted(reported):
    run, _, truth = reported
    metrics, found = _targets(run)
    known = auc((truth["sex"] == "yes").to_numpy(), truth["z"].to_numpy())
    assert found["sex"]["auc"]["value"] == pytest.approx(known, abs=0.07)
    assert found["ki67_some"]["r2"]["value"] == pytest.approx(truth["z"].corr(truth["ki67_some"]) ** 2, abs=0.15)
    assert found["months"]["c_index"]["value"] > 0.75
    assert found["months"]["integrated_brier"]["value"] < found["months"]["integrated_brier"]["null"]
    assert found["months"]["risk_groups"]["folds_split_by_validation"] == 0
    assert found["grade"]["kappa_quadratic"]["value"] > 0.5
    assert metrics["audit"]["clean"] is True


def test_missing_labels_are_counted_and_left_out(reported):
    run, _, truth = reported
    metrics, _ = _targets(run)
    labelled = int(truth["ki67_some"].notna().sum())
    assert metrics["targets"]["ki67_some"]["patients"] == labelled
    assert metrics["patients_without_label"]["ki67_some"] == len(truth) - labelled
    assert len(pd.read_csv(run.tables_dir / "ki67_some" / "patients.csv")) == labelled


def test_the_page_has_a_chapter_a_target(reported):
    run, summary, _ = reported
    page = run.report_path.read_text()
    assert summary.done == ("mean_pool",)
    for name in ("sex", "sex2", "grade", "ki67_some", "months"):
        assert f"Target: {name}" in page
    assert page.count("Who chose what") == 1


@pytest.mark.parametrize(
    "task",
    [
        TaskSpec(target="ki67", kind="regression"),
        TaskSpec(target="months", kind="survival", event="dead", loss="cox"),
    ],
    ids=["number", "time"],
)
def test_a_target_alone_makes_a_page_by_what_validation_chose(write_planted, tmp_path, task):
    table, bags, _ = write_planted(tmp_path)
    spec = TrainSpec(epochs=4, lr=2e-2, selection="validation", device="cpu", bags_per_step=8)
    crossval(
        table, bags=bags, out=tmp_path / "run", task=task, methods=["mean_pool"], folds=FoldSpec(n_folds=3), train=spec
    )
    summary = report(tmp_path / "run", pseudonymise=True)
    run = RunDir(tmp_path / "run")
    metrics, found = _targets(run)
    primary = {"ki67": "r2", "months": "c_index"}[task.target]
    assert np.isfinite(found[task.target][primary]["value"])
    assert metrics["audit"]["test_patients_without_prediction"] == 0
    assert not [failure for failure in summary.failures if failure.outcome == "not finished"]
    if task.target == "months":
        assert found["months"]["risk_groups"]["folds_split_by_validation"] == 3
        assert "Split at the median risk of the validation patients, mean_pool calls" in run.report_path.read_text()
