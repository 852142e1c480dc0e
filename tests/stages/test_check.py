"""`check` finds everything before the night, writes what needs a decision, and explains any file of ours."""

import inspect
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile

from tiling.grid import TileSpec
from tiling.pipeline import tile_slide
from tiling.slide import Slide
from tiling.store import write_grid
from wsi_mil.cohort import CohortSpec, find_sources, read_cohort
from wsi_mil.contracts import _NEXT_STEPS, LAWS, law_name
from wsi_mil.errors import CohortError, ConfigError
from wsi_mil.laws import comparing
from wsi_mil.models import mean_pool
from wsi_mil.outcomes import Summary
from wsi_mil.stages.check import check


def kinds(summary: Summary) -> list[tuple[str, str]]:
    return sorted((failure.outcome, failure.item) for failure in summary.failures)


def notes(summary: Summary) -> str:
    return "\n".join(summary.notes)


@pytest.fixture
def lab(tmp_path: Path, make_pyramid: Callable[..., Path], coded_rgb: Callable[..., np.ndarray]) -> Path:
    """The first day of a lab: subfolders, a slide without pixel size, a broken one, a copy, a doubtful scanner."""
    root = tmp_path / "slides"
    for i in range(4):
        make_pyramid(root / f"batch{i % 2}" / f"000{i}.svs", coded_rgb(300 + i, 300), vendor="aperio", objective=20.0)
    make_pyramid(root / "batch1" / "unsaid.tif", coded_rgb(320, 300), mpp=None)
    make_pyramid(root / "doubt.svs", coded_rgb(310, 300), vendor="aperio", mpp=0.5, objective=40.0)
    (root / "broken.svs").write_bytes(b"II*\0 this is no slide")
    (root / "copy.svs").write_bytes((root / "batch0" / "0000.svs").read_bytes())
    rows = [
        *("slide,patient,site,label", "0000.svs,A,U,x", "batch1/0001.svs,B,U,y", "0002,C,V,x", "3,D,V,y"),
        *("unsaid,E,U,x", "doubt,A,U,y", "broken.svs,F,V,y", "copy,G,W,x", "gone,H,U,y"),
    ]
    (tmp_path / "cohort.csv").write_text("\n".join(rows))
    return tmp_path


EVERYTHING_WRONG = [
    ("cannot be opened", "broken"),
    ("conflicting labels", "patient A"),
    ("missing slide", "3"),
    ("missing slide", "gone"),
    ("no pixel size", "batch1__unsaid"),
    ("pixel size in doubt", "doubt"),
    ("same slide twice", "copy"),
]


def test_rows_that_a_study_refuses_do_not_hide_what_is_wrong_with_the_slides(lab):
    text = (lab / "cohort.csv").read_text()
    (lab / "cohort.csv").write_text(text.replace("gone,H,U,y", "0001,H,U,y"))
    with pytest.raises(CohortError, match="both are slide 'batch1__0001'"):
        read_cohort(lab / "cohort.csv", CohortSpec(), slides=lab / "slides")
    summary = check(lab / "cohort.csv", slides=lab / "slides", n_folds=2)
    assert {("same slide twice", "cohort.csv"), *EVERYTHING_WRONG} - set(kinds(summary)) == {("missing slide", "gone")}


def test_findings_counts_and_histogram_of_a_cohort(lab):
    summary = check(lab / "cohort.csv", slides=lab / "slides", n_folds=2)
    assert kinds(summary) == EVERYTHING_WRONG
    assert summary.exit_code == 3
    assert summary.done == ("batch0__0000", "batch1__0001", "batch0__0002")
    reasons = {failure.item: failure.reason for failure in summary.failures}
    assert "Is it 'batch1__0003'?" in reasons["3"]
    assert "another patient (A and G)" in reasons["copy"]
    assert "x in batch0__0000, y in doubt" in reasons["patient A"]
    told = notes(summary)
    assert {"  missing          2", "  extra            1", "  matched          7"} <= set(told.splitlines())
    assert "  0.50  ######################################## 5" in told
    assert "  x: 4 slides, 4 patients" in told
    assert "Patients a site: U 3, V 2, W 1. Folds by site: 3 at most." in told


