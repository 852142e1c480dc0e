"""Sentences follow the figures."""

import pytest

from wsi_mil.report import wording
from wsi_mil.report.findings import find
from wsi_mil.report.study import read_study


@pytest.fixture
def found(make_run):
    return lambda **wishes: find(read_study(make_run(scores=False, **wishes).path), slides_root=None)


def test_a_tie_at_the_top_names_both(found):
    words = found(signal=(("one", 30.0), ("two", 30.0), ("weak", 0.5)))
    verdict = wording.verdict(words.best, words)
    assert verdict.startswith("one reached the highest AUC: 1.00")
    assert verdict.endswith("The same was reached by two.")


def test_methods_are_called_different_only_when_the_corrected_test_says_so(found):
    words = wording.comparison(found(signal=(("one", 1.0), ("two", 1.1))))
    assert "no method can be said to be better" in words
    assert "above" not in words


def test_a_clear_difference_is_named_with_its_direction(found):
    words = wording.comparison(found(patients=80, signal=(("weak", 0.1), ("strong", 2.5))))
    assert "strong above weak" in words
    assert "weak above strong" not in words


def test_a_handful_of_patients_is_said_to_be_too_few_for_a_test(found):
    words = found(patients=12, n_folds=2)
    assert "could not be tested" in wording.comparison(words)
    assert any("Fewer than 10 patients in a class: normal (6), tumour (6)" in line for line in wording.warnings(words))


def test_an_encoder_is_called_imagenet_only_when_the_run_says_so(found, make_run, tmp_path):
    words = found(patients=12, n_folds=2)
    assert any("ImageNet" in line for line in wording.warnings(words))
    words.study.config["encoder"]["pathology"] = True
    assert not any("encoder" in line for line in wording.warnings(words))
    del words.study.config["encoder"]["pathology"]
    assert any("does not record" in line for line in wording.warnings(words))


def test_one_method_alone_is_not_called_the_highest(found):
    words = found(signal=(("acmil", 1.5),))
    assert "acmil reached an AUC" in wording.verdict(words.best, words)
    assert wording.comparison(words) == ""
