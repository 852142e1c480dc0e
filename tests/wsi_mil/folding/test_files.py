"""Folds of other tools mean the same patients here, and whatever does not fit the cohort is refused with its names."""

import json
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from wsi_mil.cohort import folds_for
from wsi_mil.errors import CohortError, ConfigError
from wsi_mil.folding.files import ValidationDraw, folds_of_splits
from wsi_mil.folding.forms import Split, splits_of_frame
from wsi_mil.splits import Fold, FoldSpec, fold_notes, folds_to_frame, make_folds

PATIENTS = [f"{i:02d}" for i in range(12)]
CLASSES = {patient: {"xy"[i % 2]} for i, patient in enumerate(PATIENTS)}
SLIDES = {f"{patient}_{letter}": patient for patient in PATIENTS for letter in "ab"}


def of(fold: Fold) -> tuple[list[str], list[str], list[str]]:
    return list(fold.train), list(fold.validation), list(fold.test)


def clam(path: Path, train: list[str], val: list[str], test: list[str]) -> None:
    """As CLAM writes it: an index without a name, columns of unequal length."""
    columns = {"train": train, "val": val, "test": test}
    pd.DataFrame({name: pd.Series(cells, dtype=str) for name, cells in columns.items()}).to_csv(path)


def slides_of(patients: list[str], letters: str = "ab") -> list[str]:
    return [f"{patient}_{letter}" for patient in patients for letter in letters]


def read(path: Path, **options: object) -> list[Fold]:
    settings = {"allow_absent_class": True} | {k: options.pop(k) for k in ("validation", "seed") if k in options}
    spec = FoldSpec(file=path, **settings)  # type: ignore[arg-type]
    return folds_for(spec, CLASSES, **({"slides": SLIDES} | options))  # type: ignore[arg-type]