def test_the_fixes_are_filled_in_honoured_by_every_stage_and_never_overwritten(lab):
    table, slides = lab / "cohort.csv", lab / "slides"
    first = check(table, slides=slides, n_folds=2)
    assert first.out == lab / "fixes.csv"
    lines = first.out.read_text(encoding="utf-8-sig").splitlines()
    assert lines[0] == "slide,slide_mpp,exclude,reason"
    waiting = {line.split(",")[0]: line for line in lines[1:]}
    assert sorted(waiting) == ["3", "batch1__unsaid", "broken", "copy", "doubt", "gone"]
    assert all(line.split(",")[1:3] == ["", ""] for line in waiting.values())
    mended = ["batch1__unsaid,0.5,,", "broken,,yes,damaged", "copy,,yes,a copy", "doubt,0.5,,", "3,,yes,", "gone,,,"]
    first.out.write_text("\n".join([lines[0], *mended]))
    again = check(table, slides=slides, n_folds=2, level="slide")
    assert kinds(again) == [("missing slide", "gone")]
    assert "wait for a decision in" in notes(again)
    assert first.out.read_text() == "\n".join([lines[0], *mended])
    assert not (lab / "fixes.new.csv").exists()
    sources, excluded, _ = find_sources(slides, table, CohortSpec())
    assert {s.slide_id: s.slide_mpp for s in sources}["batch1__unsaid"] == (0.5, 0.5)
    assert {e.item: e.outcome for e in excluded} == {
        "broken": "excluded",
        "copy": "excluded",
        "3": "excluded",
        "gone": "missing",
    }


def test_new_questions_go_to_another_file_beside_the_users(lab):
    (lab / "fixes.csv").write_text("slide,slide_mpp,exclude,reason\nbroken,,yes,damaged\n")
    summary = check(lab / "cohort.csv", slides=lab / "slides", n_folds=2)
    assert summary.out == lab / "fixes.new.csv"
    assert "broken,,yes,damaged" in summary.out.read_text()
    assert "unsaid" in summary.out.read_text()
    assert "unsaid" not in (lab / "fixes.csv").read_text()


def test_a_row_that_still_waits_is_not_asked_for_twice_whatever_it_calls_the_slide(lab):
    rows = ["3,,yes,", "unsaid.tif,,,", "broken,,x,", "copy.svs,,x,", "doubt.svs,,,", "gone,,,"]
    (lab / "fixes.csv").write_text("\n".join(["slide,slide_mpp,exclude,reason", *rows]))
    summary = check(lab / "cohort.csv", slides=lab / "slides", n_folds=2, level="slide")
    assert [item for _, item in kinds(summary)] == ["gone", "batch1__unsaid", "doubt"]
    assert not (lab / "fixes.new.csv").exists()


def test_a_slide_that_opens_but_cannot_be_read_is_found(tmp_path, make_pyramid, coded_rgb):
    path = make_pyramid(tmp_path / "slides" / "a.tif", coded_rgb(300, 300), levels=(1,))
    with tifffile.TiffFile(path) as tiff:
        start, size = tiff.pages[0].dataoffsets[0], tiff.pages[0].databytecounts[0]
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\0" * size)
    assert kinds(check(tmp_path / "slides")) == [("cannot be opened", "a")]


def test_a_fix_for_a_slide_that_is_not_there_is_a_finding(lab):
    (lab / "fixes.csv").write_text("slide,slide_mpp,exclude\n2,,yes\n")
    summary = check(lab / "cohort.csv", slides=lab / "slides", n_folds=2)
    found = [failure.reason for failure in summary.failures if failure.outcome == "unknown fix"]
    assert found == ["fixes.csv, line 2: there is no slide '2', so nothing is done for it. Is it 'batch0__0002'?"]


def test_nothing_is_ever_written_below_the_slides(lab):
    table = (lab / "cohort.csv").rename(lab / "slides" / "cohort.csv")
    before = sorted(lab.rglob("*"))
    for summary in (check(table, slides=lab / "slides", n_folds=2), check(lab / "slides")):
        assert "Give --out FOLDER" in notes(summary)
    assert sorted(lab.rglob("*")) == before
    out = lab / "answers"
    assert check(table, slides=lab / "slides", n_folds=2, out=out).out == out / "fixes.csv"
    assert len(check(table, slides=lab / "slides", n_folds=2, out=out).failures) == 7


