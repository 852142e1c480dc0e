"""What a table row means: a path, a relative path, a file name or a bare name; never a guess."""

from pathlib import Path

import pytest

from tiling.discovery import SlideSource, slide_id_of
from wsi_mil.table.matching import SlideIndex, index_ids, index_sources

ROOT = Path("/data/slides")


def index(*relative: str) -> SlideIndex:
    paths = [ROOT / name for name in relative]
    return index_sources([SlideSource(slide_id=slide_id_of(p.relative_to(ROOT)), path=p) for p in paths], ROOT)


@pytest.mark.parametrize(
    "text",
    [
        "/data/slides/b/c.SVS",
        "b/c.SVS",
        "b/c.svs",
        "b/c",
        "c.SVS",
        "c",
        "b__c",
        "/old/share/b/c.svs",
        r"D:\old\b\c.svs",
        " c ",
    ],
)
def test_a_slide_is_found_by_every_way_to_name_it(text):
    assert index("b/c.SVS", "a.tif", "x/cc.svs").find(text).hits == ("b__c",)


def test_a_file_of_the_same_name_in_another_folder_is_not_meant():
    assert index("p2/slide.svs").find("p1/slide.svs").hits == ()


def test_two_slides_of_one_name_are_both_named():
    match = index("x/a.svs", "y/a.svs").find("a.svs")
    assert match.hits == ("x__a", "y__a")
    assert match.exact is None


def test_the_whole_relative_path_is_exact_even_if_a_deeper_file_shares_the_name():
    match = index("a.svs", "y/a.svs").find("a.svs")
    assert (match.hits, match.exact) == (("a", "y__a"), "a")


def test_the_longest_tail_of_a_foreign_path_wins():
    assert index("c.svs", "b/c.svs").find("/old/b/c.svs").hits == ("b__c",)


@pytest.mark.parametrize(
    "name", ["S01.block1", "S01.v2.0", "  leading and trailing  ", "-dash", "[glob]*?", "切片 #1 %23"]
)
def test_names_are_kept_whole_with_and_without_suffix(name):
    both = index(f"{name}.tif", "S01.tif", "S01.v2.tif")
    assert both.find(f"{name}.tif").hits == both.find(name).hits == (name,)


@pytest.mark.parametrize("text", ["case1", "study/case1", "case1/IM7.dcm", "IM7", "study__case1__IM7"])
def test_a_dicom_series_is_also_meant_by_the_folder_it_is_alone_in(text):
    assert index("study/case1/IM7.dcm", "two/a.dcm", "two/b.dcm", "case2/x.svs").find(text).hits == (
        "study__case1__IM7",
    )


@pytest.mark.parametrize("text", ["two", "case2"])
def test_no_other_slide_is_meant_by_its_folder(text):
    assert index("two/a.dcm", "two/b.dcm", "case2/x.svs").find(text).hits == ()


def test_bags_are_found_by_id_and_by_name_with_any_suffix():
    bags = index_ids(["s00", "deep__s01", "0012", "12e3"])
    assert [bags.find(t).hits for t in ("s00.svs", "s01.SVS", "deep/s01.tif", "deep__s01")] == [
        ("s00",),
        *[("deep__s01",)] * 3,
    ]


@pytest.mark.parametrize(("text", "alike"), [("12", "0012"), ("12.0", "0012"), ("12000", "12e3"), ("1.20E+04", "12e3")])
def test_a_number_that_a_spreadsheet_changed_is_proposed_and_not_taken(text, alike):
    match = index_ids(["0012", "12e3", "1_000"]).find(text)
    assert (match.hits, match.proposals) == ((), (alike,))


def test_seven_and_double_o_seven_are_different_slides():
    both = index_ids(["7", "007"])
    assert (both.find("7").hits, both.find("007").hits, both.find("07").hits) == (("7",), ("007",), ())
    assert both.find("07").proposals == ("007", "7")


def test_a_name_in_other_letters_is_proposed_only():
    match = index("Case_A7.svs").find("case-a7.svs")
    assert (match.hits, match.proposals) == ((), ("Case_A7",))


@pytest.mark.parametrize("text", ["", "  ", ".", "/", ".."])
def test_texts_that_name_nothing_find_nothing(text):
    assert index("a.svs").find(text).hits == ()