def test_a_folder_of_clam_splits_that_overlap_is_a_repeat_a_file_in_the_order_of_their_numbers(tmp_path):
    for i in (10, 2, 0):
        test = PATIENTS[: 2 + i // 2]
        clam(
            tmp_path / f"splits_{i}.csv",
            slides_of(PATIENTS[len(test) + 2 :]),
            slides_of(PATIENTS[len(test) :][:2]),
            slides_of(test),
        )
        (tmp_path / f"splits_{i}_bool.csv").write_text(",train,val,test\n00_a,True,False,False\n")
        (tmp_path / f"splits_{i}_descriptor.csv").write_text(",train,val,test\nx,5,5,5\n")
    folds = read(tmp_path)
    assert [(f.repeat, f.fold, len(f.test), len(f.validation)) for f in folds] == [
        (0, 0, 2, 2),
        (1, 0, 3, 2),
        (2, 0, 7, 2),
    ]
    assert of(folds[0]) == (PATIENTS[4:], PATIENTS[2:4], PATIENTS[:2])
    (tested, never) = fold_notes(folds, CLASSES)
    assert "3 folds test patients 1 to 3 times each" in tested
    assert "5 of 12 patients are never tested: 07, 08, 09, 10, 11" in never


def test_clam_splits_whose_test_parts_do_not_overlap_are_folds_of_one_repeat(tmp_path):
    for i in range(3):
        test = PATIENTS[4 * i : 4 * i + 4]
        rest = [p for p in PATIENTS if p not in test]
        clam(tmp_path / f"splits_{i}.csv", slides_of(rest[2:]), slides_of(rest[:2]), slides_of(test))
    folds = read(tmp_path)
    assert [(f.repeat, f.fold) for f in folds] == [(0, 0), (0, 1), (0, 2)]
    assert fold_notes(folds, CLASSES) == ()
    assert of(read(tmp_path / "splits_1.csv")[0]) == of(folds[1])


def test_a_slide_that_the_file_does_not_name_goes_with_its_patient_and_case_ids_do_as_well(tmp_path):
    for letters in ("a", ""):
        names = [slides_of(part, letters) if letters else part for part in (PATIENTS[4:], PATIENTS[2:4], PATIENTS[:2])]
        clam(tmp_path / "splits_0.csv", *names)
        assert of(read(tmp_path / "splits_0.csv")[0]) == (PATIENTS[4:], PATIENTS[2:4], PATIENTS[:2])


def test_a_patient_whose_slides_lie_in_two_parts_is_refused_with_the_slides(tmp_path):
    clam(tmp_path / "splits_0.csv", [*slides_of(PATIENTS[4:]), "00_a"], slides_of(PATIENTS[2:4]), ["00_b", "01_a"])
    with pytest.raises(CohortError, match=r"splits_0.csv, splits_0: 1 patients .* 00 \(00_a in train, 00_b in test\)"):
        read(tmp_path / "splits_0.csv")


def test_names_that_nobody_knows_are_refused_with_what_is_spelled_alike_unless_the_study_left_them_out(tmp_path):
    clam(tmp_path / "s0.csv", [*slides_of(PATIENTS[3:]), "01-A", "gone"], ["02_a"], ["00_a"])
    with pytest.raises(
        CohortError, match=r"2 of its 22 names are not in this cohort.*: 01-A, gone\..*'01_a' for '01-A'"
    ):
        read(tmp_path / "s0.csv")
    clam(tmp_path / "s0.csv", [*slides_of(PATIENTS[3:]), "01_a.svs", "gone"], ["02_a"], ["00_a"])
    assert of(read(tmp_path / "s0.csv", left_out=["old/gone.svs"])[0])[0] == ["01", *PATIENTS[3:]]


def test_a_patient_that_the_file_forgets_is_refused_but_one_fold_may_leave_it_out(tmp_path):
    clam(tmp_path / "s0.csv", slides_of(PATIENTS[4:]), ["03_a"], ["00_a"])
    with pytest.raises(CohortError, match="2 of 12 patients are of the cohort in no part: 01, 02"):
        read(tmp_path / "s0.csv")
    clam(tmp_path / "s1.csv", slides_of(PATIENTS[4:]), ["02_a"], ["01_a"])
    assert "2 of 2 folds leave patients out of all their parts, 2 at most" in fold_notes(read(tmp_path), CLASSES)[1]


def test_stamp_splits_are_of_patients_and_the_validation_part_is_drawn_from_training(tmp_path):
    parts = [PATIENTS[:6], PATIENTS[6:]]
    said = {"splits": [{"train_patients": parts[1 - i], "test_patients": parts[i]} for i in range(2)]}
    (tmp_path / "splits.json").write_text(json.dumps(said))
    folds = read(tmp_path / "splits.json", validation=0.34)
    assert [(f.repeat, f.fold, list(f.test)) for f in folds] == [(0, 0, parts[0]), (0, 1, parts[1])]
    for i, fold in enumerate(folds):
        assert sorted(fold.train + fold.validation) == parts[1 - i]
        assert Counter(min(CLASSES[p]) for p in fold.validation) == {"x": 1, "y": 1}
    assert read(tmp_path / "splits.json", validation=0.34) == folds
    drawn = {read(tmp_path / "splits.json", validation=0.34, seed=seed)[0].validation for seed in range(6)}
    assert len(drawn) > 1
    assert not any(fold.validation for fold in read(tmp_path / "splits.json", validation=0.0))


def test_the_table_of_patho_bench_is_read_with_ids_as_text_and_with_its_own_validation_where_it_has_one(tmp_path):
    rows = ["case_id\tslide_id\tgrade\tfold_0\tfold_10\tfold_9"]
    for i, patient in enumerate(PATIENTS):
        for letter in "ab":
            where = ["test" if i % 3 == k else "train" for k in range(3)]
            rows.append("\t".join([patient, f"{patient}_{letter}", "1", where[0], where[1], where[2]]))
    path = tmp_path / "k=all.tsv"
    path.write_text("\n".join(rows))
    folds = read(path)
    assert [list(f.test) for f in folds] == [PATIENTS[0::3], PATIENTS[2::3], PATIENTS[1::3]]
    assert all(len(f.validation) == 2 for f in folds)
    frame = pd.read_csv(path, sep="\t", dtype=str)
    frame.loc[frame["case_id"] == "01", "fold_0"] = "val"
    frame.drop(columns="case_id").to_csv(tmp_path / "slides.csv", index=False)
    assert [list(f.validation) for f in read(tmp_path / "slides.csv")] == [["01"], [], []]
    frame.loc[frame["slide_id"] == "01_b", "fold_0"] = "holdout"
    with pytest.raises(CohortError, match=r"'?holdout'? in the columns of folds is none of train"):
        splits_of_frame(frame, "k=all.tsv")


def test_sites_stay_whole_in_the_validation_part_that_is_drawn():
    sites = {patient: "UVW"[i // 4] for i, patient in enumerate(PATIENTS)}
    split = Split(name="0", of="patient", train=tuple(PATIENTS[4:]), validation=None, test=tuple(PATIENTS[:4]))
    draw = ValidationDraw(fraction=0.3, sites=sites)
    (fold,) = folds_of_splits([split], CLASSES, where="f", slides={}, validation=draw)
    assert {sites[p] for p in fold.validation}.isdisjoint({sites[p] for p in fold.train})
    assert len(fold.validation) == 4


def test_the_folds_of_a_run_on_such_splits_are_read_back_as_they_are(tmp_path):
    for i in range(3):
        clam(
            tmp_path / f"splits_{i}.csv",
            slides_of(PATIENTS[4:]),
            slides_of(PATIENTS[i + 1 : 4]),
            slides_of(PATIENTS[: i + 1]),
        )
    folds = read(tmp_path)
    folds_to_frame(folds).to_csv(tmp_path / "folds.csv", index=False)
    assert read(tmp_path / "folds.csv") == folds


def test_an_unknown_form_is_refused_with_the_known_ones(tmp_path):
    path = tmp_path / "folds.csv"
    path.write_text("id,group\n00,1\n")
    with pytest.raises(
        CohortError, match=r"(?s)its columns are id, group.*folds.csv of a run.*CLAM.*STAMP.*Patho-Bench"
    ):
        read(path)
    path.write_text(",train,val\n0,00_a,01_a\n")
    with pytest.raises(CohortError, match="A column test is missing; if the part val is the one to be tested"):
        read(path)
    path.write_text(",train,val,test\n00_a,True,False,False\n")
    with pytest.raises(CohortError, match="holds true and false, not slides"):
        read(path)
    with pytest.raises(CohortError, match=r"no splits_0.csv, splits_1.csv ... in this folder"):
        read(tmp_path)
    json_path = tmp_path / "splits.json"
    for text, words in [("[", "no JSON"), ('{"folds": 3}', "its columns are folds"), ("[]", "none of the known forms")]:
        json_path.write_text(text)
        with pytest.raises(CohortError, match=words):
            read(json_path)
    json_path.write_text('{"splits": [{"train_patients": "00", "test_patients": ["01"]}]}')
    with pytest.raises(CohortError, match="split 0: train_patients and test_patients must both be lists"):
        read(json_path)
    with pytest.raises(CohortError, match="no such file"):
        read(tmp_path / "none.json")


def test_a_file_and_leaving_sites_out_cannot_both_be_meant(tmp_path):
    folds_to_frame(make_folds(CLASSES, n_folds=2)).to_csv(tmp_path / "folds.csv", index=False)
    spec = FoldSpec(file=tmp_path / "folds.csv", leave_one_site_out=True)
    with pytest.raises(ConfigError, match="give one of them"):
        folds_for(spec, CLASSES, sites=dict.fromkeys(PATIENTS, "U"))


def test_a_patient_tested_twice_in_one_repeat_of_a_file_is_refused(tmp_path):
    frame = folds_to_frame(make_folds(CLASSES, n_folds=3))
    frame.loc[(frame["fold"] == 1) & (frame["part"] != "test"), "part"] = "train"
    patient = frame["patient"][(frame["fold"] == 0) & (frame["part"] == "test")].iloc[0]
    frame.loc[(frame["fold"] == 1) & (frame["patient"] == patient), "part"] = "test"
    frame.to_csv(tmp_path / "folds.csv", index=False)
    with pytest.raises(CohortError, match=f"tested once at most, but these are not: {patient}"):
        read(tmp_path / "folds.csv")


def test_a_file_for_a_target_of_numbers_may_train_without_a_stratum_but_not_without_an_essential_one(tmp_path):
    strata = {patient: {"low" if patient < "06" else "high"} for patient in PATIENTS}
    said = {"splits": [{"train_patients": PATIENTS[:6], "test_patients": PATIENTS[6:]}]}
    (tmp_path / "splits.json").write_text(json.dumps(said))
    spec = FoldSpec(file=tmp_path / "splits.json")
    (fold,) = folds_for(spec, strata, essential=())
    assert list(fold.test) == PATIENTS[6:]
    with pytest.raises(CohortError, match="the train part has no patient of class high"):
        folds_for(spec, strata)