def test_a_clean_cohort_has_exit_code_0_and_writes_nothing(tmp_path, make_pyramid, coded_rgb):
    for i in range(4):
        make_pyramid(tmp_path / "slides" / f"{i}.tif", coded_rgb(300 + i, 300))
    rows = [f"{i},p{i},{'xy'[i % 2]}" for i in range(4)]
    (tmp_path / "cohort.csv").write_text("\n".join(["slide,patient,label", *rows]))
    for deep in (False, True):
        summary = check(tmp_path / "cohort.csv", slides=tmp_path / "slides", n_folds=2, deep=deep)
        assert (summary.exit_code, summary.done) == (0, ("0", "1", "2", "3"))
    assert not (tmp_path / "fixes.csv").exists()


def test_a_table_alone_is_judged_by_its_labels(tmp_path):
    table = tmp_path / "cohort.csv"
    table.write_text("slide,patient,age,label\n" + "\n".join(f"s{i},p{i},{50 + i},one" for i in range(9)))
    summary = check(table)
    assert kinds(summary) == [("folds impossible", "column label")]
    assert "one class only" in summary.failures[0].reason
    assert check(table, target="age", n_folds=2).failures[0].item == "column age"
    with pytest.raises(CohortError, match=r"no column 'lable'\. Columns: age, label\. Did you mean 'label'"):
        check(table, target="lable")


def test_a_folder_of_slides_is_checked_without_a_table(lab):
    summary = check(lab / "slides", out=lab / "out")
    assert kinds(summary) == [
        ("cannot be opened", "broken"),
        ("no pixel size", "batch1__unsaid"),
        ("pixel size in doubt", "doubt"),
        ("same slide twice", "copy"),
    ]
    (lab / "out" / "fixes.csv").write_text("slide,slide_mpp,exclude\nbroken,,yes\nunsaid,1,\ndoubt.svs,0.5,\ncopy,,x\n")
    assert check(lab / "slides", out=lab / "out").exit_code == 0
    assert kinds(check(lab / "slides", cohort=CohortSpec(slide_mpp=0.5)))[1] == ("pixel size in doubt", "doubt")


def test_a_slide_is_explained(lab):
    good = check(lab / "slides" / "doubt.svs")
    assert "310 x 300" in notes(good)
    assert "0.5 x 0.5 microns per pixel, from metadata" in notes(good)
    assert kinds(good) == [("pixel size in doubt", "doubt.svs")]
    bad = check(lab / "slides" / "broken.svs")
    assert (bad.exit_code, kinds(bad)) == (3, [("cannot be opened", "broken.svs")])
    assert kinds(check(lab / "slides" / "batch1" / "unsaid.tif")) == [("no pixel size", "unsaid.tif")]


def test_a_grid_is_explained_and_a_changed_one_is_found(tmp_path, make_pyramid, tissue_rgb):
    with Slide(make_pyramid(tmp_path / "a.tif", tissue_rgb(900, 800))) as slide:
        grid = tile_slide(slide, TileSpec(mpp=0.5, tile_px=64))
    path = tmp_path / "grids" / "a.h5"
    write_grid(path, grid)
    assert f"{len(grid)} tiles of 64 px at 0.5 microns per pixel" in notes(check(path))
    assert check(tmp_path / "grids").exit_code == 0
    with h5py.File(path, "r+") as file:
        file["tissue_fraction"][0] = 0.123
    assert kinds(check(path)) == [("damaged", "a.h5")]
    path.write_bytes(path.read_bytes()[:-500])
    assert kinds(check(path)) == [("incomplete", "a.h5")]


