"""`wsi-mil report` on fabricated runs: what stands in the page, the tables and metrics.json."""

import importlib.util
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pandas as pd
import pytest
import tifffile

from tiling import atomic
from wsi_mil.errors import RunError
from wsi_mil.report.pseudonyms import WITHHELD, Names
from wsi_mil.stages.report import report

_SPEC = importlib.util.spec_from_file_location("fabricated_run", Path(__file__).parents[1] / "report" / "fabricated.py")
fabricated = importlib.util.module_from_spec(_SPEC)
sys.modules["fabricated_run"] = fabricated
_SPEC.loader.exec_module(fabricated)

ONE = (("acmil", 1.2),)


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


def _fabricate(folder: Path, **wishes):
    return fabricated.fabricate(folder, fabricated.Wish(**wishes))


def _files(run) -> dict[str, bytes]:
    paths = [run.report_path, run.metrics_path, *sorted((run.path / "tables").iterdir())]
    return {path.name: path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 40 patients, 3 methods, 5 folds with slides, reported once."""
    run = _fabricate(tmp_path_factory.mktemp("finished"), slides=True)
    return run, report(run.path), _Page(run.report_path.read_text())


def test_the_report_is_done_and_says_where_it_is(finished):
    run, summary, _ = finished
    assert summary.exit_code == 0
    assert summary.out == run.report_path
    assert summary.done == ("mean_pool", "abmil+aem", "acmil")


def test_the_page_says_first_what_was_asked_and_what_came_out(finished):
    run, _, page = finished
    metrics = json.loads(run.metrics_path.read_text())
    best = max(metrics["methods"], key=lambda label: metrics["methods"][label]["auc"]["value"])
    assert page.text.count("Research use only, not for diagnosis") == 2
    for words in (
        "Can the tissue alone tell “tumour” from “normal”",
        "40 patients (20 normal, 20 tumour) with 40 slides from 5 sites",
        f"{best} reached the highest AUC: {metrics['methods'][best]['auc']['value']:.2f}",
        "What it does not show",
        "an ImageNet encoder",
        "Epoch chosen by: validation loss",
        "0.5, since validation holds 4 patients of its smaller class, 10 are needed",
        "Clean. No patient stands in two parts",
        "rows of the tableslide files without a row 434",
        "43 slides in the table → 3 left out → 40 slides took part of 40 patients",
    ):
        assert words in page.text


def test_the_page_needs_nothing_from_outside(finished):
    _, _, page = finished
    for tag, attributes in page.elements:
        assert tag not in ("script", "link", "iframe", "object")
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("data:", "#", "http://localhost:8501/?"))
    images = [attributes for tag, attributes in page.elements if tag == "img"]
    assert all(attributes.get("alt") for attributes in images)
    assert sum("jpeg" in attributes["src"][:20] for attributes in images) == 3 * 4 * (2 + 8)  # with eight tiles


def test_metrics_json_holds_every_figure_and_no_nan(finished):
    run, _, _ = finished
    metrics = json.loads(run.metrics_path.read_text(), parse_constant=pytest.fail)
    for method in metrics["methods"].values():
        assert method["auc"]["low"] <= method["auc"]["value"] <= method["auc"]["high"]
        assert len(method["folds"]) == 5
        assert sum(map(sum, method["confusion"]["rows_are_truth"])) == 40
        assert {one["score"] for one in method["localisation"]} == {"attention", "probability"}
    assert len(metrics["comparisons"]) == 3
    assert metrics["audit"]["clean"] is True


def test_tables_agree_with_metrics(finished):
    run, _, _ = finished
    metrics = json.loads(run.metrics_path.read_text())
    table = pd.read_csv(run.path / "tables" / "methods.csv").set_index("method")
    for label, method in metrics["methods"].items():
        assert table.loc[label, "auc"] == method["auc"]["value"]
    assert len(pd.read_csv(run.path / "tables" / "patients.csv")) == 3 * 40
    assert len(pd.read_csv(run.path / "tables" / "localisation.csv")) == 3 * 2 * 20


def test_the_same_run_gives_the_same_bytes(tmp_path):
    run = _fabricate(tmp_path, patients=12, n_folds=3, slides=True, signal=ONE)
    report(run.path)
    first = _files(run)
    report(run.path)
    assert _files(run) == first


def test_a_name_from_a_file_is_text_never_markup(tmp_path):
    evil = "<script>alert({})<b onload=x>"
    run = _fabricate(
        tmp_path, patients=12, n_folds=3, signal=ONE, patient_name=evil, excluded=("<img src=x onerror=alert(1)>",)
    )
    report(run.path)
    page = _Page(run.report_path.read_text())
    assert "<script>alert(" in page.text
    assert "<img src=x onerror=alert(1)>" in page.text
    assert not [tag for tag, attributes in page.elements if tag in ("script", "b") and attributes]
    assert not [tag for tag, _ in page.elements if tag == "script"]
    assert not [attributes for _, attributes in page.elements if "onerror" in attributes or "onload" in attributes]


def test_pseudonyms_stand_everywhere_and_are_stable(tmp_path):
    copied = ("TCGA-XY-0007_S0 is a copy",)
    run = _fabricate(tmp_path, patients=12, n_folds=3, signal=ONE, patient_name="TCGA-XY-{:04d}", excluded=copied)
    report(run.path)
    assert b"TCGA-XY-0003" in run.report_path.read_bytes()
    report(run.path, pseudonymise=True)
    first = _files(run)
    for name, content in first.items():
        assert b"TCGA-XY" not in content, name
        assert b"lost0" not in content, name
        assert str(tmp_path).encode() not in content, name
    assert re.search(rb"P-[0-9a-f]{6}", first["report.html"])
    report(run.path, pseudonymise=True)
    assert _files(run) == first


EVERYTHING = {
    "patients": 24,
    "n_folds": 2,
    "signal": ONE,
    "patient_name": "TCGA-XY-{:04d}",
    "slides": True,
    "calibrated": True,
    "search": True,
    "leakage": True,
    "values": (("sex", ("f", "m")), ("twin", ("TCGA-XY-0001", "TCGA-XY-0002")), ("scan", ("/data/TCGA", "b"))),
}
"""A run with every part that a report can have, and columns of the table that name patients and paths."""


def test_the_page_answers_calibration_choices_subgroups_and_the_audit_before_training(tmp_path):
    run = _fabricate(tmp_path, **EVERYTHING)
    report(run.path)
    page = _Page(run.report_path.read_text())
    for words in (
        "Calibration: temperature of 30 validation patients in 2 of 2 models. Test patients never fitted it.",
        "after calibration",
        "Would acting on it help?",
        "train.lr 0.001, params.dim 128",
        "pictures that look alike, 7 bits apart",
        "repeat 0 fold 1 (train and test)",
        "Site and label go clearly together",
        "instead of 95",
        "fewer than 10 in a class",
        "19 of 52 items are for the authors to write",
    ):
        assert words in page.text, words
    metrics = json.loads(run.metrics_path.read_text())
    assert metrics["audit_before_training"]["suspicious"] == 1
    assert metrics["choices"]["acmil"]["search"][0]["trials"] == 12
    assert set(metrics["subgroups"]) == {"site", "sex", "twin", "scan"}
    assert metrics["decision_curves"]["acmil"]["probabilities"] == "calibrated"
    assert {"value", "low", "high", "method"} <= set(metrics["methods"]["acmil"]["kappa"])
    for name in ("subgroups", "leakage", "classes", "trainings", "decision_curves"):
        assert len(pd.read_csv(run.path / "tables" / f"{name}.csv")), name


def test_links_inside_the_page_meet_their_sections_and_the_viewer_is_given_method_and_slide(tmp_path):
    run = _fabricate(tmp_path, **(EVERYTHING | {"patient_name": "P {:02d}&x"}))
    report(run.path)
    page = _Page(run.report_path.read_text())
    anchors = {attributes.get("id") for _, attributes in page.elements}
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert {link[1:] for link in links if link.startswith("#")} <= anchors
    asked = [parse_qs(urlsplit(link).query) for link in links if not link.startswith("#")]
    cohort = set(pd.read_csv(run.cohort_path, dtype=str)["slide"])
    assert len(asked) == 4
    assert all(set(one) == {"method", "slide"} and set(one["slide"]) <= cohort for one in asked)


def test_pseudonyms_cover_every_part_of_the_page(tmp_path):
    run = _fabricate(tmp_path, **EVERYTHING)
    report(run.path, pseudonymise=True)
    for name, content in _files(run).items():
        for hidden in (b"TCGA-XY", b"/data/", b"localhost:8501", str(tmp_path).encode()):
            assert hidden not in content, (name, hidden)
    assert b"P-" in (run.path / "tables" / "leakage.csv").read_bytes()
    assert b"P-" in (run.path / "tables" / "subgroups.csv").read_bytes()


@pytest.mark.parametrize("patient_name", ["{:d}", "Q{:02d}"])
def test_ids_of_a_few_characters_are_hidden_too(tmp_path, patient_name):
    run = _fabricate(
        tmp_path, patients=12, n_folds=3, signal=ONE, patient_name=patient_name, excluded=("patient Q07 or 7 is away",)
    )
    report(run.path, pseudonymise=True)
    text = _Page(run.report_path.read_text()).text
    cohort = pd.read_csv(run.path / "tables" / "cohort.csv", dtype=str)
    status = cohort["status"][cohort["status"] != "used"].item()
    expected = r"\(withheld\)" if patient_name == "{:d}" else r"patient P-[0-9a-f]{6} or 7 is away"
    assert re.fullmatch(expected, status)
    assert status in text


def test_names_hide_short_ids_only_where_they_stand_alone_and_withhold_what_may_be_a_count():
    names = Names({"7", "ase", "Q07"}, {"b", "S-000_1"}, salt="salt")
    assert names.text("based on Q07's slide (ase), 0.57 of 17") == (
        f"based on {names.patient('Q07')}'s slide ({names.patient('ase')}), 0.57 of 17"
    )
    assert names.text("7 slides of Q07") == names.text("slide b") == WITHHELD
    assert [names.item(name) for name in ("b", "7", "S-000_1")] == [
        names.slide("b"),
        names.patient("7"),
        names.slide("S-000_1"),
    ]
    assert names.item("the table lacks Q07") == f"the table lacks {names.patient('Q07')}"
    shown = Names({"7"}, {"b"})
    assert (shown.text("7 slides of b"), shown.item("b")) == ("7 slides of b", "b")


def test_two_runs_give_the_same_patient_different_pseudonyms(tmp_path):
    seen = []
    for place in ("one", "two"):
        run = _fabricate(tmp_path / place, patients=10, scores=False, signal=ONE)
        report(run.path, pseudonymise=True)
        seen.append(set(pd.read_csv(run.path / "tables" / "patients.csv")["patient"]))
    assert not seen[0] & seen[1]


def test_a_report_that_dies_leaves_the_old_one(tmp_path, monkeypatch):
    run = _fabricate(tmp_path, patients=10, scores=False, signal=ONE)
    report(run.path)
    old = run.report_path.read_bytes()
    run.environment_path.write_text('{"torch": "another version"}')
    real = atomic.os.replace

    def dies_at_the_page(source, target):
        if Path(target).name == "report.html":
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(atomic.os, "replace", dies_at_the_page)
    with pytest.raises(KeyboardInterrupt):
        report(run.path)
    assert run.report_path.read_bytes() == old
    monkeypatch.undo()
    report(run.path)
    assert b"another version" in run.report_path.read_bytes()
    assert not list(run.path.glob(".*.tmp"))


def test_missing_slides_are_said_and_the_rest_stands(tmp_path):
    run = _fabricate(tmp_path, patients=12, n_folds=3, signal=ONE, slides=False)
    summary = report(run.path)
    assert summary.exit_code == 3
    assert {failure.outcome for failure in summary.failures} == {"no thumbnail"}
    page = _Page(run.report_path.read_text())
    assert page.text.count("The slide files are not reachable") == 1
    assert "give wsi-mil report RUN --slides DIR" in page.text
    assert re.search(r"P\d+_S0: its file P\d+_S0\.tif is not below .* with --slides DIR", page.text)
    assert sum(tag == "img" and "jpeg" in (a["src"] or "")[:20] for tag, a in page.elements) == 4  # heat maps stay


def test_a_slide_file_that_was_replaced_is_not_drawn_under_the_heat(tmp_path):
    run = _fabricate(tmp_path, patients=8, n_folds=2, signal=ONE, slides=True)
    for path in (tmp_path / "slides").glob("*.tif"):
        tifffile.imwrite(path, np.full((1536, 1536, 3), 90, np.uint8), tile=(256, 256), photometric="rgb")
    summary = report(run.path)
    assert {failure.outcome for failure in summary.failures} == {"no thumbnail"}
    assert all("is not the file that was scored" in failure.reason for failure in summary.failures)
    page = _Page(run.report_path.read_text())
    assert "not the ones that were scored, so no tissue is shown" in page.text
    assert sum(tag == "img" and "jpeg" in (a["src"] or "")[:20] for tag, a in page.elements) == 4  # heat on blank


def test_slides_under_another_suffix_are_found_by_their_id(tmp_path):
    run = _fabricate(tmp_path, patients=8, n_folds=2, signal=ONE, slides=True)
    for path in (tmp_path / "slides").glob("*.tif"):
        path.rename(path.with_suffix(".tiff"))
    assert report(run.path).exit_code == 0


def test_moved_slides_are_found_by_the_option(tmp_path):
    run = _fabricate(tmp_path, patients=8, n_folds=2, signal=ONE, slides=True)
    (tmp_path / "slides").rename(tmp_path / "elsewhere")
    assert report(run.path).exit_code == 3
    failures = report(run.path, slides=tmp_path / "elsewhere").failures
    assert {failure.outcome for failure in failures} == {"no annotation"}  # annotations have their own paths


def test_leakage_is_shouted(tmp_path):
    run = _fabricate(tmp_path, patients=20, scores=False, signal=ONE)
    folds = pd.read_csv(run.folds_path, dtype=str)
    extra = folds[folds["part"] == "test"].assign(part="train")
    pd.concat([folds, extra]).to_csv(run.folds_path, index=False)
    summary = report(run.path)
    assert "audit is not clean" in " ".join(summary.notes)
    assert "Do not use these figures" in _Page(run.report_path.read_text()).text


def test_three_classes_slides_seeds_and_repeats_make_a_page(tmp_path):
    run = _fabricate(
        tmp_path,
        classes=("a", "b", "c"),
        patients=30,
        n_folds=3,
        level="slide",
        slides_per_patient=2,
        seeds=(0, 1),
        repeats=2,
        signal=ONE,
    )
    assert report(run.path).exit_code == 3  # no slide files
    text = _Page(run.report_path.read_text()).text
    assert "Trainings(repeats × seeds)" in text
    assert "Each class against the rest" in text
    assert "a patient's probability is the mean over the slides" in text


def test_an_unfinished_run_is_refused(tmp_path):
    run = _fabricate(tmp_path, patients=10, scores=False, signal=ONE)
    run.predictions_path.unlink()
    with pytest.raises(RunError, match="not finished"):
        report(run.path)
    assert not run.report_path.exists()
