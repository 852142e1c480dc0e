"""The whole report: one page, shared parts once, a chapter and a folder of tables for each target."""

import json
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from wsi_mil.errors import RunError
from wsi_mil.report.kinds.macro_mean import macro_mean
from wsi_mil.report.kinds.tables import folders_of
from wsi_mil.runs import write_frame
from wsi_mil.stages.report import report

kinds = sys.modules["fabricated_kinds"]

ALL = (kinds.GRADE, kinds.TIME, kinds.NUMBER, kinds.YES)
ONE = (("acmil", 1.5),)


class _Page(HTMLParser):
    """Elements with their attributes, and the text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))


def _files(run) -> dict[str, bytes]:
    tables = (run.path / "tables").rglob("*.csv")
    return {str(path.relative_to(run.path)): path.read_bytes() for path in (run.report_path, run.metrics_path, *tables)}


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Four kinds of target in one model, with missing labels, reported once."""
    wish = kinds.KindsWish(
        targets=ALL, patients=40, missing=6, signal=(("mean_pool", 0.4), ("acmil", 2.0)), scores=True
    )
    run = kinds.fabricate_kinds(tmp_path_factory.mktemp("several"), wish)
    return run, report(run.path), _Page(run.report_path.read_text())


def test_every_target_has_a_chapter_and_the_cohort_is_told_once(several):
    _, summary, page = several
    assert summary.done == ("mean_pool", "acmil")
    headings = ["Target: grade", "Target: months", "Target: ki67", "Target: tp53", "All targets"]
    ids = [attributes["id"] for _, attributes in page.elements if attributes.get("id")]
    assert len(ids) == len(set(ids))
    assert {"cohort", "audit", "appendix", "how", "pointing"} <= set(ids)
    for heading in headings:
        assert heading in page.text
    assert page.text.count("slides in the table →") == 1
    assert page.text.count("Everything that is not trained is chosen by somebody") == 1
    assert "6 tested patients have no label of “ki67”" in page.text


def test_the_page_needs_nothing_from_outside(several):
    _, _, page = several
    ids = {attributes["id"] for _, attributes in page.elements if attributes.get("id")}
    for tag, attributes in page.elements:
        assert tag not in ("script", "link", "iframe", "object")
        assert not [name for name in attributes if name.startswith("on")]
        assert (attributes.get("src") or "data:").startswith("data:")
        target = attributes.get("href") or "#summary"
        assert target.startswith("http://localhost:") or target[1:] in ids, target
    assert all(attributes.get("alt") for tag, attributes in page.elements if tag == "img")


def test_metrics_hold_one_entry_a_target_and_no_nan(several):
    run, _, _ = several
    metrics = json.loads(run.metrics_path.read_text(), parse_constant=pytest.fail)
    assert {name: one["kind"] for name, one in metrics["targets"].items()} == {one["name"]: one["kind"] for one in ALL}
    assert metrics["patients_without_label"] == {"grade": 0, "months": 6, "ki67": 6, "tp53": 6}
    assert metrics["mean_auc_over_targets"] is None
    assert metrics["audit"]["clean"] is True
    assert metrics["audit"]["test_patients_without_prediction"] == 0


def test_tables_lie_in_a_folder_a_target_and_those_of_the_run_above(several):
    run, _, _ = several
    tables = run.path / "tables"
    for name, kind in (("grade", "ordinal.csv"), ("months", "kaplan_meier.csv"), ("ki67", "methods.csv")):
        assert (tables / name / kind).is_file()
    assert (tables / "cohort.csv").is_file()
    assert not (tables / "grade" / "cohort.csv").exists()
    assert len(pd.read_csv(tables / "months" / "patients.csv")) == 2 * 34
    assert len(pd.read_csv(tables / "grade" / "patients.csv")) == 2 * 40