def test_bags_are_explained_and_incomplete_or_foreign_ones_are_found(tmp_path, make_study):
    _, bags = make_study(tmp_path, patients=3)
    clean = check(bags)
    assert clean.exit_code == 0
    assert "3 HDF5 files, 3 of them whole" in notes(clean)
    assert "x 16 features by synthetic" in notes(check(bags / "s00_0.h5"))
    with h5py.File(bags / "s01_0.h5", "r+") as file:
        file["features"][0, 0] += 1
    assert check(bags).exit_code == 0
    assert kinds(check(bags, deep=True)) == [("damaged", "s01_0.h5")]
    (bags / "s02_0.h5").write_bytes((bags / "s02_0.h5").read_bytes()[:3000])
    with h5py.File(bags / "foreign.h5", "w") as file:
        file["features"] = np.zeros((3, 4))
    assert kinds(check(bags)) == [("incomplete", "foreign.h5"), ("incomplete", "s02_0.h5")]


def test_bags_of_two_encoders_in_one_folder_are_found(tmp_path, make_study):
    make_study(tmp_path, patients=4)
    make_study(tmp_path, patients=1, encoder="another")
    summary = check(tmp_path / "bags")
    assert kinds(summary) == [("mixed contracts", "bags")]
    assert "s00_0" in summary.failures[0].reason


RUN = """
kind: crossval
version: 0.1.0
task: {target: label, level: slide, kind: binary, classes: [x, y], positive: y, targets: [{kind: binary,
  name: label, classes: [x, y]}]}
methods: [{label: abmil, name: abmil}]
"""


def test_a_patient_of_two_sites_is_found(tmp_path):
    rows = [f"s{i},p{i // 2},{'UV'[i == 5]},{'xy'[i // 2 % 2]}" for i in range(20)]
    (tmp_path / "cohort.csv").write_text("\n".join(["slide,patient,site,label", *rows]))
    assert kinds(check(tmp_path / "cohort.csv")) == [("several sites", "patient p2")]


def test_a_run_is_explained_and_an_unfinished_one_is_found(tmp_path):
    (tmp_path / "config.yaml").write_text(RUN)
    unfinished = check(tmp_path)
    assert kinds(unfinished) == [("unfinished", tmp_path.name)]
    assert "task label (x, y) at level slide" in notes(unfinished)
    row = "abmil,label,0,0,0,slide,p,s,x,0.1,0.5,0.5"
    header = "method,target_name,repeat,fold,seed,level,patient,slide,target,logit_y,prob_x,prob_y"
    (tmp_path / "predictions.csv").write_text(f"{header}\n{row}\n")
    assert check(tmp_path).exit_code == 0
    (tmp_path / "predictions.csv").write_text(f"{header}\n{row}\n{row}\n")
    assert kinds(check(tmp_path)) == [("predictions twice", tmp_path.name)]


def test_a_users_method_is_held_to_every_law(tmp_path):
    source = Path(mean_pool.__file__).read_text(encoding="utf-8")
    (tmp_path / "my_method.py").write_text(source)
    good = check(tmp_path / "my_method.py")
    assert good.exit_code == 0
    assert "kept  ignores order" in notes(good)
    sees_neighbours = source.replace("segment_mean(hidden, batch.offsets)", "hidden.mean(0).expand(len(batch), -1)")
    (tmp_path / "bad_method.py").write_text(sees_neighbours)
    bad = check(tmp_path / "bad_method.py")
    assert bad.exit_code == 3
    assert {failure.outcome for failure in bad.failures} == {"law broken"}
    assert "ignores neighbours" in " ".join(failure.reason for failure in bad.failures)


ORDERED = """
import torch

from wsi_mil.bags import segment_mean
from wsi_mil.models._base import MILModel, MILOutput


class Mine(MILModel):
    summary = "a toy"
    family = "pooling"
    paper = "none"
    score_kinds = ("probability",)

    def __init__(self, *, in_dim: int, n_outputs: int, weight: float = 0.1) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.weight = weight
        self.head = torch.nn.Linear(in_dim, n_outputs)

    def forward(self, batch, *, generator=None):
        place = torch.cat([torch.arange(n) for n in batch.lengths])[:, None]
        scores = self.head(batch.features + self.weight * place)
        logits = segment_mean(self.head(batch.features * (1 + self.weight * place)), batch.offsets)
        return MILOutput(logits=logits, offsets=batch.offsets, instance_logits=scores)
"""


