"""Times to an event: pairs within folds, risk groups that look at no outcome, weights from training patients."""

import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from wsi_mil.errors import RunError
from wsi_mil.report.designs import design_of
from wsi_mil.report.external import External
from wsi_mil.report.kinds.records import patient_answers, seed_mean_answers
from wsi_mil.report.kinds.survival import evaluate_survival
from wsi_mil.report.kinds.survival_times import BrierFigures, brier_figures, followed_patients, times_in_table
from wsi_mil.report.kinds.survival_wording import brier_words, survival_how
from wsi_mil.report.method_figures import Figure
from wsi_mil.runs import FoldKey, write_frame
from wsi_mil.statistics.intervals import percentile_interval
from wsi_mil.statistics.survival import censoring_curve, kaplan_meier

kinds = sys.modules["fabricated_kinds"]


def _folds(patients, n_folds):
    return pd.DataFrame(
        [
            {"repeat": 0, "fold": fold, "patient": patient, "part": "test" if place % n_folds == fold else "train"}
            for fold in range(n_folds)
            for place, patient in enumerate(patients)
        ]
    )


def _study(answered, *, n=40, n_folds=4, shift=0.0, seed=2, validation=()):
    generator = np.random.default_rng(seed)
    times, events = generator.exponential(20, size=n).round(1) + 1, generator.random(n) < 0.7
    risks = -np.log(times) + generator.normal(size=n)
    rows = [(f"p{i:02d}", 0, i % n_folds, 0, times[i], risks[i] + shift * (i % n_folds), events[i]) for i in range(n)]
    method = answered(rows, validation)
    table = {row[0]: (row[4], bool(row[6])) for row in rows}
    return method, followed_patients([method.test], _folds([row[0] for row in rows], n_folds), table)


def test_a_shift_of_a_fold_model_moves_the_pooled_c_index_alone_and_is_flagged(answered):
    plain, shifted = (evaluate_survival(*_study(answered, shift=shift)) for shift in (0.0, 5.0))
    assert shifted.primary.value == plain.primary.value
    assert shifted.pooled.value < plain.pooled.value - 0.05
    assert shifted.flagged
    assert shifted.primary.interval.low < shifted.primary.value < shifted.primary.interval.high


def test_wrong_pairs_and_the_c_index_are_two_views_of_one_count(answered):
    figures = evaluate_survival(*_study(answered))
    assert figures.patients.wrong.sum() / figures.patients.met.sum() == pytest.approx(1 - figures.primary.value)


def test_hand_worked_pairs(answered):
    # a (event at 1, risk 0.1), b (event at 2, risk 0.9), c (seen until 3, risk 0.5): a is wrong against both.
    rows = [("a", 0, 0, 0, 1.0, 0.1, True), ("b", 0, 0, 0, 2.0, 0.9, True), ("c", 0, 0, 0, 3.0, 0.5, False)]
    method = answered(rows)
    figures = evaluate_survival(method, followed_patients([method.test], _folds("abc", 1)))
    assert figures.patients.met.tolist() == [2, 2, 2]
    assert figures.patients.wrong.tolist() == [2, 1, 1]
    assert figures.primary.value == pytest.approx(1 / 3)


def test_groups_are_split_at_the_median_of_the_validation_risks_of_the_same_model(answered):
    held = [(f"v{i}", 0, fold, 0, 1.0, risk, True) for fold in range(4) for i, risk in enumerate((-9.0, -2.0, 5.0))]
    figures = evaluate_survival(*_study(answered, validation=held))
    assert figures.patients.high.tolist() == (figures.patients.risks > -2.0).tolist()
    assert (figures.split_by_validation, figures.splits) == (4, 4)


def test_without_validation_the_fold_s_own_median_splits(answered):
    figures = evaluate_survival(*_study(answered, shift=100.0))
    assert figures.split_by_validation == 0
    for fold in range(4):
        own = [i for i, key in enumerate(figures.rows.keys) if key.fold == fold]
        high = [figures.patients.high[figures.patients.ids.index(figures.rows.patients[i])] for i in own]
        assert sum(high) == 5


def test_the_split_looks_at_no_outcome(answered):
    method, followed = _study(answered)
    other = answered(
        [
            (p, *k, 200 - t, r, not e)
            for p, k, t, r, e in zip(
                method.test.patients,
                method.test.keys,
                method.test.truth,
                method.test.predicted,
                method.test.events,
                strict=True,
            )
        ]
    )
    before, after = evaluate_survival(method, followed), evaluate_survival(other, followed)
    assert before.patients.high.tolist() == after.patients.high.tolist()
    assert before.primary.value != after.primary.value


