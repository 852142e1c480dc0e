"""The audit finds what must not be, and the cohort is counted right."""

import pandas as pd

from wsi_mil.report.audit import audit, cohort_flow
from wsi_mil.report.findings import fingerprints
from wsi_mil.report.study import read_study
from wsi_mil.runs import RunDir


def _audit(run: RunDir):
    study = read_study(run.path)
    return audit(study, fingerprints(study)[0])


def test_a_clean_run_is_clean(make_run):
    found = _audit(make_run(patients=20))
    assert found.clean
    assert found.tested_once
    assert found.fingerprints == 20
    assert (found.foreign_rows, found.missing_rows, found.duplicates) == (0, 0, ())
    for fold in found.folds:
        assert dict(fold.counts)["test"] == (2, 2)
        assert sum(sum(counts) for _, counts in fold.counts) == 20


def test_a_test_patient_in_training_is_counted(make_run):
    run = make_run(patients=20, scores=False)
    folds = pd.read_csv(run.folds_path, dtype=str)
    tested = folds[(folds["fold"] == "1") & (folds["part"] == "test")]
    pd.concat([folds, tested.assign(part="train")]).to_csv(run.folds_path, index=False)
    found = _audit(run)
    assert not found.clean
    assert [fold.train_test for fold in found.folds] == [0, len(tested), 0, 0, 0]


def test_predictions_of_patients_that_were_trained_on_are_counted_and_missing_ones_too(make_run):
    run = make_run(patients=20, scores=False)
    frame = pd.read_csv(run.predictions_path, dtype=str)
    moved = frame.index[(frame["fold"] == "0") & (frame["method"] == "acmil")][:2]
    frame.loc[moved, "fold"] = "1"
    frame.to_csv(run.predictions_path, index=False)
    found = _audit(run)
    assert (found.foreign_rows, found.missing_rows) == (2, 2)
    assert not found.clean


def test_the_same_slide_under_two_patients_is_found(make_run):
    run = make_run(patients=20)
    study = read_study(run.path)
    prints = fingerprints(study)[0]
    prints["P003_S0"] = prints["P004_S0"]
    found = audit(study, prints)
    assert found.duplicates == (("P003_S0", "P004_S0"),)
    assert found.duplicates_across == 1
    assert not found.clean


def test_a_patient_tested_twice_is_noticed(make_run):
    run = make_run(patients=20, scores=False)
    folds = pd.read_csv(run.folds_path, dtype=str)
    folds.loc[(folds["fold"] == "1") & (folds["patient"] == "P019"), "part"] = "test"
    folds.to_csv(run.folds_path, index=False)
    found = _audit(run)
    assert not found.tested_once
    assert not found.tested_at_most_once
    assert not found.clean


def test_one_split_that_tests_some_is_clean_and_says_who_is_never_tested(make_run):
    run = make_run(patients=20, scores=False, signal=(("acmil", 1.0),))
    for path in (run.folds_path, run.predictions_path):
        frame = pd.read_csv(path, dtype=str)
        frame[frame["fold"] == "2"].to_csv(path, index=False)
    found = _audit(run)
    assert (found.tested_once, found.tested_at_most_once, found.clean) == (False, True, True)
    assert found.never_tested == 16
    assert found.missing_rows == 0


def test_the_flow_counts_rows_reasons_classes_and_sites(make_run):
    study = read_study(make_run(patients=20, slides_per_patient=2, scores=False).path)
    flow = cohort_flow(study)
    assert (flow.rows, flow.used, flow.patients) == (43, 40, 20)
    assert [(reason, count) for reason, count, _ in flow.reasons] == [("slide file missing", 2), ("no label", 1)]
    assert flow.by_site[-1] == ("all", ((10, 20), (10, 20)))
    assert sum(patients for _, counts in flow.by_site[:-1] for patients, _ in counts) == 20
    assert len(flow.mpp) == 40
