"""Public faults of tables, names and folds: CV-02, CV-03, CV-06, STO-04, CLI-02, CLI-05."""

from pathlib import Path

import pandas as pd
import pytest

from tiling.discovery import find_slides
from wsi_mil.cohort import CohortSpec, folds_for, labels_of_patients, read_cohort
from wsi_mil.errors import CohortError
from wsi_mil.runs import write_frame
from wsi_mil.splits import FoldSpec, folds_from_frame, folds_to_frame

PLAIN = CohortSpec()
NUMERIC_IDS = ["0012", "0013", "0100", "0101", "1200", "1201", "7", "007", "0008", "0009", "12e3", "1_000"]
HOSTILE_NAMES = [
    "  leading and trailing  .tif",
    "-dash-first.tif",
    "O'Brien; rm -rf $HOME.tif",
    "Präparat 07 (копия).tif",
    "[glob]*?.tif",
    "切片 #1 %23 a&b.tif",
]


def table(folder: Path, rows: list[tuple[str, str, str]]) -> Path:
    lines = [",".join(row) for row in [("slide", "patient", "label"), *rows]]
    (folder / "labels.csv").write_bytes("\r\n".join(lines).encode())
    return folder / "labels.csv"


def slides(folder: Path, *names: str) -> Path:
    (folder / "slides").mkdir()
    for name in names:
        (folder / "slides" / name).touch()
    return folder / "slides"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([(f"s{i}", f"P{i % 4}", str(i % 2)) for i in range(16)], ["4 patients for 5 folds", "0: 2", "1: 2"]),
        (
            [
                ("s0", "a", "1"),
                ("s1", "b", "1"),
                ("s2", "b", "0"),
                ("s3", "c", "0"),
                ("s4", "c", "2"),
                ("s5", "d", "2"),
            ],
            ["4 patients for 5 folds"],
        ),
        (
            [(f"s{i}", "BIG", "1") for i in range(10)] + [(f"s{i}", f"P{i}", "0") for i in range(10, 20)],
            ["class '1' is in one patient only ('BIG')", "0: 10, 1: 1"],
        ),
        (
            [(f"s{i}", f"P{i}", "rare" if i < 2 else "common") for i in range(30)],
            ["'rare' has 2 patients", "common: 28"],
        ),
    ],
    ids=["four patients", "six slides of three classes", "one patient holds a class", "rare class"],
)
def test_cv_02_folds_that_cannot_hold_the_classes_stop_before_training(tmp_path, rows, words):
    labels = labels_of_patients(read_cohort(table(tmp_path, rows), PLAIN).records, "label")
    with pytest.raises(CohortError) as error:
        folds_for(FoldSpec(), labels)
    for word in words:
        assert word in str(error.value)


def test_cv_03_numeric_ids_stay_text_in_the_cohort_and_in_the_file_of_folds(tmp_path):
    rows = [(slide, f"{i // 2:03d}", str(i % 2)) for i, slide in enumerate(NUMERIC_IDS)]
    cohort = read_cohort(table(tmp_path, rows), PLAIN, known_ids=NUMERIC_IDS)
    assert [r.slide_id for r in cohort.records] == NUMERIC_IDS
    labels = {r.slide_id: {r.values["label"] or ""} for r in cohort.records}
    folds = folds_for(FoldSpec(n_folds=3), labels)
    write_frame(tmp_path / "folds.csv", folds_to_frame(folds))
    assert folds_for(FoldSpec(file=tmp_path / "folds.csv"), labels) == folds
    text = pd.read_csv(tmp_path / "folds.csv", dtype=str, keep_default_na=False)
    assert folds_from_frame(text) == folds
    assert set(text["patient"]) == set(NUMERIC_IDS)


def test_cv_06_every_row_and_bag_is_counted_and_suffixes_are_tolerated(tmp_path):
    bags = [f"s{i:02d}" for i in range(16)]
    rows = [(f"{name}.svs" if i % 5 == 0 else name, f"P{i:02d}", str(i % 2)) for i, name in enumerate(bags)]
    rows += [(f"s9{i}", f"P9{i}", "1") for i in range(3)]
    cohort = read_cohort(table(tmp_path, rows), PLAIN, known_ids=[*bags, "not_in_csv"])
    assert [cohort.counts[name] for name in ("rows", "matched", "missing", "extra")] == [19, 16, 3, 1]
    assert [(e.item, e.outcome) for e in cohort.excluded] == [(f"s9{i}", "missing") for i in range(3)]
    assert cohort.extra == ("not_in_csv",)


def test_cv_06_a_label_that_is_not_known_is_no_class(tmp_path):
    labels = ["0", "1", "NA", "", "nan", "unknown"]
    cohort = read_cohort(table(tmp_path, [(f"s{i}", f"P{i}", label) for i, label in enumerate(labels)]), PLAIN)
    assert [r.values["label"] for r in cohort.records] == ["0", "1", None, None, None, "unknown"]
    assert cohort.counts["unlabelled"] == 3


def test_sto_04_names_with_dots_stay_three_slides_with_and_without_suffix(tmp_path):
    root = slides(tmp_path, "S01.block1.tif", "S01.block2.tif", "S01.v2.0.svs")
    rows = [("S01.block1.tif", "1", "x"), ("S01.block2", "1", "x"), ("S01.v2.0", "1", "x")]
    cohort = read_cohort(table(tmp_path, rows), PLAIN, slides=root)
    assert [r.slide_id for r in cohort.records] == ["S01.block1", "S01.block2", "S01.v2.0"]
    assert cohort.counts["extra"] == 0


def test_cli_02_hostile_names_are_matched_unchanged(tmp_path):
    root = slides(tmp_path, *HOSTILE_NAMES)
    cohort = read_cohort(table(tmp_path, [(n, f"P{i}", "0") for i, n in enumerate(HOSTILE_NAMES)]), PLAIN, slides=root)
    assert [r.slide_id for r in cohort.records] == [name.removesuffix(".tif") for name in HOSTILE_NAMES]
    assert [r.path for r in cohort.records] == [root / name for name in HOSTILE_NAMES]


def test_cli_05_suffixes_in_any_case_links_once_and_no_hidden_files(tmp_path):
    root = slides(tmp_path, "UPPER.TIF", "Mixed.SvS", "._UPPER.TIF")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "linked_slide.tif").touch()
    (root / "linked_slide.tif").symlink_to("../store/linked_slide.tif")
    (root / "linked_dir").symlink_to("../store")
    (root / "loop").symlink_to(".")
    (root / "dangling.tif").symlink_to("nowhere.tif")
    found = find_slides(root)
    assert len(found.sources) == 3
    assert [item for item, _ in found.problems] == ["dangling.tif"]
    rows = [("upper.tif", "1", "x"), ("UPPER", "1", "x"), ("Mixed.svs", "1", "x"), ("linked_slide.tif", "1", "x")]
    cohort = read_cohort(table(tmp_path, rows), PLAIN, slides=root)
    assert [r.path.name for r in cohort.records if r.path] == ["UPPER.TIF", "Mixed.SvS", "linked_slide.tif"]
    assert [(e.item, "Is it 'UPPER'?" in e.reason) for e in cohort.excluded] == [("upper.tif", True)]
