"""Classes in an order: steps, weighted agreement, and the cuts between the classes."""

import sys

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score, roc_auc_score

kinds = sys.modules["fabricated_kinds"]


@pytest.fixture
def part(make_kinds, found_of):
    run = make_kinds(targets=(kinds.GRADE,), patients=60, n_folds=2, signal=(("one", 1.0),))
    return found_of(run).targets[0][1]


def test_kappa_and_steps_are_those_of_a_second_library(part):
    patients, (figures,) = part.found.methods[0].patients, part.ordinal
    expected = cohen_kappa_score(patients.targets, patients.decisions, weights="quadratic")
    assert figures.kappa.value == pytest.approx(expected)
    assert figures.kappa.interval.low < expected < figures.kappa.interval.high
    assert figures.steps.value == pytest.approx(np.abs(patients.targets - patients.decisions).mean())
    assert figures.steps.interval.low < figures.steps.value < figures.steps.interval.high


def test_a_cut_is_the_auc_of_the_classes_above_against_those_below_within_folds(part):
    rows, (figures,) = part.found.methods[0].rows, part.ordinal
    assert [name for name, _ in figures.splits] == ["G2", "G3"]
    for at, (_, figure) in enumerate(figures.splits, start=1):
        aucs, pairs = [], []
        for fold in range(2):
            own = [i for i, key in enumerate(rows.keys) if key.fold == fold]
            above = rows.targets[own] >= at
            aucs.append(roc_auc_score(above, rows.probabilities[own, at:].sum(axis=1)))
            pairs.append(above.sum() * (~above).sum())
        assert figure.value == pytest.approx(np.average(aucs, weights=pairs))
    assert figures.splits_mean.value == pytest.approx(np.mean([figure.value for _, figure in figures.splits]))


def test_the_page_has_everything_of_classes_and_the_order(make_kinds, page_of):
    page, (chapter,) = page_of(make_kinds(targets=(kinds.GRADE,), signal=(("one", 1.0),)))
    told = chapter.sentences[0].split("That means")[0]  # an order may be found although hardly any class is hit
    assert "one reached an AUC" in told
    assert "quadratic kappa of its decisions" in told
    for words in (
        "where a patient stands from “G1” to “G3”",
        "steps off on average",
        "Quadratic kappa",
        "AUC, “G2” and above",
        "called G1",
    ):
        assert words in page
    own = chapter.metrics["methods"]["one"]
    assert {"auc", "kappa_quadratic", "steps_off", "auc_of_cuts", "auc_by_cut"} <= set(own)
    assert "ordinal.csv" in chapter.tables
