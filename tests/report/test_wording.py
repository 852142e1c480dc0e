"""Sentences follow the figures."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from wsi_mil.report import wording
from wsi_mil.report.findings import find
from wsi_mil.report.method_figures import Figure
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.sections import cohort
from wsi_mil.report.study import read_study
from wsi_mil.statistics.intervals import Interval


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
    assert "strong better than weak" in words
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


def test_only_the_tested_are_said_to_be_judged(make_run):
    study = read_study(make_run(scores=False, signal=(("acmil", 1.0),)).path)
    assert wording.asked_of(study).endswith("40 patients with 40 slides from 5 sites.")
    gone = study.folds["part"].mask(study.folds["fold"] == 4, "train")
    found = find(replace(study, folds=study.folds.assign(part=gone)), slides_root=None)
    assert "Asked of 32 patients (16 normal, 16 tumour) with 32 slides" in wording.question(found)
    assert "(8 more patients of the cohort are in no test part)" in wording.question(found)
    assert any(line.startswith("8 of 40 patients are in no test part") for line in wording.warnings(found))


def test_a_study_that_left_sites_out_says_so(found):
    words = found(signal=(("acmil", 1.0),))
    assert "never seen any of that patient's slides" in wording.question(words)
    assert any("another hospital: all patients come from this cohort" in line for line in wording.not_shown(words))
    words.study.config["folds"]["leave_one_site_out"] = True
    assert "Each site was judged by models that had never seen a slide of it" in wording.question(words)
    assert wording.not_shown(words)[0].startswith("Each site was new to the models that judged it.")


def _ranked(label, low, high):
    return SimpleNamespace(
        label=label,
        primary=Figure(value=(low + high) / 2, interval=Interval(low=low, high=high, level=0.95, method="x")),
    )


def test_a_best_figure_that_may_be_chance_and_those_below_it_are_named():
    best, worst = _ranked("abmil", 0.4, 0.7), _ranked("mean_pool", 0.1, 0.45)
    first, second = wording.about_chance([worst, best], best, what="AUC")
    assert "highest AUC (abmil, 0.40–0.70) includes chance" in first
    assert second.startswith("Below chance with the whole interval: mean_pool.")
    good = _ranked("good", 0.6, 0.9)
    assert wording.about_chance([good], good, what="AUC") == []


def test_a_printed_gap_is_flagged_over_repeats_too(found):
    words = found(patients=80, repeats=5, signal=(("acmil", 0.8),))
    assert words.best.pooled.value - words.best.primary.value > 0.03
    assert any("differ by more than 0.03" in line for line in wording.warnings(words))


def test_rows_without_a_label_are_those_left_out_for_it(found):
    words = found(signal=(("acmil", 1.0),))
    words.study.config["cohort"]["counts"]["unlabelled"] = 6  # cells of a column that the run does not predict
    counts = dict(cohort.context(words, Names(set(), set(words.study.cohort["slide"])))["counts"])
    assert counts["without a label"] == 1


def test_a_validation_part_that_chose_nothing_is_said_with_the_cure(make_run):
    study = read_study(make_run(scores=False, signal=(("acmil", 1.0),)).path)
    assert wording.unused_validation(study) == []
    method = study.methods[0]
    few = {key: replace(one, chosen_by="fixed number of epochs: few") for key, one in method.selections.items()}
    unused = replace(study, methods=(replace(method, selections=few),))
    (line,) = wording.unused_validation(unused)
    assert "of 5 of 5 models" in line
    assert "--train.selection none" in line
    unused.config["train"]["selection"] = "none"
    assert wording.unused_validation(unused) == []
