"""Localisation from stored held-out scores, and pictures that name their class."""

import dataclasses
import json

import numpy as np

from wsi_mil.heatmap import ScoreColumn
from wsi_mil.report.case_notes import pictures_note
from wsi_mil.report.evaluate import evaluate
from wsi_mil.report.pictures import worst_cases
from wsi_mil.report.pointing import NO_CUT, NO_CUT_OF_CLASSES, held_out_keys, point
from wsi_mil.report.study import read_study
from wsi_mil.runs import FoldKey, write_frame


def test_the_planted_lesion_is_found_and_chance_stands_beside_it(make_run):
    found, failures = point(read_study(make_run(patients=20).path))
    assert failures == []
    own = {one.method: one.together for one in found if one.own}
    assert own["abmil+aem"].mean_auc > 0.9 > own["mean_pool"].mean_auc > 0.55
    assert own["abmil+aem"].n_slides == 10
    assert own["abmil+aem"].prevalence == 12 / 144
    assert [one.kind for one in found if one.method == "acmil"] == ["attention", "probability"]
    assert all(one.interval.low < one.together.mean_auc < one.interval.high for one in found)


def test_annotations_from_qupath_lie_where_they_were_drawn_on_slides_with_scanned_bounds(make_run, tmp_path):
    run = make_run(patients=10, signal=(("acmil", 2.0),))
    before, _ = point(read_study(run.path))
    corner = np.array([384, 256])
    for key in run.keys("acmil"):
        for path in run.scores_path("acmil", key, "any").parent.glob("*.h5"):
            scores = run.scores("acmil", key, path.stem)
            geometry = dataclasses.replace(scores.geometry, bounds_l0=(*corner.tolist(), 1000, 1000))
            run.write_scores("acmil", key, dataclasses.replace(scores, geometry=geometry))
    for path in (tmp_path / "slides").glob("*.geojson"):
        document = json.loads(path.read_text())
        (feature,) = document["features"]
        feature["properties"]["objectType"] = "annotation"
        feature["geometry"]["coordinates"] = [
            (np.array(ring) - corner).tolist() for ring in feature["geometry"]["coordinates"]
        ]
        path.write_text(json.dumps(document))
    after, failures = point(read_study(run.path))
    assert failures == []
    assert [one.together for one in after] == [one.together for one in before]
    assert before[0].together.mean_auc > 0.9


def test_only_models_that_did_not_see_the_patient_speak(make_run):
    run = make_run(patients=20)
    study = read_study(run.path)
    seen = FoldKey(0, 1, 0)  # P001 is tested in fold 0, so the model of fold 1 was trained on it
    run.write_scores("acmil", seen, run.scores("acmil", FoldKey(0, 0, 0), "P001_S0"))
    assert run.score_keys("acmil", "P001_S0") == [FoldKey(0, 0, 0), seen]
    assert held_out_keys(study, "acmil", "P001_S0", "P001") == [FoldKey(0, 0, 0)]


def test_a_missing_annotation_and_a_damaged_score_file_cost_one_slide_each(make_run, tmp_path):
    run = make_run(patients=20)
    (tmp_path / "slides" / "P001_S0.geojson").unlink()
    run.scores_path("acmil", FoldKey(0, 1, 0), "P003_S0").write_bytes(b"damaged")
    found, failures = point(read_study(run.path))
    assert {failure.item for failure in failures} == {"P001_S0", "P003_S0"}
    slides = {one.method: one.together.n_slides for one in found if one.own}
    assert slides == {"mean_pool": 9, "abmil+aem": 9, "acmil": 8}


def test_attention_is_compared_between_slides_as_lift(make_run):
    run = make_run(patients=10, signal=(("acmil", 2.0),))
    scores = run.scores("acmil", FoldKey(0, 0, 0), "P001_S0")
    before = point(read_study(run.path))[0][0].together.pooled_auc
    run.write_scores("acmil", FoldKey(0, 0, 0), dataclasses.replace(scores, values=scores.values * np.float32(1e-3)))
    after = point(read_study(run.path))[0][0].together.pooled_auc
    assert abs(after - before) < 1e-3


