"""Who chose what, counted over the models and said in words."""

import json

from wsi_mil.report.choices import choices_of
from wsi_mil.report.evaluate import evaluate
from wsi_mil.report.findings import before_training
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.sections.calibration import fitted
from wsi_mil.report.sections.leakage import association
from wsi_mil.report.study import read_study


def _choices(run):
    method = read_study(run.path).methods[0]
    return choices_of(method, evaluate(method))


def test_every_model_is_counted_with_its_chooser(make_run):
    run = make_run(scores=False, patients=80, validation=30, calibrated=True, search=True, n_folds=4)
    path = run.selection_path("mean_pool", run.keys("mean_pool")[0])
    choice = json.loads(path.read_text())
    choice["calibration"]["diagnosis"] = {"kind": "none", "reason": "validation holds 3 patients of its smallest class"}
    choice["chosen_by"] = "fixed number of epochs: too few"
    path.write_text(json.dumps(choice))
    found = _choices(run)
    assert found.epochs == (("validation loss", 3), ("fixed number of epochs: too few", 1))
    assert found.thresholds == (("Youden point of the validation part", 4),)
    assert found.calibrations[0] == ("temperature of 30 validation patients", 3)
    assert fitted(found) == (
        "Calibration: temperature of 30 validation patients in 3 of 4 models; none, since validation holds 3 patients "
        "of its smallest class in 1 of 4 models. Test patients never fitted it."
    )
    key, search = found.searches[0]
    assert (key, search.trials, search.metric) == ("r0_f0_s0", 12, "loss")
    assert search.chosen == "train.lr 0.001, params.dim 128"


def test_a_run_that_records_nothing_says_so(make_run):
    found = _choices(make_run(scores=False))
    assert (found.calibrations, found.searches) == ((), ())
    assert fitted(found) == "The run fitted no calibration."


def test_an_audit_that_is_damaged_is_said_and_the_report_goes_on(make_run):
    run = make_run(scores=False, leakage=True)
    audit, failures = before_training(read_study(run.path))
    assert (audit.patients, failures) == (40, [])
    words = association(audit.association, Names(set(), set()))
    assert words.startswith("Site and label go clearly together (Cramér’s V 0.35")
    assert words.endswith("Sites with patients of one label only: site1.")
    run.leakage_path.write_text("{}")
    audit, (failure,) = before_training(read_study(run.path))
    assert audit is None
    assert failure.item == run.leakage_path.name