def test_curves_of_a_fold_come_from_its_training_patients_alone(answered):
    method, followed = _study(answered)
    test = method.test
    for key, curve in followed.censoring.items():
        kept = [i for i, own in enumerate(test.keys) if own.fold != key.fold]
        expected = censoring_curve(test.truth[kept], test.events[kept])
        np.testing.assert_array_equal(curve.survival, expected.survival)
        np.testing.assert_array_equal(curve.times, expected.times)


@pytest.fixture
def one_split(make_kinds):
    """one_split(targets) -> a run whose 30 training patients are never tested; fold 0 alone is left."""

    def make(*targets, **wishes):
        run = make_kinds(targets=targets, patients=60, n_folds=2, validation=0, signal=(("one", 2.0),), **wishes)
        folds, rows = run.folds(), run.predictions()
        write_frame(run.folds_path, folds[folds["fold"].astype(int) == 0])
        write_frame(run.predictions_path, rows[rows["fold"] == 0])
        return run

    return make


def test_training_patients_need_not_be_tested_to_tell_who_is_followed_until_when(one_split, found_of):
    run = one_split(kinds.DISCRETE)
    ((_, part),) = found_of(run).targets
    folds, cohort = run.folds(), run.cohort()
    trained = cohort[cohort["patient"].isin(folds["patient"][folds["part"] == "train"])]
    assert len(trained) == 30
    assert not set(trained["patient"]) & set(part.methods[0].patients.ids)
    expected = kaplan_meier(trained["target"].astype(float).to_numpy(), trained["value:died"].to_numpy() == "1")
    np.testing.assert_array_equal(part.followed.events[FoldKey(0, 0, 0)].survival, expected.survival)
    (method,) = part.methods
    assert all(np.isfinite(one.figure.value) for one in method.times)
    assert method.brier.figure.value < method.brier.null


def test_an_event_that_is_itself_predicted_is_read_where_its_label_stands(one_split, found_of):
    died = {"name": "died", "kind": "binary", "classes": ["no", "yes"]}
    events = [place % 3 > 0 for place in range(60)]
    times = [float(10 + place) for place in range(60)]
    truth = {
        "died": ["yes" if event else "no" for event in events],
        "months": list(zip(times, events, strict=True)),
    }
    run = one_split(died, kinds.DISCRETE, truth=truth)
    write_frame(run.cohort_path, run.cohort().drop(columns="value:died"))
    (_, (_, part)) = found_of(run).targets
    folds = run.folds()
    own = [int(patient[1:]) for patient in folds["patient"][folds["part"] == "train"]]
    expected = kaplan_meier(np.array(times)[own], np.array(events)[own])
    np.testing.assert_array_equal(part.followed.events[FoldKey(0, 0, 0)].survival, expected.survival)


def test_the_table_gives_a_patient_one_time_from_slides_that_are_used():
    rows = [
        ("a", "", "", "used"),
        ("a", "3.5", "Yes", "used"),
        ("a", "9", "0", "used"),
        ("b", "2", "1", "slide file missing"),
        ("c", "4", "0.0", "used"),
        ("d", "4", "", "used"),
    ]
    cohort = pd.DataFrame(rows, columns=["patient", "target", "value:died", "status"])
    words = {"time": "target", "event": "value:died", "source": "run/cohort.csv"}
    assert times_in_table(cohort, **words) == {"a": (3.5, True), "c": (4.0, False)}
    with pytest.raises(RunError, match=r"cohort.csv: c has no time or event in '4', 'perhaps'"):
        times_in_table(cohort.replace("0.0", "perhaps"), **words)


def test_without_a_training_patient_nothing_is_said_and_why(answered):
    method, _ = _study(answered)
    figures = evaluate_survival(method, followed_patients([method.test], _folds(method.test.patients, 4), {}))
    assert np.isnan(figures.times[0].figure.value)
    assert "repeat 0 fold 3: the time of none of the training patients is known" in figures.times[0].reason


def test_where_those_tested_are_followed_too_short_the_reason_names_them_and_no_fold(answered):
    method = answered([("a", 0, 0, 0, 2.0, 0.5, True), ("b", 0, 0, 0, 2.0, 0.1, False)])
    followed = followed_patients([method.test], _folds("ab", 1))
    assert evaluate_survival(method, followed).times[0].reason == "none of these patients was followed beyond 2"


def test_figures_stand_at_the_quartiles_of_the_times_of_the_events(answered):
    method, followed = _study(answered)
    had = method.test.truth[method.test.events]
    assert followed.times == tuple(np.quantile(had, [0.25, 0.5, 0.75]))
    figures = evaluate_survival(method, followed)
    assert [one.at for one in figures.times] == list(followed.times)
    assert all(0.5 < one.figure.value <= 1 for one in figures.times)