def test_a_target_among_others_has_the_figures_that_it_has_alone(tmp_path):
    run = kinds.fabricate_kinds(tmp_path, kinds.KindsWish(targets=(kinds.NUMBER, kinds.YES), missing=4, signal=ONE))
    report(run.path)
    together = json.loads(run.metrics_path.read_text())["targets"]
    frame = run.predictions()
    config = run.config()
    config["task"] = config["task"] | {
        "targets": [kinds.YES],
        "target": "tp53",
        "kind": "binary",
        "classes": ["no", "yes"],
    }
    run.write_config(config)
    cohort = run.cohort()
    write_frame(run.cohort_path, cohort.assign(target=cohort["value:tp53"]))
    own = frame[(frame["target_name"] == "tp53") & (frame["target"] != "")].drop(columns="prediction")
    write_frame(run.predictions_path, own)
    for label, _ in ONE:
        for key in run.keys(label):
            held = run.validation(label, key)
            own = held[(held["target_name"] == "tp53") & (held["target"] != "")]
            write_frame(run.validation_path(label, key), own.drop(columns="prediction"))
    report(run.path)
    alone = json.loads(run.metrics_path.read_text())
    for name in ("auc", "auc_pooled", "average_precision", "brier", "balanced_accuracy", "confusion"):
        assert together["tp53"]["methods"]["acmil"][name] == alone["methods"]["acmil"][name], name


def test_the_mean_over_yes_or_no_targets_counts_each_target_once(make_kinds, found_of):
    run = make_kinds(targets=(kinds.YES, kinds.ALSO), patients=50, missing=10, signal=ONE)
    found = found_of(run)
    parts = [part for _, part in found.targets]
    aucs = [part.found.methods[0].primary.value for part in parts]
    mean = macro_mean(parts, "acmil")
    assert mean.value == pytest.approx(np.mean(aucs))
    assert mean.interval.low < mean.value < mean.interval.high


def test_two_targets_that_are_one_leave_the_interval_as_wide(make_kinds, found_of):
    found = found_of(make_kinds(targets=(kinds.YES, kinds.ALSO), patients=50, signal=ONE))
    first = found.targets[0][1]
    twice = macro_mean([first, first], "acmil")
    assert twice.value == first.found.methods[0].primary.value
    assert twice.interval.low == pytest.approx(first.found.methods[0].primary.interval.low)


def test_a_mean_over_unlike_targets_is_not_taken(make_kinds, found_of):
    found = found_of(make_kinds(targets=(kinds.YES, kinds.NUMBER), signal=ONE))
    assert macro_mean([part for _, part in found.targets], "acmil") is None


def test_a_target_without_a_label_is_named_and_the_others_stand(tmp_path):
    wish = kinds.KindsWish(targets=(kinds.NUMBER, kinds.YES), patients=20, signal=ONE, truth={"tp53": [None] * 20})
    run = kinds.fabricate_kinds(tmp_path, wish)
    report(run.path)
    text = _Page(run.report_path.read_text()).text
    assert "“tp53”: no tested patient has a label of its own, so there is no figure." in text
    assert list(json.loads(run.metrics_path.read_text())["targets"]) == ["ki67"]


def test_a_run_without_any_label_is_refused(tmp_path):
    wish = kinds.KindsWish(patients=20, signal=ONE, truth={"ki67": [None] * 20})
    run = kinds.fabricate_kinds(tmp_path, wish)
    with pytest.raises(RunError, match="no tested patient has a label"):
        report(run.path)


def test_slides_that_all_contradict_each_other_leave_no_patient_with_a_value(tmp_path):
    wish = kinds.KindsWish(patients=10, n_folds=2, level="slide", slides_per_patient=2, signal=ONE)
    run = kinds.fabricate_kinds(tmp_path, wish)
    frame = run.predictions()
    write_frame(run.predictions_path, frame.assign(target=[str(place) for place in range(len(frame))]))
    with pytest.raises(RunError, match="no tested patient has a label of its own of ki67"):
        report(run.path)


