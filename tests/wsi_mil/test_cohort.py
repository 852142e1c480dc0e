"""A cohort is read once: every row is accounted for, what is wrong is said all at once, and nothing is guessed."""

import time
from pathlib import Path

import pytest

from tiling.discovery import SlideSource
from wsi_mil.cohort import (
    CohortSpec,
    Exclusion,
    SlideRecord,
    find_sources,
    folds_for,
    labels_of_patients,
    read_cohort,
    sites_of_patients,
)
from wsi_mil.errors import CohortError, ConfigError
from wsi_mil.splits import FoldSpec, folds_to_frame, make_folds

PLAIN = CohortSpec()


def table(folder: Path, text: str, name: str = "cohort.csv") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def slides(folder: Path, *names: str) -> Path:
    root = folder / "slides"
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def test_a_row_becomes_a_record_with_everything_the_table_says(tmp_path):
    root = slides(tmp_path, "a/0012.svs")
    (tmp_path / "mask.png").touch()
    (root / "a" / "outline.geojson").touch()
    path = table(
        tmp_path,
        "slide,patient,site,slide_mpp,mask,annotation,label,grade\n"
        "0012.svs, 007 ,Ulm,0.25x0.26,mask.png,a/outline.geojson,tumour,NA\n",
    )
    cohort = read_cohort(path, PLAIN, slides=root)
    assert cohort.records == (
        SlideRecord(
            slide_id="a__0012",
            patient="007",
            site="Ulm",
            values={"label": "tumour", "grade": None},
            path=root / "a" / "0012.svs",
            slide_mpp=(0.25, 0.26),
            mask=tmp_path / "mask.png",
            annotation=root / "a" / "outline.geojson",
        ),
    )
    assert cohort.sources == (
        SlideSource(slide_id="a__0012", path=root / "a/0012.svs", slide_mpp=(0.25, 0.26), mask=tmp_path / "mask.png"),
    )


def test_every_row_and_slide_is_counted_and_named(tmp_path):
    root = slides(tmp_path, "a.svs", "b.svs", "c.svs", "extra.svs")
    table(tmp_path, "slide,slide_mpp,exclude,reason\nc,,yes,pen\n", "fixes.csv")
    path = table(tmp_path, "slide,patient,label\na,1,x\nb.svs,1,\nc,2,y\ngone,3,y\n")
    cohort = read_cohort(path, PLAIN, slides=root)
    assert cohort.counts == {
        "rows": 4,
        "matched": 3,
        "missing": 1,
        "excluded": 1,
        "extra": 1,
        "unlabelled": 1,
        "patients": 1,
        "sites": 0,
    }
    assert cohort.excluded == (
        Exclusion(item="c", reason="excluded in fixes.csv, line 2: pen"),
        Exclusion(item="gone", reason="line 5: there is no slide 'gone'.", outcome="missing", values={"label": "y"}),
    )
    assert cohort.extra == ("extra",)
    told = "\n".join(cohort.warnings)
    for words in (
        "fixes.csv beside the table is honoured",
        "no slide 'gone'",
        "1 slides have no row in the table: extra",
    ):
        assert words in told


def test_columns_can_be_mapped_and_one_patient_a_slide_must_be_asked_for(tmp_path):
    path = table(tmp_path, "FILENAME,Diagnosis\na.svs,x\nb.svs,y\n")
    spec = CohortSpec(columns={"slide": "FILENAME", "patient": "FILENAME", "label": "Diagnosis"})
    records = read_cohort(path, spec, known_ids=["a", "b"]).records
    assert [(r.slide_id, r.patient, r.values) for r in records] == [
        ("a", "a.svs", {"label": "x"}),
        ("b", "b.svs", {"label": "y"}),
    ]
    with pytest.raises(CohortError, match=r"no column 'slide'.*Columns: FILENAME, Diagnosis"):
        read_cohort(path, PLAIN)
    with pytest.raises(CohortError, match=r"no column 'patient'.*mapping patient to the slide column"):
        read_cohort(path, CohortSpec(columns={"slide": "FILENAME"}))


def test_patients_are_found_in_names_by_preset_or_expression(tmp_path):
    path = table(tmp_path, "slide\nsub/TCGA-AB-1234-01Z-00-DX1.svs\nTCGA-AB-1234-01Z-00-DX2.svs\n")
    for regex in ("tcga", r"(TCGA-..-....)-\d"):
        records = read_cohort(path, CohortSpec(patient_regex=regex)).records
        assert [r.patient for r in records] == ["TCGA-AB-1234"] * 2
    with pytest.raises(CohortError, match="line 3: patient_regex 'DX1' finds no patient"):
        read_cohort(path, CohortSpec(patient_regex="DX1"))
    with pytest.raises(ConfigError, match="no regular expression"):
        read_cohort(path, CohortSpec(patient_regex="(tcg"))


def test_a_patient_column_wins_over_the_expression_and_that_is_told(tmp_path):
    path = table(tmp_path, "slide,patient\na1,p\n")
    cohort = read_cohort(path, CohortSpec(patient_regex="tcga"))
    assert cohort.records[0].patient == "p"
    assert "patient_regex is not used" in cohort.warnings[0]


