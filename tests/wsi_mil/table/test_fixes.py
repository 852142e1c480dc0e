"""fixes.csv: read as a person writes it, never overwritten."""

import pytest

from wsi_mil.errors import CohortError
from wsi_mil.table.fixes import Fix, parse_mpp, read_fixes, write_fixes


def test_a_filled_file_is_read_as_it_is_meant(tmp_path):
    path = tmp_path / "fixes.csv"
    path.write_text(
        "slide;slide_mpp;exclude;reason\n0012;0,25;;\nb;0.25x0.26;no;\nc;;YES;coverslip broken\nd;;;waits\n"
    )
    fixes = read_fixes(path)
    assert [(f.slide, f.slide_mpp, f.exclude, f.decided) for f in fixes] == [
        ("0012", (0.25, 0.25), False, True),
        ("b", (0.25, 0.26), False, True),
        ("c", None, True, True),
        ("d", None, False, False),
    ]
    assert fixes[2].why == "excluded in fixes.csv, line 4: coverslip broken"


@pytest.mark.parametrize("text", ["40x", "0", "-1", "0.25x0.25x0.25", "a", "nan x 1", "250"])
def test_what_is_no_pixel_size_is_refused_with_the_place(text):
    with pytest.raises(CohortError, match="line 3: slide_mpp"):
        parse_mpp(text, where="line 3")


def test_no_pixel_size_is_none():
    assert parse_mpp(" ", where="") is parse_mpp("NA", where="") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("slide,slide_mp,exclude\na,,\n", "no column 'slide_mpp'.*Did you mean 'slide_mp'"),
        ("slide,slide_mpp,exclude\na,,maybe\n", "line 2: exclude 'maybe' is neither yes nor no"),
        ("slide,slide_mpp,exclude\na,,\nb,,\na,,yes\n", "line 4: slide 'a' stands in fixes.csv, line 2"),
        ("slide,slide_mpp,exclude\n,0.5,\n", "line 2: no slide is named"),
    ],
)
def test_cells_that_cannot_be_meant_are_refused(tmp_path, text, words):
    (tmp_path / "fixes.csv").write_text(text)
    with pytest.raises(CohortError, match=words):
        read_fixes(tmp_path / "fixes.csv")


def test_what_is_written_can_be_filled_in_and_read_again(tmp_path):
    path = write_fixes(tmp_path, [("Präparat, 1", 'no "mpp"'), ("0012", "x")], existing=None)
    assert path == tmp_path / "fixes.csv"
    assert [(f.slide, f.reason, f.decided) for f in read_fixes(path)] == [
        ("Präparat, 1", 'no "mpp"', False),
        ("0012", "x", False),
    ]


def test_an_existing_file_is_never_touched(tmp_path):
    (tmp_path / "fixes.csv").write_text("mine")
    kept = [Fix(slide="a", slide_mpp=(0.25, 0.26)), Fix(slide="b", exclude=True, reason="r"), Fix(slide="c")]
    path = write_fixes(tmp_path, [("a", "again"), ("new", "why")], existing=kept)
    assert path == tmp_path / "fixes.new.csv"
    assert (tmp_path / "fixes.csv").read_text() == "mine"
    assert [(f.slide, f.slide_mpp, f.exclude) for f in read_fixes(path)] == [
        ("a", (0.25, 0.26), False),
        ("b", None, True),
        ("c", None, False),
        ("new", None, False),
    ]


def test_nothing_new_writes_nothing(tmp_path):
    assert write_fixes(tmp_path, [("a", "again")], existing=[Fix(slide="a")]) is None
    assert not list(tmp_path.iterdir())


def test_new_rows_go_to_the_first_name_that_is_free_and_the_same_rows_to_the_same_file(tmp_path):
    kept = [Fix(slide="a")]
    first = write_fixes(tmp_path, [("b", "why")], existing=kept)
    assert write_fixes(tmp_path, [("b", "why")], existing=kept) == first
    first.write_text("slide,slide_mpp,exclude,reason\nb,,yes,mine\n")
    second = write_fixes(tmp_path, [("b", "why")], existing=kept)
    third = write_fixes(tmp_path, [("b", "why"), ("c", "why")], existing=kept)
    assert (second.name, third.name) == ("fixes.new2.csv", "fixes.new3.csv")
    assert [(f.slide, f.exclude) for f in read_fixes(first)] == [("b", True)]
    assert len(read_fixes(second)) == 2


def test_a_file_that_was_not_read_is_not_written_over(tmp_path):
    (tmp_path / "fixes.csv").write_text("mine")
    assert write_fixes(tmp_path, [("a", "why")], existing=None) == tmp_path / "fixes.new.csv"
    assert (tmp_path / "fixes.csv").read_text() == "mine"


def test_a_fix_by_whole_id_leaves_out_a_row_that_has_only_the_name_and_no_bag(tmp_path):
    from wsi_mil.cohort import CohortSpec, read_cohort

    table = tmp_path / "labels.csv"
    table.write_text("slide,patient,label\nbroken,p1,a\ngood,p2,b\n")
    (tmp_path / "fixes.csv").write_text("slide,slide_mpp,exclude,reason\nOld Archive__broken,,yes,cannot be opened\n")
    cohort = read_cohort(table, CohortSpec(), known_ids=["Old Archive__good"])
    assert [record.slide_id for record in cohort.records] == ["Old Archive__good"]
    (exclusion,) = cohort.excluded
    assert exclusion.outcome == "excluded"
    assert "cannot be opened" in exclusion.reason
