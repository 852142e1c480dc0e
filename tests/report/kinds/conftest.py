"""Fabricated runs of numbers, times, ordered classes and several targets, for the tests of their reports."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from wsi_mil.report.kinds.findings import find_run
from wsi_mil.report.kinds.page import chapters_of, render_run
from wsi_mil.report.kinds.reading import read_run
from wsi_mil.report.kinds.records import Answered, Answers
from wsi_mil.report.pseudonyms import Names
from wsi_mil.runs import FoldKey


def _load(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_load("fabricated_run", Path(__file__).parents[1] / "fabricated.py")
kinds = _load("fabricated_kinds", Path(__file__).with_name("fabricated_kinds.py"))


@pytest.fixture
def make_kinds(tmp_path):
    """make_kinds(**wishes) -> RunDir of a finished, fabricated run in tmp_path/run."""
    return lambda **wishes: kinds.fabricate_kinds(tmp_path, kinds.KindsWish(**wishes))


@pytest.fixture
def found_of():
    """found_of(run) -> findings."""
    return lambda run: find_run(read_run(run.path), slides_root=None)


@pytest.fixture
def page_of():
    """page_of(run) -> (page, chapters)."""

    def render(run):
        studies = read_run(run.path)
        found = find_run(studies, slides_root=None)
        names = Names(set(studies.everyone.cohort["patient"]) | studies.patients, set(studies.everyone.cohort["slide"]))
        chapters = chapters_of(found, names)
        return render_run(found, chapters, names), chapters

    return render


@pytest.fixture
def answered():
    """answered(rows, validation=...) -> Answered; a row: (patient, repeat, fold, seed, truth, predicted[, event])."""

    def rows_of(rows):
        n = len(rows)
        return Answers(
            patients=tuple(row[0] for row in rows),
            slides=("",) * n,
            keys=tuple(FoldKey(*row[1:4]) for row in rows),
            truth=np.array([row[4] for row in rows], dtype=float),
            predicted=np.array([row[5] for row in rows], dtype=float),
            events=np.array([row[6] if len(row) > 6 else True for row in rows], dtype=bool),
            survival=np.empty((n, 0)),
            cuts=np.empty((n, 0)),
        )

    def build(rows, validation=()):
        held = rows_of(validation)
        return Answered(
            label="one",
            test=rows_of(rows),
            validation={key: held.of(key) for key in sorted(set(held.keys))},
            selections={},
            broken=0,
        )

    return build