def test_all_that_is_wrong_is_said_at_once_with_its_lines(tmp_path):
    root = slides(tmp_path, "x/a.svs", "y/a.svs", "b.svs", "c.svs", "d.svs", "e.svs")
    path = table(
        tmp_path,
        "slide,patient,label,slide_mpp,mask\n"
        "a,1,x,,\nb,1,x,,\nb.svs,2,y,,\nc,,x,,\n,3,x,,\nd,4,x,40x,\ne,5,x,,no.png\n",
    )
    with pytest.raises(CohortError) as error:
        read_cohort(path, PLAIN, slides=root)
    for words in (
        "line 2: 'a' can mean 'x__a' or 'y__a'",
        "lines 3 and 4: both are slide 'b'; they differ in patient '1' and '2', label 'x' and 'y'",
        "line 5: slide 'c' has no patient",
        "line 6: no slide is named",
        "line 7: slide 'd': slide_mpp '40x' is no pixel size",
        "line 8: the mask 'no.png' of slide 'e' is not there",
    ):
        assert words in str(error.value)


def test_a_name_at_the_root_and_below_are_two_slides_when_both_have_a_row_and_a_question_when_not(tmp_path):
    root = slides(tmp_path, "a.svs", "deep/a.svs")
    both = read_cohort(table(tmp_path, "slide,patient\na.svs,1\ndeep/a.svs,2\n"), PLAIN, slides=root)
    assert [(r.slide_id, r.patient) for r in both.records] == [("a", "1"), ("deep__a", "2")]
    with pytest.raises(CohortError, match=r"'a\.svs' can mean 'a' or 'deep__a'"):
        read_cohort(table(tmp_path, "slide,patient\na.svs,1\n"), PLAIN, slides=root)


def test_equal_rows_are_refused_too(tmp_path):
    with pytest.raises(CohortError, match="lines 2 and 3: both are slide 'a'; they are equal"):
        read_cohort(table(tmp_path, "slide,patient\na,1\na.svs,1\n"), PLAIN, known_ids=["a"])


def test_without_slides_a_mask_that_is_elsewhere_is_only_told(tmp_path):
    cohort = read_cohort(table(tmp_path, "slide,patient,mask,annotation\na,1,m.png,o.json\n"), PLAIN, known_ids=["a"])
    assert (cohort.records[0].mask, cohort.records[0].annotation) == (None, None)
    assert "the mask 'm.png'" in cohort.warnings[0]
    assert "the annotation 'o.json'" in cohort.warnings[1]


def test_lost_zeros_are_proposed_in_the_exclusion_and_never_applied(tmp_path):
    path = table(tmp_path, "slide,patient\n12,1\n7,2\n")
    cohort = read_cohort(path, PLAIN, known_ids=["0012", "7"])
    assert [r.slide_id for r in cohort.records] == ["7"]
    assert "Is it '0012'?" in cohort.excluded[0].reason
    with pytest.raises(CohortError, match=r"(?s)none of its 2 rows can be used.*Is it '0012'"):
        read_cohort(path, PLAIN, known_ids=["0012", "007"])


def test_fixes_exclude_a_missing_slide_mend_pixel_sizes_and_unknown_ones_are_told(tmp_path):
    root = slides(tmp_path, "a.svs", "deep/b.svs")
    fixes = table(
        tmp_path, "slide,slide_mpp,exclude,reason\nb.svs,0.5,,\ngone.svs,,x,lost\naa,,yes,\n0a,,,\n", "decisions.csv"
    )
    path = table(tmp_path, "slide,patient,slide_mpp\na,1,0.25\ndeep/b,2,0.25\ngone,3,\n")
    cohort = read_cohort(path, CohortSpec(fixes=fixes), slides=root)
    assert [r.slide_mpp for r in cohort.records] == [(0.25, 0.25), (0.5, 0.5)]
    assert cohort.excluded == (Exclusion(item="gone", reason="excluded in decisions.csv, line 3: lost"),)
    assert "decisions.csv, line 4: there is no slide 'aa'" in "\n".join(cohort.warnings)


def test_sources_are_the_rows_of_the_table_or_the_whole_folder_with_fixes_either_way(tmp_path):
    root = slides(tmp_path, "a.svs", "b.svs", "c.svs")
    (root / "dangling.svs").symlink_to("nowhere.svs")
    fixes = CohortSpec(fixes=table(tmp_path, "slide,slide_mpp,exclude\na,0.3,\nb,,yes\nzzz,,yes\n", "f.csv"))
    sources, excluded, problems = find_sources(root, None, fixes)
    assert [(s.slide_id, s.slide_mpp) for s in sources] == [("a", (0.3, 0.3)), ("c", None)]
    assert [e.item for e in excluded] == ["b"]
    assert [item for item, _ in problems] == ["dangling.svs", "fixes"]
    path = table(tmp_path, "slide,patient\na,1\nb,1\ndangling,2\n")
    sources, excluded, problems = find_sources(root, path, fixes)
    assert [(s.slide_id, s.slide_mpp) for s in sources] == [("a", (0.3, 0.3))]
    assert [(e.item, e.outcome) for e in excluded] == [("b", "excluded"), ("dangling", "missing")]
    assert "dangling.svs:" in excluded[1].reason
    assert [item for item, _ in problems] == ["dangling.svs", "fixes"]