def test_dice_cuts_the_tile_probability_where_the_model_cuts_its_patients(make_run):
    run = make_run(patients=20, signal=(("acmil", 2.0),))
    attention, probability = point(read_study(run.path))[0]
    assert (attention.overlap.figures, attention.overlap.cut) == (None, NO_CUT)
    assert probability.overlap.cut.startswith("0.5, since validation holds")
    one = next(slide for slide in probability.slides if slide.slide == "P001_S0")
    scores = run.scores("acmil", FoldKey(0, 0, 0), "P001_S0")
    inside = ((scores.coords_l0 >= (384, 512)) & (scores.coords_l0 < (896, 896))).all(axis=1)
    called = scores.column("probability:tumour") >= 0.5
    assert one.cut == 0.5
    assert one.dice == 2 * (inside & called).sum() / (inside.sum() + called.sum()) > 0.3
    figures = probability.overlap.figures
    assert figures.mean == np.mean([slide.dice for slide in probability.slides])
    assert probability.overlap.interval.low < figures.mean < probability.overlap.interval.high


def test_the_cut_of_dice_comes_from_validation_and_test_rows_have_no_say(make_run):
    run = make_run(patients=40, validation=24, signal=(("acmil", 2.0),))
    before = point(read_study(run.path))[0][1]
    assert before.overlap.cut == "Youden point of the validation part"
    predictions = run.predictions()
    predictions["prob_tumour"] = predictions["prob_tumour"] / 2
    predictions["prob_normal"] = 1 - predictions["prob_tumour"]
    write_frame(run.predictions_path, predictions)
    after = point(read_study(run.path))[0][1]
    assert [slide.cut for slide in after.slides] == [slide.cut for slide in before.slides]
    validation = run.validation("acmil", FoldKey(0, 0, 0))
    validation["prob_tumour"] = validation["prob_tumour"] / 2
    validation["prob_normal"] = 1 - validation["prob_tumour"]
    write_frame(run.validation_path("acmil", FoldKey(0, 0, 0)), validation)
    moved = {slide.slide: slide.cut for slide in point(read_study(run.path))[0][1].slides}
    changed = {slide.slide for slide in before.slides if moved[slide.slide] != slide.cut}
    folds = run.folds()
    tested = set(folds["patient"][(folds["fold"] == 0) & (folds["part"] == "test")])
    assert changed
    assert {slide.removesuffix("_S0") for slide in changed} <= tested


def test_there_is_no_dice_of_three_classes(make_run):
    run = make_run(patients=12, classes=("normal", "a", "b"), n_folds=2, signal=(("acmil", 2.0),))
    found, failures = point(read_study(run.path))
    assert failures == []
    assert {one.kind: one.overlap.cut for one in found} == {"attention": NO_CUT, "probability": NO_CUT_OF_CLASSES}


def test_a_heat_map_of_classes_shows_the_predicted_one_and_says_so(make_run):
    run = make_run(patients=12, signal=(("clam_mb", 1.0),), n_folds=3)
    study = read_study(run.path)
    columns = (
        ScoreColumn(name="attention:normal", kind="attention", label="normal"),
        ScoreColumn(name="attention:tumour", kind="attention", label="tumour"),
    )
    for key in run.keys("clam_mb"):
        for slide in study.used["slide"]:
            if key in run.score_keys("clam_mb", slide):
                scores = run.scores("clam_mb", key, slide)
                run.write_scores("clam_mb", key, dataclasses.replace(scores, columns=columns))
    figures = evaluate(study.methods[0])
    cases, _ = worst_cases(study, figures, slides_root=None)
    for case in (one for one in cases if one.picture):
        decided = study.classes[figures.patients.decisions[case.place]]
        assert f"Class shown: {decided}." in case.picture.caption
        assert case.picture.heatmap.startswith("data:image/jpeg;base64,")
        assert not case.picture.thumbnail
    assert "The slide files are not reachable" in pictures_note(cases, external=False)


def test_errors_are_sorted_by_loss(make_run):
    study = read_study(make_run(patients=20, scores=False).path)
    figures = evaluate(study.methods[0])
    cases, _ = worst_cases(study, figures, slides_root=None)
    losses = [figures.patients.losses[case.place] for case in cases]
    assert losses == sorted(figures.patients.losses, reverse=True)[: len(cases)]
    assert sum(case.picture is not None for case in cases) == 4