def told_of(path: Path, source: str) -> tuple[list[str], Summary]:
    path.write_text(source)
    summary = check(path)
    return [failure.reason for failure in summary.failures], summary


def test_a_broken_law_is_told_once_with_what_mends_it(tmp_path):
    told, summary = told_of(tmp_path / "mine.py", ORDERED)
    ours = [reason for reason in told if "ignores order" in reason]
    assert len(ours) == 1
    assert "logits of shuffled tiles: off by" in ours[0]
    assert ours[0].endswith("Pool over the tiles of a bag, or say order_matters = True in the class.")
    assert "ignores order" not in notes(summary)
    assert len(told) + notes(summary).count("kept  ") == len(LAWS)


def test_a_class_that_does_not_say_what_it_is_is_told_all_of_it_and_held_to_no_more(tmp_path):
    silent = ORDERED.replace('    family = "pooling"\n', "").replace('    score_kinds = ("probability",)\n', "")
    silent = silent.replace("weight: float = 0.1", "weight=0.1").replace("self.weight = weight", "self.other = weight")
    told, summary = told_of(tmp_path / "mine.py", silent)
    assert len(told) == 1
    assert told[0].startswith("says what it is: the class does not say family, score_kinds; ")
    assert "keyword-only and typed; not so: weight; not kept as attributes: weight. " in told[0]
    assert "self.<name> = <name>" in told[0]
    assert notes(summary).endswith(f"{len(LAWS) - 1} laws not tried: mend this first")
    without_forward = ORDERED.replace("def forward", "def forwards").replace('    paper = "none"\n', "")
    told, _ = told_of(tmp_path / "mine.py", without_forward)
    assert len(told) == 1
    assert "does not say paper; it cannot be built: TypeError: Can't instantiate abstract class Mine" in told[0]


def test_one_error_that_breaks_many_laws_is_told_once(tmp_path):
    told, _ = told_of(tmp_path / "mine.py", ORDERED.replace("* place)", "* place[:3])"))
    raised = [reason for reason in told if "it raised RuntimeError: The size of tensor" in reason]
    assert len(raised) == 1
    assert raised[0].startswith("is well formed, sees no label, ")
    greedy = ORDERED.replace("        return", "        scores[:5].topk(10, dim=0)\n        return")
    told, _ = told_of(tmp_path / "mine.py", greedy)
    assert told[0].endswith("out of range. Take at most as many tiles as the bag has, or say min_tiles in the class.")


def test_every_next_step_is_about_words_that_its_law_says():
    laws = {law_name(law): inspect.getsource(inspect.getmodule(law)) for law in LAWS}
    said = "".join(inspect.getsource(inspect.getmodule(part)) for part in (comparing, *LAWS))
    assert all(law == "" or (law in laws and words in said) for law, words, _ in _NEXT_STEPS)


def test_what_is_not_there_or_holds_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        check(tmp_path / "none")
    with pytest.raises(CohortError, match="holds nothing to check"):
        check(tmp_path)


def test_findings_are_told_where_fixes_cannot_be_written(lab, monkeypatch):
    def full(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("wsi_mil.table.fixes.write_text", full)
    summary = check(lab / "cohort.csv", slides=lab / "slides")
    assert set(EVERYTHING_WRONG) <= set(kinds(summary))
    assert "cannot be written" in notes(summary)
    assert "--out" in notes(summary)


def test_spellings_that_make_two_of_one_are_found(lab):
    rows = ["slide,patient,site,label", "0000,A,U,Tumour", "0001,B,u,tumour", "0002,a,V,y", "0003,C,V,y"]
    (lab / "cohort.csv").write_text("\n".join(rows))
    found = [item for kind, item in kinds(check(lab / "cohort.csv", slides=lab / "slides")) if kind == "spelled alike"]
    assert found == ["column label", "column patient", "column site"]


@pytest.mark.parametrize("name", ["cohort.xls", "cohort.ods"])
def test_a_table_of_another_program_is_not_taken_for_a_slide(lab, name):
    (lab / name).write_bytes(b"old")
    with pytest.raises(CohortError, match="not a table this program reads"):
        check(lab / name, slides=lab / "slides")