def record(slide: str, patient: str, *, label: str | None = None, site: str | None = None) -> SlideRecord:
    return SlideRecord(slide_id=slide, patient=patient, site=site, values={"label": label})


def test_labels_of_patients_leave_out_what_is_not_known():
    records = [record("a", "1", label="x"), record("b", "1", label="y"), record("c", "2"), record("d", "3", label="x")]
    assert labels_of_patients(records, "label") == {"1": {"x", "y"}, "3": {"x"}}


def test_sites_of_patients_are_one_each():
    assert sites_of_patients([record("a", "1", site="U"), record("b", "1"), record("c", "2", site="V")]) == {
        "1": "U",
        "2": "V",
    }
    with pytest.raises(CohortError, match="1 patients have no site: 2"):
        sites_of_patients([record("a", "1", site="U"), record("b", "2")])
    with pytest.raises(CohortError, match="patient '1' is in several sites: U, V"):
        sites_of_patients([record("a", "1", site="U"), record("b", "1", site="V")])


def test_folds_come_from_the_spec_or_from_the_file_of_a_former_run(tmp_path):
    classes_of = {f"{i:02d}": {"xy"[i % 2]} for i in range(20)}
    labels = {patient: min(found) for patient, found in classes_of.items()}
    spec = FoldSpec(n_folds=4, seed=5, repeats=2)
    folds = folds_for(spec, classes_of)
    assert folds == make_folds(labels, n_folds=4, seed=5, repeats=2)
    sites = {patient: str(i // 4) for i, patient in enumerate(labels)}
    assert folds_for(FoldSpec(by_site=True), classes_of, sites=sites) == make_folds(labels, sites=sites)
    left_out = folds_for(FoldSpec(leave_one_site_out=True), classes_of, sites=sites)
    assert [{sites[p] for p in fold.test} for fold in left_out] == [{str(i)} for i in range(5)]
    for by_site in (FoldSpec(by_site=True), FoldSpec(leave_one_site_out=True)):
        with pytest.raises(ValueError, match="by site need the sites"):
            folds_for(by_site, classes_of)
    folds_to_frame(folds).to_csv(tmp_path / "folds.csv", index=False)
    assert folds_for(FoldSpec(file=tmp_path / "folds.csv"), classes_of) == folds
    with pytest.raises(CohortError, match="of the cohort in no part: 99"):
        folds_for(FoldSpec(file=tmp_path / "folds.csv"), classes_of | {"99": {"x"}})


def test_a_table_without_a_row_is_refused(tmp_path):
    with pytest.raises(CohortError, match=r"slide, patient, label, but no row"):
        read_cohort(table(tmp_path, "slide,patient,label\n"), PLAIN)


def test_patients_that_may_be_one_are_told(tmp_path):
    cohort = read_cohort(table(tmp_path, "slide,patient\na,P1\nb,p 1\nc,P2\n"), PLAIN)
    (warning,) = [text for text in cohort.warnings if "held for different" in text]
    assert "'P1' and 'p 1'" in warning


def test_a_large_cohort_under_other_names_is_answered_soon(tmp_path):
    rows = "".join(f"S-{i:05d}_h,p{i}\n" for i in range(4000))
    path = table(tmp_path, "slide,patient\nS-1,p\n" + rows)
    began = time.monotonic()
    with pytest.raises(CohortError, match=r"(?s)none of its 4001 rows.*Did you mean"):
        read_cohort(path, PLAIN, known_ids=[f"S-{i:05d}" for i in range(4000)])
    assert time.monotonic() - began < 15


def test_folds_from_a_file_must_keep_what_the_spec_says(tmp_path):
    classes_of = {f"{i:02d}": {"y" if i < 3 else "x"} for i in range(20)}
    folds = make_folds(classes_of, n_folds=4, allow_absent_class=True)
    path = tmp_path / "folds.csv"
    folds_to_frame(folds).to_csv(path, index=False)
    with pytest.raises(CohortError, match=r"test part has no patient of class y.*allow_absent_class true"):
        folds_for(FoldSpec(file=path), classes_of)
    assert folds_for(FoldSpec(file=path, allow_absent_class=True), classes_of) == folds
    sites = {patient: str(i % 5) for i, patient in enumerate(classes_of)}
    with pytest.raises(CohortError, match=r"patients of site .* are in the test part and outside it"):
        folds_for(FoldSpec(file=path, allow_absent_class=True, by_site=True), classes_of, sites=sites)
    whole = make_folds(classes_of, n_folds=4, sites=sites, allow_absent_class=True)
    folds_to_frame(whole).to_csv(path, index=False)
    assert folds_for(FoldSpec(file=path, allow_absent_class=True, by_site=True), classes_of, sites=sites) == whole
