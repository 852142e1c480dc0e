import os
import shutil
import struct
from pathlib import Path, PurePath

import pytest

from tiling.discovery import find_slides, slide_id_of
from tiling.errors import UserError

SERIES = Path(__file__).parents[1] / "data" / "slides" / "series1"


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode("utf-8", "surrogateescape"))
    return folder


def ids(folder: Path) -> list[str]:
    return [source.slide_id for source in find_slides(folder).sources]


@pytest.mark.parametrize(
    ("relative", "slide_id"),
    [
        ("a.svs", "a"),
        ("S01.v2.0.svs", "S01.v2.0"),
        ("S01.block1.tif", "S01.block1"),
        ("site/2020/A.B.NDPI", "site__2020__A.B"),
        ("dots.in.folder/a.tiff", "dots.in.folder__a"),
        ("  leading and trailing  .tif", "  leading and trailing  "),
        ("-dash.tif", "-dash"),
        ("no suffix", "no suffix"),
        ("a.h5", "a.h5"),
        ("007", "007"),
    ],
)
def test_a_slide_id_is_the_path_without_the_known_suffix(relative, slide_id):
    assert slide_id_of(PurePath(relative)) == slide_id


def test_known_suffixes_are_found_in_any_case_at_any_depth(tmp_path):
    fill(tmp_path, "UPPER.TIF", "b/Mixed.SvS", "b/c/d.ndpi", "e.btf", "notes.txt", "picture.png", "svs", "x.svs.part")
    assert ids(tmp_path) == ["UPPER", "b__Mixed", "b__c__d", "e"]


def test_hostile_names_are_kept_whole(tmp_path):
    names = ["  leading and trailing  ", "-dash-first", "O'Brien; rm -rf $HOME", "Präparat 07 (копия)", "[glob]*?"]
    names += ["切片 #1 %23 a&b", "new\nline", "a,b", '"quoted"']
    fill(tmp_path, *(f"{name}.tif" for name in names))
    discovery = find_slides(tmp_path)
    assert {source.slide_id: source.path for source in discovery.sources} == {
        name: tmp_path / f"{name}.tif" for name in names
    }
    assert discovery.problems == ()


def test_hidden_files_and_folders_are_passed_over(tmp_path):
    fill(tmp_path, "a.tif", "._a.tif", ".hidden.svs", ".trash/b.tif")
    assert ids(tmp_path) == ["a"]


def test_links_are_followed_once_and_without_loops(tmp_path):
    fill(tmp_path / "store", "linked.tif", "more/other.tif")
    slides = fill(tmp_path / "slides", "a.tif")
    (slides / "linked.tif").symlink_to(tmp_path / "store" / "linked.tif")
    (slides / "linked_dir").symlink_to(tmp_path / "store")
    (slides / "twice").symlink_to(tmp_path / "store")
    (slides / "loop").symlink_to(slides)
    (slides / "self.tif").symlink_to("self.tif")
    (slides / "dangling.tif").symlink_to("nowhere.tif")
    (slides / "offline").symlink_to("/nowhere/at/all")
    discovery = find_slides(slides)
    assert [source.slide_id for source in discovery.sources] == ["a", "linked", "linked_dir__more__other"]
    assert [name for name, _ in discovery.problems] == ["dangling.tif", "offline", "self.tif"]
    assert "nowhere.tif, which does not exist" in discovery.problems[0][1]


def test_a_way_without_links_gives_the_name(tmp_path):
    fill(tmp_path, "z/real.tif")
    (tmp_path / "a").symlink_to(tmp_path / "z")
    (tmp_path / "b.tif").symlink_to(tmp_path / "z" / "real.tif")
    assert ids(tmp_path) == ["z__real"]


def test_two_paths_with_one_id_are_both_problems(tmp_path):
    fill(tmp_path, "a/b.svs", "a__b.svs", "c.svs", "c.TIF", "d.tif")
    discovery = find_slides(tmp_path)
    assert [source.slide_id for source in discovery.sources] == ["d"]
    problems = dict(discovery.problems)
    assert set(problems) == {"a/b.svs", "a__b.svs", "c.svs", "c.TIF"}
    assert "a__b.svs" in problems["a/b.svs"]
    assert "a/b.svs" in problems["a__b.svs"]


def test_the_data_folder_of_a_mirax_slide_is_not_entered(tmp_path):
    fill(tmp_path, "a.mrxs", "a/Data0001.dat", "a/overview.tif", "b/c.tif")
    assert ids(tmp_path) == ["a", "b__c"]


