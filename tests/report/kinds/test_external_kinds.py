"""An external validation of numbers, times, ordered classes and several targets."""

import json
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from wsi_mil.report.kinds.survival_times import followed_patients
from wsi_mil.runs import FoldKey, RunDir, write_frame
from wsi_mil.stages.report import report

kinds = sys.modules["fabricated_kinds"]
KEPT = ("version", "table", "slides", "bags", "task", "methods", "encoder")


@pytest.fixture
def make_external(make_kinds):
    """make_external(targets, trained_on=...) -> the run that predict writes: everybody in one test part."""

    def make(targets, *, trained_on=(), **wishes) -> RunDir:
        run = make_kinds(targets=targets, n_folds=1, signal=(("acmil", 2.0),), **wishes)
        rows = run.predictions()
        flags = np.where(rows["patient"].isin(list(trained_on)), "patient", "")
        write_frame(run.predictions_path, rows.assign(in_training=flags))
        config = run.config()
        facts = {"kind": "predict", "labelled": True, "training_known": True, "bundle": "ab"}
        run.write_config(facts | {name: config[name] for name in KEPT})
        cohort = run.cohort()
        write_frame(run.cohort_path, cohort[cohort["status"] == "used"])
        return run

    return make


class _Text(HTMLParser):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found["id"]} if "id" in found else set()
        self.links |= {found["href"]} if "href" in found else set()

    def handle_data(self, data):
        self.words.append(data)


CHOICES = {
    "number": (kinds.NUMBER,),
    "risk": (kinds.TIME,),
    "curve": (kinds.DISCRETE,),
    "ordered": (kinds.GRADE,),
    "several": (kinds.GRADE, kinds.TIME, kinds.NUMBER, kinds.YES),
}


@pytest.mark.parametrize("name", CHOICES)
def test_every_kind_speaks_of_models_that_were_trained_elsewhere(make_external, name):
    run = make_external(CHOICES[name], trained_on=("P003", "P004"), patients=50)
    report(run.path)
    page = _Text(run.report_path.read_text())
    text = re.sub(r"\s+", " ", "".join(page.words))
    assert "External validation of whole-slide image models" in text
    assert "1 method, trained elsewhere, on 48 patients" in text
    assert "2 patients were trained on (known by name, slide or file)." in text
    said = text.split("Configuration")[0]
    assert not re.search(r"\bfolds?\b|cross-valid|held-out|another hospital|training part", said, flags=re.IGNORECASE)
    assert {link[1:] for link in page.links if link.startswith("#")} <= page.anchors
    assert {"shift", "known"} <= page.anchors
    found = json.loads(run.metrics_path.read_text())
    assert (found["design"], found["patients"]) == ("external validation", 48)
    assert set(found["external"]["patients_trained_on"]) == {"P003", "P004"}


def test_a_number_is_judged_over_all_patients_that_were_not_trained_on(make_external):
    run = make_external((kinds.NUMBER,), trained_on=("P004",), patients=30, missing=4)
    report(run.path)
    rows = run.predictions()
    rows = rows[(rows["patient"] != "P004") & (rows["target"] != "")]
    truth, told = rows["target"].astype(float), rows["prediction"].astype(float)
    (target,) = json.loads(run.metrics_path.read_text())["targets"].values()
    assert target["methods"]["acmil"]["mae"]["value"] == pytest.approx(np.abs(truth - told).mean())
    assert len(rows) == 30 - 4 - 1


def test_a_c_index_counts_all_pairs_of_patients(make_external):
    run = make_external((kinds.TIME,), patients=30)
    report(run.path)
    rows = run.predictions()
    time, risk, event = (rows[name].astype(float).to_numpy() for name in ("target", "risk", "event"))
    first = (time[:, None] < time[None]) & (event[:, None] == 1)
    right = (risk[:, None] > risk[None])[first].mean()
    (target,) = json.loads(run.metrics_path.read_text())["targets"].values()
    assert target["methods"]["acmil"]["c_index"]["value"] == pytest.approx(right)


def test_where_nobody_was_trained_on_those_tested_tell_who_is_censored(answered):
    rows = [("a", 0, 0, 0, 1.0, 0.5, True), ("b", 0, 0, 0, 2.0, 0.5, False), ("c", 0, 0, 0, 3.0, 0.5, True)]
    folds = pd.DataFrame({"repeat": 0, "fold": 0, "patient": ["a", "b", "c"], "part": "test"})
    followed = followed_patients([answered(rows).test], folds)
    events = followed.events[FoldKey(0, 0, 0)]
    assert events.times.tolist() == [1.0, 3.0]
    np.testing.assert_allclose(events.survival, [2 / 3, 0.0])
    np.testing.assert_allclose(followed.censoring[FoldKey(0, 0, 0)].survival, [0.5])