@pytest.mark.parametrize("target", [kinds.NUMBER, kinds.TIME], ids=["number", "time"])
def test_pseudonyms_stand_everywhere_and_are_stable(tmp_path, target):
    wish = kinds.KindsWish(
        targets=(target,), patients=12, n_folds=3, signal=ONE, scores=True, patient_name="TCGA-XY-{:04d}"
    )
    run = kinds.fabricate_kinds(tmp_path, wish)
    report(run.path)
    assert b"TCGA-XY-0003" in run.report_path.read_bytes()
    report(run.path, pseudonymise=True)
    first = _files(run)
    for name, content in first.items():
        assert b"TCGA-XY" not in content, name
        assert str(tmp_path).encode() not in content, name
    assert re.search(rb"P-[0-9a-f]{6}", first[run.report_path.name])
    report(run.path, pseudonymise=True)
    assert _files(run) == first


def test_a_name_from_a_file_is_text_never_markup(tmp_path):
    evil = {"name": "<b onload=x>ki67", "kind": "regression"}
    wish = kinds.KindsWish(targets=(evil, kinds.TIME), patients=20, signal=ONE, patient_name="<i onload=y>{}")
    run = kinds.fabricate_kinds(tmp_path, wish)
    report(run.path)
    page = _Page(run.report_path.read_text())
    assert "<b onload=x>ki67" in page.text
    assert "<i onload=y>" in page.text
    assert not [attributes for _, attributes in page.elements if "onload" in attributes]


def test_slides_seeds_and_repeats_make_a_page(tmp_path):
    wish = kinds.KindsWish(
        targets=(kinds.NUMBER, kinds.DISCRETE),
        patients=30,
        n_folds=3,
        level="slide",
        slides_per_patient=2,
        seeds=(0, 1),
        repeats=2,
        signal=ONE,
    )
    run = kinds.fabricate_kinds(tmp_path, wish)
    report(run.path)
    text = _Page(run.report_path.read_text()).text
    assert "Over 4 trainings (repeats and seeds) the within-fold C-index runs" in text
    assert "a patient's answer is the mean over the slides" in text


def test_a_missing_prediction_is_counted_and_said(tmp_path):
    run = kinds.fabricate_kinds(tmp_path, kinds.KindsWish(targets=(kinds.NUMBER, kinds.TIME), patients=20, signal=ONE))
    write_frame(run.predictions_path, run.predictions().drop(index=[3]))
    summary = report(run.path)
    assert any(failure.outcome == "not finished" for failure in summary.failures)
    assert "1 test predictions are missing" in _Page(run.report_path.read_text()).text


def test_a_cell_that_is_no_number_is_refused_with_its_file(tmp_path):
    run = kinds.fabricate_kinds(tmp_path, kinds.KindsWish(patients=20, signal=ONE))
    frame = run.predictions().astype({"prediction": str})
    frame.loc[2, "prediction"] = "high"
    write_frame(run.predictions_path, frame)
    with pytest.raises(RunError, match=r"predictions\.csv is damaged.*high"):
        report(run.path)


@pytest.mark.parametrize(("column", "cell"), [("target", "-3"), ("target", "inf"), ("event", "2"), ("event", "")])
def test_a_label_that_can_be_none_is_refused(tmp_path, column, cell):
    run = kinds.fabricate_kinds(tmp_path, kinds.KindsWish(targets=(kinds.TIME,), patients=20, signal=ONE))
    frame = run.predictions().astype(object)
    frame.loc[5, column] = cell
    write_frame(run.predictions_path, frame)
    with pytest.raises(RunError, match="label of “months” is not a time of 0 or more and an event of 0 or 1"):
        report(run.path)


def test_a_row_that_stands_there_twice_is_refused(tmp_path):
    run = kinds.fabricate_kinds(tmp_path, kinds.KindsWish(patients=20, signal=ONE))
    frame = run.predictions()
    write_frame(run.predictions_path, pd.concat([frame, frame.iloc[[4]]]))
    with pytest.raises(RunError, match="stand there twice"):
        report(run.path)


def test_folders_are_plain_names_and_never_the_same():
    assert folders_of(["grade", "ki-67"]) == ["grade", "ki-67"]
    assert folders_of(["a/b", "a b", "../x"]) == ["1_a_b", "2_a_b", "3_x"]
    assert folders_of(["Ä", "b"]) == ["1", "2_b"]
    assert folders_of(["T", "t"]) == ["1_T", "2_t"]