def test_a_dicom_series_is_one_slide(tmp_path):
    shutil.copytree(SERIES, tmp_path / "one")
    shutil.copytree(SERIES, tmp_path / "two")
    discovery = find_slides(tmp_path)
    assert [source.slide_id for source in discovery.sources] == ["one__level0", "two__level0"]
    assert discovery.problems == ()


def dicom(path: Path, *, sop_class: str, image_type: str, series: str) -> None:
    def element(group: int, number: int, kind: bytes, text: str) -> bytes:
        value = text.encode() + b" " * (len(text) % 2)
        return struct.pack("<HH2sH", group, number, kind, len(value)) + value

    data = element(2, 2, b"UI", sop_class) + element(8, 8, b"CS", image_type) + element(0x20, 0xE, b"UI", series)
    path.write_bytes(bytes(128) + b"DICM" + data)


def test_dicom_files_that_are_no_slide_are_problems(tmp_path):
    slide = "1.2.840.10008.5.1.4.1.1.77.1.6"
    dicom(tmp_path / "label.dcm", sop_class=slide, image_type="ORIGINAL\\PRIMARY\\LABEL\\NONE", series="1.2")
    dicom(tmp_path / "ct.dcm", sop_class="1.2.840.10008.5.1.4.1.1.2", image_type="ORIGINAL\\PRIMARY", series="1.3")
    fill(tmp_path, "junk.dcm")
    discovery = find_slides(tmp_path)
    assert discovery.sources == ()
    problems = dict(discovery.problems)
    assert "label or overview" in problems["label.dcm"]
    assert "VL Whole Slide Microscopy" in problems["ct.dcm"]
    assert "preamble" in problems["junk.dcm"]


def test_one_file_is_taken_as_it_is(tmp_path):
    fill(tmp_path, "a.b.svs", "other.svs")
    discovery = find_slides(tmp_path / "a.b.svs")
    assert (discovery.root, discovery.sources[0].slide_id, len(discovery.sources)) == (tmp_path, "a.b", 1)


def test_a_folder_that_does_not_exist_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match=r"gone.*no such folder"):
        find_slides(tmp_path / "gone")


def test_a_folder_that_cannot_be_read_is_a_problem(tmp_path, monkeypatch):
    fill(tmp_path, "a.tif", "locked/b.tif")
    listing = Path.iterdir

    def iterdir(self):
        if self.name == "locked":
            raise PermissionError(13, "Permission denied")
        return listing(self)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    discovery = find_slides(tmp_path)
    assert [source.slide_id for source in discovery.sources] == ["a"]
    assert discovery.problems == (("locked", "the folder cannot be read: Permission denied"),)


def test_a_name_that_is_no_text_is_a_problem(tmp_path):
    os.close(os.open(os.fsencode(tmp_path) + b"/bad\xff.tif", os.O_CREAT | os.O_WRONLY))
    fill(tmp_path, "good.tif")
    discovery = find_slides(tmp_path)
    assert [source.slide_id for source in discovery.sources] == ["good"]
    assert [name.encode() for name, _ in discovery.problems] == [rb"bad\udcff.tif"]


def test_nothing_is_written_among_the_slides(tmp_path):
    fill(tmp_path, "a.tif", "b/c.svs")
    before = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*"))
    find_slides(tmp_path)
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*")) == before


def test_entries_that_cannot_be_looked_at_are_problems(tmp_path, monkeypatch):
    fill(tmp_path, "a.tif", "b.tif")
    is_dir = Path.is_dir

    def looked_at(self):
        if self.name == "b.tif":
            raise PermissionError(13, "Permission denied")
        return is_dir(self)

    monkeypatch.setattr(Path, "is_dir", looked_at)
    discovery = find_slides(tmp_path)
    assert [source.slide_id for source in discovery.sources] == ["a"]
    assert discovery.problems == (("b.tif", "it cannot be read: Permission denied"),)


def test_an_id_that_no_file_could_be_named_by_is_a_problem(tmp_path):
    fill(tmp_path, "x" * 200 + ".tif", "y" * 201 + ".tif", "folder" * 20 + "/" + "file" * 25 + ".svs")
    discovery = find_slides(tmp_path)
    assert [source.slide_id for source in discovery.sources] == ["x" * 200]
    assert [(item[0], "200 bytes" in reason) for item, reason in discovery.problems] == [("f", True), ("y", True)]


def test_a_problem_is_told_in_one_line(tmp_path):
    (tmp_path / "new\nline.svs").symlink_to("no\rwhere.svs")
    ((item, reason),) = find_slides(tmp_path).problems
    assert item == r"new\nline.svs"
    assert r"no\rwhere.svs" in reason