def _telling(method, curves, cuts):
    """The rows of a method that reads off the curve of each fold at these cuts, and says the same to everyone."""
    rows = seed_mean_answers(patient_answers(method.test)[0])
    survival = np.stack([curves[key].at(np.array(cuts)) for key in rows.keys])
    return rows.__class__(**{**rows.__dict__, "survival": survival, "cuts": np.tile(cuts, (len(rows), 1))})


def test_who_tells_everyone_the_curve_of_the_training_patients_at_four_cuts_scores_about_the_null(answered):
    method, followed = _study(answered, n=200)
    ids = tuple(sorted(set(method.test.patients)))
    last = min(curve.last for curve in followed.events.values())
    found = brier_figures(
        _telling(method, followed.events, (*followed.times, last)), ids, np.ones((3, len(ids))), followed
    )
    assert found.figure.value == pytest.approx(found.null, abs=0.003)
    assert found.end == followed.times[-1]


@pytest.mark.parametrize(
    ("external", "weights", "null", "would"),
    [
        (None, "in the training part of the same fold", "of the training part", "of the training patients would"),
        (
            External(trained_on={}, unlabelled=0, flagging=None),
            "among these patients themselves, as is usual where models come from elsewhere",
            "harder to beat than a curve of other patients",
            "of these patients, which knows what became of them, would",
        ),
    ],
    ids=["folds", "external"],
)
def test_it_is_said_whose_outcomes_make_the_weights_and_the_null(external, weights, null, would):
    design = design_of(SimpleNamespace(external=external, folds=_folds("ab", 2), config={}))
    _, at_a_time, brier, _ = survival_how(design)
    assert weights in at_a_time
    assert null in brier
    figure = Figure(value=0.2, interval=percentile_interval(np.empty(0)))
    told = BrierFigures(figure=figure, null=0.25, end=3.0, reason="")
    assert would in brier_words(SimpleNamespace(brier=told), 1, design)


def test_a_method_that_gives_a_risk_alone_has_no_brier_score(answered):
    figures = evaluate_survival(*_study(answered))
    assert np.isnan(figures.brier.figure.value)
    assert "predicts a risk" in figures.brier.reason


def test_discrete_times_are_read_and_scored_below_the_null(make_kinds, found_of):
    run = make_kinds(targets=(kinds.DISCRETE,), patients=80, signal=(("strong", 2.0),))
    ((_, part),) = found_of(run).targets
    assert part.methods[0].rows.survival.shape[1] == len(kinds.CUTS)
    assert part.methods[0].brier.figure.value < part.methods[0].brier.null


def test_kaplan_meier_of_a_group_is_that_of_its_patients(answered):
    figures = evaluate_survival(*_study(answered))
    high = figures.patients.high
    expected = kaplan_meier(figures.patients.times[high], figures.patients.events[high])
    np.testing.assert_array_equal(figures.groups[1].curve.survival, expected.survival)
    assert figures.groups[1].name == "high"


def test_a_fold_without_event_says_so_and_the_rest_stands(make_kinds, page_of):
    truth = [(float(10 + place), place // 2 % 5 != 2 and place % 4 > 0) for place in range(60)]
    run = make_kinds(targets=(kinds.TIME,), signal=(("one", 1.5),), truth={"months": truth})
    page, (chapter,) = page_of(run)
    folds = {row["fold"]: row for row in chapter.metrics["methods"]["one"]["folds"]}
    assert folds[2]["reason"] == "no event"
    assert np.isnan(folds[2]["c_index"])
    assert np.isfinite(chapter.metrics["methods"]["one"]["c_index"]["value"])
    assert "No C-index is defined in r0_f2_s0: no event, or no pair, in its test part." in page


@pytest.mark.parametrize("events", [0, 1])
def test_no_event_or_a_single_one_still_makes_a_page(make_kinds, page_of, events):
    truth = [(float(10 + place), place < events) for place in range(30)]
    run = make_kinds(targets=(kinds.DISCRETE,), patients=30, signal=(("one", 1.0),), truth={"months": truth})
    page, (chapter,) = page_of(run)
    assert f"Only {events} patients had the event" in page
    if events:
        assert 0 <= chapter.metrics["methods"]["one"]["c_index"]["value"] <= 1
    else:
        assert "No method has a defined C-index" in page
        assert "log-rank test not defined: no event was seen" in page


def test_equal_risks_are_chance_and_said(make_kinds, page_of):
    run = make_kinds(targets=(kinds.TIME,), patients=40, signal=(("one", 1.0),))
    write_frame(run.predictions_path, run.predictions().assign(risk="0.25"))
    page, (chapter,) = page_of(run)
    assert chapter.metrics["methods"]["one"]["c_index"]["value"] == 0.5
    assert "one: every patient got the same risk." in page
