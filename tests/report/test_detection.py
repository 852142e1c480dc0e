"""FROC of a run: which slides count, and what the planted lesions give."""

import json

import numpy as np

from wsi_mil.report.pointing import point
from wsi_mil.report.study import read_study
from wsi_mil.runs import FoldKey, write_frame
from wsi_mil.statistics.froc import RATES


def _annotate(run, tmp_path, slide: str, rings: list) -> None:
    """Give a slide an annotation file with these outlines."""
    path = tmp_path / "slides" / f"{slide}.geojson"
    geometry = {"type": "MultiPolygon", "coordinates": [[ring] for ring in rings]}
    path.write_text(json.dumps({"type": "FeatureCollection", "features": [{"type": "Feature", "geometry": geometry}]}))
    cohort = run.cohort()
    cohort.loc[cohort["slide"] == slide, "annotation"] = str(path)
    write_frame(run.cohort_path, cohort)


def _detection(run):
    found, failures = point(read_study(run.path))
    assert failures == []
    assert [one.detection is not None for one in found] == [one.own for one in found]
    return {one.method: one.detection for one in found if one.own}


def test_the_planted_lesions_are_found_and_normal_slides_count_among_all(make_run):
    found = _detection(make_run(patients=40, signal=(("abmil", 3.0), ("mean_pool", 0.0))))
    strong, weak = found["abmil"], found["mean_pool"]
    assert (strong.froc.n_slides, strong.froc.n_without_lesion, strong.froc.n_lesions) == (40, 20, 20)
    assert strong.negatives_are.startswith("slides of class normal without annotation")
    assert strong.froc.score > 0.9
    assert strong.froc.score > weak.froc.score + 0.2
    assert len(strong.froc.at_rates) == len(RATES)
    assert weak.interval.low < weak.froc.score < weak.interval.high


def test_false_positives_by_hand_on_one_planted_map(make_run):
    run = make_run(patients=10, n_folds=5, signal=(("acmil", 2.0),))
    for key in run.keys("acmil"):
        for path in run.scores_path("acmil", key, "any").parent.glob("*.h5"):
            scores = run.scores("acmil", key, path.stem)
            values = np.full_like(scores.values, 1e-3)
            if path.stem == "P001_S0":  # one peak in the lesion, a higher one far from it
                values[(scores.coords_l0 == (512, 640)).all(axis=1)] = 0.5
                values[(scores.coords_l0 == (1408, 1408)).all(axis=1)] = 0.9
            run.write_scores("acmil", key, type(scores)(**{**vars(scores), "values": values}))
    figures = _detection(run)["acmil"].froc
    # 10 slides; the alarm of .9 comes first, then the hit; each flat ground gives one more, at the very end
    assert figures.false_positives[:3].tolist() == [0, 0.1, 0.1]
    assert figures.sensitivity[:3].tolist() == [0, 0, 0.2]
    assert figures.false_positives[-1] == (1 + 10) / 10
    assert figures.at_rates[-1] == figures.sensitivity[-1]


def test_where_the_negative_class_is_outlined_a_slide_without_annotation_is_not_taken_for_free_of_lesions(
    make_run, tmp_path
):
    run = make_run(patients=20, signal=(("acmil", 2.0),))
    _annotate(run, tmp_path, "P000_S0", [[[0, 0], [900, 0], [900, 900], [0, 0]]])
    found = _detection(run)["acmil"]
    assert (found.froc.n_slides, found.froc.n_without_lesion, found.froc.n_lesions) == (11, 0, 11)
    assert found.negatives_are == "slides whose annotation holds no outline"


def test_an_annotation_without_outline_means_no_lesion_unless_the_label_says_otherwise(make_run, tmp_path):
    run = make_run(patients=20, signal=(("acmil", 2.0),))
    _annotate(run, tmp_path, "P000_S0", [])
    _annotate(run, tmp_path, "P001_S0", [])
    found = _detection(run)["acmil"]
    assert (found.froc.n_slides, found.froc.n_without_lesion, found.froc.n_lesions) == (19, 10, 9)


def test_with_three_classes_only_annotated_slides_count(make_run):
    found = _detection(make_run(patients=12, classes=("normal", "a", "b"), n_folds=2, signal=(("acmil", 2.0),)))
    assert (found["acmil"].froc.n_slides, found["acmil"].froc.n_without_lesion) == (8, 0)


def test_a_damaged_map_of_a_slide_without_lesion_is_told_and_costs_that_slide(make_run):
    run = make_run(patients=20, signal=(("acmil", 2.0),))
    run.scores_path("acmil", FoldKey(0, 0, 0), "P000_S0").write_bytes(b"damaged")
    found, failures = point(read_study(run.path))
    assert [failure.item for failure in failures] == ["P000_S0"]
    assert found[0].detection.froc.n_slides == 19
