"""An external validation: whose figures it shows, and that its words are of models that were trained elsewhere."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from wsi_mil.errors import RunError
from wsi_mil.report import shift
from wsi_mil.report.external import TRAINED_ON
from wsi_mil.report.sections.tripod import ITEMS, items_for
from wsi_mil.report.study import read_study
from wsi_mil.runs import FoldKey, RunDir, Selection, write_frame
from wsi_mil.stages.report import report
from wsi_mil.transfer import domain_shift

KEY = FoldKey(0, 0, 0)
SOURCE = "0.5, since validation holds 4 patients of its smaller class, 10 are needed"


@pytest.fixture
def make_external(make_run):
    """make_external(**wishes) -> the run that predict writes: everybody in one test part, nothing of any training."""

    def make(*, trained_on=(), unlabelled=(), **wishes) -> RunDir:
        run = make_run(n_folds=1, **{"signal": (("acmil", 1.0),), "excluded": (), **wishes})
        rows = pd.read_csv(run.predictions_path, dtype=str, keep_default_na=False)
        by = np.where(rows["patient"].isin(list(trained_on)), "patient file", "")
        item = rows["slide"].where(rows["slide"] != "", rows["patient"])
        rows = rows.assign(in_training=by, target=rows["target"].mask(item.isin(list(unlabelled)), ""))
        write_frame(run.predictions_path, rows)
        write_frame(run.validation_path("acmil", KEY), rows.iloc[:0])
        cohort = pd.read_csv(run.cohort_path, dtype=str, keep_default_na=False)
        silent = cohort["slide"].isin(list(unlabelled)) | cohort["patient"].isin(list(unlabelled))
        write_frame(run.cohort_path, cohort.assign(target=cohort["target"].mask(silent, "no such class")))
        told = "each of 5 models by validation loss"
        cuts = {"diagnosis": {"value": 0.4, "source": SOURCE}}
        means = {"diagnosis": {"kind": "none", "reason": "mean over the models of: none; temperature"}}
        run.write_selection(
            "acmil",
            KEY,
            Selection(
                epoch=9, chosen_by=told, metric=None, value=None, epochs_run=9, thresholds=cuts, calibration=means
            ),
        )
        kept = {
            name: run.config()[name] for name in ("version", "table", "slides", "bags", "task", "methods", "encoder")
        }
        run.write_config({"kind": "predict", "labelled": True, "training_known": True, "bundle": "ab", **kept})
        return run

    return make


def reconfigure(run: RunDir, **changes) -> RunDir:
    run.write_config(run.config() | changes)
    return run


class _Text(HTMLParser):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.sources: list[str] = []
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found["id"]} if "id" in found else set()
        self.links |= {found["href"]} if "href" in found else set()
        self.sources += [found["src"]] if "src" in found else []

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))


def page_of(run: RunDir) -> _Text:
    return _Text(run.report_path.read_text())


def metrics_of(run: RunDir):
    return json.loads(run.metrics_path.read_text())


def by_hand(rows: pd.DataFrame) -> float:
    """AUC over all pairs."""
    score = rows["prob_tumour"].astype(float)
    pairs = np.subtract.outer(
        score[rows["target"] == "tumour"].to_numpy(), score[rows["target"] == "normal"].to_numpy()
    )
    return float((pairs > 0).mean() + (pairs == 0).mean() / 2)


def test_the_words_are_of_models_that_were_trained_elsewhere(make_external):
    run = make_external(scores=False)
    report(run.path)
    page = page_of(run)
    for words in (
        "External validation of whole-slide image models: they were trained elsewhere, and nothing was fitted here.",
        "1 method, trained elsewhere, on 40 patients",
        "None of these patients is known as one that the models were trained on.",
        "a third hospital",
        "from a probability of 0.400 up, the mean of what the models brought along",
        "each of 5 models by validation loss",
        "mean of what each model's own gives (none; temperature)",
        "No patient was met again.",
    ):
        assert words in page.text, words
    shown = page.text.split("Configuration")[0]  # the appendix lists files as they are called
    assert not re.search(r"\bfolds?\b|cross-valid|held-out|another hospital", shown, flags=re.IGNORECASE)
    assert metrics_of(run)["design"] == "external validation"
    assert {link[1:] for link in page.links if link.startswith("#")} <= page.anchors
    assert {"shift", "known"} <= page.anchors
    assert "leakage" not in page.anchors


def test_the_auc_is_over_all_pairs_and_cut_and_calibration_are_those_brought_along(make_external):
    run = make_external(scores=False, calibrated=True)
    report(run.path)
    rows, found = pd.read_csv(run.predictions_path, dtype=str), metrics_of(run)
    own = found["methods"]["acmil"]
    assert own["auc"]["value"] == pytest.approx(by_hand(rows))
    called = np.where(rows["prob_tumour"].astype(float) >= 0.4, "tumour", "normal")
    assert own["accuracy"]["value"] == pytest.approx((called == rows["target"]).mean())
    shares = rows["calibrated_tumour"].astype(float)
    brier = ((shares - (rows["target"] == "tumour")) ** 2).mean()
    assert own["brier_calibrated"]["value"] == pytest.approx(brier)
    assert found["audit"]["clean"]


def test_who_was_trained_on_is_named_and_left_out_of_every_figure(make_external):
    run = make_external(trained_on=("P001", "P006"), scores=False)
    summary = report(run.path)
    rows, found = pd.read_csv(run.predictions_path, dtype=str), metrics_of(run)
    others = rows[~rows["patient"].isin(["P001", "P006"])]
    assert found["methods"]["acmil"]["auc"]["value"] == pytest.approx(by_hand(others))
    assert found["patients"] == 38
    assert found["external"]["patients_trained_on"] == {"P001": "patient file", "P006": "patient file"}
    assert (found["audit"]["clean"], found["audit"]["test_patients_without_prediction"]) == (True, 0)
    text = page_of(run).text
    assert "Mind this 2 patients were trained on (known by name, slide or file)." in text
    assert "left out of every figure" in " ".join(summary.notes)
    assert f"{TRAINED_ON} 2 P001_S0, P006_S0".replace(" 2 ", "2") in text
    assert "P001patient, file" in text
    assert set(pd.read_csv(run.path / "tables" / "patients.csv")["patient"]) == set(others["patient"])


def test_a_patient_of_whom_one_slide_is_known_is_left_out_as_a_whole(make_external):
    run = make_external(level="slide", slides_per_patient=2, scores=False)
    rows = pd.read_csv(run.predictions_path, dtype=str, keep_default_na=False)
    write_frame(run.predictions_path, rows.assign(in_training=np.where(rows["slide"] == "P003_S1", "file", "")))
    study = read_study(run.path)
    assert study.external.trained_on == {"P003": "file"}
    assert "P003" not in study.methods[0].test.patients
    assert len(study.methods[0].test) == 2 * 39
    assert set(study.cohort["status"][study.cohort["patient"] == "P003"]) == {TRAINED_ON}


@pytest.mark.parametrize(("level", "silent"), [("patient", ("P002", "P007")), ("slide", ("P002_S0", "P007_S1"))])
def test_who_has_no_label_is_counted_and_left_out(make_external, level, silent):
    run = make_external(level=level, slides_per_patient=2, unlabelled=silent, scores=False)
    report(run.path)
    found = metrics_of(run)
    assert found["external"]["left_out_without_label"] == 2
    left = 2 if level == "patient" else 0
    assert found["patients"] == 40 - left
    assert found["slides"] == 80 - (4 if level == "patient" else 2)
    assert found["audit"]["test_patients_without_prediction"] == 0
    assert "no label" in page_of(run).text


def test_a_slide_that_could_not_be_scored_is_missing_and_predict_is_the_cure(make_external):
    run = make_external(scores=False)
    rows = pd.read_csv(run.predictions_path, dtype=str)
    write_frame(run.predictions_path, rows[rows["patient"] != "P005"])
    failures = report(run.path).failures
    assert "1 test predictions are missing: give the predict command again" in failures[0].reason
    assert "1 test predictions are missing (of slides that could not be scored)" in page_of(run).text


def test_without_labels_or_without_anybody_left_there_is_no_report(make_external):
    run = make_external(trained_on=[f"P{i:03d}" for i in range(38)], unlabelled=("P038", "P039"), scores=False)
    with pytest.raises(
        RunError, match=r"38 patients were trained on, such as P000 .known by patient file., and 2 more"
    ):
        report(run.path)
    reconfigure(run, labelled=False)
    with pytest.raises(RunError, match=r"without labels.*another --out and --table TABLE.*column 'diagnosis'"):
        report(run.path)
    reconfigure(run, kind="train")
    with pytest.raises(RunError, match="which tests nobody"):
        report(run.path)


@pytest.mark.parametrize(
    ("known", "words"), [(False, "without the hashes of its training patients"), (None, "do not tell whether")]
)
def test_where_nobody_can_be_flagged_the_page_says_so_on_top(make_external, known, words):
    run = reconfigure(make_external(scores=False), training_known=known)
    report(run.path)
    text = page_of(run).text
    assert words in text
    assert "Mind this Nobody can tell whether the models were trained on a patient of this cohort." in text
    assert "met again." not in text.replace("what was met again.", "")


def shifted(run: RunDir, png: bytes = b"\x89PNG fake") -> RunDir:
    slides = pd.read_csv(run.cohort_path, dtype=str)["slide"]
    near = [0.1 + place / 100 for place in range(len(slides))]
    frame = pd.DataFrame({"slide": slides, "features_distance": 1.0, "features_training_nearer": near})
    frame = frame.assign(stain_distance="", stain_training_nearer="", mpp=0.5, unusual="")
    frame.loc[[4, 7], "unusual"] = "features"
    frame.loc[[4, 7], "features_training_nearer"] = [0.97, 1.0]
    frame.loc[9, "unusual"] = "mpp"
    write_frame(run.domain_shift_path, frame)
    run.domain_shift_path.with_suffix(".txt").write_text("Pixel size: 1 of 40 slides lie outside.\n")
    run.domain_shift_path.with_suffix(".png").write_bytes(png)
    return run


def test_domain_shift_is_shown_the_farthest_slides_first(make_external):
    run = shifted(make_external(scores=False))
    assert report(run.path).exit_code == 3  # no slide files
    page = page_of(run)
    assert page.text.count("Pixel size: 1 of 40 slides lie outside.") == 2  # on top, and where it is explained
    assert "data:image/png;base64,iVBORyBmYWtl" in page.sources
    assert re.search(r"P007_S0features1.00100%0.5 P004_S0features1.0097%0.5 P009_S0pixel size", page.text)
    assert metrics_of(run)["external"]["domain_shift"]["unlike_the_training_slides"] == 3
    assert len(pd.read_csv(run.path / "tables" / "domain_shift.csv")) == 40


def test_pseudonyms_stand_in_the_parts_of_an_external_validation_too(make_external):
    run = shifted(make_external(scores=False, patient_name="TCGA-XY-{:04d}", trained_on=("TCGA-XY-0002",)))
    report(run.path, pseudonymise=True)
    for path in (run.report_path, run.metrics_path, *(run.path / "tables").iterdir()):
        assert b"TCGA-XY" not in path.read_bytes(), path.name


def test_a_damaged_table_of_distances_costs_that_section_only(make_external):
    run = shifted(make_external(scores=False))
    run.domain_shift_path.write_text("slide\nP001_S0\n")
    failures = report(run.path).failures
    assert [one.item for one in failures if one.outcome == "not shown"] == ["domain_shift.csv"]
    assert "Not measured: only a bundle knows" in page_of(run).text


def test_far_means_the_same_as_where_it_was_measured():
    assert shift.FAR == domain_shift.FAR


def test_the_checklist_points_where_an_external_validation_answers(make_external):
    run = make_external(scores=False)
    report(run.path)

    class Found:
        study = read_study(run.path)

    items = {item.number: item for item in items_for(Found)}
    assert list(items) == [item.number for item in ITEMS]
    assert items["16"].sections[0] == items["20c"].sections[0] == "shift"
    assert items["12a"].sections == ("known", "audit")
    assert {name for item in items.values() for name in item.sections} <= page_of(run).anchors
